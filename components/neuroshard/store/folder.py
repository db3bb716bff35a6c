"""A store in a folder, local or shared. Readers need no lock; writers use links, locks and renames."""

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from neuroshard.core.errors import Conflict, InvalidInput, NotFound, StoreError, Unreachable
from neuroshard.core.store_url import check_key, is_key
from neuroshard.core.value import sha256
from neuroshard.store.protocol import MAX_BYTES, ObjectInfo, PartlyListed

# errors of a network file system whose server is gone
GONE = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ECONNREFUSED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
}
NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}  # errors of file systems without hard links
_SCRATCH = re.compile(r"\..+\.[0-9a-f]{32}")  # the names of `_temporary`
LAST_SECONDS = 2e11  # after 1970: the year 8307, which leaves room for ages
LOCK_SECONDS = 20.0  # a lock is held for one small write, so a longer hold means a stuck process


class FolderStore:
    """Objects as files under `root`. The first write creates the folder.

    Names that start with a dot are scratch: `.lock`, and temporary files, which a killed writer may leave behind. The file
    system must have flock, as local disks and NFS do. Without hard links (vfat, some FUSE), writers use the lock alone.

    A folder under the key of an object is no object: it is not found, and what is written there moves it aside, to a name
    that starts with a dot.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def url(self) -> str:
        return str(self.root)

    @property
    def identity(self) -> str:
        return os.path.abspath(self.root)  # does not ask the file system, which may hang

    def read(self, key: str, max_bytes: int = MAX_BYTES) -> bytes:
        path = self._path(key)
        with _errors(path, "read it"):
            return _bytes_of(path, max_bytes)

    def read_versioned(self, key: str, max_bytes: int = MAX_BYTES) -> tuple[bytes, str]:
        data = self.read(key, max_bytes)
        return data, sha256(data)

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with _errors(path, "write it"), _temporary(path, data) as temporary:
            _move_folder_aside(path)
            try:
                _take_name(temporary, path)
            except FileExistsError:
                if _bytes_of(path, max(MAX_BYTES, len(data))) != data:
                    raise Conflict(f"{path}: already exists with other content, and is written only once") from None
                return False
            finally:
                _sync_folder(path.parent)
            return True

    def swap(self, key: str, data: bytes, expected: str | None) -> None:
        path = self._path(key)
        with _errors(path, "write it"), _temporary(path, data) as temporary, _lock(path.parent):
            current = sha256(_bytes_of(path, MAX_BYTES)) if path.exists() and not path.is_dir() else None
            if current != expected:
                raise Conflict(f"{path}: somebody else changed it in between")
            _move_folder_aside(path)
            temporary.replace(path)
            _sync_folder(path.parent)

    def list(self, prefix: str) -> tuple[ObjectInfo, ...]:
        folder = self.root / prefix.rpartition("/")[0]
        entries = []
        denied: dict[str, str] = {}

        def failed(error: OSError) -> None:
            if isinstance(error, FileNotFoundError):  # deleted since
                return
            if not isinstance(error, PermissionError):
                raise error
            key = Path(error.filename).relative_to(self.root).as_posix()
            denied[key] = f"{self.root / key}: cannot list it: {error.strerror}"

        with _errors(folder, "list it"):
            for path in _files_under(folder, failed):
                key = path.relative_to(self.root).as_posix()
                if not key.startswith(prefix) or not is_key(key):
                    continue
                try:
                    status = path.stat()
                except OSError as error:
                    failed(error)
                    continue
                if stat.S_ISREG(status.st_mode):
                    entries.append(ObjectInfo(key, status.st_size, _when(status)))
        if denied:
            raise PartlyListed(tuple(sorted(entries)), denied)
        return tuple(sorted(entries))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with suppress(NotFound), _errors(path, "delete it"):
            _move_folder_aside(path)
            path.unlink()
            _sync_folder(path.parent)

    def scratch(self, prefix: str, before: datetime) -> tuple[ObjectInfo, ...]:
        """Temporary files below a prefix that were last changed `before` then: writers that were killed have left them."""
        folder, found = self.root / prefix.rpartition("/")[0], []
        with _errors(folder, "list it"):
            for path in _files_under(folder, lambda _: None):
                if not _SCRATCH.fullmatch(path.name):
                    continue
                with suppress(FileNotFoundError):  # its writer has ended since
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and _when(status) < before:
                        found.append(ObjectInfo(path.relative_to(self.root).as_posix(), status.st_size, _when(status)))
        return tuple(sorted(found))

    def delete_scratch(self, key: str) -> None:
        """Delete one of those."""
        path = self.root / key
        with suppress(NotFound), _errors(path, "delete it"):
            path.unlink()

    def clock(self) -> datetime:
        """The time of modification of a file written now: a file server has a clock of its own."""
        scratch = self.root / "clock"
        with _errors(scratch, "write it"), _temporary(scratch, b"") as temporary:
            return _when(temporary.stat())

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)


def _when(status: os.stat_result) -> datetime:
    """When a file was changed, between 1970 and 8307: file systems keep times that no date can be."""
    return datetime.fromtimestamp(min(max(status.st_mtime, 0.0), LAST_SECONDS), UTC)


def _files_under(folder: Path, failed: Callable[[OSError], None]) -> Iterator[Path]:
    """All files below a folder, except in hidden folders. A folder that cannot be listed is passed to `failed`."""
    for above, folders, names in os.walk(folder, onerror=failed):
        folders[:] = [name for name in folders if not name.startswith(".")]  # scratch; .snapshot of a file server
        yield from (Path(above, name) for name in names)


def _move_folder_aside(path: Path) -> None:
    """Rename a folder that is where an object belongs, and nothing else. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f".{path.name}.{uuid4().hex}"))


def _bytes_of(path: Path, max_bytes: int) -> bytes:
    """A file's bytes. Raises OSError, and InvalidInput for too many bytes, or for a pipe, which would block for ever."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InvalidInput(f"{path}: is not a file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise InvalidInput(f"{path}: more than the {max_bytes:,} bytes that it may have")
    return data


@contextmanager
def _errors(path: Path, doing: str) -> Iterator[None]:
    """Turn an OSError into a StoreError of one line that names the path."""
    try:
        yield
    except OSError as error:
        if isinstance(error, IsADirectoryError) and doing != "write it":
            raise NotFound(f"{path}: is a folder, not an object") from None
        if isinstance(error, FileNotFoundError) and doing != "write it":  # a write creates its folders
            raise NotFound(f"{path}: does not exist") from None
        kind = Unreachable if error.errno in GONE else StoreError
        raise kind(f"{path}: cannot {doing}: {error.strerror or error}") from None


@contextmanager
def _temporary(path: Path, data: bytes) -> Iterator[Path]:
    """A file in the folder of `path` that holds `data`, synced to disk. It is deleted with the block, unless it was renamed."""
    _make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _take_name(temporary: Path, path: Path) -> None:
    """Give what is written its name. Raises FileExistsError where another has it."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with _lock(path.parent):
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
            temporary.rename(path)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel frees when the holder dies. Raises StoreError after LOCK_SECONDS."""
    began = time.monotonic()
    with _errors(folder / ".lock", "write it"):  # O_NONBLOCK: a pipe of that name would block
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - began > LOCK_SECONDS:
                    raise StoreError(
                        f"{folder}/.lock: another writer has held it for {LOCK_SECONDS:.0f} s; end that process"
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents, each synced to disk."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Sync `folder`, so that a rename or link in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
