"""A plan against the live plan: the cost of both by one measure, and the bytes that move from one to the other."""

from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from neuroshard.core.comparable import other_groups, other_work, why_not_comparable
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.moves import bytes_by_device, moves
from neuroshard.core.plan import DeviceCost, Plan, shardings_of
from neuroshard.core.row_order import LISTS_FOLDER
from neuroshard.core.shapes import shape_fault, shapes_of
from neuroshard.core.sharding import SHARDINGS
from neuroshard.core.text import counted, short_name
from neuroshard.core.tiers import TIERS
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel
from neuroshard.files.plan import read_plan
from neuroshard.files.row_orders import ReadIds, ids_among, with_drift
from neuroshard.report.numbers import Columns, short
from neuroshard.store.open import open_store
from neuroshard.store.releases import plans_of
from neuroshard.store.releases import read_plan as read_published
from neuroshard.store.row_orders import read_ids
from neuroshard.store.track import live_or_none

NOT_KNOWN = "–"
MOST_MOVES = 5000  # in the page's list, the largest ones; sums are over all moves


class LivePlan(NamedTuple):
    """The live plan, and its name on the page. `read` returns the hot ids of a row order, of it or of the new plan."""

    plan: Plan
    name: str
    read: ReadIds | None = None


@dataclass(frozen=True)
class PlanChange:
    """What changes from the live plan to the new one.

    `live_ms` is the predicted cost of each device of the live plan; `why` says how it was predicted, or why it was not. `pieces`
    are the rectangles of tables that move; the list leaves out the `left_out` smallest. Nothing is `counted` between plans of
    other groups of ranks.
    """

    live: LivePlan
    live_ms: tuple[float, ...] | None
    why: str
    pieces: int
    left_out: int
    devices: Columns
    moves: Columns
    counted: bool

    @property
    def moved_bytes(self) -> int:
        return sum(self.devices["arriving"])

    @property
    def to_move(self) -> str:
        """The bytes that move, in words."""
        return f"{format_bytes(self.moved_bytes)} to move" if self.counted else "moves not counted"

    @property
    def cost_ms(self) -> float | None:
        """Predicted ms of the live plan's slowest device."""
        return max(self.live_ms) if self.live_ms else None


def open_live(spec: str, plan: Plan, lists: Path | None = None) -> LivePlan | None:
    """A plan.json, or the live plan of STORE#MODEL; if that is `plan` itself, the plan that it replaced. None without one. The
    folder `lists` may have the lists of hot rows that `plan` names.

    Raises UsageError, InvalidInput, NewerFormat and StoreError.
    """
    url, mark, model = spec.rpartition("#")
    folders = [] if lists is None else [lists]
    if not mark or Path(spec).exists():
        read = cache(partial(ids_among, [*folders, Path(spec).parent / LISTS_FOLDER]))
        return LivePlan(read_plan(Path(spec)), Path(spec).name, read)
    if not url:
        raise UsageError(f"{spec!r} names no store; write STORE#MODEL, as in s3://bucket/prefix#ads-ranker")
    store = open_store(url)
    read = cache(partial(ids_among, folders, otherwise=partial(read_ids, store, model)))
    found = live_or_none(store, plans_of(model))
    if found is None:
        return None
    release = found.release
    if release.plan_digest != plan.digest():
        name = f"release {release.number} of {model}, live since {release.time}"
        return LivePlan(read_published(store, model, release.plan_digest), name, read)
    if release.previous_digest is None:
        return None
    name = f"what release {release.number} of {model}, this plan, replaced at {release.time}"
    return LivePlan(read_published(store, model, release.previous_digest), name, read)


def change(plan: Plan, live: LivePlan, model: CostModel | None) -> PlanChange:
    """What changes when `plan` replaces the live plan."""
    live_ms, why = _live_ms(plan, live, model)
    differ = other_groups(live.plan.task, plan.task)
    found = () if differ else moves(live.plan, plan)
    sums = bytes_by_device(found, max(plan.task.devices, live.plan.task.devices))
    place = {table.name: index for index, table in enumerate(plan.parted.tables)}
    listed = sorted(found, key=lambda move: -move.nbytes)[:MOST_MOVES]
    return PlanChange(
        live=live,
        live_ms=live_ms,
        why=why,
        pieces=sum(move.from_device is not None for move in found),
        left_out=len(found) - len(listed),
        devices={
            "device": [*range(len(sums["made"]))],
            "arriving": sums["arriving"],
            "made anew": sums["made"],
            "leaving": sums["leaving"],
        },
        moves={
            "table": [place[move.table] for move in listed],
            "from": [-1 if move.from_device is None else move.from_device for move in listed],
            "to": [move.to_device for move in listed],
            "column": [move.column_offset for move in listed],
            "dim": [move.dim for move in listed],
            "row": [move.row_offset for move in listed],
            "rows": [move.rows for move in listed],
            "bytes": [move.nbytes for move in listed],
        },
        counted=not differ,
    )


def _live_ms(plan: Plan, there: LivePlan, model: CostModel | None) -> tuple[tuple[float, ...] | None, str]:
    """Predicted ms of the live plan's devices with today's tables, and how they were predicted; or None, and why not."""
    live = there.plan
    fault = shape_fault(live, shapes_of(plan.task.tables))
    if fault:
        return None, f"not compared in ms: the live plan {fault}".replace("the model", "this plan")
    if differ := other_groups(live.task, plan.task):
        return None, f"neither ms nor moves are compared: the plans are for {differ}"
    if live.task.devices != plan.task.devices:
        return None, f"not compared in ms: the live plan is for {counted(live.task.devices, 'device')}"
    if model is not None:
        task, drifted, unknown = live.held, tuple[str, ...](), ""
        if there.read is not None:  # as the gate prices it (deploy/run.py)
            task, drifted, unknown = with_drift(task, plan.held, there.read, "its")
        prices = price_shards(model, plan.held.held_as(task), live.shards)
        if prices is None:
            return None, "not compared in ms: the live plan splits tables row-wise, which given costs do not cover"
        apart = other_work(live.task, plan.task).replace("the predictions are", "the plans are")
        by_model = "both are priced for this plan's task and tables by its cost model"
        said = filter(None, [apart, by_model, *drifted, unknown])
        return tuple(short(prices.total_ms)), "; ".join(said)
    if why := why_not_comparable(plan, live):
        return None, f"not compared in ms: {why}; --model prices both for this plan's task"
    if live.predicted_ms is None:
        return None, "not compared in ms: the live plan carries no prediction"
    return live.predicted_ms, "both carry predictions of one cost model on the same tables"


class Side(NamedTuple):
    """One line: its subject, the live plan's value, this plan's value."""

    what: str
    live: str
    this: str


def sides(plan: Plan, change: PlanChange) -> list[Side]:
    """The lines: costs and memory always, other facts only where the two plans differ."""
    live = change.live.plan
    of_live, of_this = (_facts(one, ms) for one, ms in ((live, change.live_ms), (plan, plan.predicted_ms)))
    always = {"slowest device", "mean device", "fullest device"}
    return [
        Side(what, of_live[what], of_this[what]) for what in of_this if what in always or of_live[what] != of_this[what]
    ]


def _facts(plan: Plan, ms: tuple[float, ...] | None) -> dict[str, str]:
    counted = Counter(shardings_of(plan).values())
    _, used, usable = plan.fullest
    topology, beyond = plan.task.topology, plan.parted.constraints.beyond_hbm
    tiers = Counter(rule.in_tier for rule in beyond.values())
    return {
        "slowest device": f"{max(ms):.3f} ms, predicted" if ms else NOT_KNOWN,
        "mean device": f"{sum(ms) / len(ms):.3f} ms, predicted" if ms else NOT_KNOWN,
        "fullest device": f"{format_bytes(used)} of {format_bytes(usable)}",
        "tables": f"{len(plan.task.tables):,}",
        "shards": f"{len(plan.shards):,}",
        **{f"tables {sharding.words}": f"{counted[sharding]:,}" for sharding in SHARDINGS},
        **{f"tables {tier.words}": f"{tiers[tier]:,}" for tier in TIERS.values() if tier.beyond_hbm},
        "fullest host": NOT_KNOWN if not beyond else format_bytes(max(plan.host_memory())),
        "devices": f"{plan.task.devices:,}",
        "hosts": NOT_KNOWN if topology is None else topology.text(plan.task.devices),
        "groups": "none" if plan.task.groups is None else plan.task.groups.text(plan.task.devices),
        "pipeline": plan.task.pipeline or NOT_KNOWN,
        "batch": f"{plan.task.global_batch_size:,}",
        "collectives": plan.task.collective_precision.text if plan.task.collective_precision else "fp32",
        "found by": plan.provenance.algorithm,
    }


def priced(plan: Plan, model: CostModel) -> tuple[DeviceCost, ...]:
    """Predicted ms of every device (D,). Raises InvalidInput where the plan splits rows and the model knows whole tables only."""
    prices = price_shards(model, plan.held, plan.shards)
    if prices is None:
        raise InvalidInput(
            f"cost model {short_name(model.name)} knows whole tables only, but plan {plan.digest()[:12]} splits some row-wise; "
            "price it by another cost model, or search with --no-row-wise"
        )
    return prices.of_devices
