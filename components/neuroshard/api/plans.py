"""Search a plan, price it, compare it, look at it, and put it where trainers load it from."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuroshard.api import arguments as take
from neuroshard.api.arguments import FilePath, public
from neuroshard.api.results import Deployment, Diff, Price, Report, Tables
from neuroshard.core.constraints import SIMPLICITY
from neuroshard.core.errors import UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.precision import parse_precision
from neuroshard.core.step_memory import DEFAULT_PIPELINE
from neuroshard.core.table import Table, check_dense_optimizer
from neuroshard.core.topology import topology_of
from neuroshard.core.units import parse_bytes, parse_duration, parse_memory
from neuroshard.core.value import shown

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


AUTO = "auto"  # the search chooses the data-parallel tables


@public
def search(
    tables: FilePath | nn.Module | pd.DataFrame | Iterable[Table | Mapping[str, Any]],
    model: FilePath,
    *,
    devices: int,
    memory: str | float | Sequence[str | float],
    out: FilePath | None = None,
    algorithm: str = "local-search",
    batch_size: int | None = None,
    rounds: int | None = None,
    time_budget: str | float | None = None,
    constraints: FilePath | None = None,
    pipeline: str = DEFAULT_PIPELINE,
    domain: int | None = None,
    local_world_size: int | None = None,
    network: str | Sequence[str] | None = None,
    collective_precision: str | None = None,
    dense_optimizer: str | None = None,
    reserve: str | float | None = None,
    min_dim: int | None = None,
    max_shards: int | None = None,
    never_split: Sequence[str] = (),
    row_wise: Sequence[str] = (),
    no_row_wise: bool = False,
    sharding_types: str | Sequence[str] | None = None,
    data_parallel: Sequence[str] = (),
    pin: Sequence[str] = (),
    together: Sequence[str] = (),
    previous: Plan | FilePath | None = None,
    move_budget: str | float | None = None,
    keep_optimizer_state: bool = False,
    simplicity: str | float = SIMPLICITY,
    seed: int = 0,
    quiet: bool = False,
    stop: threading.Event | None = None,
) -> Plan:
    """The plan whose slowest device is fastest, by the cost model; as `neuroshard search`.

    `neuroshard search --help` says what each option does. `tables` is a tables.json, or anything that `neuroshard.tables`
    takes. `model` names a cost model: a folder that `neuroshard pretrain` wrote, STORE#HARDWARE, analytic:h100 (or another
    datasheet's), or given:costs.json. Amounts are text as on the command line: `memory` is "80GiB" a device (or one for each, by
    commas), `reserve` "2GiB" or "15%", `move_budget` "50GiB", `time_budget` "30s", `network` "400Gb/s", `simplicity` "0.5%";
    a bare number is bytes, seconds, or a share. `previous` is a plan to start from (--from). With `out`, the plan is also
    written there as plan.json. Progress goes to stderr unless `quiet`. Once `stop` is set, the best plan so far is returned.

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
    from neuroshard.files.constraints import ConstraintsFile, read_constraints, with_flags
    from neuroshard.files.disk import check_other_path
    from neuroshard.search.run import run
    from neuroshard.search.settings import SearchSettings

    devices = _devices(devices)
    written = take.maybe(take.path, "out", out)
    given_constraints = take.maybe(take.path, "constraints", constraints)
    before = (
        None if previous is None else previous if isinstance(previous, Plan) else _path_of_plan("previous", previous)
    )
    source = take.path("tables", tables) if isinstance(tables, str | PathLike) else None
    if written is not None:
        check_other_path(written, (one for one in (source, given_constraints, before) if isinstance(one, Path)))
    listed = _tables_or_file(tables, quiet)
    file, ignored = (ConstraintsFile(), ()) if given_constraints is None else read_constraints(given_constraints)
    _say_notes(ignored, take.switch("quiet", quiet))
    copied = take.several("data_parallel", data_parallel)
    settings = SearchSettings(
        algorithm=take.name("algorithm", algorithm, "the name of one"),
        seed=take.seed(seed),
        rounds=take.maybe(take.whole, "rounds", rounds),
        time_budget_s=None
        if time_budget is None
        else parse_duration(take.amounts("time_budget", time_budget, "'30s'")),
        move_budget_bytes=(
            None if move_budget is None else parse_bytes(take.amounts("move_budget", move_budget, "'50GiB'"), least=0)
        ),
        simplicity=take.portion("simplicity", simplicity),
        keep_optimizer_state=take.switch("keep_optimizer_state", keep_optimizer_state),
        try_data_parallel=AUTO in copied,
    )
    memory_bytes = parse_memory(take.amounts("memory", memory, "'80GiB'"), devices)
    topology = topology_of(
        devices,
        take.maybe(take.whole, "domain", domain),
        take.maybe(take.whole, "local_world_size", local_world_size),
        take.maybe(take.amounts, "network", network, "'400Gb/s' or '50GB/s,0.06ms'"),
    )
    precision = take.maybe(take.name, "collective_precision", collective_precision, "text, as in 'fp16'")
    dense = take.maybe(take.name, "dense_optimizer", dense_optimizer, "text, as in 'adam'")
    given = with_flags(
        file,
        reserve=take.maybe(take.amounts, "reserve", reserve, "'2GiB' or '15%'"),
        min_dim=take.maybe(take.whole, "min_dim", min_dim),
        max_shards=take.maybe(take.whole, "max_shards", max_shards),
        never_split=take.several("never_split", never_split),
        pins=take.several("pin", pin),
        together=take.several("together", together),
        row_wise=take.several("row_wise", row_wise),
        no_row_wise=take.switch("no_row_wise", no_row_wise),
        sharding_types=take.maybe(take.amounts, "sharding_types", sharding_types, "'column-wise,row-wise'"),
        data_parallel=[pattern for pattern in copied if pattern != AUTO],
        ranks_a_host=None if topology is None else topology.local_world_size,
    )
    with silent(quiet):
        return run(
            listed,
            _model(model),
            written,
            settings,
            memory_bytes=memory_bytes,
            batch_size=take.maybe(take.whole, "batch_size", batch_size),
            pipeline=take.name("pipeline", pipeline, "none, sparse-dist or prefetch"),
            topology=topology,
            collective_precision=None if precision is None else parse_precision(precision),
            dense_optimizer=None if dense is None else check_dense_optimizer(dense),
            constraints=given,
            previous=before,
            stop=_stop(stop),
        )


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
    from neuroshard.report.priced import priced

    read = _plan(plan)
    opened = open_cost_model(_model(model), read.task.batch_size)
    return Price(read.digest(), opened.name, read.task.batch_size, priced(read, opened))


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
    return Diff(diff_json(*plans, opened), diff_text(*plans, opened))


@public
def report(
    plan: Plan | FilePath,
    *,
    model: FilePath | None = None,
    live: str | None = None,
    costs: Sequence[FilePath] = (),
    fleet: FilePath | None = None,
    evaluation: FilePath | None = None,
) -> Report:
    """The report of a plan, one HTML page, as `neuroshard report`. In a notebook it shows itself; `.save(path)` writes it.

    `model` is the plan's cost model, `live` the plan to compare with (a plan.json, or STORE#MODEL), `costs` the folders that
    the cost model learned from, `fleet` what `neuroshard fleet --json` printed, `evaluation` what `neuroshard evaluate -o` wrote
    of this plan. Raises NeuroshardError in one line, InvalidInput where the cost model is not the plan's.

    >>> import neuroshard as ns
    >>> tables = [{"name": f"t{i}", "rows": 100_000, "dim": 64, "pooling_factor": 10.0} for i in range(8)]
    >>> plan = ns.search(tables, "analytic:h100", devices=4, memory="1GiB", batch_size=4096, rounds=1, quiet=True)
    >>> ns.report(plan, model="analytic:h100").save("report.html") > 100_000
    True
    """
    from neuroshard.report.run import read_for_report, report_of

    read, files = (plan, {}) if isinstance(plan, Plan) else read_for_report(_path_of_plan("plan", plan))
    html = report_of(
        read,
        model=None if model is None else _model(model),
        live=take.maybe(take.name, "live", live, "a plan.json, or STORE#MODEL"),
        costs=[*map(Path, take.several("costs", costs))],
        fleet=take.maybe(take.path, "fleet", fleet),
        evaluation=take.maybe(take.path, "evaluation", evaluation),
        files=files,
    )
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
def deploy(
    plan: Plan | FilePath,
    store: FilePath,
    name: str,
    *,
    tables: FilePath | Iterable[Table] | None = None,
    model: FilePath | None = None,
    memory_margin: str | float = 0.0,
    max_error: str | float | None = None,
    min_gain: str | float | None = None,
    force: bool = False,
    single_writer: bool = False,
) -> Deployment:
    """Publish a plan in a store, ask the gate, and make it the live one of the model `name`; as `neuroshard deploy`.

    `store` is a folder or s3://bucket/prefix. `tables` are today's (a tables.json, or tables), `model` the plan's cost model;
    `memory_margin`, `max_error` and `min_gain` are shares, as in 0.05 or "5%". Raises Refused where the plan breaks a rule of
    the gate, Conflict where another deployer was faster, StoreError, InvalidInput; all in one line.

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
        cost_model=None if model is None else _model(model),
        memory_margin=take.portion("memory_margin", memory_margin),
        max_error=take.maybe(take.portion, "max_error", max_error),
        min_gain=take.maybe(take.portion, "min_gain", min_gain),
        force=take.switch("force", force),
        single_writer=take.switch("single_writer", single_writer),
    )
    store, name = _store(store), _name(name)
    read = _plan(plan)
    where = f"plan {read.digest()[:12]}" if isinstance(plan, Plan) else str(plan)
    return Deployment(store, *deploy_into(read, store, name, settings, where=where))


def _plan(plan: Plan | FilePath) -> Plan:
    from neuroshard.files.plan import read_plan

    return plan if isinstance(plan, Plan) else read_plan(_path_of_plan("plan", plan))


def _path_of_plan(option: str, plan: object) -> Path:
    if not isinstance(plan, str | PathLike):
        raise UsageError(
            f"{option} is a plan that neuroshard.search returned, or the path of a plan.json, not {shown(plan)}"
        )
    return take.path(option, plan)


def _model(model: object) -> str:
    return take.name("model", model, "the name of a cost model, as in 'analytic:h100'")


def _store(store: object) -> str:
    return take.name("store", store, "a folder, or s3://bucket/prefix")


def _name(name: object) -> str:
    return take.name("name", name, "the model's name in the store, as in 'ads-ranker'")


def _tables_or_file(tables: Any, quiet: bool) -> Path | Tables:
    """A tables.json's path, which a plan then names as its source, or the tables of anything else."""
    from neuroshard.api import sources

    if isinstance(tables, str | PathLike) and "://" not in str(tables) and str(tables).endswith(".json"):
        return Path(tables)
    return tables if isinstance(tables, Tables) else sources.tables(tables, quiet=quiet)


def _todays(tables: object) -> Path | tuple[Table, ...]:
    if isinstance(tables, str | PathLike):
        return take.path("tables", tables)
    listed = tuple(tables) if isinstance(tables, Iterable) and not isinstance(tables, Mapping) else None
    if listed is None or not all(isinstance(table, Table) for table in listed):
        raise UsageError(f"tables is a tables.json, or what neuroshard.tables returned, not {shown(tables)}")
    return listed


def _stop(stop: object) -> threading.Event | None:
    if stop is None or isinstance(stop, threading.Event):
        return stop
    raise UsageError(f"stop is a threading.Event, not {shown(stop)}")


def _say_notes(notes: Iterable[str], quiet: bool) -> None:
    from neuroshard.core.clean import log

    if not quiet:
        log(*(f"note: {note}" for note in notes))


def _devices(devices: object) -> int:
    from neuroshard.core.task import MAX_DEVICES

    count = take.whole("devices", devices)
    if not 1 <= count <= MAX_DEVICES:
        raise UsageError(f"devices must be a whole number from 1 to {MAX_DEVICES}, not {shown(devices)}")
    return count
