"""What a proposer is."""

from dataclasses import dataclass
from typing import Protocol

from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.watch import Watch


@dataclass(frozen=True)
class ProposalRequest:
    """What a proposer gets besides the problem: the clock, a seed, and the current plan."""

    watch: Watch
    seed: int = 0
    current: CurrentPlacement | None = None


class Proposer(Protocol):
    """Plans to improve. To add one: a module in this folder with such a function, and a line in registry.py."""

    def __call__(self, problem: Problem, request: ProposalRequest) -> list[State]:
        """Plans that fit, cheapest first; none if it finds none. Whether they keep a move budget is checked by `run`."""
