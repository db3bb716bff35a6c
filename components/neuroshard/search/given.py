"""What a search was given, and says of itself in a plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from neuroshard import __version__
from neuroshard.core.plan import Provenance
from neuroshard.core.task import ShardingTask
from neuroshard.core.versions import of_pair
from neuroshard.costmodel.protocol import CostModel
from neuroshard.orders.options import LOCAL_SEARCH
from neuroshard.search.problem.kinds import MayHold
from neuroshard.search.problem.previous import Previous
from neuroshard.search.settings import SearchSettings, Trust
from neuroshard.search.watch import Watch


@dataclass(frozen=True)
class Given:
    """A task, the same with all that the search may do of itself (`permitted`, `may`), and how to search it."""

    task: ShardingTask
    permitted: ShardingTask
    may: MayHold
    cost_model: CostModel
    settings: SearchSettings
    watch: Watch
    previous: Previous | None
    trust: Trust
    notes: tuple[str, ...]

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
