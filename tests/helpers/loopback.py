"""The loopback address of this machine, 127.0.0.1 or, where there is IPv6 only, ::1; and servers on it."""

import socket
import socketserver
from http.server import ThreadingHTTPServer

from neuroshard.system import loopback_address

HOST = loopback_address() or "127.0.0.1"
FAMILY = socket.AF_INET6 if ":" in HOST else socket.AF_INET
NETLOC = f"[{HOST}]" if ":" in HOST else HOST  # as it is written in a URL


def url(port: int) -> str:
    return f"http://{NETLOC}:{port}"


def port_of(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])


def listening() -> socket.socket:
    """A socket that listens on a free port."""
    return socket.create_server((HOST, 0), family=FAMILY)


def bound() -> socket.socket:
    """A socket that holds a free port and does not listen: nobody else can begin to answer there."""
    taken = socket.socket(FAMILY)
    taken.bind((HOST, 0))
    return taken


class HttpServer(ThreadingHTTPServer):
    """An HTTP server on a free port."""

    address_family = FAMILY
    daemon_threads = True

    def __init__(self, handler: type[socketserver.BaseRequestHandler], bind_and_activate: bool = True) -> None:
        super().__init__((HOST, 0), handler, bind_and_activate)

    def server_bind(self) -> None:
        """Bind, without asking for this host's name, which may not be known."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, port_of(self.socket)

    @property
    def url(self) -> str:
        return url(port_of(self.socket))
