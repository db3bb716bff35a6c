"""The edge of the disk: whole files or nothing, and errors of one line."""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NeuroshardError, UsageError
from neuroshard.core.units import format_bytes

MAX_JSON_BYTES = 256 * 2**20
LEAST_UNPACKED_BYTES, MOST_UNPACKED_TIMES = 64 * 2**20, 100  # files of costs unpack to ten times their size
LOCK = ".lock"
LOCK_ATTEMPTS = 100  # each but the last meets a run that has just ended
NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)  # of file systems without flock
WAYS_OUT = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "; check its permissions, or give another path"),
    errno.EROFS: "; give another path",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; free some space, or give another path"),
}


@contextmanager
def disk_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn an OSError (disk full, no permission, is a directory) into one line: the path, what is wrong, the way out."""
    try:
        yield
    except OSError as error:
        way_out = WAYS_OUT.get(error.errno or 0, "")
        raise NeuroshardError(f"{path}: cannot {doing}: {error.strerror or error}{way_out}") from None


def check_folder_exists(path: Path) -> None:
    """Raise UsageError where the folder that `path` is in does not exist.

    For paths that a person gives: only the last part may be new, since a mistyped path would make unwanted folders.
    """
    folder = path.absolute().parent
    if not os.path.lexists(folder):  # a broken link is reported when it is written
        raise UsageError(
            f"{path}: its folder {folder} does not exist, and only the last part of a path is created; check the path, or "
            "create the folder first (mkdir -p)"
        )


def check_other_path(out: Path, others: Iterable[Path]) -> None:
    """Raise UsageError where `out` is also one of the `others`, which a command reads or writes: one would be lost."""
    if not _is_sink(out) and os.path.realpath(out) in map(os.path.realpath, others):
        raise UsageError(
            f"{out}: is given twice, and writing it would overwrite the other; give another path to write to"
        )


def check_can_write(path: Path, *, folder: bool = False) -> None:
    """Raise now, before hours of work, what writing the file (or into the `folder`) would raise after them. Writes nothing."""
    with disk_errors(path, "write it"):
        if path.is_dir() and not folder:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if _is_sink(path) and not folder:
            return
        target = _target(path)
        for above in (target, *target.parents) if folder else target.parents:
            if above.is_symlink() and not above.exists():
                raise NotADirectoryError(errno.ENOTDIR, f"{above} is a broken link")
        there = next(one for one in ((target, *target.parents) if folder else target.parents) if one.exists())
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{there} is not a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            if os.statvfs(there).f_flag & os.ST_RDONLY:
                raise OSError(errno.EROFS, f"{there.absolute()} is on a read-only file system")
            raise PermissionError(errno.EACCES, f"user {os.getuid()} may not write to {there.absolute()}")


def read_bytes(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The whole file. Raises InvalidInput where it is missing, a folder, or larger than `max_bytes`."""
    with disk_errors(path, "read it"):
        if not path.exists():
            is_url = path.parts[:1] in (("s3:",), ("file:",))  # a Path has one slash of the two
            way_out = "; a file is read here, not a URL: copy it to this machine" if is_url else ""
            raise InvalidInput(f"{path}: no such file{way_out}")
        if path.is_dir():
            raise InvalidInput(f"{path}: cannot read it: Is a directory")
        if path.stat().st_size > max_bytes:
            raise InvalidInput(
                f"{path}: {path.stat().st_size:,} bytes, more than the {max_bytes:,} that such a file may have"
            )
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:  # a pipe or a device reports no size
            raise InvalidInput(f"{path}: more than the {max_bytes:,} bytes that such a file may have")
        return data


def check_unpacked(nbytes: int, size: int, path: Path) -> None:
    """Raise InvalidInput where a file of `size` bytes unpacks to so many that it looks like an attack on memory or disk."""
    most = max(LEAST_UNPACKED_BYTES, MOST_UNPACKED_TIMES * size)
    if nbytes > most:
        raise InvalidInput(
            f"{path}: has {format_bytes(size)}, but unpacks to {format_bytes(nbytes)} or more; at most {format_bytes(most)} are "
            "taken of a file of its size: make it again with less in it"
        )


def write_bytes(path: Path, data: bytes) -> None:
    """Write the file whole or not at all: a temporary file in the same folder, fsync, rename."""
    with writing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary path next to `path`; at the end of the block it is flushed and renamed to `path`, on an error removed.

    Where `path` is a link, its target is written. A pipe or a device (/dev/null, /dev/stdout) gets the bytes, as from any
    other program.
    """
    check_can_write(path)
    with disk_errors(path, "write it"):
        target, is_sink = _target(path), _is_sink(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=None if is_sink else target.parent, prefix=_scratch(target))
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            if is_sink:
                with temporary.open("rb") as data, path.open("wb") as sink:
                    shutil.copyfileobj(data, sink)
                return
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def writing_folder(path: Path) -> Iterator[Path]:
    """A temporary folder next to `path`, which may exist only if empty; at the end it is renamed, on an error removed.

    Where `path` is a link, its target is written: a folder cannot be renamed to a link.
    """
    with disk_errors(path, "write it"):
        target = _target(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=_scratch(target)))
        try:
            yield temporary
            temporary.chmod(0o777 & ~_umask())
            temporary.replace(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def only_writer_of(paths: Iterable[Path]) -> Iterator[None]:
    """The block is the only one that writes any of these files, which belong together. Raises InvalidInput if another does.

    Only blocks of this kind exclude each other.
    """
    targets = {Path(os.path.realpath(path)) for path in paths if not _is_sink(path)}
    with ExitStack() as locks:
        for target in sorted(targets):
            locks.enter_context(only_writer(target.parent, target.name, f"{_scratch(target)}lock"))
        yield


@contextmanager
def only_writer(folder: Path, what: str, name: str = LOCK) -> Iterator[None]:
    """The block is the only one that writes `what` into the folder, which is created. Raises InvalidInput if another does.

    The lock goes with the process that holds it, so a killed run keeps nobody out. No file of it stays.
    """
    was_there = folder.is_dir()
    lock = take_lock(folder, what, name)
    try:
        yield
    finally:
        with suppress(OSError):  # while it is held: who has opened it sees that it is gone, and begins anew
            (folder / name).unlink()
            if not was_there:
                folder.rmdir()  # nothing was written
        os.close(lock)


def take_lock(folder: Path, what: str, name: str = LOCK) -> int:
    """Lock the folder until the descriptor is closed or the process ends. Raises InvalidInput if another run has locked it."""
    taken = InvalidInput(f"{folder}: another run is writing {what} here; wait for it, or give another -o")
    with disk_errors(folder, "write to it"):
        for _ in range(LOCK_ATTEMPTS):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
            except FileExistsError:
                if _is_no_folder(folder):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
                continue
            except FileNotFoundError:  # another run has just removed the folder, having written nothing
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise taken from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    os.close(lock)
                    raise
                log(f"note: {folder}: its file system has no locks (flock): let no other run write {what} here")
            if is_lock_of(lock, folder, name):
                return lock
            os.close(lock)
    raise taken


def _is_no_folder(path: Path) -> bool:
    """Whether something else has the name of a folder, a broken link among it. Asks once: runs create and remove folders."""
    try:
        return not stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def is_lock_of(lock: int, folder: Path, name: str = LOCK) -> bool:
    """Whether the descriptor is that of the folder's lock, and neither was deleted or replaced."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(folder / name))
    except OSError:
        return False


def _target(path: Path) -> Path:
    """The target of a link, whether it exists or not; any other path unchanged."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _scratch(path: Path) -> str:
    """The beginning of a temporary name, short enough that the name has at most 255 bytes."""
    return f".{path.name[:50]}."


def _is_sink(path: Path) -> bool:
    """Whether it is a pipe or a device, which gets the bytes and must not be replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
