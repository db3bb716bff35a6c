"""Every number of every format, at and beyond what it may be: a value that is used, or an error of one line.

The numbers of a format are those of its type, so a new field is drawn by itself, and a new type must be put here or there. Plans
and the manifests of costs and cost models are in tests/cli/test_hostile_numbers.py.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

import neuroshard
from helpers.bounds import HOSTILE, drawn, numbers_of, values_in
from helpers.costs import formula_costs, random_tables
from helpers.memory_store import MemoryStore
from helpers.parts import cut_to, wholes
from helpers.plans import make_plan
from helpers.refusals import names, refused
from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.errors import InvalidInput, NeuroshardError
from neuroshard.core.plan import DeviceCost, Plan
from neuroshard.core.release import SEAL, ModelRelease, Refusal, Release, Sealed
from neuroshard.core.table import Table
from neuroshard.core.value import Value, decode_json, sha256
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.cache import Caches, miss_curve
from neuroshard.costmodel.given import GivenCosts, load_given
from neuroshard.costmodel.manifest import Manifest
from neuroshard.files.cases import CASE_FIELDS, CasesManifest, read_cases, read_rows, write_cases
from neuroshard.files.constraints import ConstraintsFile, read_constraints, resolve
from neuroshard.files.costs import FIELDS, CostsManifest, CostWriter, read_costs
from neuroshard.files.tables import read_tables
from neuroshard.files.traces import Lookups, Recorded, Traces, read_traces, write_traces
from neuroshard.fleet.cluster import Node
from neuroshard.fleet.labels import Fleet
from neuroshard.measure.backends import MeasureSettings, open_backend
from neuroshard.measure.evaluate import Evaluation
from neuroshard.orders.nightly import Job, ModelSpec, Survey, Verdict, read_specs
from neuroshard.pretrain.labels import collect
from neuroshard.report.facts import FleetFile, fleet_rows
from neuroshard.report.text import refusals_text, releases_text
from neuroshard.report.trust import Evaluated, read_evaluation
from neuroshard.seen.record import PARTS, Seen, truth_of
from neuroshard.store.folder import FolderStore
from neuroshard.store.measuring import Share, left_of_share, write_record
from neuroshard.store.traces import TracePointer
from neuroshard.submit.wait import told

GOLDEN = Path(__file__).parent.parent / "golden"
TABLES = random_tables(20)
COSTS = formula_costs(TABLES, compute_cases=4, collective_cases=2, devices=(2,))
PLAN = make_plan()


class TablesFile(BaseModel):
    tables: tuple[Table, ...]


class Specs(BaseModel):
    models: tuple[ModelSpec, ...]


class Format(NamedTuple):
    """The type of a format, an example with all that holds numbers, and what reads and uses it, in a folder of its own."""

    kind: type[BaseModel]
    example: Any
    use: Callable[[Any, Path], object]


def file_of(data: Any, folder: Path, name: str = "data.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(data))
    return path


def use_tables(data: Any, folder: Path) -> None:
    for entry in data["tables"]:
        read_and_price({"tables": [{key: entry[key] for key in entry if key != "reuse_bins"}]}, folder)
        read_and_price({"tables": [entry]}, folder)


def read_and_price(data: Any, folder: Path) -> None:
    tables, _ = read_tables(file_of(data, folder))
    vectors = analytic_model("h100", 512).part_vectors(wholes(tables))
    assert np.isfinite(vectors).all()
    assert sum(table.memory_bytes for table in tables) > 0
    for batch_size in (1, 512, 2**31):
        curves = [miss_curve(table, batch_size) for table in tables]
        for curve in curves:
            missed = curve.missed(np.linspace(0, curve.rows, 9))
            assert np.isfinite(missed).all()
            assert (np.diff(missed) <= 1e-9 * (1 + missed[0])).all()
            assert np.isfinite(curve.warm_up(np.linspace(0, curve.rows, 9))).all()
        shared = Caches(curves, [table.dim * table.element_bytes for table in tables]).for_misses(0.05)
        assert np.isfinite(shared.hbm_bytes)


def use_given(data: Any, folder: Path) -> None:
    tables = [TABLES[0].model_copy(update={"name": name, "dim": 64}) for name in ("user", "item")]
    vectors = load_given(file_of(data, folder)).part_vectors(cut_to(tables, [4, 64]))
    assert (np.isfinite(vectors) & (vectors >= 0)).all()


def use_constraints(data: Any, folder: Path) -> None:
    given, _ = read_constraints(file_of(data, folder))
    names = ("user_id", "user_history", "item_a")
    resolve(given, [TABLES[0].model_copy(update={"name": name, "pooling": "none"}) for name in names], "")


def use_cases_manifest(data: Any, folder: Path) -> None:
    if not (folder / "compute.parquet").exists():
        write_cases(folder, Cases(tables=TABLES, compute=(), collective=(), max_dim=128, seed=0))
    file_of(data, folder, "cases.json")
    read_cases(folder)


def use_evaluation(data: Any, folder: Path) -> None:
    found = read_evaluation(file_of(data, folder), PLAN)
    assert all(ms is None or math.isfinite(ms) for ms in found.ms())


def sealed(kind: type[Sealed]) -> Callable[[Any, Path], Any]:
    """Reads the data with the seal that a writer would have put on them."""

    def read(data: Any, _: Path) -> Any:
        fields = {key: value for key, value in data.items() if key != SEAL}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return kind.from_json(json.dumps({**fields, SEAL: sha256(text.encode())}).encode(), "it")

    return read


def shown_as(show: Callable[[Any], str], kind: type[Sealed]) -> Callable[[Any, Path], None]:
    def use(data: Any, folder: Path) -> None:
        assert show([sealed(kind)(data, folder)])

    return use


def message(kind: type[Value]) -> Callable[[Any, Path], object]:
    return lambda data, _: kind.parse(decode_json(json.dumps(data).encode(), "it"), "it")


def golden(name: str, **fields: Any) -> Any:
    return json.loads((GOLDEN / name).read_bytes()) | fields


HARDWARE = {"kind": "cuda", "name": "H100", "memory_bytes": 80 * 2**30}
CAMPAIGN = {
    "hardware": HARDWARE, "folder": "f", "pods": 1, "devices": 8, "resource": "", "node_selector": {}, "tolerations": [],
    "ranks": [8], "measurable": [2], "oldest_seconds": 60.0,
}  # fmt: skip
MODEL = {
    "name": "ads", "tables": "t.json", "devices": 8, "memory": "8GiB", "domain": 8, "local_world_size": 8,
    "size": {"devices": "8", "models": ["analytic:h100"], "batch_per_device": 512},
}  # fmt: skip
SURVEY = {
    "request": {"compute_cases": 1, "collective_cases": 1, "batch_size": 1, "seed": 0, "backend": "synthetic"},
    "models": [MODEL], "hardware": {}, "kinds": {"0": HARDWARE}, "campaigns": [CAMPAIGN],
    "topologies": {"0": {"domain": 8, "local_world_size": 8}},
}  # fmt: skip
STREAM = {
    "order": "time", "batches": 10, "distinct_rows": 20.0, "first_touches": 1.0, "sampled": 0.5, "error": 0.01,
    "cached_rows": [0, 50, 100], "missed_rows": [19.0, 5.0, 0.0],
}  # fmt: skip
ACCESS = {"batch_size": 10, "group_rows": [1, 9], "lookups_per_row": [11, 1], "stream": STREAM}
ROW_ORDER = {
    "ids_digest": "0" * 64, "rows": 900, "hot_rows": 100, "lookup_share": 0.8, "points": [[1, 0.2], [10, 0.5]],
    "time": "2026-01-05T00:00:00Z",
}  # fmt: skip
TABLE = {
    "name": "a", "rows": 1000, "dim": 16, "pooling_factor": 2.0, "reuse_bins": [1.0] + [0.0] * 16,
    "features": [{"name": "f", "pooling_factor": 2.0}], "access": ACCESS, "row_order": ROW_ORDER,
    "lookups_by_id": [0.7, 0.2, 0.1],
}  # fmt: skip
ID_MAP = {"kind": "mpzch", "bytes_per_row": 12, "bytes_per_lookup": 1.5, "bytes_per_rank": 8, "buckets": 4}
MAPPED = {"name": "b", "rows": 1000, "dim": 16, "pooling_factor": 2.0, "id_map": ID_MAP}
LIVE = golden("live-1.json")
COST = DeviceCost(compute_ms=1, forward_collective_ms=1, backward_collective_ms=1)
PROMISED = PLAN.model_copy(update={"predicted": (COST,) * PLAN.task.devices})
SEEN = {
    "format_version": 1, "model": "ads", "plan_digest": PLAN.digest(), "job": "0" * 16, "time": "2026-01-05T00:00:00Z",
    "steps": 5, "step_ms": [9, 10, 11], "embeddings_ms": [4, 8, 12], "device": "CPU", "batch_size": 8,
    "ranks": [
        {"parts": {part: [1, 2, 3] for part in PARTS}, "embeddings_ms": [4, 8, 12], "waiting_ms": [1, 2, 3], "allocated_bytes": 1}
    ] * PLAN.task.devices,
}  # fmt: skip
EVALUATED = {
    "plan_digest": PLAN.digest(), "all_to_all_measured": True,
    "bench": COSTS.bench.model_dump(mode="json") | {
        "calm_all_to_all_ms": {"2": 1.0}, "calm_compute_ms": {"random reads": 1.0, "small table set": 1.0},
    },
    "devices": [{"device": n, "measured": COST.model_dump()} for n in (0, 1)],
}  # fmt: skip
RECORDED = {"batch_size": 10, "rows": {"t": 5}, "batches": 4, "steps": 9, "time": "2026-01-05T00:00:00Z"}
TRACE = {
    "format_version": 1, "model": "ads", "trace_digest": "0" * 64, "batches": 4, "steps": 9, "time": "2026-01-05T00:00:00Z",
}  # fmt: skip


CONSTRAINTS = golden("constraints-1.json")
CONSTRAINTS["tables"][0]["rows_by_access"] = {"hot_rows": 100}

FORMATS = {
    "recorded": Format(Recorded, RECORDED, lambda data, _: Recorded.parse(data, "it").said),
    "trace.json": Format(TracePointer, TRACE, sealed(TracePointer)),
    "tables.json": Format(TablesFile, {"tables": [TABLE, MAPPED]}, use_tables),
    "given costs": Format(GivenCosts, golden("given-1.json"), use_given),
    "given costs of parts": Format(
        GivenCosts, golden("given-1.json", tables=golden("given-1.json")["tables"][::-1]), use_given
    ),
    "constraints.json": Format(ConstraintsFile, CONSTRAINTS, use_constraints),
    "cases.json": Format(
        CasesManifest,
        {"tables": [TABLE, MAPPED], "compute_cases": 0, "collective_cases": 0, "max_dim": 128, "seed": 0},
        use_cases_manifest,
    ),
    "evaluation.json": Format(Evaluated, EVALUATED, use_evaluation),
    "fleet.json": Format(
        FleetFile,
        {"kinds": [{"hardware": HARDWARE, "nodes": 2, "devices": 8, "out_of_service": 1}]},
        lambda data, folder: fleet_rows(file_of(data, folder)),
    ),
    "live.json": Format(Release, LIVE, shown_as(releases_text, Release)),
    "live.json of cost models": Format(
        ModelRelease, golden("model-live-1.json"), shown_as(releases_text, ModelRelease)
    ),
    "refusal": Format(
        Refusal,
        {key: LIVE[key] for key in ("format_version", "model", "plan_digest", "time", "decision")},
        shown_as(refusals_text, Refusal),
    ),
    "seen": Format(Seen, SEEN, shown_as(lambda found: str(truth_of(PROMISED, found)), Seen)),
    "survey": Format(Survey, SURVEY, message(Survey)),
    "job": Format(Job, {"campaign": CAMPAIGN, "share": 1}, message(Job)),
    "verdict": Format(Verdict, {"run": "r", "model": "ads", "end": "live", "why": ""}, message(Verdict)),
    "models": Format(Specs, {"models": [MODEL]}, lambda data, _: read_specs(json.dumps(data["models"]))),
}
ELSEWHERE = (Plan, CostsManifest, Manifest)  # in tests/cli/test_hostile_numbers.py
IN_PARQUET = (ComputeCase, CollectiveCase, *map(type, (*COSTS.compute[0], *COSTS.collective[0])), Cases, type(COSTS))
NEVER_READ = (Evaluation, Fleet, Node)  # written only; a node is what Kubernetes says, drawn in tests/fleet


def or_one_line(use: Callable[[], object], what: str) -> bool:
    """Whether it was refused, which takes one line that is not endless."""
    said = ""
    try:
        use()
    except NeuroshardError as error:
        said = str(error)
    assert "\n" not in said, what
    assert len(said) < 1000, what
    return bool(said)


@pytest.mark.parametrize("name", FORMATS)
def test_any_number_in_a_file_is_used_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    kind, example, use = FORMATS[name]
    use(example, tmp_path)
    refusals = [or_one_line(partial(use, data, tmp_path), what) for what, data in drawn(kind, example)]
    assert sum(refusals) > len(list(numbers_of(kind)))


def test_every_type_of_a_file_that_holds_numbers_is_drawn() -> None:
    package = Path(neuroshard.__path__[0])
    for source in package.rglob("*.py"):
        if re.search(r"^class \w+\((Value|Sealed|Pointer)\)", source.read_text(), re.M):
            import_module(".".join(("neuroshard", *source.relative_to(package).with_suffix("").parts)))
    kinds = [*(one.kind for one in FORMATS.values()), *ELSEWHERE, *IN_PARQUET, *NEVER_READ]
    tried = {inner for kind in kinds for inner in values_in(kind)}
    in_memory = {"Move", "KindCoverage"}
    missing = {kind.__name__ for kind in subclasses(Value) if any(numbers_of(kind))} - {one.__name__ for one in tried}
    assert missing <= in_memory | {"MatchedRule", "Pointer", "_Model"}


def subclasses(kind: type[Value]) -> Iterator[type[Value]]:
    for one in kind.__subclasses__():
        if one.__module__.startswith("neuroshard."):
            yield from (one, *subclasses(one))


def numeric(fields: list[tuple[str, pa.DataType]]) -> list[tuple[str, bool]]:
    """The columns of numbers, and which of them are lists."""
    of_entries = [
        (name, kind.value_type if pa.types.is_list(kind) else kind, pa.types.is_list(kind)) for name, kind in fields
    ]
    return [
        (name, listed) for name, kind, listed in of_entries if pa.types.is_integer(kind) or pa.types.is_floating(kind)
    ]


def with_id(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the id that a writer would give its case; with its own where no case has such numbers."""
    base = {table.name: table for table in TABLES}
    try:
        if "table" in row:
            sizes = zip(row["table"], row["rows"], row["dim"], row["pooling_factor"], strict=True)
            tables = tuple(base[name].resized(*size) for name, *size in sizes)
            case: Any = ComputeCase.model_construct(tables=tables, batch_size=row["batch_size"])
        else:
            dims, delays = tuple(row["device_dims"]), tuple(row["start_delays_ms"])
            case = CollectiveCase.model_construct(device_dims=dims, start_delays_ms=delays)
        return row | {"case_id": case.case_id}
    except (TypeError, ValueError):
        return row


def spoiled_rows(path: Path, fields: list[tuple[str, pa.DataType]]) -> Iterator[str]:
    """Put each hostile number into each column of the file's first row; as another type where the column's cannot hold it."""
    first, *others = read_rows(path, fields)
    for name, listed in numeric(fields):
        for value in (*HOSTILE, 1e9, math.nextafter(1e9, math.inf), 1e10, math.nextafter(1e10, math.inf)):
            row = with_id(first | {name: [value] * max(len(first[name]), 2) if listed else value})
            for schema in (pa.schema(fields), None):
                try:
                    pq.write_table(pa.Table.from_pylist([row, *others], schema=schema), path)
                except (pa.ArrowException, OverflowError):
                    continue
                yield f"{name} = {str(value)[:20]}"
                break


@pytest.mark.parametrize(
    ("kind", "fields"), [("compute", CASE_FIELDS["compute"]), ("collective", CASE_FIELDS["collective"])]
)
def test_any_number_of_a_case_is_measured_or_refused_in_one_line(kind, fields, tmp_path: Path) -> None:
    cases = Cases(
        tables=TABLES,
        compute=tuple({case.case_id: case for case, _ in COSTS.compute}.values()),
        collective=tuple({case.case_id: case for case, _ in COSTS.collective}.values()),
        max_dim=128,
        seed=0,
    )
    write_cases(tmp_path, cases)

    def measure() -> None:
        read = read_cases(tmp_path)
        backend = open_backend("synthetic", read, MeasureSettings(batch_size=2**31))
        for case in read.compute[:1]:
            backend.compute(case, 0)
        for each in read.collective[:1]:
            backend.all_to_all(each, 0)

    refusals = [or_one_line(measure, what) for what in spoiled_rows(tmp_path / f"{kind}.parquet", fields)]
    assert 10 < sum(refusals) < len(refusals)


@pytest.mark.parametrize(("kind", "fields"), [("compute", FIELDS["compute"]), ("collective", FIELDS["collective"])])
def test_any_number_of_a_cost_is_a_label_or_refused_in_one_line(kind, fields, tmp_path: Path) -> None:
    with CostWriter(tmp_path, COSTS.bench, TABLES, (2,)) as writer:
        for compute in COSTS.compute:
            writer.add(*compute)
        for collective in COSTS.collective:
            writer.add(*collective)

    def learn() -> None:
        costs = read_costs(tmp_path)
        for labels in (
            collect(costs.compute, lambda cost: cost.total_ms),
            collect(costs.collective, attrgetter("forward_ms")),
        ):
            assert np.isfinite(labels.ms).all()
            assert np.isfinite(1 / labels.ms**2).all()
        dims = [table.dim for case, _ in costs.compute for table in case.tables]
        assert max(dims) <= 65_536  # what a cost model's manifest may say

    refusals = [or_one_line(learn, what) for what in spoiled_rows(tmp_path / f"{kind}-00000.parquet", fields)]
    assert 20 < sum(refusals) < len(refusals)


@pytest.mark.parametrize("left", [-1, True, 0.5, "0", None, 1e308])
def test_a_share_whose_record_says_no_number_of_cases_has_not_ended(left: Any) -> None:
    store, share = MemoryStore(), Share(1, 1, 2)
    write_record(store, f"m/{share.ended}", {"left": left})
    assert left_of_share(store, "m", share) is None
    write_record(store, f"m/{share.ended}", {"left": 0})
    assert left_of_share(store, "m", share) == 0


def test_a_case_that_takes_longer_than_a_cost_may_be_is_an_error_of_its_row() -> None:
    case = CollectiveCase(device_dims=(64, 64), start_delays_ms=(0.0, 2e9))
    cases = Cases(tables=TABLES, compute=(), collective=(case,), max_dim=128, seed=0)
    cost = open_backend("synthetic", cases, MeasureSettings(batch_size=512)).all_to_all(case, 0)
    assert cost.forward_ms is None
    assert names(cost.error or "", "1e+09")


def test_lengths_of_a_trace_that_overflow_as_they_are_added_up_are_refused(tmp_path: Path) -> None:
    lengths = np.array([2**62] * 4, dtype=np.int64)  # 2^64, which is 0 in int64
    write_traces(tmp_path / "traces", Traces({"a": Lookups(np.array([], dtype=np.int64), lengths)}))
    with refused(InvalidInput, tmp_path / "traces", "lengths[0]"):
        read_traces(tmp_path / "traces")


def test_a_verdict_that_cannot_be_read_is_as_one_that_is_not_there(tmp_path: Path) -> None:
    survey = Survey.parse({**SURVEY, "owner": "r", "campaigns": []}, "survey")
    for release in (-1, 10**25, "x"):
        verdict = {"run": "r", "model": "ads", "end": "red", "why": "", "release": release}
        write_record(FolderStore(tmp_path), "_nightly/ads.json", verdict)
        assert len(told(FolderStore(tmp_path), survey, ended_well=True)) == 1
