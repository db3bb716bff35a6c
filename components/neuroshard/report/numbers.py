"""Numbers for the page and the terminal: columns of rounded floats, shares, bars, and the source of a cost model's ms."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Shard, shardings_of
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted
from neuroshard.core.tiers import RESOURCES, TIERS, Resource
from neuroshard.core.units import format_bytes

Columns = dict[str, list[Any]]
DIGITS = 7  # more than any chart or cell shows
FILLS = "█▓░"  # distinguishable without colour


def short(values: Iterable[float]) -> list[float]:
    """Floats rounded to DIGITS digits."""
    return [float(f"{value:.{DIGITS}g}") for value in values]


def row_wise_tables(plan: Plan) -> dict[str, list[Shard]]:
    """The tables that are split row-wise, each with its shards in the order of their rows."""
    shards = plan.by_table()
    return {
        name: sorted(shards[name], key=lambda shard: (shard.row_offset, shard.column_offset))
        for name, kind in shardings_of(plan).items()
        if kind.splits_rows
    }


def cut_tables(plan: Plan) -> str:
    """`26 tables in 31 shards (5 cuts)`, `26 tables in 38 shards (5 cuts, 1 table row-wise)`."""
    shards, kinds = plan.by_table(), shardings_of(plan)
    placed = [name for name, kind in kinds.items() if not kind.splits_rows and not kind.copied]
    row_wise = sum(kind.splits_rows for kind in kinds.values())
    copied = sum(kind.copied for kind in kinds.values())
    split = f", {counted(row_wise, 'table')} row-wise" if row_wise else ""
    split += f", {counted(copied, 'table')} data-parallel" if copied else ""
    tiers = Counter(rule.in_tier for rule in plan.parted.constraints.beyond_hbm.values())
    split += "".join(f", {tiers[tier]} {tier.words}" for tier in TIERS.values() if tier in tiers)
    held = plan.held.constraints.rows_by_access
    in_two = sum(one.hot_rows is not None for one in held.values())
    split += f", {counted(in_two, 'table')} in two parts" if in_two else ""
    split += f", {counted(len(held) - in_two, 'table')} dealt by access" if len(held) > in_two else ""
    cuts = counted(sum(len(shards[name]) - 1 for name in placed), "cut")
    return f"{counted(len(plan.task.tables), 'table')} in {counted(len(plan.shards), 'shard')} ({cuts}{split})"


def memory_counts(plan: Plan) -> str:
    """What a plan's memory counts, as words after "counts"."""
    what = "weights and optimizer state; not a step's inputs and outputs, since the plan names no pipeline"
    if plan.task.pipeline is not None:
        what = f"weights, optimizer state, and a step's inputs and outputs by pipeline {plan.task.pipeline}"
        if plan.task.step_ledger is None:
            what += " as TorchRec estimates them, which real steps exceed two to four times"
        elif plan.task.dense_memory_bytes is None:
            what += "; not what dense layers keep of a step, which nobody said (--dense-memory)"
        if share := plan.task.allocator_share:
            what += f"; {100 * share:g} % of a step's bytes for what CUDA's caching allocator holds beyond them"
    if plan.parted.constraints.beyond_hbm:
        what += "; of tables beyond HBM their caches, and what they keep in HBM"
    if plan.task.mapped:
        what += "; id maps, and what is remembered of ids until they are evicted"
    if maps := plan.held.by_access.map_bytes:
        what += f"; {format_bytes(maps)} for maps of ids to rows by access"
    return what + _copies_counted(plan.parted)


def fullest_step(plan: Plan) -> str | None:
    """What fills the fullest device, by cause, and what is left; None where steps are not counted."""
    if not plan.task.counts_steps:
        return None
    device, used, usable = plan.fullest
    limit = plan.task.device_memory_bytes[device]
    held, peak = plan.device_memory()[device], plan.step_peaks()[device]
    kept: dict[str, int] = {"weights": held.weights, "optimizer": held.optimizer, "id maps": held.maps}
    kept["reserve"] = limit - usable
    kept.update((str(cause), nbytes) for cause, nbytes in peak.causes.items())
    causes = ", ".join(
        f"{cause} {format_bytes(nbytes)}" for cause, nbytes in sorted(kept.items(), key=lambda one: -one[1]) if nbytes
    )
    left = f"{format_bytes(usable - used)} of {format_bytes(limit)}"
    return f"device {device} is fullest, {left} left; at its step's {peak.moment}: {causes}"


HOSTS_SHOWN = 8


def hosts_memory(plan: Plan) -> list[str]:
    """`host memory: 2.0 GiB on host 0, 4.2 GiB on host 1, of 1.0 TiB each`, for each resource in which tables beyond HBM are. Of
    more than HOSTS_SHOWN hosts, the fullest.
    """
    in_use = {rule.in_tier.elements for rule in plan.parted.constraints.beyond_hbm.values()}
    return [f"{words}: {_of_hosts(plan, resource)}" for resource, words in RESOURCES.items() if resource in in_use]


def _of_hosts(plan: Plan, resource: Resource) -> str:
    used, limit = plan.host_memory(resource), plan.task.host_memory_bytes if resource == "host" else None
    of = "" if limit is None else f" of {format_bytes(limit)}"
    if len(used) == 1:
        return f"{format_bytes(used[0])}{of}"
    hosts = sorted(sorted(range(len(used)), key=lambda host: -used[host])[:HOSTS_SHOWN])
    each = [f"{format_bytes(used[host])} on host {host}" for host in hosts]
    left = len(used) - len(hosts)
    more = f", at most as much on {counted(left, 'more host')}" if left else ""
    return f"{', '.join(each)}{more}{of and f',{of} each'}"


def _copies_counted(task: ShardingTask) -> str:
    """What memory counts of data-parallel tables, and of copied hot parts, in words; empty where there are none."""
    hot = task.by_access.hot
    apart, copied = ([table for table in task.copied if (table.name in hot) == is_hot] for is_hot in (True, False))
    words = f"; {_copied_bytes(task, apart)} for copies of hot rows, with a gradient" if apart else ""
    return words + (_densely_trained(task, copied) if copied else "")


def _copied_bytes(task: ShardingTask, tables: list[Table]) -> str:
    return format_bytes(sum(task.memory(Part.of(table, copies=task.devices)).total for table in tables))


def _densely_trained(task: ShardingTask, copied: list[Table]) -> str:
    nbytes = _copied_bytes(task, copied)
    if task.dense_optimizer is None:
        return f"; {nbytes} for data-parallel tables, with a gradient, without a dense optimizer, which the plan does not name"
    return f"; {nbytes} for data-parallel tables, with gradients and the state of the dense optimizer {task.dense_optimizer}"


def percent(share: float) -> str:
    """`0.0312` -> `3.1 %`."""
    return f"{share:.1%}".replace("%", " %")


def ranges_text(plan: Plan) -> str | None:
    """What the plan may take when it is measured; None where its cost model does not say."""
    ranges = plan.provenance.cost_ranges
    if ranges is None:
        return None
    (low, high), (lowest, highest) = ranges.one, ranges.two
    return f"measured, 68 % of such plans take {low:.3f} to {high:.3f} ms, 95 % {lowest:.3f} to {highest:.3f} ms"


def against(cost_ms: float, other_ms: float, share: Callable[[float], str] = percent) -> str:
    """A cost compared with another one: `12.3 % lower`. `share` formats the share."""
    change = cost_ms / other_ms - 1 if other_ms else 0.0
    if abs(change) < 0.0005:
        return "equal"
    return f"{share(abs(change))} {'lower' if change < 0 else 'higher'}"


def source(backend: str | None, device: str | None) -> str:
    """Where a cost model's milliseconds come from, as words after "of"."""
    match backend:
        case None:
            return "an unknown source"
        case "analytic":
            return f"datasheets, not measured ({device})"
        case "given":
            return f"costs as given, not measured here ({device})"
        case "synthetic":
            return f"costs by a formula, not measured ({device})"
    return f"costs measured on {backend} ({device})"


def measured(backend: str | None) -> str:
    """The name of the costs that a cost model learned from: those of a formula are never called measured."""
    return "the formula's" if backend == "synthetic" else "measured"


def bar(parts: Sequence[float], whole: float, width: int) -> str:
    """`███▓░  `: up to three kinds of parts, one after another; `whole` would fill `width` characters."""
    if not whole > 0:
        return " " * width
    ends = [min(width, round(width * (end / whole))) for end in accumulate(parts)]
    pieces = (FILLS[index] * (end - begin) for index, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)))
    return "".join(pieces).ljust(width)
