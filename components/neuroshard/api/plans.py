"""Search a plan, price it, compare it, look at it, and put it where trainers load it from."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from neuroshard.api.arguments import public, takes
from neuroshard.api.results import Deployment, Diff, Price, Report, Tables
from neuroshard.core.errors import UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.row_order import LISTS_FOLDER
from neuroshard.core.table import Table
from neuroshard.core.value import shown
from neuroshard.orders import values as take
from neuroshard.orders.deploy import DeployOptions
from neuroshard.orders.options import SearchOptions, checked
from neuroshard.orders.values import FilePath
from neuroshard.report.options import ReportOptions

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


@public
@takes(SearchOptions)
def search(
    tables: FilePath | nn.Module | pd.DataFrame | Iterable[Table | Mapping[str, Any]],
    model: FilePath,
    *,
    out: FilePath | None = None,
    quiet: bool = False,
    stop: threading.Event | None = None,
    **options: Unpack[SearchOptions],
) -> Plan:
    """The plan whose slowest device is fastest, by the cost model; as `neuroshard search`.

    `tables` is a tables.json, or anything that `neuroshard.tables` takes. `model` names a cost model: a folder that `neuroshard
    pretrain` wrote, STORE#HARDWARE, analytic:h100 (or another datasheet's), or given:costs.json. With `out`, the plan is also
    written there as plan.json. Progress goes to stderr unless `quiet`. Once `stop` is set, the best plan so far is returned.

    The options are those of the command. A SIZE is text as in "80GiB", or a number of bytes; a TIME "30s" or seconds, a SHARE
    "0.5%" or 0.005, a RATE "400Gb/s". A list stands for what may be repeated, and for text with commas. `constraints` also takes
    what is in a constraints.json, as a mapping, and `pin` a mapping such as {"user_*": [0, 1]}.

    OPTIONS

    Predicted costs are ms a step: `plan.cost_ms` of the slowest device, `plan.predicted_ms` of each of D devices.

    Raises UsageError for an invalid argument, InvalidInput for a fault in a file, Infeasible if no plan fits, StoreError
    for a store that does not answer; all are NeuroshardError, in one line.

    >>> import neuroshard as ns
    >>> tables = [{"name": f"t{i}", "rows": 100_000, "dim": 64, "pooling_factor": 10.0} for i in range(8)]
    >>> plan = ns.search(tables, "analytic:h100", devices=4, memory="1GiB", batch_size=4096, rounds=1, quiet=True)
    >>> plan.shards_by_device()
    (2, 2, 2, 2)
    """
    from neuroshard.core.clean import silent
    from neuroshard.files.disk import check_other_path
    from neuroshard.orders.search import SearchOrder
    from neuroshard.search.watch import Watch

    with silent(take.switch("quiet", quiet)):
        order = SearchOrder.of(options)
        watch = Watch(order.settings["time_budget_s"], stop=stop_event(stop))  # reading and imports count
        from neuroshard.search.run import run

        written = take.maybe(take.path, "out", out)
        if written is not None:
            read = (tables, options.get("constraints"), order.previous)
            check_other_path(written, [Path(one) for one in read if isinstance(one, str | PathLike)])
        return run(tables_or_file(tables), _model(model), written, order, watch=watch)


@public
def price(plan: Plan | FilePath, model: FilePath) -> Price:
    """What a plan costs by a cost model, which need not be the one that it was searched with; as `neuroshard price`.

    `plan` is a Plan or a plan.json, `model` names a cost model as for `search`. The result has the predicted ms of each of D
    devices, for the batch size of the plan's task. Raises NeuroshardError, in one line: InvalidInput for a broken plan, or one
    that the model cannot price; UsageError for an unknown cost model.

    >>> import neuroshard as ns
    >>> tables = [{"name": f"t{i}", "rows": 100_000, "dim": 64, "pooling_factor": 10.0} for i in range(8)]
    >>> plan = ns.search(tables, "analytic:h100", devices=4, memory="1GiB", batch_size=4096, rounds=1, quiet=True)
    >>> ns.price(plan, "analytic:a100").cost_ms > ns.price(plan, "analytic:h100").cost_ms
    True
    """
    from neuroshard.models.open import open_cost_model
    from neuroshard.report.live import priced

    read = _plan(plan)
    opened = open_cost_model(_model(model), read.task.batch_size)
    return Price(read.digest(), opened.name, read.task.global_batch_size, priced(read, opened))


@public
def diff(old: Plan | FilePath, new: Plan | FilePath, model: FilePath | None = None) -> Diff:
    """What moves from one plan to another, how many bytes, and what is gained; as `neuroshard diff`.

    Plans are Plans or plan.json files. With `model`, both are priced by that cost model; without, the plans' own predictions
    are compared, if they are by the same one. Raises InvalidInput for plans of other tables or, with `model`, of other batch
    sizes, and what `price` raises.

    >>> import neuroshard as ns
    >>> tables = [{"name": f"t{i}", "rows": 100_000, "dim": 64, "pooling_factor": 10.0} for i in range(8)]
    >>> plan = ns.search(tables, "analytic:h100", devices=4, memory="1GiB", batch_size=4096, rounds=1, quiet=True)
    >>> ns.diff(plan, plan).moved_bytes
    0
    """
    from neuroshard.report.moves import diff_json, diff_text

    plans = _plan(old), _plan(new)
    opened = None
    if model is not None:
        from neuroshard.models.open import open_cost_model

        opened = open_cost_model(_model(model), plans[1].task.batch_size)
    data = diff_json(*plans, opened, [folder for folder in map(_lists, (old, new)) if folder is not None])
    return Diff(data, diff_text(*plans, data))


@public
@takes(ReportOptions)
def report(plan: Plan | FilePath, **options: Unpack[ReportOptions]) -> Report:
    """The report of a plan, one HTML page, as `neuroshard report`. In a notebook it shows itself; `.save(path)` writes it.

    OPTIONS

    Raises NeuroshardError in one line, InvalidInput where the cost model is not the plan's.

    >>> import neuroshard as ns
    >>> tables = [{"name": f"t{i}", "rows": 100_000, "dim": 64, "pooling_factor": 10.0} for i in range(8)]
    >>> plan = ns.search(tables, "analytic:h100", devices=4, memory="1GiB", batch_size=4096, rounds=1, quiet=True)
    >>> ns.report(plan, model="analytic:h100").save("report.html") > 100_000
    True
    """
    from neuroshard.report.run import read_for_report, report_of

    read, files = (plan, {}) if isinstance(plan, Plan) else read_for_report(take.plan_file("plan", plan))
    html = report_of(read, files=files, lists=_lists(plan), **options)
    return Report(html, read.digest()[:12])


@public
def load_plan(source: FilePath, name: str | None = None, *, digest: str | None = None) -> Plan:
    """A plan, checked: of a plan.json, or with `name` the live plan of that model in the store `source`.

    A store is a folder or s3://bucket/prefix; with `digest` (64 hex digits) it is the published plan of that digest. Trainers:
    `neuroshard.client.load_plan` has more options. Raises NotFound, StoreError, InvalidInput or NewerFormat in one line.

    >>> import neuroshard as ns
    >>> ns.load_plan("nowhere.json")
    Traceback (most recent call last):
    neuroshard.core.errors.InvalidInput: nowhere.json: no such file
    """
    if name is not None:
        from neuroshard import client

        return client.load_plan(
            _store(source), _name(name), digest=take.maybe(take.name, "digest", digest, "64 hex digits")
        )
    if digest is not None or "://" in str(source):
        raise UsageError(f"{source}: a plan of a store has a model; give the model's name too, as in name='ads-ranker'")
    return _plan(source)


@public
@takes(DeployOptions)
def deploy(
    plan: Plan | FilePath,
    store: FilePath,
    name: str,
    *,
    tables: FilePath | Iterable[Table] | None = None,
    row_orders: FilePath | None = None,
    **options: Unpack[DeployOptions],
) -> Deployment:
    """Publish a plan in a store, ask the gate, and make it the live one of the model `name`; as `neuroshard deploy`.

    `store` is a folder or s3://bucket/prefix, `tables` are today's (a tables.json, or tables), which the plan must be for.
    `row_orders` is the folder of the lists of hot rows that the tables name, by default `rows` beside the plan's file. A SHARE is
    0.05 or "5%":

    OPTIONS

    Raises Refused where the plan breaks a rule of the gate, Conflict where another deployer was faster, StoreError,
    InvalidInput; all in one line.

    >>> import neuroshard as ns
    >>> tables = [{"name": f"t{i}", "rows": 100_000, "dim": 64, "pooling_factor": 10.0} for i in range(8)]
    >>> plan = ns.search(tables, "analytic:h100", devices=4, memory="1GiB", batch_size=4096, rounds=1, quiet=True)
    >>> ns.deploy(plan, "store", "ads-ranker").release.number
    1
    >>> ns.load_plan("store", "ads-ranker") == plan
    True
    """
    from neuroshard.deploy.run import DeploySettings, deploy_into

    settings = DeploySettings(
        tables=None if tables is None else _todays(tables),
        row_orders=_lists(plan) if row_orders is None else take.path("row_orders", row_orders),
        **checked(DeployOptions, options, "deploy"),
    )
    store, name = _store(store), _name(name)
    read = _plan(plan)
    where = f"plan {read.digest()[:12]}" if isinstance(plan, Plan) else str(plan)
    return Deployment(store, *deploy_into(read, store, name, settings, where=where))


def _lists(plan: Plan | FilePath) -> Path | None:
    """The folder of the lists of hot rows beside a plan's file."""
    return None if isinstance(plan, Plan) else take.plan_file("plan", plan).parent / LISTS_FOLDER


def _plan(plan: Plan | FilePath) -> Plan:
    from neuroshard.files.plan import read_plan

    return plan if isinstance(plan, Plan) else read_plan(take.plan_file("plan", plan))


_model = partial(take.name, "model", what="the name of a cost model, as in 'analytic:h100'")
_store = partial(take.name, "store", what="a folder, or s3://bucket/prefix")
_name = partial(take.name, "name", what="the model's name in the store, as in 'ads-ranker'")


def tables_or_file(tables: Any) -> Path | Tables:
    """A tables.json's path, which a plan then names as its source, or the tables of anything else."""
    from neuroshard.api import sources

    if isinstance(tables, str | PathLike):
        take.path("tables", tables)
        if "://" not in str(tables) and str(tables).endswith(".json"):
            return Path(tables)
    return tables if isinstance(tables, Tables) else sources.tables(tables)


def _todays(tables: object) -> tuple[Table, ...]:
    if isinstance(tables, str | PathLike):
        from neuroshard.files.tables import read_tables

        return read_tables(take.path("tables", tables))[0]
    listed = tuple(tables) if isinstance(tables, Iterable) and not isinstance(tables, Mapping) else None
    if listed is None or not all(isinstance(table, Table) for table in listed):
        raise UsageError(f"tables is a tables.json, or what neuroshard.tables returned, not {shown(tables)}")
    return listed


def stop_event(stop: object) -> threading.Event | None:
    if stop is None or isinstance(stop, threading.Event):
        return stop
    raise UsageError(f"stop is a threading.Event, not {shown(stop)}")
