"""A model's spec -> its plan for today's tables, with the best cost model there is.

The plan obeys the spec's constraints. With a move budget, or with optimizer state to keep, it is searched from the live plan. A
plan that was rolled back does not return by itself, and while the live plan can be loaded, the live plan stays. If it cannot,
other algorithms are tried.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from neuroshard.core.clean import log
from neuroshard.core.errors import Infeasible, InvalidInput, NeuroshardError, NotFound, Unreachable, UsageError
from neuroshard.core.operator_limits import device_of, fault_of_plan
from neuroshard.core.plan import Plan
from neuroshard.core.release import Release
from neuroshard.core.row_order import LISTS_FOLDER
from neuroshard.core.value import canonical_json
from neuroshard.deploy.run import Placement, placement, rolled_back_digests, rolled_back_placements
from neuroshard.files.importers.table_access import with_traces
from neuroshard.files.tables import read_tables, write_tables
from neuroshard.nightly.fallbacks import Searched, choose
from neuroshard.orders.nightly import ModelSpec, Survey
from neuroshard.orders.options import ALGORITHMS
from neuroshard.orders.search import SearchOrder
from neuroshard.search.run import KeptOrders
from neuroshard.search.run import run as search
from neuroshard.store.patience import open_patiently, patiently
from neuroshard.store.protocol import Store
from neuroshard.store.releases import live_plan, read_live
from neuroshard.store.row_orders import put_ids, read_ids
from neuroshard.store.tables import fetch_tables
from neuroshard.store.traces import fetch_trace
from neuroshard.store.track import Live


def run(survey: Survey, name: str, store_url: str, tables: Path, out: Path) -> tuple[Plan | None, Searched]:
    """Write the model's tables as tables.json, and its plan as plan.json, by the run's `algorithm` and with its `memory_margin`
    left free; the plan, and the cost model it was searched with.

    Where there is no plan, both files hold the reason, as JSON. Raises Unreachable where the store does not answer.
    """
    reason = survey.no_plan.get(name, "")
    try:
        if not reason:
            store = open_patiently(store_url)
            patiently(lambda: fetch_tables(survey.spec(name).tables, tables))
            return patiently(lambda: search_plan(survey, name, store, tables, out))
    except Unreachable:
        raise
    except NeuroshardError as error:
        reason = str(error)
    log(f"no plan for {name}: {reason}")
    for path in (tables, out):
        if not path.exists():
            path.write_bytes(canonical_json({"no_plan": reason}))
    return None, Searched(no_plan=reason)


def search_plan(survey: Survey, name: str, store: Store, tables: Path, out: Path) -> tuple[Plan, Searched]:
    """Search the plan of the model `name`, and write it as plan.json.

    Raises what search/run.py raises, StoreError, and InvalidInput for invalid constraints.
    """
    spec = survey.spec(name)
    notes = _as_read(spec, store, tables) if spec.counted_access else ()
    pointer: Live[Release] | None = None
    with suppress(NotFound, InvalidInput):
        pointer = read_live(store, name)
    live = live_plan(pointer, store)
    searched = choose(survey, spec, store)
    # without a live plan that can be read and trains right, every table may be placed anywhere
    start = live if spec.starts_from_live else None
    if start is not None and (fault := fault_of_plan(start, device_of(survey.request.backend, searched.model))):
        log(f"note: the live plan of {name!r} is not started from, since {fault}: its tables may be placed anywhere")
        start = None
    if start is not None and start.task.groups is not None:
        log(f"note: the live plan of {name!r} is for groups of ranks, so it is not started from: no night plans any")
        start = None
    of_the_night = {"algorithm": survey.parameters["algorithm"], "seed": survey.request.seed}
    if start is None:
        of_the_night |= {"move_budget_bytes": None, "keep_optimizer_state": False}
    order = todays_order(survey, spec, survey.parameters["memory_margin"])
    order = replace(order, settings={**order.settings, **of_the_night}, previous=start)
    # a new order of the night is taken where access has drifted from that of the live plan, and that is worth moving rows
    keeping = None if live is None else KeptOrders(live, partial(read_ids, store, name))
    search_for = partial(search, tables, searched.model, out, notes=notes, keeping=keeping)
    plan = search_for(order, instead=searched.instead)
    digests = rolled_back_digests(pointer, name, store) if live is None else frozenset()
    if barred := rolled_back_placements(digests, name, store):
        plan, searched = _another(plan, searched, barred, order, search_for)
    return plan, searched


def todays_order(survey: Survey, spec: ModelSpec, memory_margin: float) -> SearchOrder:
    """What a model asks of tonight's plan, on its hardware and batch. Raises InvalidInput for invalid constraints."""
    asked, rules = spec.order, spec.rules
    topology, found = asked.topology, survey.topologies.get(survey.hardware.get(spec.name, ""))
    # as the nodes are, unless the devices are one domain, or not whole nodes
    if topology is None and found is not None and asked.devices > found.domain and not found.fault(asked.devices):
        topology = found
    return replace(
        asked,
        task={**asked.task, "batch_size": survey.request.batch_size, "topology": topology},
        # the gate refuses a plan that leaves less of any device
        constraints=rules.model_copy(update={"reserve_share": max(rules.reserve_share, memory_margin)}),
    )


def _as_read(spec: ModelSpec, store: Store, tables: Path) -> tuple[str, ...]:
    """Write the tables as the model's trainer recorded that they are read, put their lists of hot rows into the store, and return
    notes on it for the plan. Where no trainer recorded, or that cannot be read, the tables stay as they are."""
    with TemporaryDirectory() as folder:
        trace, lists = Path(folder) / "trace.safetensors", Path(folder) / LISTS_FOLDER
        try:
            fetch_trace(store, spec.name, trace)
            listed, notes = with_traces(read_tables(tables)[0], [trace], row_orders=lists)
            for each in lists.glob("*.npy"):
                put_ids(store, spec.name, each.read_bytes())
        except NotFound as error:
            log(f"note: {spec.name}: its tables are read as {spec.tables} says: {error}")
            return ()
        except Unreachable:
            raise
        except NeuroshardError as error:
            why = f"how the trainer reads the tables is not used: {error}"
            log(f"note: {spec.name}: {why}")
            return (why,)
    write_tables(tables, listed)
    log(*(f"note: {spec.name}: {note}" for note in notes))
    return notes


def _another(
    plan: Plan, searched: Searched, barred: frozenset[Placement], order: SearchOrder, search_for: Callable[..., Plan]
) -> tuple[Plan, Searched]:
    """A plan that nobody rolled back, by another algorithm if it must be, for a model without a live plan to keep.

    `plan` itself if every algorithm finds plans that were rolled back.
    """
    why = ""
    for other in (one for one in ALGORITHMS if one not in (order.settings["algorithm"], "random")):
        if placement(plan) not in barred:
            break
        said = "the live plan cannot be loaded, and the plan that was found was rolled back before"
        why = "; ".join(filter(None, [searched.instead, f"{said}, so this one is by {other}"]))
        with suppress(Infeasible, UsageError):  # some algorithms take fewer tasks
            plan = search_for(replace(order, settings={**order.settings, "algorithm": other}), instead=why)
    if placement(plan) in barred:
        return search_for(order, instead=searched.instead), searched
    return plan, searched._replace(instead=why or searched.instead)
