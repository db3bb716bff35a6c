"""When the predicted costs of two plans can be compared: one cost model predicted both, of the same work."""

from collections.abc import Callable

from neuroshard.core.plan import Plan
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology

# What changes a step's cost whatever the plan. The number of devices does too, but a step does the same work on more of them.
WORK: dict[str, Callable[[ShardingTask], object]] = {
    "tables": lambda task: task.tables,
    "batch sizes": lambda task: task.global_batch_size,
    "topologies": lambda task: _domains(task),
    "collective precisions": lambda task: task.collective_precision,
    "pipelines": lambda task: task.waits_for_input,
    "dense times": lambda task: task.hidden_ms,
    "steps between averagings": lambda task: task.groups and task.groups.sync_every,
}


def why_not_comparable(plan: Plan, other: Plan) -> str:
    """Why the costs that two plans carry cannot be compared; "" where they can."""
    by, work = plan.provenance.cost_model, other_work(plan.task, other.task)
    if by is not None and by == other.provenance.cost_model:
        return work
    models = "the predictions are of other cost models"
    return f"{models}, and {work.removeprefix('the predictions are ')}" if work else models


def other_work(task: ShardingTask, other: ShardingTask) -> str:
    """Why costs of one cost model on two tasks cannot be compared; "" where they can. Who compares plans says it first."""
    nouns = [noun for noun, of in WORK.items() if of(task) != of(other)]
    if not (task.groups and other.groups):
        nouns = [noun for noun in nouns if noun != "steps between averagings"]
    if task.pipeline == other.pipeline:  # which waits in one topology, and not in another
        nouns = [noun for noun in nouns if noun != "pipelines"]
    return f"the predictions are for other {' and '.join(nouns)}" if nouns else ""


def _domains(task: ShardingTask) -> Topology | None:
    """The topology of all ranks; None where all are one domain, whatever their hosts."""
    topology = task.topology_of_all
    return None if topology is None or topology.domains(task.ranks) == 1 else topology


def other_groups(task: ShardingTask, other: ShardingTask) -> str:
    """How the groups of ranks of two tasks differ, so that devices of one are other ranks in the other; "" where they do not."""
    same = [(one.devices, one.groups.ranks, one.groups.contiguous) if one.groups else None for one in (task, other)]
    if same[0] == same[1]:
        return ""
    was, now = (one.groups.text(one.devices) if one.groups else "ranks that are no groups" for one in (task, other))
    return f"{was}, and {now}"
