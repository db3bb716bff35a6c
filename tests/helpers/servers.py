"""Real S3 servers on free ports of this machine, for as long as a block lasts."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.limits import HANGS
from helpers.loopback import HOST, NETLOC, bound, listening, port_of, url

KEY, SECRET = "a-key", "a-secret-that-no-message-shows"
BIN = Path(sys.executable).parent


@contextmanager
def moto() -> Iterator[str]:
    """Honours conditional writes; checks no signature. Yields its URL."""
    with announced([sys.executable, Path(__file__).with_name("moto_atomic.py"), NETLOC]) as url:
        yield url


@contextmanager
def rclone(folder: Path) -> Iterator[str]:
    """Checks signatures; ignores conditions. Buckets are the folders in `folder`. Yields its URL."""
    served = ["serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--addr", f"{NETLOC}:0", "--config", os.devnull]
    with announced([BIN / "rclone", *served, folder]) as url:
        yield url


@contextmanager
def announced(command: list[object]) -> Iterator[str]:
    """A server that takes a free port by itself and prints its URL: no other suite can take the port in between."""
    words = [str(word) for word in command]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    rest = threading.Thread(target=process.stdout.read, daemon=True)  # else a full pipe would stop it
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(re.escape(f"http://{NETLOC}:") + "[0-9]+", line):
                break
        else:
            raise AssertionError(f"{words[0]} ended with {process.wait()}: {''.join(said)}")
        rest.start()
        yield found[0]
    finally:
        process.kill()
        process.wait()
        if rest.ident is not None:
            rest.join()
        process.stdout.close()


@contextmanager
def nobody() -> Iterator[str]:
    """An address where nobody answers, and nobody can begin to: the port is taken, without listening."""
    with bound() as taken:
        yield f"{NETLOC}:{port_of(taken)}"


def free_port() -> int:
    """A port that is free now, for programs that must be given one. Another may take it before they do."""
    with bound() as probe:
        return port_of(probe)


@contextmanager
def serving(command: list[object], port: int) -> Iterator[str]:
    process = subprocess.Popen([str(c) for c in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + HANGS
        while time.monotonic() < until:
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            try:
                socket.create_connection((HOST, port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        else:
            raise AssertionError(f"{command[0]} does not listen on {port}")
        yield url(port)
    finally:
        process.kill()
        process.wait()


@contextmanager
def answering(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that says the same to every request and hangs up. Yields its URL and the list of requests."""
    requests: list[bytes] = []
    with listening() as server:

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
            yield url(port_of(server)), requests
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
