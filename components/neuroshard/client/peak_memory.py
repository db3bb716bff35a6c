"""The most memory that tensors take at once while a trainer makes some steps, beside what its plan says. Needs torch.

    with peak_memory(device) as peak:
        for _ in range(3):
            pipeline.progress(batches)
    print(against_plan(plan, peak))  # on every rank

On a GPU these are the statistics of CUDA's caching allocator. On a CPU they are torch's own memory events, of tensors made inside
the block only: begin before the pipeline is made, and after a few steps, so that what is made once (state, buffers) is left out.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from neuroshard.client.ranks import gathered
from neuroshard.core.errors import UsageError
from neuroshard.core.plan import Plan, peaks_of
from neuroshard.core.units import format_bytes
from neuroshard.seen.record import devices_of_ranks, promised_tensors

# gloo's thread is sometimes the last to hold a tensor, and torch reports no free from there. After a pause it has let go.
PAUSE_S = 0.005


@dataclass
class Peak:
    """What tensors took at most: on a GPU all of them, on a CPU those made inside the block. `reserved` is what CUDA's caching
    allocator held for them, 0 on a CPU."""

    nbytes: int = 0
    reserved: int = 0


def against_plan(plan: Plan, peak: Peak, process_group: dist.ProcessGroup | None = None) -> str:
    """A line on the rank that is furthest above what the plan says of it, or least below. Every rank calls it with its own peak,
    and gets the same line.

    What tensors take is compared with what the plan says of them, beside the allocator's share, which is among what it says to be
    reserved. On a GPU that is weights, state and a step, and the dense layers' parameters and what they keep are measured too. On
    a CPU it is a step. Raises UsageError for a plan that counts no steps.
    """
    if not plan.task.counts_steps:
        raise UsageError(
            f"plan {plan.digest()[:12]} does not say what a step needs: search it again, with a --pipeline, by this version"
        )
    each = gathered(process_group, (peak.nbytes, peak.reserved))
    ranks = len(each)
    if ranks != plan.task.ranks:
        raise UsageError(
            f"plan {plan.digest()[:12]} is for {plan.task.ranks:,} ranks, and {ranks:,} said their peak: every one of its ranks "
            "calls against_plan"
        )
    places = devices_of_ranks(plan.task)
    on_gpus = peak.reserved > 0
    peaks = peaks_of(plan.held, plan.shards, gloo=not on_gpus)
    whole = plan.memory_bytes()
    said = promised_tensors(plan) if on_gpus else [one.nbytes for one in peaks]
    rank = max(range(ranks), key=lambda one: each[one][0] / max(said[places[one]], 1))
    (measured, reserved), place = each[rank], places[rank]
    what = "weights, state and a step" if on_gpus else "a step"
    held = f" ({format_bytes(reserved)} reserved, and {format_bytes(whole[place])} planned for it)" if on_gpus else ""
    off = measured / max(said[place], 1) - 1
    return (
        f"plan {plan.digest()[:12]}: rank {rank} of {ranks} is furthest from it: {format_bytes(measured)} allocated at its peak, "
        f"and it says {format_bytes(said[place])} for {what} ({off:+.0%}), most at the {peaks[place].moment}{held}"
    )


@contextmanager
def peak_memory(device: torch.device | str = "cpu") -> Iterator[Peak]:
    """Measures what the block's tensors take on this device at most; known once the block has ended."""
    peak = Peak()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.nbytes, peak.reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return
    with _pausing_after_waits(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        yield peak
    peak.nbytes = _most_live(_allocations(events))


def _allocations(events: Any) -> list[tuple[int, int]]:
    """The allocations (bytes) and frees (less than 0) of tensors, with their addresses, in the order in which they were made."""
    found, waiting = [], [*events.profiler.kineto_results.experimental_event_tree()]
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(address, nbytes) for _, address, nbytes in sorted(found, key=lambda one: one[0])]


def _most_live(allocations: list[tuple[int, int]]) -> int:
    """The most bytes that lived at once. Frees of what was made before the block do not count, nor does what was lost."""
    # where an address is given out again, no free of what lay there was reported
    lost, holds = set[int](), dict[int, int]()
    for place, (address, nbytes) in enumerate(allocations):
        before = holds.pop(address, None)
        if nbytes > 0:
            lost |= set() if before is None else {before}
            holds[address] = place
    live: dict[int, int] = {}
    total = most = 0
    for place, (address, nbytes) in enumerate(allocations):
        if place in lost:
            continue
        if nbytes > 0:
            live[address] = nbytes
            total += nbytes
            most = max(most, total)
        else:
            total -= live.pop(address, 0)
    return most


@contextmanager
def _pausing_after_waits() -> Iterator[None]:
    """Every wait for a collective is followed by a pause."""
    work = dist.distributed_c10d.Work if dist.is_available() else None
    if work is None:
        yield
        return
    wait = work.wait

    def waits(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = wait(self, *args, **kwargs)
        time.sleep(PAUSE_S)
        return done

    with patch.object(work, "wait", waits):
        yield
