"""Whether a plan sends ids of sequences once, by TorchRec's `use_index_dedup` (core/dedup.py).

A search without comes first. Where its plan would be cheaper with, or nothing fits without, the task is searched again so, and
that plan is taken if it saves WORTH. One sharder serves all EmbeddingCollections of a model: all sequences are held alike.
"""

from collections.abc import Callable

from neuroshard.core.errors import Infeasible
from neuroshard.core.plan import Plan
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel, trains_on
from neuroshard.search.notes import knows_repeats, with_notes
from neuroshard.search.rows_by_access import assuming
from neuroshard.search.watch import Watch

WORTH = 0.01  # share of the cost for which a trainer sets a switch: a guess
OFF = "ids of sequences are sent as often as they come (use_index_dedup is off)"
ON = "each rank sends each distinct id of its batch of sequences once (use_index_dedup is on)"


def may_send_once(task: ShardingTask, model: CostModel) -> bool:
    """Whether a search may choose: FBGEMM has the kernel on GPUs alone, given costs are of tables as they are, and somebody must
    know how often rows come again."""
    repeats = any(knows_repeats(table) for table in task.tables if table.pooling == "none")
    return repeats and not task.index_dedup and model.prices_rows and trains_on(model) == "cuda"


def choose(task: ShardingTask, model: CostModel, search: Callable[..., Plan], watch: Watch) -> Plan:
    """The plan that `search` finds of the task, or of the same with ids of its sequences sent once, whichever is cheaper."""
    names = [table.name for table in task.tables if table.pooling == "none"]
    try:
        with watch.sharing(0.5):
            off = search(task.with_dedup(()), watch=watch.anew())
    except Infeasible:
        return _said(search(task.with_dedup(names), watch=watch.anew()), "nothing fits otherwise")
    prices = price_shards(model, off.task.with_dedup(names), off.shards)
    saved = 0.0 if prices is None else 1 - float(prices.total_ms.max()) / (off.cost_ms or 1.0)
    if saved < WORTH:
        said = f"use_index_dedup is left off: in the plan found it saves {max(saved, 0.0):.1%}, less than {WORTH:.0%}"
        return with_notes(assuming(off, OFF), said)
    try:
        on = search(task.with_dedup(names), watch=watch.anew())
    except Infeasible:
        return assuming(off, OFF)
    saved = 1 - (on.cost_ms or 0.0) / (off.cost_ms or 1.0)
    return assuming(off, OFF) if saved < WORTH else _said(on, f"that saves {saved:.1%}")


def _said(plan: Plan, why: str) -> Plan:
    """The plan, which sends ids once, with a line on how many they are and why."""
    once = [table for table in plan.parted.tables if table.sent_once]
    share = sum(table.pooling_factor for table in once) / (sum(table.every_lookup for table in once) or 1.0)
    sent = f"{share:.1%} of the lookups of {counted(len(once), 'sequence')} are distinct in a rank's batch, and sent once: {why}"
    needs = "the trainer's sharders need EmbeddingCollectionSharder(use_index_dedup=True)"
    return with_notes(assuming(plan, ON), f"{sent}; {needs}")
