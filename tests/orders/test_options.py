"""An option of a search is declared once: command line, Python and models.yaml say the same by it, and refuse the same."""

import inspect
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

import neuroshard as ns
from helpers.refusals import refused
from neuroshard.api import sources
from neuroshard.augment.settings import AugmentSettings
from neuroshard.cli import app
from neuroshard.cli.cluster import RunOptions
from neuroshard.core.errors import InvalidInput, NeuroshardError, UsageError
from neuroshard.core.task import ShardingTask
from neuroshard.files.constraints import ConstraintsFile
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.network import NetworkSettings
from neuroshard.orders.deploy import DeployOptions
from neuroshard.orders.nightly import read_specs
from neuroshard.orders.options import OPTIONS, checked, declared, settings_of
from neuroshard.orders.search import SearchOrder
from neuroshard.orders.sizes import SizeOptions
from neuroshard.report.options import ReportOptions
from neuroshard.search import run as searching
from neuroshard.search.settings import SearchSettings
from neuroshard.search.watch import Watch
from neuroshard.submit.package import read_parameters

NEEDED: dict[str, Any] = {"devices": 8, "memory": "80GiB"}
TABLES = [{"name": f"t{i}", "rows": 1000, "dim": 16, "pooling_factor": 2.0} for i in range(3)]


class Said(NamedTuple):
    """An option as words of the command line, as an argument from Python, and in a model of models.yaml, unless it has none."""

    words: str
    value: Any
    entry: dict[str, Any] | None = None


def rule(**fields: Any) -> dict[str, Any]:
    return {"constraints": {"tables": [{"match": "t1", **fields}]}}


def of_all(**fields: Any) -> dict[str, Any]:
    return {"constraints": fields}


SAID = {
    "devices": Said("--devices 4", 4, {"devices": 4}),
    "memory": Said("--memory 40GiB", 40 * 2**30, {"memory": "40GiB"}),
    "algorithm": Said("--algorithm size", "size"),
    "batch_size": Said("--batch-size 512", 512),
    "rounds": Said("--rounds 3", 3),
    "time_budget": Said("--time-budget 2m", 120),
    "constraints": Said("--constraints rules.json", Path("rules.json"), of_all(min_dim=16)),
    "pipeline": Said("--pipeline prefetch", "prefetch", {"pipeline": "prefetch"}),
    "dense_memory": Said("--dense-memory 6GiB", 6 * 2**30, {"dense_memory": "6GiB"}),
    "allocator_share": Said("--allocator-share 0", 0, {"allocator_share": 0}),
    "index_dedup": Said("--index-dedup on", "on", {"index_dedup": "on"}),
    "pipeline_options": Said(
        "--pipeline-options clear_data_dist_inputs,free_features_storage_early",
        ["free_features_storage_early", "clear_data_dist_inputs"],
        {"pipeline_options": "free_features_storage_early,clear_data_dist_inputs"},
    ),
    "dense_time": Said(
        "--pipeline prefetch --host-memory 1TiB --dense-time 12ms",
        "12ms",
        {"pipeline": "prefetch", "host_memory": "1TiB", "dense_time": "12ms"},
    ),
    "domain": Said("--domain 4", 4, {"domain": 4}),
    "local_world_size": Said("--local-world-size 2", 2, {"local_world_size": 2}),
    "network": Said(
        "--domain 4 --network 50GB/s,0.06ms", ["50GB/s", "0.06ms"], {"domain": 4, "network": "50GB/s,0.06ms"}
    ),
    "collective_precision": Said("--collective-precision fp16", "fp16", {"collective_precision": "fp16:fp16"}),
    "host_memory": Said("--host-memory 1TiB", 2**40, {"host_memory": "1TiB"}),
    "dense_optimizer": Said("--dense-optimizer sgd", "sgd", {"dense_optimizer": "sgd"}),
    "reserve": Said("--reserve 15%", "15%", of_all(reserve="15%")),
    "min_dim": Said("--min-dim 8", 8, of_all(min_dim=8)),
    "max_shards": Said("--max-shards 2", 2, of_all(max_shards=2)),
    "never_split": Said("--never-split t1", ["t1"], rule(split=False)),
    "row_wise": Said("--row-wise t1", ["t1"], rule(row_wise=True)),
    "data_parallel": Said("--data-parallel auto", ["auto"], {"data_parallel": "auto"}),
    "rows_by_access": Said("--rows-by-access auto", "auto", {"rows_by_access": "auto"}),
    "no_row_wise": Said("--no-row-wise", True, of_all(row_wise=False)),
    "sharding_types": Said(
        "--sharding-types column-wise,row-wise",
        ("column-wise", "row-wise"),
        of_all(sharding_types=["column-wise", "row-wise"]),
    ),
    "pin": Said("--pin t1=0,3", ["t1=0,3"], rule(devices=[0, 3])),
    "together": Said("--together t1,t2", ["t1,t2"], of_all(together=[["t1", "t2"]])),
    "previous": Said("--from live.json", "live.json"),
    "move_budget": Said("--move-budget 0", 0, {"move_budget": "0"}),
    "keep_optimizer_state": Said("--keep-optimizer-state", True, {"keep_optimizer_state": True}),
    "group_size": Said("--group-size 4 --batch-size 512 --domain 4", 4),
    "sync_every": Said("--sync-every 10 --group-size auto --batch-size 512 --domain 4", 10),
    "simplicity": Said("--simplicity 1%", 0.01, {"simplicity": 0.01}),
    "seed": Said("--seed 7", 7),
}
BESIDE: dict[str, dict[str, Any]] = {
    "network": {"domain": 4},
    "dense_time": {"pipeline": "prefetch", "host_memory": "1TiB"},
    "group_size": {"batch_size": 512, "domain": 4},
    "sync_every": {"group_size": "auto", "batch_size": 512, "domain": 4},
}  # what else Python needs beside the option

# what an option cannot be: again on the command line, from Python, and in models.yaml
ILL = {
    "devices": Said("--devices 4097", 4097, {"devices": 4097}),
    "memory": Said("--memory lots", "lots", {"memory": "lots"}),
    "algorithm": Said("--algorithm guess", "guess"),
    "batch_size": Said("--batch-size 0", 0),
    "rounds": Said("--rounds -1", -1),
    "time_budget": Said("--time-budget soon", "soon"),
    "constraints": Said("--constraints absent.json", "absent.json", of_all(min_dim=6)),
    "pipeline": Said("--pipeline fast", "fast", {"pipeline": "fast"}),
    "dense_memory": Said("--dense-memory much", "much", {"dense_memory": "much"}),
    "allocator_share": Said("--allocator-share -1", 11, {"allocator_share": "1100%"}),
    "index_dedup": Said("--index-dedup=x", 1, {"index_dedup": "maybe"}),
    "pipeline_options": Said("--pipeline-options fast", "fast", {"pipeline_options": "fast"}),
    "dense_time": Said("--dense-time 12", 12, {"dense_time": "12"}),
    "domain": Said("--domain 3", 3, {"domain": 3}),
    "local_world_size": Said("--local-world-size 5", 5, {"local_world_size": 5}),
    "network": Said("--network 3", 3, {"network": "3"}),
    "collective_precision": Said("--collective-precision fp4", "fp4", {"collective_precision": "fp4"}),
    "host_memory": Said("--host-memory much", "much", {"host_memory": "much"}),
    "dense_optimizer": Said("--dense-optimizer lion", "lion", {"dense_optimizer": "lion"}),
    "reserve": Said("--reserve 100%", "100%", of_all(reserve="100%")),
    "min_dim": Said("--min-dim 6", 6, of_all(min_dim=6)),
    "max_shards": Said("--max-shards 0", 0, of_all(max_shards=0)),
    "never_split": Said("--never-split ''", "t1", rule(split="perhaps")),
    "row_wise": Said("--row-wise ''", [1], rule(row_wise="perhaps")),
    "data_parallel": Said("--data-parallel ''", "auto", {"data_parallel": "t1"}),
    "rows_by_access": Said("--rows-by-access maybe", True, {"rows_by_access": "maybe"}),
    "no_row_wise": Said("--no-row-wise --row-wise t1", "yes", of_all(row_wise="perhaps")),
    "sharding_types": Said("--sharding-types diagonal", "diagonal", of_all(sharding_types=["diagonal"])),
    "pin": Said("--pin t1", ["t1"], rule(devices=["t1"])),
    "together": Said("--together ''", "t1,t2", of_all(together="t1,t2")),
    "previous": Said("--from ''", 3),
    "move_budget": Said("--move-budget all", "all", {"move_budget": "all"}),
    "keep_optimizer_state": Said("--keep-optimizer-state=x", 1, {"keep_optimizer_state": "maybe"}),
    "group_size": Said("--group-size 3", 3),
    "sync_every": Said("--sync-every 2", 2),
    "simplicity": Said("--simplicity 60%", 0.6, {"simplicity": "60%"}),
    "seed": Said("--seed -1", -1),
}


class Ordered(Exception):
    """What a search was called with."""

    def __init__(self, order: SearchOrder, watch: Watch) -> None:
        self.order, self.watch = order, watch


@pytest.fixture(autouse=True)
def _nothing_is_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(_tables: object, _model: object, _out: object, order: SearchOrder, *, watch: Watch) -> None:
        raise Ordered(order, watch)

    monkeypatch.setattr(searching, "run", run)
    monkeypatch.chdir(tmp_path)
    Path("rules.json").write_text('{"min_dim": 16}')
    Path("tables.json").write_text(json.dumps({"tables": TABLES}))


def typed(words: str) -> SearchOrder:
    """The order of a command line. Raises what it ends with; a usage error as UsageError."""
    needed = " ".join(f"--{name} {value}" for name, value in NEEDED.items() if f"--{name}" not in words)
    done = CliRunner().invoke(app, f"search tables.json --model analytic:h100 -o plan.json {needed} {words}")
    if isinstance(done.exception, Ordered):
        return done.exception.order
    if isinstance(done.exception, NeuroshardError):
        raise done.exception
    raise UsageError(done.output.partition("Error: ")[2].strip())


def called(**options: Any) -> SearchOrder:
    with pytest.raises(Ordered) as seen:
        ns.search(TABLES, "analytic:h100", **{**NEEDED, **options}, quiet=True)
    return seen.value.order


def written(entry: dict[str, Any]) -> SearchOrder:
    """The order of a model of models.yaml, as `neuroshard submit` reads it."""
    model = {"name": "ads", "tables": "tables.json", **NEEDED, **entry}
    Path("models.yaml").write_text(yaml.safe_dump([model]))
    [spec] = read_specs(read_parameters(None, Path("models.yaml"))["models"])
    return replace(spec.order, constraints=spec.rules)


def test_every_option_is_tried_here() -> None:
    assert SAID.keys() == ILL.keys() == OPTIONS.keys()


@pytest.mark.parametrize("name", SAID)
def test_what_is_typed_called_and_written_is_one_order(name: str) -> None:
    said = SAID[name]
    order = called(**{name: said.value, **BESIDE.get(name, {})})
    assert order == typed(said.words)
    assert order != called(**BESIDE.get(name, {}))
    if said.entry is not None:
        assert order == written(said.entry)
    else:
        with refused(InvalidInput, "'ads'", name):
            written({name: said.value})


@pytest.mark.parametrize("name", ILL)
def test_what_an_option_cannot_be_is_refused_in_one_line(name: str) -> None:
    said = ILL[name]
    calls: list[Callable[[], object]] = [lambda: typed(said.words), lambda: called(**{name: said.value})]
    if said.entry is not None:
        calls.append(partial(written, said.entry))
    for call in calls:
        with pytest.raises(NeuroshardError) as error:
            call()
        assert str(error.value)
        assert "\n" not in str(error.value)


def test_a_pin_to_a_host_takes_the_ranks_of_the_same_order() -> None:
    assert typed("--local-world-size 4 --pin t1=host:1").constraints == called(pin=["t1=4,5,6,7"]).constraints
    with refused(UsageError, "pin", "'t1=host:1'", "local_world_size"):
        called(pin=["t1=host:1"])


@pytest.mark.parametrize(
    ("others", "fact"), [("--pipeline prefetch", "--host-memory"), ("--host-memory 1TiB", "sparse-dist")]
)
def test_a_dense_time_that_would_be_ignored_is_refused(others: str, fact: str) -> None:
    with refused(UsageError, "12 ms", "--dense-time", fact):
        typed(f"--dense-time 12ms {others}")
    option, value = others.removeprefix("--").replace("-", "_").split()
    with refused(NeuroshardError, "12 ms", "dense_time"):
        called(dense_time="12ms", **{option: value})
    with refused(NeuroshardError, "12 ms", "models.yaml"):
        written({"dense_time": "12ms", option: value})


def test_an_option_that_there_is_not_is_refused_by_name() -> None:
    with refused(UsageError, "--colour"):
        typed("--colour red")
    with pytest.raises(TypeError, match=r"search\(\) got an unexpected keyword argument 'colour'"):
        called(colour="red")
    with refused(InvalidInput, "colour", "'ads'"):
        written({"colour": "red"})
    with refused(UsageError, "devices"):
        ns.search(TABLES, "analytic:h100", memory="80GiB", quiet=True)  # type: ignore[call-arg]


def test_help_has_every_option_with_what_it_does() -> None:
    told = " ".join((inspect.getdoc(ns.search) or "").split())
    shown = " ".join(CliRunner().invoke(app, ["search", "--help"], env={"COLUMNS": "200"}).output.split())
    parameters = inspect.signature(ns.search).parameters
    for name, option in OPTIONS.items():
        begin = option.help[:30]
        assert re.search(rf"- `{name}` \([^)]+\): {re.escape(begin.replace('--from', 'previous'))}", told), name
        assert begin in shown, name
        assert len(option.help.split()) > 2, name
        assert parameters[name].default == (inspect.Parameter.empty if option.required else option.default)
        assert parameters[name].annotation == option.python
    assert (parameters["devices"].annotation, parameters["row_wise"].annotation) == (int, Sequence[str])
    assert "--" not in told.replace("`neuroshard", "")


def test_no_public_function_has_more_parameters_of_its_own_than_people_can_read() -> None:
    own = {name for name in inspect.signature(ns.search).parameters if name not in OPTIONS}
    assert own == {"tables", "model", "out", "quiet", "stop"}


def test_every_value_has_a_place_where_the_search_reads_it() -> None:
    order = called()
    assert order.task.keys() <= ShardingTask.model_fields.keys()
    assert order.settings.keys() <= {one.name for one in fields(SearchSettings)}
    rules = {name for name, option in OPTIONS.items() if option.part == "constraints"}
    lists = {name for name in rules if OPTIONS[name].kind == list[str]}
    assert rules - lists - {"no_row_wise"} <= ConstraintsFile.model_fields.keys()


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A clock that stands still, but for the hour that each call takes."""
    now = [0.0]

    def one() -> None:
        now[0] += 3600.0

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return one


def test_the_time_budget_counts_from_before_the_tables_are_read(
    hours: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*given: Any) -> Any:
        hours()
        return sources_tables(*given)

    sources_tables = sources.tables
    monkeypatch.setattr(sources, "tables", slow)
    with pytest.raises(Ordered) as seen:
        ns.search(TABLES, "analytic:h100", **NEEDED, time_budget="59m", quiet=True)
    assert seen.value.watch.expired
    with pytest.raises(Ordered) as seen:
        ns.search(TABLES, "analytic:h100", **NEEDED, time_budget="61m", quiet=True)
    assert not seen.value.watch.expired


@pytest.mark.parametrize("name", ["group_size", "sync_every"])
def test_groups_are_refused_in_the_models_of_a_night(name: str) -> None:
    """Also as the pipeline's parameter, where other keys that nobody reads are ignored."""
    models = json.dumps([{"name": "ads", "tables": "tables.json", **NEEDED, name: 4}])
    with refused(InvalidInput, "models[0]", name, "no groups of ranks are planned at night"):
        read_specs(models)
    models = json.dumps([{"name": "ads", "tables": "tables.json", **NEEDED, "size": {"devices": "4-8", name: 4}}])
    with refused(InvalidInput, "models[0]", name, "no groups of ranks are planned at night"):
        read_specs(models)


@pytest.mark.parametrize("kind", [AugmentSettings, MeasureSettings, NetworkSettings, RunOptions])
def test_the_default_that_help_shows_of_a_setting_is_the_one_that_it_has(kind: type) -> None:
    of_field = getattr(kind, "_field_defaults", vars(kind))
    options = declared(kind)
    assert options
    for name in options.keys() & of_field.keys():
        assert options[name].checked(options[name].default) == of_field[name] or of_field[name] == (), name


@pytest.mark.parametrize(
    "kind", [AugmentSettings, MeasureSettings, NetworkSettings, RunOptions, SizeOptions, DeployOptions, ReportOptions]
)
def test_every_declared_option_says_what_it_is_for(kind: type) -> None:
    for name, option in declared(kind).items():
        assert len(option.help.split()) > 2, name
        assert re.fullmatch(r"[A-Z=]+", option.word), name


def test_what_is_typed_is_refused_by_its_flag() -> None:
    with refused(UsageError, "--memory-limit", "'lots'"):
        settings_of(MeasureSettings, {"batch_size": 1, "memory_limit_bytes": "lots"})
    with refused(UsageError, "--budget", "'soon'"):
        settings_of(MeasureSettings, {"batch_size": 1, "budget_seconds": "soon"})


def test_a_share_of_deploy_is_per_cent_or_a_number() -> None:
    given = checked(DeployOptions, {"min_gain": "5%", "max_error": 0.1}, "deploy")
    assert (given["min_gain"], given["max_error"], given["memory_margin"], given["cost_model"]) == (
        0.05,
        0.1,
        0.0,
        None,
    )
    with pytest.raises(TypeError, match=r"deploy\(\) got an unexpected keyword argument 'min_gains'"):
        checked(DeployOptions, {"min_gains": "5%"}, "deploy")
