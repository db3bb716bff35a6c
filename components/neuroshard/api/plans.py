"""Search a plan, price it, compare it, look at it, and put it where trainers load it from."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from neuroshard.api.results import Deployment, Diff, Price, Report, Tables
from neuroshard.core.constraints import SIMPLICITY
from neuroshard.core.errors import UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.precision import parse_precision
from neuroshard.core.step_memory import DEFAULT_PIPELINE
from neuroshard.core.table import Table, check_dense_optimizer
from neuroshard.core.topology import topology_of
from neuroshard.core.units import parse_bytes, parse_duration, parse_memory, parse_portion
from neuroshard.core.value import shown

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


FilePath = str | PathLike[str]
AUTO = "auto"  # the search chooses the data-parallel tables


def search(
    tables: FilePath | nn.Module | pd.DataFrame | Iterable[Table | Mapping[str, Any]],
    model: FilePath,
    *,
    devices: int,
    memory: str | int,
    out: FilePath | None = None,
    algorithm: str = "local-search",
    batch_size: int | None = None,
    rounds: int | None = None,
    time_budget: str | float | None = None,
    constraints: FilePath | None = None,
    pipeline: str = DEFAULT_PIPELINE,
    domain: int | None = None,
    local_world_size: int | None = None,
    network: str | None = None,
    collective_precision: str | None = None,
    dense_optimizer: str | None = None,
    reserve: str | None = None,
    min_dim: int | None = None,
    max_shards: int | None = None,
    never_split: Sequence[str] = (),
    row_wise: Sequence[str] = (),
    no_row_wise: bool = False,
    sharding_types: str | None = None,
    data_parallel: Sequence[str] = (),
    pin: Sequence[str] = (),
    together: Sequence[str] = (),
    previous: Plan | FilePath | None = None,
    move_budget: str | int | None = None,
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

    _check_devices(devices)
    if out is not None:
        read = (one for one in (tables, constraints, previous) if isinstance(one, str | PathLike))
        check_other_path(Path(out), map(Path, read))
    file, ignored = (ConstraintsFile(), ()) if constraints is None else read_constraints(Path(constraints))
    _say_notes(ignored, quiet)
    settings = SearchSettings(
        algorithm=algorithm,
        seed=seed,
        rounds=rounds,
        time_budget_s=None if time_budget is None else parse_duration(str(time_budget)),
        move_budget_bytes=None if move_budget is None else parse_bytes(str(move_budget), least=0),
        simplicity=parse_portion(str(simplicity)),
        keep_optimizer_state=keep_optimizer_state,
        try_data_parallel=AUTO in data_parallel,
    )
    memory_bytes = parse_memory(str(memory), devices)
    topology = topology_of(devices, domain, local_world_size, network)
    given = with_flags(
        file,
        reserve=reserve,
        min_dim=min_dim,
        max_shards=max_shards,
        never_split=_several("never_split", never_split),
        pins=_several("pin", pin),
        together=_several("together", together),
        row_wise=_several("row_wise", row_wise),
        no_row_wise=no_row_wise,
        sharding_types=sharding_types,
        data_parallel=[pattern for pattern in _several("data_parallel", data_parallel) if pattern != AUTO],
        ranks_a_host=None if topology is None else topology.local_world_size,
    )
    is_file = isinstance(tables, str | PathLike) and "://" not in str(tables) and str(tables).endswith(".json")
    listed = Path(cast("FilePath", tables)) if is_file else _tables(tables, quiet)
    with silent(quiet):
        return run(
            listed,
            str(model),
            None if out is None else Path(out),
            settings,
            memory_bytes=memory_bytes,
            batch_size=batch_size,
            pipeline=pipeline,
            topology=topology,
            collective_precision=None if collective_precision is None else parse_precision(collective_precision),
            dense_optimizer=None if dense_optimizer is None else check_dense_optimizer(dense_optimizer),
            constraints=given,
            previous=previous if isinstance(previous, Plan) or previous is None else Path(previous),
            stop=stop,
        )


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
    opened = open_cost_model(str(model), read.task.batch_size)
    return Price(read.digest(), opened.name, read.task.batch_size, priced(read, opened))


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

        opened = open_cost_model(str(model), plans[1].task.batch_size)
    return Diff(diff_json(*plans, opened), diff_text(*plans, opened))


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

    read, files = (plan, {}) if isinstance(plan, Plan) else read_for_report(Path(plan))
    html = report_of(
        read,
        model=None if model is None else str(model),
        live=live,
        costs=[*map(Path, _several("costs", costs))],
        fleet=None if fleet is None else Path(fleet),
        evaluation=None if evaluation is None else Path(evaluation),
        files=files,
    )
    return Report(html, read.digest()[:12])


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

        return client.load_plan(str(source), name, digest=digest)
    if digest is not None or "://" in str(source):
        raise UsageError(f"{source}: a plan of a store has a model; give the model's name too, as in name='ads-ranker'")
    return _plan(source)


def deploy(
    plan: Plan | FilePath,
    store: FilePath,
    name: str,
    *,
    tables: FilePath | Iterable[Table] | None = None,
    model: FilePath | None = None,
    memory_margin: float = 0.0,
    max_error: float | None = None,
    min_gain: float | None = None,
    force: bool = False,
    single_writer: bool = False,
) -> Deployment:
    """Publish a plan in a store, ask the gate, and make it the live one of the model `name`; as `neuroshard deploy`.

    `store` is a folder or s3://bucket/prefix. `tables` are today's (a tables.json, or tables), `model` the plan's cost model;
    `memory_margin`, `max_error` and `min_gain` are shares of 1. Raises Refused where the plan breaks a rule of the gate,
    Conflict where another deployer was faster, StoreError, InvalidInput; all in one line.

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
        tables=Path(tables) if isinstance(tables, str | PathLike) else None if tables is None else tuple(tables),
        cost_model=None if model is None else str(model),
        memory_margin=memory_margin,
        max_error=max_error,
        min_gain=min_gain,
        force=force,
        single_writer=single_writer,
    )
    read = _plan(plan)
    where = f"plan {read.digest()[:12]}" if isinstance(plan, Plan) else str(plan)
    return Deployment(str(store), *deploy_into(read, str(store), name, settings, where=where))


def _plan(plan: Plan | FilePath) -> Plan:
    from neuroshard.files.plan import read_plan

    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | PathLike):
        raise UsageError(f"{shown(plan)} is no plan; give what neuroshard.search returns, or a plan.json")
    return read_plan(Path(plan))


def _tables(tables: FilePath | nn.Module | pd.DataFrame | Iterable[Table | Mapping[str, Any]], quiet: bool) -> Tables:
    from neuroshard.api import sources

    return tables if isinstance(tables, Tables) else sources.tables(tables, quiet=quiet)


def _say_notes(notes: Iterable[str], quiet: bool) -> None:
    from neuroshard.core.clean import log

    if not quiet:
        log(*(f"note: {note}" for note in notes))


def _several(option: str, values: Sequence[Any]) -> Sequence[Any]:
    """A list of values. Raises UsageError for a single text, whose letters would count as values."""
    if isinstance(values, str | PathLike):
        raise UsageError(f"{option} is a list, as in {option}=[{str(values)!r}], not {shown(values)}")
    return values


def _check_devices(devices: int) -> None:
    from neuroshard.core.task import MAX_DEVICES

    if not isinstance(devices, int) or not 1 <= devices <= MAX_DEVICES:
        raise UsageError(f"devices must be a whole number from 1 to {MAX_DEVICES}, not {shown(devices)}")
