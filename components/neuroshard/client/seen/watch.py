"""What a plan promised, measured in the trainer: some steps now and then, written to the store. Needs torch and torchrec.

    from neuroshard.client.seen.watch import watch_plan

    with watch_plan(model, plan, "s3://bucket/prefix", "ads-ranker"):  # on every rank, after DistributedModelParallel
        for batch in loader:
            ...  # a loop, or a pipeline's progress: the forward of `model` is a step

Every 500 steps, five are timed: the lookups of FBGEMM's operators and their backward, and TorchRec's exchanges of outputs and of
gradients, each with what the rank waits in it. On GPUs by events, which nobody waits for until they are read; on CPUs by clocks.
Between these steps one counter is all that is added. After them the ranks gather their numbers, some hundred bytes each, and rank
0 writes them to the store: after the first, once an hour and at the end. What fails, as a store that is away, is a WatchWarning;
training goes on.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.distributed import comm_ops

from neuroshard.client.model.warn import warn_and_go_on
from neuroshard.client.ranks import gathered
from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.core.plan import Plan, check_plan
from neuroshard.core.store_url import StoreUrl
from neuroshard.core.text import one_line
from neuroshard.core.value import shown, timestamp, whole_number
from neuroshard.core.versions import Installed
from neuroshard.seen.record import CPU, PARTS, Quantiles, RankSeen, Seen
from neuroshard.seen.stored import put_seen
from neuroshard.store.deadline import within
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.releases import check_model

EVERY, STEPS, WARM_UP = 500, 5, 20
WRITE_EVERY_SECONDS = 3600.0
WRITE_SECONDS = 300.0  # of a store, for all requests
MOST_SPANS = 10_000  # of a step
OPERATORS = (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen)
# TorchRec's exchanges are pairs of autograd functions: one sends, and the other waits; backward the other way round
EXCHANGES = [
    kind
    for name, kind in vars(comm_ops).items()
    if isinstance(kind, type) and issubclass(kind, torch.autograd.Function) and name.endswith(("_Req", "_Wait"))
]


_timing: list["Watch"] = []  # who times now: one, or none


class WatchWarning(UserWarning):
    """Steps are not timed any more, or what was seen was not written; training is as it was."""


class _Step(NamedTuple):
    """Of one rank: a whole step, and what its parts took, in ms, each in the order in which it was done."""

    ms: float
    parts: dict[str, list[float]]


class _OfRank(NamedTuple):
    steps: list[_Step]
    allocated_bytes: int | None
    reserved_bytes: int | None


class Watch:
    """Times some steps of a trainer, as `watch_plan` says. Rank 0 writes what all ranks saw."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        store: Store,
        name: str,
        process_group: dist.ProcessGroup | None,
        steps: tuple[int, int],
        batch_size: int | None,
    ) -> None:
        check_plan(plan)
        self._name, self._digest, self._group = check_model(name), plan.digest(), process_group
        self._store, (self._steps, self._every) = store, steps
        self._batch_size = None if batch_size is None else whole_number("batch_size", batch_size)
        if self._batch_size is not None and self._batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}, the samples of a step over all ranks")
        if not 1 <= self._steps < self._every:
            raise UsageError(f"steps is {self._steps} of every {self._every}: give at least 1, and fewer than every")
        self._model = model
        if not any(hasattr(module, "_lookups") for module in model.modules()):
            raise UsageError(
                "watch_plan found no sharded collection in the model: give it what DistributedModelParallel returned"
            )
        # also where a rank has no tables
        with_nccl = dist.is_initialized() and dist.get_backend(process_group) == "nccl"
        on_gpu = with_nccl or any(one.is_cuda for one in model.parameters())
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._is_first = not dist.is_initialized() or dist.get_rank(process_group) == 0
        self._job, self._wrote = secrets.token_hex(8), -WRITE_EVERY_SECONDS
        self._step, self._next, self._is_over, self._has_timed = 0, WARM_UP, False, False
        self._timing: ExitStack | None = None
        self._began: dict[nn.Module, Any] = {}  # operators that look up
        self._marks: list[Any] = []  # when each timed step began, and when the last one ended
        self._spans: list[list[tuple[str, Any, Any]]] = []  # of each timed step: a part, its begin and end
        self._windows: list[list[_OfRank]] = []  # what every rank saw since the last write
        self._writing: threading.Thread | None = None
        self._failed: list[str] = []

    def begins_step(self, *_: Any) -> None:
        """The forward of the model is called."""
        if self._is_over:
            return
        self._report_failures()
        if not torch.is_grad_enabled():  # it is evaluated, so the step before has no known end
            self.stops_timing()
            return
        if self._timing is None:
            if self._step >= self._next and not _timing:  # of two that watch, one at a time
                self._starts_timing()
        elif len(self._spans) < self._steps:
            self._marks.append(self._now())
            self._spans.append([])
        else:
            self._marks.append(self._now())
            self.stops_timing()
            self._gather()
        self._step += 1

    def stops_timing(self) -> None:
        if self._timing is not None:
            self._timing.close()
            self._timing = None
            _timing.remove(self)

    def now_by(self, plan: Plan) -> None:
        """The model is held by another plan from now on, on all ranks. What was seen of the one before is written."""
        self.stops_timing()
        if self._windows:
            self._write()
        self._digest, self._windows, self._wrote = plan.digest(), [], -WRITE_EVERY_SECONDS

    def ends(self, wait_seconds: float) -> None:
        """Write what was not written, and wait so long for it."""
        self.stops_timing()
        if self._is_first and not (self._has_timed or self._is_over):
            self._failed.append(
                f"of the model's {self._step} forwards none were timed: {self._steps} after the first {WARM_UP} are, where "
                "nothing is evaluated between them"
            )
        ends = time.monotonic() + wait_seconds
        while self._writing is not None or self._windows:
            if self._writing is not None:
                self._writing.join(max(ends - time.monotonic(), 0.0))
                if self._writing.is_alive():
                    self._failed.append(f"{self._store.url} did not take it within {wait_seconds:g} s")
                    break
                self._writing = None
            if self._windows:
                self._write()
        self._report_failures()

    def _starts_timing(self) -> None:
        self._timing, self._next = ExitStack(), self._step + self._every
        _timing.append(self)
        for operator in self._operators():
            self._timing.callback(operator.register_forward_pre_hook(self._looks_up).remove)
            self._timing.callback(operator.register_forward_hook(self._looked_up).remove)
        for kind in EXCHANGES:
            for way in ("forward", "backward"):
                timed = self._timed(f"exchange_{way}", getattr(kind, way))
                self._timing.enter_context(patch.object(kind, way, staticmethod(timed)))
        self._marks, self._spans = [self._now()], [[]]

    def _operators(self) -> list[nn.Module]:
        """FBGEMM's, as they are now, since another plan makes some anew; each once, since a collection around another names the
        same."""
        lookups = [lookup for module in self._model.modules() for lookup in getattr(module, "_lookups", ())]
        return list(dict.fromkeys(one for each in lookups for one in each.modules() if isinstance(one, OPERATORS)))

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _took(self, part: str, begin: Any) -> None:
        if len(self._spans[-1]) < MOST_SPANS:  # another model may train on in this process
            self._spans[-1].append((part, begin, self._now()))

    def _timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def works(context: Any, *args: Any) -> Any:
            begin = self._now()
            done = work(context, *args)
            if any(context.needs_input_grad):  # not where a model is evaluated
                self._took(part, begin)
            return done

        return works

    def _looks_up(self, operator: nn.Module, *_: Any) -> None:
        self._began[operator] = self._now()

    def _looked_up(self, operator: nn.Module, _: Any, output: torch.Tensor) -> None:
        begin = self._began.pop(operator)
        if (node := output.grad_fn) is not None:
            self._took("lookup_forward", begin)
            began: list[Any] = []
            node.register_prehook(lambda *_: began.append(self._now()))
            node.register_hook(lambda *_: self._took("lookup_backward", began.pop()))

    def _gather(self) -> None:
        """What every rank timed, to every rank; rank 0 writes it, once an hour."""
        try:
            every = gathered(self._group, self._read())
        except Exception as error:  # a rank is lost, which training will say too
            self._is_over = True
            self._failed.append(f"the ranks could not gather it: {one_line(error)}")
            return
        steps = [step.parts for rank in every for step in rank.steps[1:]]  # of the first a pipeline began before
        if any(
            one[f"{part}_forward"] and not one[f"{part}_backward"] for one in steps for part in ("lookup", "exchange")
        ):
            self._is_over = True
            if self._is_first:
                self._failed.append("a timed step had a forward and no backward; promises are of steps with both")
        if not self._is_first or self._is_over:
            return
        self._windows.append(every)
        self._has_timed = True
        if time.monotonic() - self._wrote >= WRITE_EVERY_SECONDS:
            self._write()

    def _read(self) -> _OfRank:
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)

        def ms(begin: Any, end: Any) -> float:
            return float(begin.elapsed_time(end)) if on_gpu else (end - begin) * 1e3

        steps = []
        for begin, end, spans in zip(self._marks[:-1], self._marks[1:], self._spans, strict=True):
            parts: dict[str, list[float]] = {part: [] for part in PARTS}
            for part, *span in spans:
                parts[part].append(ms(*span))
            steps.append(_Step(ms(begin, end), parts))
        if not on_gpu:
            return _OfRank(steps, None, None)
        of_cuda = torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
        return _OfRank(steps, *of_cuda)

    def _write(self) -> None:
        if self._writing is not None and self._writing.is_alive():
            return  # with the next
        windows, self._windows, self._wrote = self._windows, [], time.monotonic()
        self._writing = threading.Thread(target=self._put, args=(windows, self._digest), daemon=True)
        try:
            self._writing.start()
        except RuntimeError as error:  # the machine has no thread left
            self._writing = None
            self._failed.append(one_line(error))

    def _put(self, windows: list[list[_OfRank]], digest: str) -> None:
        """Write what was seen, in a thread of its own."""
        try:
            on_gpu, here = self._device.type == "cuda", Installed.here()
            seen = Seen(
                model=self._name,
                plan_digest=digest,
                job=self._job,
                time=timestamp(datetime.now(UTC)),
                device=torch.cuda.get_device_name(self._device) if on_gpu else CPU,
                batch_size=self._batch_size,
                versions=({"torch": here.torch} if here.torch else {}) | here.fbgemm | here.torchrec,
                **summary(windows),
            )
            within(WRITE_SECONDS, self._store.url, lambda: put_seen(self._store, seen))
        except Exception as error:
            self._failed.append(str(error) if isinstance(error, NeuroshardError) else one_line(error))

    def _report_failures(self) -> None:
        while self._failed:
            warn_and_go_on(WatchWarning, f"what steps took is not in the store: {self._failed.pop(0)}")


def summary(windows: Sequence[Sequence[_OfRank]]) -> dict[str, Any]:
    """The fields of a Seen that are timed, from what every rank saw in each window."""
    parts, waits = [], []
    for window in windows:
        for of_ranks in zip(*(rank.steps for rank in window), strict=True):
            parts.append([[sum(step.parts[part]) for part in PARTS] for step in of_ranks])
            waits.append(_waiting(of_ranks))
    took, waited = np.array(parts), np.array(waits)  # (steps, ranks, parts), (steps, ranks)
    whole = [max(rank.steps[step].ms for rank in window) for window in windows for step in range(len(window[0].steps))]
    embeddings = took.sum(axis=2)
    ranks = [
        RankSeen(
            parts={part: _quantiles(took[:, rank, place]) for place, part in enumerate(PARTS)},
            embeddings_ms=_quantiles(embeddings[:, rank]),
            waiting_ms=_quantiles(waited[:, rank]),
            allocated_bytes=last.allocated_bytes,
            reserved_bytes=last.reserved_bytes,
        )
        for rank, last in enumerate(windows[-1])
    ]
    return {
        "steps": len(whole),
        "step_ms": _quantiles(np.array(whole)),
        "embeddings_ms": _quantiles(embeddings.max(axis=1)),
        "ranks": tuple(ranks),
    }


def _waiting(of_ranks: Sequence[_Step]) -> list[float]:
    """Of each rank in a step: what its exchanges took longer than on the rank that came last to each. 0 where ranks do not have
    the same exchanges."""
    waited = [0.0] * len(of_ranks)
    for part in ("exchange_forward", "exchange_backward"):
        each = [step.parts[part] for step in of_ranks]
        if len({len(one) for one in each}) > 1:
            continue
        for together in zip(*each, strict=True):
            waited = [ms + own - min(together) for ms, own in zip(waited, together, strict=True)]
    return waited


def _quantiles(values: Any) -> Quantiles:
    low, middle, high = (round(float(one), 6) for one in np.quantile(values, (0.1, 0.5, 0.9)))
    return low, middle, high


@contextmanager
def watch_plan(
    model: nn.Module,
    plan: Plan,
    store_url: StoreUrl,
    name: str,
    *,
    process_group: dist.ProcessGroup | None = None,
    every: int = EVERY,
    steps: int = STEPS,
    batch_size: int | None = None,
    wait_seconds: float = 10.0,
    single_writer: bool = False,
) -> Iterator[Watch]:
    """Time `steps` of every `every` steps of `model`, what DistributedModelParallel returned, and write what they took of `plan`
    to the store, for the model `name`. Every rank of `process_group` calls it, with the same numbers.

    After a `reshard`, `now_by(plan)` of what it yields says which plan is trained by. A forward and a backward alternate.
    `batch_size` is of a step over all ranks: where it is not the plan's, promises are said not to be of it. At the end the last
    write is waited for `wait_seconds`. Only rank 0 needs to write to the store. Raises UsageError for wrong
    arguments; nothing else, but for what a collective raises where a rank is lost.
    """
    if not isinstance(wait_seconds, int | float) or not 0 <= wait_seconds <= threading.TIMEOUT_MAX:
        raise UsageError(f"wait_seconds is a number of seconds, not {shown(wait_seconds)}")
    store = open_store(store_url, single_writer=single_writer)
    of = whole_number("steps", steps), whole_number("every", every)
    watch = Watch(model, plan, store, name, process_group, of, batch_size)
    hook = model.register_forward_pre_hook(watch.begins_step)
    try:
        yield watch
    finally:
        hook.remove()
        watch.ends(wait_seconds)
