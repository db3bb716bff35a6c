"""kill -9 before every single touch of the files under a folder."""

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from helpers.limits import HANGS
from neuroshard.store.folder import FolderStore

TOUCHES = {"open", "os.mkdir", "os.link", "os.rename", "os.remove"}
Act = Callable[[FolderStore], object]


def killed_everywhere(start: Path, work: Path, act: Act) -> Iterator[Path]:
    """Copies of the store in `start`, in each of which `act` was killed one touch later; in the last one it came through."""
    touch, killed = 0, True
    while killed:
        touch += 1
        root = work / f"kill-{touch}"
        shutil.copytree(start, root)
        killed = _killed_at(touch, root, act)
        yield root
        shutil.rmtree(root)


def _killed_at(touch: int, root: Path, act: Act) -> bool:
    """Do `act` in a process of its own that kills itself before its `touch`-th touch of files under `root`."""

    def child() -> None:
        touches = 0

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal touches
            if event in TOUCHES and str(arguments[0]).startswith(str(root)):
                touches += 1
                if touches == touch:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        act(FolderStore(root))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(HANGS)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0
