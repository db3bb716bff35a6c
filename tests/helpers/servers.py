"""Real S3 servers on free ports of this machine, for as long as a block lasts."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEY, SECRET = "a-key", "a-secret-that-no-message-shows"
BIN = Path(sys.executable).parent


@contextmanager
def moto() -> Iterator[str]:
    """Honours conditional writes; checks no signature. Yields its URL."""
    port = free_port()
    with serving(
        [sys.executable, Path(__file__).with_name("moto_atomic.py"), "-H", "127.0.0.1", "-p", port], port
    ) as url:
        yield url


@contextmanager
def rclone(folder: Path) -> Iterator[str]:
    """Checks signatures; ignores conditions. Buckets are the folders in `folder`. Yields its URL."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    with serving(
        [BIN / "rclone", "serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--addr", address, folder], port
    ) as url:
        yield url


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(command: list[object], port: int) -> Iterator[str]:
    process = subprocess.Popen([str(c) for c in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        else:
            raise AssertionError(f"{command[0]} does not listen on {port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def answering(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that says the same to every request and hangs up. Yields its URL and the list of requests."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    requests.append(connection.recv(65536))
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", requests
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
