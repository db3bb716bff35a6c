"""A proxy in front of a real S3 server that spoils some of its answers."""

import random
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, get_args
from urllib.parse import urlsplit

from helpers.limits import HANGS
from helpers.loopback import FAMILY, HOST, NETLOC, port_of

Fault = Literal["403", "500", "503", "reset", "lost", "hang", "truncate", "corrupt"]
FAULTS: tuple[Fault, ...] = tuple(fault for fault in get_args(Fault) if fault != "403")  # those that pass
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
Choose = Callable[[bytes], Fault | None]  # from a request's head


@contextmanager
def faulty(url: str, choose: Choose, rng: random.Random) -> Iterator[str]:
    """The URL of a proxy to `url`. What `choose` names happens to a request:

    403, 500, 503: that answer, and the server never sees it; reset: the same, without an answer; lost: the server does it, and
    the answer is lost; hang: never an answer; truncate: half the answer; corrupt: one byte of its body is another.
    """
    upstream = urlsplit(url)
    closing = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        request: socket.socket

        def handle(self) -> None:
            with suppress(OSError):
                request = _read_request(self.request)
                if request is None:
                    return
                fault = choose(request.partition(b"\r\n\r\n")[0])
                if fault in ("403", "500", "503"):
                    body = SLOW_DOWN if fault == "503" else b""
                    head = b"HTTP/1.1 %s x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
                    self.request.sendall(head % (fault.encode(), len(body)) + body)
                elif fault == "reset":
                    self.reset()
                elif fault == "hang":
                    closing.wait()
                else:
                    self.answer(_forward(request, (upstream.hostname, upstream.port)), fault)

        def answer(self, answer: bytes, fault: Fault | None) -> None:
            head, gap, body = answer.partition(b"\r\n\r\n")
            if fault == "lost":
                self.reset()
            elif fault == "truncate":
                cut = answer[: len(head) + len(gap) + len(body) // 2] if body else head[: len(head) // 2]
                self.request.sendall(cut)
            elif fault == "corrupt" and body:
                place = rng.randrange(len(body))
                other = bytes([body[place] ^ rng.randrange(1, 256)])
                self.request.sendall(head + gap + body[:place] + other + body[place + 1 :])
            else:
                self.request.sendall(answer)

        def reset(self) -> None:
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.request.close()

    class Server(socketserver.ThreadingTCPServer):
        address_family = FAMILY
        daemon_threads = True
        block_on_close = False

        def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
            with suppress(OSError):
                super().shutdown_request(request)

    with Server((HOST, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://{NETLOC}:{port_of(server.socket)}"
        finally:
            closing.set()
            server.shutdown()
            thread.join()


def _read_request(client: socket.socket) -> bytes | None:
    """A whole request, without Expect, and for a connection that is closed after it; None where the client left."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = client.recv(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    fields = [line for line in lines[1:] if line.partition(b":")[0].lower() not in (b"expect", b"connection")]
    length = next((int(line.partition(b":")[2]) for line in fields if line.lower().startswith(b"content-length:")), 0)
    if any(line.lower().startswith(b"expect:") for line in lines):
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    while len(body) < length:
        more = client.recv(65536)
        if not more:
            return None
        body += more
    return b"\r\n".join([lines[0], *fields, b"Connection: close"]) + b"\r\n\r\n" + body


def _forward(request: bytes, address: tuple[str | None, int | None]) -> bytes:
    """The server's whole answer, marked to close the connection."""
    with socket.create_connection(address, HANGS) as server:
        server.sendall(request)
        answer = b""
        while more := server.recv(65536):
            answer += more
    head, gap, body = answer.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([*lines, b"Connection: close"]) + gap + body
