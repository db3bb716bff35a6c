"""Processes of a gloo world on this machine, forked, so that what is imported is shared."""

import gc
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers.limits import HANGS


@contextmanager
def world(rendezvous: Path, rank: int, ranks: int) -> Iterator[None]:
    """This process as one rank of a world."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_ranks(
    ranks: int,
    folder: Path,
    work: Callable[..., Any],
    *arguments: object,
    timeout: float = HANGS,
    begin: Callable[[int], None] | None = None,
) -> list[Any]:
    """What `work(rank, ...)` returns on every rank, in order; `begin(rank)` comes before its world is there. Raises
    AssertionError with the traceback of one that fails."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(
            target=_rank, args=(rank, ranks, folder / "rendezvous", results, begin, work, arguments), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    by_rank = {}
    try:
        for _ in processes:
            rank, result, error = results.get(timeout=timeout)
            assert error is None, f"rank {rank}: {error}"
            by_rank[rank] = result
    finally:
        for process in processes:
            process.join(10) if len(by_rank) == ranks else process.kill()
    return [by_rank[rank] for rank in range(ranks)]


def _rank(
    rank: int, ranks: int, rendezvous: Path, results: Any, begin: Any, work: Callable[..., Any], arguments: Any
) -> None:
    gc.freeze()  # who collects a process group from before the fork waits for its threads, which are not here
    try:
        if begin is not None:
            begin(rank)
        with world(rendezvous, rank, ranks):
            results.put((rank, work(rank, *arguments), None))
            dist.barrier()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
