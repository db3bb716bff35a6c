"""Copies a folder into a store while the folder grows, so that what a pod has measured outlives the pod."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neuroshard.core.clean import log
from neuroshard.core.errors import StoreError
from neuroshard.files.disk import write_bytes
from neuroshard.store.lease import repeating
from neuroshard.store.patience import PatientStore
from neuroshard.store.protocol import Store

EVERY_SECONDS = 30.0  # a pod that dies loses at most so much of its work
# Of one object of such a folder: a case of a draw takes some 100 bytes, and up to 10^7 of them may be asked for.
MOST_BYTES = 2**30


def fetch_folder(store: Store, prefix: str, folder: Path) -> tuple[str, ...]:
    """Copy the objects under `prefix` into `folder`, and return the names of the files. Raises StoreError."""
    names = tuple(entry.key.removeprefix(f"{prefix}/") for entry in store.list(f"{prefix}/"))
    for name in names:
        write_bytes(folder / name, store.read(f"{prefix}/{name}", MOST_BYTES))
    return names


def send_folder(store: Store, prefix: str, folder: Path, sent: set[str]) -> None:
    """Create the files of `folder` under `prefix`, except those in `sent`, and add them to `sent`. Hidden files are skipped.

    JSON files, which describe the others, go first: where two pods fill one folder, the second one then fails at once and sends
    no parts that would mix with those of the first.
    """
    for path in sorted(folder.rglob("*"), key=lambda path: (path.suffix != ".json", path)):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in sent and not any(part.startswith(".") for part in name.split("/")):
            store.create(f"{prefix}/{name}", path.read_bytes())
            sent.add(name)


def delete_folder(store: Store, prefix: str) -> None:
    """Delete the objects under `prefix`. Raises StoreError."""
    for entry in store.list(f"{prefix}/"):
        store.delete(entry.key)


@contextmanager
def kept(store: PatientStore, prefix: str, folder: Path, every_seconds: float = EVERY_SECONDS) -> Iterator[None]:
    """Send new files of `folder` while the block runs, and at its end. Raises StoreError at the end alone, after some patience.

    Files of `folder` must appear whole (by rename) and never change. Files that the store already has are not sent again.
    """
    sent = {entry.key.removeprefix(f"{prefix}/") for entry in store.list(f"{prefix}/")}
    noted = ""

    def send() -> None:
        nonlocal noted
        try:
            send_folder(store.impatient, prefix, folder, sent)
            noted = ""
        except StoreError as error:  # the block continues; its end raises if the store still fails
            if str(error) != noted:
                noted = str(error)
                log(f"note: {error}; until that is fixed, nothing new is kept there")

    try:
        with repeating(every_seconds, send):
            yield
    finally:
        send_folder(store, prefix, folder, sent)
