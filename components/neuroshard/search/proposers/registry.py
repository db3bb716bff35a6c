"""All proposers by name. `Tuning` has a switch of the same name for each; `algorithms.py` says when each is asked."""

from collections.abc import Callable

from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers import baselines, greedy, spread

# A problem and a seed, which only some need -> plans that fit, cheapest first; none if it finds none
Proposer = Callable[[Problem, int], list[State]]
PROPOSERS: dict[str, Proposer] = {
    "greedy": greedy.propose,
    "row_wise": spread.propose,
    "copies": spread.propose_copies,
    "baselines": baselines.propose,
}


def propose(name: str, problem: Problem, seed: int) -> list[State]:
    """The plans of one proposer; none if its switch is off. Whether they keep a move budget, the caller checks."""
    return PROPOSERS[name](problem, seed) if getattr(problem.tuning, name) else []
