"""A folder of files that are each written once, kept in a store while it grows: what a pod measures outlives the pod."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from neuroshard.core.clean import log
from neuroshard.core.errors import StoreError, Unreachable
from neuroshard.files.disk import write_bytes
from neuroshard.store.protocol import Store

EVERY_SECONDS = 30.0  # so much of the work is lost at most with a pod
PATIENCE_SECONDS = 600.0  # for a store that does not answer; boto3's own retries take under a minute
WAIT_SECONDS = 5.0

T = TypeVar("T")


def patiently(ask: Callable[[], T], patience_seconds: float = PATIENCE_SECONDS) -> T:
    """The answer of a store that may be away for a while. Raises StoreError, Unreachable only after `patience_seconds`."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return ask()
        except Unreachable:
            if time.monotonic() + WAIT_SECONDS > deadline:
                raise
            time.sleep(WAIT_SECONDS)


def fetch_folder(store: Store, prefix: str, folder: Path) -> tuple[str, ...]:
    """Write what lies under `prefix` into `folder`; the names of the files. Raises StoreError."""
    names = tuple(entry.key.removeprefix(f"{prefix}/") for entry in patiently(lambda: store.list(f"{prefix}/")))
    for name in names:
        write_bytes(folder / name, patiently(lambda name=name: store.read(f"{prefix}/{name}")))  # type: ignore[misc]
    return names


def send_folder(store: Store, prefix: str, folder: Path, sent: set[str]) -> None:
    """Create the files of `folder` under `prefix`, but for those in `sent`, which grows. Scratch (.name) stays here.

    JSON, which tells of the rest, goes first: of two pods that fill one folder the second then sends nothing at all, rather than
    parts that lie beside the other's.
    """
    for path in sorted(folder.rglob("*"), key=lambda path: (path.suffix != ".json", path)):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in sent and not any(part.startswith(".") for part in name.split("/")):
            store.create(f"{prefix}/{name}", path.read_bytes())
            sent.add(name)


def delete_folder(store: Store, prefix: str) -> None:
    """Delete what lies under `prefix`. Raises StoreError."""
    for entry in patiently(lambda: store.list(f"{prefix}/")):
        patiently(lambda key=entry.key: store.delete(key))  # type: ignore[misc]


@contextmanager
def kept(store: Store, prefix: str, folder: Path, every_seconds: float = EVERY_SECONDS) -> Iterator[None]:
    """While the block runs, and at its end, send what `folder` has new. Raises StoreError at the end, after some patience.

    Files of `folder` must appear whole (by rename) and never change. What the store already has is not sent again.
    """
    sent = {entry.key.removeprefix(f"{prefix}/") for entry in patiently(lambda: store.list(f"{prefix}/"))}
    ended = threading.Event()

    def send_now_and_then() -> None:
        said = ""
        while not ended.wait(every_seconds):
            try:
                send_folder(store, prefix, folder, sent)
                said = ""
            except StoreError as error:  # the block goes on; the end tells if it stays so
                if str(error) != said:
                    said = str(error)
                    log(f"note: {error}; until that is mended, nothing new is kept there")

    thread = threading.Thread(target=send_now_and_then, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        patiently(lambda: send_folder(store, prefix, folder, sent))
