"""The algorithms that ask a cost model. The heuristics that ask none are in baselines.py."""

from collections.abc import Callable, Sequence

from neuroshard.core.errors import Infeasible
from neuroshard.search.baselines import KEYS
from neuroshard.search.beam import NEUROSHARD, PAPER, Effort, beam_search
from neuroshard.search.feasibility import misfit
from neuroshard.search.improve import improve
from neuroshard.search.problem import Placement, Problem
from neuroshard.search.splits import pack, split_oversized

# From the problem, the effort, and the heuristics' placements. Raises Infeasible where it finds none that fits.
Search = Callable[[Problem, Effort, Sequence[Placement]], Placement]


def neuroshard(problem: Problem, effort: Effort, heuristic: Sequence[Placement]) -> Placement:
    """The beam search from tables whole and from tables split as memory needs; then the best few of what it, the published
    search, packing by memory and the heuristics found are improved in small steps. So by the cost model none is better."""
    packed = pack(problem)
    starts = [problem.whole, split_oversized(problem, problem.whole), packed.shards]
    found = beam_search(problem, starts, effort, NEUROSHARD).placement
    published = beam_search(problem, [problem.whole], effort, PAPER).placement
    fitting = [placement for placement in (found, published, packed, *heuristic) if placement.fits]
    if not fitting:
        raise Infeasible(f"no packing found: {misfit(problem, packed)}; add devices or memory")
    ranked: list[Placement] = [fitting[index] for index in problem.worst_ms(fitting).argsort(kind="stable")]
    if not effort.improve_steps:
        return ranked[0]
    distinct = list({placement.key: placement for placement in ranked}.values())
    return improve(problem, distinct[: effort.beam], effort.improve_steps)


def paper(problem: Problem, effort: Effort, heuristic: Sequence[Placement]) -> Placement:
    """The search as published, to compare with: it may miss plans where memory is tight."""
    found = beam_search(problem, [problem.whole], effort, PAPER).placement
    if not found.fits:
        raise Infeasible(
            f"paper, which gives a device at most 1.5 x the mean columns, found no plan: {misfit(problem, found)}; "
            "neuroshard splits until tables fit: try it"
        )
    return found


SEARCHES: dict[str, Search] = {"neuroshard": neuroshard, "paper": paper}
ALGORITHMS = (*SEARCHES, *KEYS)
