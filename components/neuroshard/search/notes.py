"""What a plan's notes say: what was not measured for it, what a choice cost, and what a trainer must know."""

import math
from collections import Counter
from typing import cast

import numpy as np

from neuroshard.core.access import stated_curve
from neuroshard.core.moves import changed_state
from neuroshard.core.operator_limits import widest_shard
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, device_memory, host_memory, parts_of, shardings_of
from neuroshard.core.reuse import uniform_bins
from neuroshard.core.sharding import COLUMN_WISE, GRID
from neuroshard.core.skew import largest_block
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.core.tiers import TIERS
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.cache import miss_curve
from neuroshard.costmodel.network import CODEC_BYTES, for_task, knows_tasks
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel, trains_on
from neuroshard.costmodel.tiers import InTiers, KnowsTiers
from neuroshard.search.copies import copies_note
from neuroshard.search.groups import averaging_notes
from neuroshard.search.problem.state import State

# of a datasheet's rate: 47 of 188 GB/s between two racks of GB300, the slowest network of docs/benchmarks.md
BETWEEN_RACKS = 0.25
REFERENCE_ACCESS = "zipf:1"  # what lookups that nobody counted may be: the ids of DLRMv4's sequences are hotter still
MATTERS = 0.05  # of a step's time or of memory: from then on pooled tables are said to be a bet
SEQUENCES_MATTER = 0.005  # sequences, whose outputs all scale with the share
NOTABLE_SKEW = 1.1  # times an even share
STOPPED = "the search was stopped by hand: more of it might have found a better plan"


def with_notes(plan: Plan, *notes: str) -> Plan:
    """The plan with these notes after its own."""
    provenance = plan.provenance.model_copy(update={"notes": (*plan.provenance.notes, *notes)})
    return plan.model_copy(update={"provenance": provenance})


def of_plan(plan: Plan, task: ShardingTask, cost_model: CostModel, keeping: Plan | None) -> list[str]:
    """What copies take, what lies beyond HBM, what was not measured, what a precision saves and groups cost, and whose state is
    not kept of the plan whose state is to be (`keeping`). All of it follows from the plan: it is said last, of the plan that a
    search of the `task` returns."""
    model = for_task(cost_model, plan.parted)
    said = [copies_note(plan, model, assumed=task.dense_optimizer is None)] if plan.task.densely_trained else []
    said += [*in_tiers(plan, cost_model), *caveats(plan, model), *precision_saves(plan, cost_model)]
    said += [*skew(plan), *bet_on_even_lookups(plan, cost_model)]
    said += [*network_doubt(plan, cost_model), *averaging_notes(plan, cost_model)]
    return said if keeping is None else [*said, *state_changed(plan, keeping)]


def knows_repeats(table: Table) -> bool:
    """Whether it is known how often rows come again in a batch: stated or counted, not taken to be read alike."""
    uniform = uniform_bins(table.rows, table.pooling_factor, table.reuse_batch_size)
    return table.access is not None or table.reuse_bins != uniform


def row_givers(plan: Plan) -> list[str]:
    """A line about tables that give rows to ids as they train, where a plan has any."""
    task = plan.task
    if not task.mapped:
        return []
    most = max(memory.id_map for memory in device_memory(task, plan.shards))
    return [
        f"{counted(len(task.mapped), 'table')} row-wise over all devices, since TorchRec gives rows to their ids as they train "
        f"({first_few([table.name for table in task.mapped])}): id maps take up to {format_bytes(most, 'up')} of a device; ids "
        "are taken to be hashed evenly. Not priced: finding the rows of ids, and evicting"
    ]


def caveats(plan: Plan, model: CostModel) -> list[str]:
    """A line for each thing that the plan asks of the cost model, which is that of its task, and that was not measured for it."""
    task, kinds, may = plan.parted, shardings_of(plan), {*plan.parted.may_split_rows}
    notes = beyond_measured(plan, model) + row_givers(plan)
    once = plan.held.sent_once
    if task.index_dedup and not once:
        notes.append("no table is a sequence, of which alone --index-dedup is: it changes nothing")
    if once and trains_on(model) == "cpu":
        notes.append(
            "use_index_dedup needs a kernel of FBGEMM's that CPUs lack: there TorchRec fails at the first step"
        )
    if unknown := [table.name for table in plan.held.tables if table.name in once and not knows_repeats(table)]:
        notes.append(
            f"how often ids of {counted(len(unknown), 'sequence')} come again in a batch is not known ({first_few(unknown)}): "
            "rows are taken to be read alike, and use_index_dedup may save more"
        )
    cut = [table for table in task.tables if table.name in may and kinds[table.name] is COLUMN_WISE]
    held = [table for table in cut if table.dim <= (widest_shard(table, trains_on(model)) or table.dim)]
    if wide_tables := [table for table in held if table.dim > model.max_dim]:
        widest = max(table.dim for table in wide_tables)
        notes.append(
            f"{counted(len(wide_tables), 'table')} that may be split row-wise stayed column-wise: wider (up to {widest} columns) "
            f"than the {model.max_dim} that the cost model has seen; augment with --max-dim {widest}, measure and pretrain again"
        )
    asked, topology = task.constraints.sharding_types or (), task.topology
    in_domains = topology is not None and 1 < topology.domain < task.devices
    if "table-row-wise" in asked and not in_domains and task.devices > 1:
        alone = topology is not None and topology.domain == 1
        why = "domains have one device each" if alone else "all devices are one domain"
        notes.append(f"no table can be table-row-wise: {why} (--domain says how many share fast links)")
    untrained = [table.name for table in task.tables if not GRID.trains(table.optimizer_bytes_per_row, task.topology)]
    if "grid" in asked and untrained:
        notes.append(
            f"{counted(len(untrained), 'table')} cannot be in a grid ({first_few(untrained)}): where a domain is several hosts, "
            "TorchRec cannot train grids with optimizer state per row"
        )
    counts = Counter(kind.over.format(plan.task.devices) for kind in kinds.values() if kind.splits_rows)
    if counts:
        ways = [f"{counts[way]} {way}" for way in counts] if len(counts) > 1 else list(counts)
        split = [table for table in task.tables if kinds[table.name].splits_rows]
        pooled = any(table.pooling != "none" for table in split)
        known = sum(table.knows_ids for table in split)
        skewed = sum(task.skewed(table) is not None for table in split)
        others = (
            (known, "by their lookups by id"),
            (skewed, "by their access, each block as the largest is expected to be"),
        )
        otherwise = " and ".join(f"{number} of them {how}" for number, how in others if number)
        where = f", but {otherwise}" * bool(otherwise)
        dealt = sum(table.name in task.by_access.dealt for table in split)
        even = f"; {dealt} of them dealt by access: so are their row blocks while their row orders hold" * bool(dealt)
        sums = ", and the reduce-scatter of its sums to take as long as an all-to-all of as many bytes" * pooled
        notes.append(
            f"{counted(counts.total(), 'table')} of {len(kinds)} split row-wise {', '.join(ways)}: costs take all rows of a "
            f"table to be looked up alike{where}{sums}{even}"
        )
    return notes


def skew(plan: Plan) -> list[str]:
    """A line about row blocks that are taken to be hot, where only the shape of access is known."""
    task, hot = plan.parted, dict[str, tuple[float, str]]()
    for part in parts_of(task, plan.shards):
        loads = task.skewed(part.table) if part.rows < part.table.rows and part.table.name not in hot else None
        if loads is not None:
            largest = largest_block((loads,), part.row_blocks)
            even = part.table.block_rows(part.row_blocks) / part.table.rows
            in_runs = part.table.hottest_share(part.table.block_rows(part.row_blocks))
            high, most = largest.high / even, in_runs / even
            hot[part.table.name] = high, f"{part.table.name} {largest.expected / even:.2f}, {high:.2f} and {most:.2f}"
    notable = [text for high, text in sorted(hot.values(), reverse=True) if high >= NOTABLE_SKEW]
    if not notable:
        return []
    return [
        "hot row blocks, in times an even share of the lookups, as ids are taken to be hashed (expected, as priced; in one "
        f"plan of twenty; if the hottest rows are side by side): {first_few(notable)}. Memory has the second, of all such tables "
        "together; `neuroshard tables --access-from TRACES` counts which ids are hot"
    ]


def bet_on_even_lookups(plan: Plan, cost_model: CostModel) -> list[str]:
    """A line about row blocks of tables of whose access nothing is known, where they are sequences, or where it matters."""
    task, kinds = plan.task, shardings_of(plan)
    bets = [
        table
        for table in task.tables
        if table.name in kinds and kinds[table.name].splits_rows and not table.knows_ids and table.loads is None
        if table.name not in task.by_access.dealt
    ]
    if not bets or task.step_ledger is None or not plan.cost_ms:
        return []
    stated = {t.name: stated_curve(REFERENCE_ACCESS, t.rows, t.pooling_factor, 1) for t in bets}
    tables = (table.model_copy(update={"access": stated.get(table.name, table.access)}) for table in task.tables)
    skewed = task.model_copy(update={"tables": tuple(tables)})
    prices = price_shards(cost_model, skewed, plan.shards)
    if prices is None:
        return []
    ms, held = float(prices.total_ms.max()), device_memory(skewed, plan.shards)
    now, then = (max(one.total for one in of) for of in (device_memory(task, plan.shards), held))
    dearer, fuller = ms / plan.cost_ms - 1, then / now - 1
    sequences = [table for table in bets if table.pooling == "none"]
    if max(dearer, fuller) < (SEQUENCES_MATTER if sequences else MATTERS):
        return []
    lacking = max(one.total - limit for one, limit in zip(held, task.usable_bytes, strict=True))
    full = f", {format_bytes(lacking, 'up')} more than there is" if lacking > 0 else ""
    return [
        f"a bet on even lookups: nothing is known of the access of {counted(len(bets), 'row-wise table')} "
        f"({first_few([table.name for table in sequences or bets])}). With the hot blocks of {REFERENCE_ACCESS}, a step takes "
        f"{ms:.3f} ms ({dearer:+.0%}) and the fullest device {format_bytes(then)} ({fuller:+.0%}){full}; count it (neuroshard "
        "tables --access-from TRACES), or state it (--access), and search again"
    ]


def beyond_measured(plan: Plan, model: CostModel) -> list[str]:
    """A line for each cost of a plan that is beyond what was measured for the cost model, which is that of the plan's task."""
    notes, dims = list[str](), np.array([shard.dim for shard in plan.shards])
    if (wide := dims > model.max_dim).any():
        notes.append(
            f"{wide.sum()} of {counted(len(dims), 'shard')} {'is' if wide.sum() == 1 else 'are'} wider than the {model.max_dim} "
            f"columns that the cost model has seen (widest: {dims.max()}); costs beyond that are extrapolated"
        )
    notes += model.caveats(plan.task.devices, _as_asked(plan))
    if plan.task.batch_size != model.batch_size:
        notes.append(
            f"costs are predicted for the cost model's batch size {model.batch_size:,}, not for the task's "
            f"{plan.task.batch_size:,}"
        )
    return notes


def _as_asked(plan: Plan) -> list[Part]:
    """The parts that the cost model is asked for, the largest of each table."""
    largest: dict[str, Part] = {}
    for part in parts_of(plan.task, plan.shards):
        kept = largest.setdefault(part.table.name, part)
        if part.rows > kept.rows:
            largest[part.table.name] = part
    return [largest[table.name] for table in plan.parted.tables]


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


def fewer_cuts_cost(best: State, simple: State) -> tuple[str, ...]:
    """A line about what fewer cuts, or fewer bytes to move, cost, if they cost anything."""
    if simple.cost <= best.cost:
        return ()
    cuts, instead = (state.cuts - len(state.problem.spread) for state in (simple, best))
    what = (
        f"{counted(cuts, 'cut')} instead of {instead}" if cuts < instead else "fewer row-wise tables, or less to move"
    )
    share = (simple.cost - best.cost) / best.cost
    return (f"{what}, for {share:.2%} more than the plan that would be taken otherwise (--simplicity 0)",)


def more_in_hbm_cost(beyond: int, cost_ms: float, now: int, now_ms: float) -> tuple[str, ...]:
    """A line about what it costs that so many tables are beyond HBM `now`, not as many as in a plan of `cost_ms`, if anything."""
    if now_ms <= cost_ms:
        return ()
    return (
        f"{counted(now, 'table')} beyond HBM instead of {beyond}, for {now_ms / cost_ms - 1:.2%} more than the plan that would "
        "be taken otherwise (--simplicity 0)",
    )


def in_tiers(plan: Plan, cost_model: CostModel) -> list[str]:
    """What lies beyond HBM, what that takes, and what was assumed."""
    task, rules = plan.parted, plan.parted.constraints.beyond_hbm
    if not rules:
        return []
    tables = {table.name: table for table in task.tables}
    held = [rule.in_tier for rule in rules.values()]
    some = ", ".join(f"{held.count(tier)} {tier.words}" for tier in TIERS.values() if tier.beyond_hbm)
    cached = [name for name, rule in rules.items() if rule.in_tier.cached]
    model = cast(InTiers, for_task(cost_model, task))
    terms = np.zeros((task.devices, model.terms))
    np.add.at(terms, [shard.device for shard in plan.shards], model.of_parts(parts_of(task, plan.shards)))
    ms, fetched_ms = model.terms_ms(terms), float(terms[:, 1].max())
    host = sum(host_memory(task, plan.shards))
    notes = [
        f"{counted(len(rules), 'table')} of {len(tables)} beyond HBM: {some} "
        f"({format_bytes(host)} of host memory in all); that takes up to {ms.max():.3f} ms of a device's step, "
        f"{cast(KnowsTiers, model.inner).tiers_from}"
    ]
    if cached and task.hidden_ms:
        waited_ms = max(fetched_ms - task.hidden_ms, 0.0)
        notes.append(
            f"prefetching takes up to {fetched_ms:.3f} ms of a step on a device, of which {fetched_ms - waited_ms:.3f} ms are "
            f"hidden under dense layers of {task.hidden_ms:g} ms, as stated, and {waited_ms:.3f} ms are waited for; that was not "
            "measured"
        )
    elif cached and task.pipeline == "prefetch":
        notes.append(
            "no dense time is stated (--dense-time), so it is taken to be 0 ms: prefetching hides nothing, and missed rows are "
            "waited for"
        )
    if cached:
        warm = max(
            float(miss_curve(tables[n], task.batch_size).warm_up(float(rules[n].cached_rows or 0))) for n in cached
        )
        notes.append(f"caches are warm after up to {math.ceil(warm):,} batches; before that other rows are missed")
    if unknown := [name for name in cached if tables[name].access is None]:
        notes.append(
            f"misses of {counted(len(unknown), 'cached table')} are those of their reuse bins: which rows are hot stays the same "
            "from batch to batch; an access curve says more (neuroshard cache)"
        )
    return notes


def precision_saves(plan: Plan, cost_model: CostModel) -> tuple[str, ...]:
    """A line about what the plan's collective precision saves against fp32, or costs."""
    if plan.task.collective_precision is None or plan.cost_ms is None:
        return ()
    prices = price_shards(cost_model, plan.task.model_copy(update={"collective_precision": None}), plan.shards)
    if prices is None:
        return ()
    before, words = float(prices.total_ms.max()), plan.task.collective_precision.text
    saved = before - plan.cost_ms
    what = (
        f"saves {saved:.3g} ms a step"
        if saved >= 0
        else f"costs {-saved:.3g} ms a step: leave out --collective-precision"
    )
    return (
        f"all-to-alls in {words}, which {what} (in fp32 this plan takes {before:.3f} ms); encoding was not measured: it is taken "
        f"to move {CODEC_BYTES:g} bytes of memory a value. The trainer's sharders must have client.torchrec.qcomms(plan)",
    )


def network_doubt(plan: Plan, cost_model: CostModel) -> tuple[str, ...]:
    """A line about what the plan takes if the network between domains is as slow as the slowest that others measured. How
    switches and racks share ports is in no datasheet (docs/benchmarks.md)."""
    task, topology = plan.task, plan.task.topology
    joins = topology is not None and topology.domains(task.devices) > 1 and topology.network_bytes_per_s is None
    if topology is None or not joins or plan.cost_ms is None or not knows_tasks(cost_model):
        return ()
    rate = cost_model.for_task(task, waiting=False).network_bytes_per_ms * 1000
    slower = topology.model_copy(update={"network_bytes_per_s": rate * BETWEEN_RACKS})
    prices = price_shards(cost_model, task.model_copy(update={"topology": slower}), plan.shards)
    if prices is None:
        return ()
    return (
        f"with {BETWEEN_RACKS:.0%} of the {rate / 1e9:.3g} GB/s that devices send to other domains by their datasheet, as was "
        f"measured between two racks, this plan takes {float(prices.total_ms.max()):.3f} ms, not {plan.cost_ms:.3f}",
    )


def state_changed(plan: Plan, previous: Plan) -> list[str]:
    """Lines about tables whose state changes though it is to be kept. Parts of a table have its state where both are cut at the
    same columns; of copies it is the dense optimizer's; and neighbouring shards of unequal widths on one device are one shard to
    TorchRec."""
    were, are = previous.task.constraints, plan.task.constraints
    by_access, copied = {**were.rows_by_access, **are.rows_by_access}, are.data_parallel ^ were.data_parallel
    joined, parts, copies = list[str](), list[str](), list[str]()
    for name in changed_state(previous, plan):
        (parts if name in by_access else copies if name in copied else joined).append(name)
    inexactly = "does not carry over exactly"
    said = (
        (
            joined,
            f"{inexactly} though its cuts are kept: neighbouring shards of unequal widths lie on one device, where TorchRec "
            "joins them",
        ),
        (
            parts,
            f"{inexactly}: a hot and a cold part are not cut at the same columns as each other, or as the table was",
        ),
        (
            copies,
            "starts anew: data-parallel in only one of the plan to start from and this one; --data-parallel NAME keeps a table "
            "so",
        ),
    )
    return [
        f"the optimizer state of {counted(len(names), 'table')} ({first_few(names)}) {what}"
        for names, what in said
        if names
    ]


def no_row_orders(task: ShardingTask) -> tuple[str, ...]:
    """A line where a search is to choose hot rows to copy, and no sequence has a row order."""
    if any(table.row_order is not None and table.pooling == "none" for table in task.tables):
        return ()
    return (
        "no hot rows are copied, since no sequence has a row order: `neuroshard tables --from tables.json --access-from TRACES "
        "--batch-size B --row-orders -o hot.json` counts which rows are hot",
    )


def no_longer_by_access(task: ShardingTask, previous: Plan) -> tuple[str, ...]:
    """Lines about tables that the plan to start from holds by access, and the task of the plan found does not."""
    held, tables = task.constraints.rows_by_access, {table.name: table for table in task.tables}
    rest = {n: how for n, how in previous.task.constraints.rows_by_access.items() if n in tables and n not in held}
    gone = [name for name, how in rest.items() if how.went(tables[name])]
    others, said = (
        [name for name in rest if name not in gone],
        "held by access in the plan to start from, and no longer",
    )
    lines = [
        (others, "sequences are held so by --rows-by-access auto, where that pays, and by constraints"),
        (gone, "plans hold no pooled table in two parts any more, and deal none"),
    ]
    return tuple(f"{counted(len(some), 'table')} {said} ({first_few(some)}): {why}" for some, why in lines if some)
