"""When the predicted costs of two plans can be compared: one cost model predicted both, of the same work."""

from neuroshard.core.plan import Plan
from neuroshard.core.task import ShardingTask

# What changes a step's cost whatever the plan. The number of devices does too, but a step does the same work on more of them.
WORK = {
    "tables": "tables",
    "global_batch_size": "batch sizes",
    "topology_of_all": "topologies",
    "collective_precision": "collective precisions",
    "waits_for_input": "pipelines",
    "hidden_ms": "dense times",
}


def why_not_comparable(plan: Plan, other: Plan) -> str:
    """Why the costs that two plans carry cannot be compared; "" where they can."""
    by = plan.provenance.cost_model
    if by is None or by != other.provenance.cost_model:
        return "the predictions are of other cost models"
    return other_work(plan.task, other.task)


def other_work(task: ShardingTask, other: ShardingTask) -> str:
    """Why costs of one cost model on two tasks cannot be compared; "" where they can."""
    differing = next((noun for field, noun in WORK.items() if getattr(task, field) != getattr(other, field)), "")
    if task.groups and other.groups and task.groups.sync_every != other.groups.sync_every:
        differing = differing or "steps between averagings"
    return f"the predictions are for other {differing}" if differing else ""


def other_groups(task: ShardingTask, other: ShardingTask) -> str:
    """How the groups of ranks of two tasks differ, so that devices of one are other ranks in the other; "" where they do not."""
    same = [(one.devices, one.groups.ranks, one.groups.contiguous) if one.groups else None for one in (task, other)]
    if same[0] == same[1]:
        return ""
    was, now = (one.groups.text(one.devices) if one.groups else "ranks that are no groups" for one in (task, other))
    return f"{was}, and {now}"
