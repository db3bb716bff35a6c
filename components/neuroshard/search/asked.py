"""What is asked of a search, in one value that its steps hand on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from neuroshard import __version__
from neuroshard.core.errors import UsageError
from neuroshard.core.plan import Provenance, Shard
from neuroshard.core.sharding import DATA_PARALLEL
from neuroshard.core.task import ShardingTask
from neuroshard.core.versions import of_pair
from neuroshard.costmodel.protocol import CostModel, trains_on
from neuroshard.orders.options import LOCAL_SEARCH
from neuroshard.search.copies import check_copies, may_be_copied, with_dense_optimizer
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.equal_shards import HALVES
from neuroshard.search.problem.kept_cuts import KeptCuts
from neuroshard.search.problem.kinds import MayHold
from neuroshard.search.problem.previous import Previous
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.room import contradicts_itself
from neuroshard.search.problem.state import State
from neuroshard.search.settings import UNKNOWN, SearchSettings, Trust
from neuroshard.search.watch import Watch

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """A task, the same with all that the search may do of itself (`permitted`, `may`), how to search it, and from which plan.

    Of a search that keeps the column cuts of that plan they are `kept`; `current` is where it has the tables of the problem that
    is searched. `ends` are the ends of descents from first plans, by these plans, and `bounds_ms` quick bounds by root problem.
    Sequences are cut into `cut_into`; `bounded` plans have a lower bound.
    """

    task: ShardingTask
    permitted: ShardingTask
    may: MayHold
    cost_model: CostModel
    settings: SearchSettings
    watch: Watch
    previous: Previous | None = None
    trust: Trust = UNKNOWN
    notes: tuple[str, ...] = ()
    kept: KeptCuts | None = None
    current: CurrentPlacement | None = None
    cut_into: int = HALVES
    bounded: bool = True
    ends: dict[State, State] = field(default_factory=dict, init=False)
    bounds_ms: dict[Problem, float] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls,
        task: ShardingTask,
        model: CostModel,
        settings: SearchSettings,
        watch: Watch,
        previous: Previous | None = None,
        trust: Trust = UNKNOWN,
        notes: tuple[str, ...] = (),
    ) -> "Asked":
        """Of a task without tables in two parts. Raises UsageError where the cost model cannot price copies, and Infeasible where
        the task's own do not fit."""
        permitted, may = _permitted(task, model, settings, previous)
        return cls(task, permitted, may, model, settings, watch, previous, trust, notes)

    def placement(self, problem: Problem) -> CurrentPlacement | None:
        """Where the tables of a problem, or their pieces, are in the plan to start from, if there is one."""
        if self.previous is None:
            return None
        (plan, elsewhere), kept = self.previous, self.kept
        if kept is not None:
            plan, elsewhere = kept.plan, elsewhere and elsewhere._replace(pieces=kept.columns_of)
        return CurrentPlacement(problem, plan, self.settings.move_budget_bytes, elsewhere)

    def planned(self, best: State) -> ShardingTask:
        """The permitted task with what a plan does, and nothing more: rows are split only if the caller or the plan splits some,
        and the tables that the plan copies are data-parallel."""
        copied = [name for name, sharding in best.problem.spread_as.items() if sharding.copied]
        task = self.permitted
        if not self.task.may_split_rows and not best.problem.splits_rows:
            task = task.model_copy(update={"constraints": self.task.constraints})
        if copied:
            return task.with_copies(task.constraints.data_parallel.union(copied))
        return task if self.task.copied else task.model_copy(update={"dense_optimizer": self.task.dense_optimizer})

    def provenance(self, notes: Sequence[str]) -> Provenance:
        """Of a plan that was found, with these notes on how, and without what is said of the one that is returned."""
        settings, model = self.settings, self.cost_model
        is_ours = settings.algorithm == LOCAL_SEARCH
        return Provenance(
            neuroshard_version=__version__,
            algorithm=settings.algorithm,
            seed=settings.seed,
            time_budget_s=settings.time_budget_s if is_ours else None,
            cost_model=model.name,
            cost_model_backend=model.backend,
            cost_model_device=model.device_name,
            cost_model_error=self.trust.error,
            cost_model_versions={} if model.manifest is None else of_pair(model.manifest.bench.versions),
            instead=self.trust.instead,
            notes=tuple(notes),
        )


def keeping_cuts(asked: Asked, search: Callable[[Asked], T], shards: Callable[[T], Sequence[Shard]]) -> T:
    """What `search` finds with the column cuts of the plan to start from, if they are to be kept. Where its `shards` lie so that
    TorchRec would mix them up, it searches again with these where they were."""
    if asked.previous is None or not asked.settings.keep_optimizer_state:
        return search(asked)
    stay = frozenset[str]()
    while True:
        kept = KeptCuts(asked.permitted, asked.previous.plan, asked.cost_model, stay)
        found = search(replace(asked, kept=kept))
        mixed_up = kept.mixed_up(shards(found)) - stay
        if not mixed_up:
            return found
        stay |= mixed_up


def _permitted(
    task: ShardingTask, model: CostModel, settings: SearchSettings, previous: Previous | None
) -> tuple[ShardingTask, MayHold]:
    """The task with all that the search may do of itself: which rows it may split, and the tables that it may copy."""
    device, may_copy = trains_on(model), frozenset[str]()
    is_ours = settings.algorithm == LOCAL_SEARCH
    if settings.try_data_parallel and not model.prices_rows:
        raise UsageError("given costs do not say what copies of tables cost; name the tables: --data-parallel PATTERN")
    if settings.try_data_parallel and is_ours:
        # copies would lose the state of tables that are sharded now, or go to all other devices
        keeps = settings.keep_optimizer_state or settings.move_budget_bytes is not None
        now = previous.plan.task if keeps and previous is not None else None
        may_copy = may_be_copied(task, () if now is None else {table.name for table in now.placed}, device)
    if may_copy or task.densely_trained:
        assumed, task = task.dense_optimizer is None, with_dense_optimizer(task)
        check_copies(task, device, assumed=assumed)
    tries_rows = settings.try_row_wise and is_ours and model.prices_rows
    return (tries_rows and _trying_row_wise(task)) or task, {DATA_PARALLEL: may_copy}


def _trying_row_wise(task: ShardingTask) -> ShardingTask | None:
    """The task with permission to split row-wise every table that no rule keeps whole. None if there is no such table, if the
    task permits some already, or if it contradicts a limit of shards."""
    if task.may_split_rows:
        return None
    tried = task.model_copy(update={"constraints": task.constraints.model_copy(update={"row_wise": True})})
    return tried if tried.may_split_rows and not contradicts_itself(tried) else None
