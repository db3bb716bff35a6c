"""All proposers by name. `Tuning` has a switch of the same name for each; `run` says when each is asked."""

from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers import baselines, greedy, row_wise
from neuroshard.search.proposers.base import ProposalRequest, Proposer

PROPOSERS: dict[str, Proposer] = {
    "greedy": greedy.propose,
    "row_wise": row_wise.propose,
    "baselines": baselines.propose,
}


def propose(name: str, problem: Problem, request: ProposalRequest) -> list[State]:
    """The plans of one proposer; none if its switch is off."""
    return PROPOSERS[name](problem, request) if getattr(problem.tuning, name) else []
