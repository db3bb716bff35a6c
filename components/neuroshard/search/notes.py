"""What a plan's provenance says about it: what a choice cost, and what a trainer must know."""

from neuroshard.core.moves import changed_state
from neuroshard.core.plan import Plan
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.costmodel.network import CODEC_BYTES
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel
from neuroshard.search.problem.kept_cuts import KeptCuts
from neuroshard.search.problem.state import State

STOPPED = "the search was stopped by hand: more of it might have found a better plan"
LEAST_SAID = 0.0005  # share of the cost by which a plan may be dearer than the cheapest without a word


def with_notes(plan: Plan, *notes: str) -> Plan:
    """The plan with these notes after its own."""
    provenance = plan.provenance.model_copy(update={"notes": (*plan.provenance.notes, *notes)})
    return plan.model_copy(update={"provenance": provenance})


def mean_pooled(task: ShardingTask, tried: bool) -> tuple[str, ...]:
    """A line about tables that are not split row-wise, though tried or allowed, because their rows are averaged."""
    rules, allowed = task.constraints.rules(), tried or task.constraints.row_wise
    said = {name: rule.row_wise for name, rule in rules.items() if rule.row_wise is not None}
    names = [table.name for table in task.tables if table.pooling == "mean" and said.get(table.name, allowed)]
    if not names:
        return ()
    return (
        f"{counted(len(names), 'table')} pooled by mean not split row-wise ({first_few(names)}): TorchRec would then divide "
        "the sums of whole tables too",
    )


def doubted(taken: State, cheapest_ms: float) -> tuple[str, ...]:
    """A line where a plan is taken that costs more than the cheapest found."""
    if taken.cost <= cheapest_ms * (1 + LEAST_SAID):
        return ()
    more = taken.cost / cheapest_ms - 1
    return (
        f"{more:.2%} more than the cheapest plan found ({cheapest_ms:.3f} ms), which gains from errors of the cost model: this "
        "plan is expected to be faster in truth (--take cheapest takes that one)",
    )


def fewer_cuts_cost(best: State, simple: State) -> tuple[str, ...]:
    """A line about what fewer cuts, or fewer bytes to move, cost, if they cost anything."""
    if simple.cost <= best.cost:
        return ()
    cuts, instead = (state.cuts - len(state.problem.row_wise) for state in (simple, best))
    what = (
        f"{counted(cuts, 'cut')} instead of {instead}" if cuts < instead else "fewer row-wise tables, or less to move"
    )
    return (
        f"{what}, for {simple.cost / best.cost - 1:.2%} more than the plan that would be taken otherwise (--simplicity 0)",
    )


def precision_saves(plan: Plan, cost_model: CostModel) -> tuple[str, ...]:
    """A line about what the plan's exchange precision saves against fp32, or costs."""
    if plan.task.exchange_precision is None or plan.cost_ms is None:
        return ()
    prices = price_shards(cost_model, plan.task.model_copy(update={"exchange_precision": None}), plan.shards)
    if prices is None:
        return ()
    before, words = float(prices.total_ms.max()), plan.task.exchange_precision.text
    saved = before - plan.cost_ms
    what = (
        f"saves {saved:.3g} ms a step"
        if saved >= 0
        else f"costs {-saved:.3g} ms a step: leave out --exchange-precision"
    )
    return (
        f"exchange in {words}, which {what} (in fp32 this plan takes {before:.3f} ms); encoding was not measured: it is taken to "
        f"move {CODEC_BYTES:g} bytes of memory a value. The trainer's sharders must have client.torchrec.qcomms(plan)",
    )


def state_changed(plan: Plan, previous: Plan, kept: KeptCuts) -> tuple[str, ...]:
    """A line about tables whose cuts were kept and whose state changes all the same: neighbouring shards of unequal widths on one
    device are one shard to TorchRec."""
    changed = [name for name in changed_state(previous, plan) if name in kept.tables]
    if not changed:
        return ()
    return (
        f"the optimizer state of {counted(len(changed), 'table')} ({first_few(changed)}) does not carry over exactly though its "
        "cuts are kept: neighbouring shards of unequal widths lie on one device, where TorchRec joins them",
    )
