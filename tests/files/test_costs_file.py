"""The folder of costs: parts that appear whole, a run that goes on where another stopped."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys

import pytest
from pydantic import ValidationError

from helpers.refusals import refused
from neuroshard.core.case import CollectiveCase, ComputeCase
from neuroshard.core.cost import READS, SLOWDOWN_EXPONENTS, SMALL_SET, Bench, CollectiveCost, ComputeCost, Hardware
from neuroshard.core.errors import InvalidInput, NeuroshardError
from neuroshard.core.label import teaches
from neuroshard.files.costs import CostWriter, difference, merge_costs, read_costs, read_manifest
from neuroshard.pretrain.labels import collect

BENCH = Bench(
    backend="synthetic",
    hardware=Hardware(kind="synthetic", name="formula", memory_bytes=2**35),
    batch_size=512,
    warmup=1,
    repeats=3,
    optimizer="sgd",
    threads=1,
    seed=0,
)


def timed(case: ComputeCase, ms: float = 1.5, round_: int = 0) -> ComputeCost:
    return ComputeCost(
        case_id=case.case_id,
        round=round_,
        forward_ms=ms,
        backward_ms=2 * ms,
        forward_spread_ms=0.1,
        forward_median_ms=ms,
    )


@pytest.fixture
def compute(tables) -> list[ComputeCase]:
    return [ComputeCase(tables=(table.with_dim(dim),)) for table in tables for dim in (4, 8)]


@pytest.fixture
def collective() -> CollectiveCase:
    return CollectiveCase(device_dims=(16, 32), start_delays_ms=(0.0, 0.5), split="valid")


def test_costs_read_back_are_the_costs_that_were_added(tmp_path, tables, compute, collective):
    no_room = ComputeCost(case_id=compute[1].case_id, error="out of memory")
    all_to_all = CollectiveCost(
        case_id=collective.case_id,
        forward_ms=(1.0, 0.5),
        backward_ms=(0.25, 0.5),
        forward_spread_ms=(0.1, 0.2),
        forward_median_ms=(1.0, 0.5),
    )
    dead = CollectiveCost(case_id=collective.case_id, round=1, error="worker died")
    with CostWriter(tmp_path, BENCH, tables) as writer:
        writer.add(compute[0], timed(compute[0]))
        writer.flush()
        writer.add(compute[0], timed(compute[0], 1.6, round_=1))
        writer.add(compute[1], no_room)
        writer.add(collective, all_to_all)
        writer.add(collective, dead)

    costs = read_costs(tmp_path)
    assert costs.bench == BENCH
    assert costs.compute == (
        (compute[0], timed(compute[0])),
        (compute[0], timed(compute[0], 1.6, round_=1)),
        (compute[1], no_room),
    )
    assert costs.collective == ((collective, all_to_all), (collective, dead))


def test_an_undisturbed_measurement_is_the_label_whatever_its_round(tmp_path, tables, compute):
    disturbed = timed(compute[0], 9.0).model_copy(update={"disturbed": True})
    alone = timed(compute[1], 8.0).model_copy(update={"disturbed": True})
    calm = timed(compute[0], 1.0, round_=1)
    with CostWriter(tmp_path, BENCH, tables) as writer:
        for case, cost in ((compute[0], disturbed), (compute[1], alone), (compute[0], calm)):
            writer.add(case, cost)
    assert [(cost.round, cost.forward_ms, cost.disturbed) for _, cost in read_costs(tmp_path).compute] == [
        (1, 9.0, True),
        (0, 8.0, True),
        (0, 1.0, False),
    ]


def test_a_label_is_the_best_measurement_that_any_machine_has(tmp_path, tables, compute, collective):
    no_room, dead = ComputeCost(case_id=compute[0].case_id, error="out of memory"), "worker died"
    disturbed = timed(compute[1], 9.0).model_copy(update={"disturbed": True})
    all_to_all = CollectiveCost(case_id=collective.case_id, forward_ms=(1.0, 0.5), backward_ms=(0.25, 0.5))
    with CostWriter(tmp_path / "busy", BENCH, tables) as writer:
        writer.add(compute[0], no_room)
        writer.add(compute[1], disturbed)
        writer.add(collective, CollectiveCost(case_id=collective.case_id, error=dead))
    with CostWriter(tmp_path / "calm", BENCH, tables) as writer:
        writer.add(compute[0], timed(compute[0], 8.0).model_copy(update={"disturbed": True}))
        writer.add(compute[1], timed(compute[1], 1.0))
        writer.add(collective, all_to_all)

    for folders in (("busy", "calm"), ("calm", "busy")):
        costs = read_costs(*(tmp_path / name for name in folders))
        assert {(cost.case_id, cost.forward_ms) for _, cost in costs.compute if cost.round == 0} == {
            (compute[0].case_id, 8.0),
            (compute[1].case_id, 1.0),
        }
        assert [cost.error for _, cost in sorted(costs.collective, key=lambda row: row[1].round)] == [None, dead]


def test_a_time_of_0_is_no_label_where_another_round_has_one_to_train_on(tmp_path, tables, compute, collective):
    """Training leaves out rows of 0 ms, and cases without a round 0."""
    with CostWriter(tmp_path, BENCH, tables) as writer:
        writer.add(compute[0], timed(compute[0], 0.0))
        writer.add(compute[0], timed(compute[0], 2.0, round_=1).model_copy(update={"disturbed": True}))
        for round_, ms in enumerate((0.0, 0.5)):
            times = {"forward_ms": (1.0, 0.5), "backward_ms": (0.25, ms)}
            writer.add(collective, CollectiveCost(case_id=collective.case_id, round=round_, **times))

    costs = read_costs(tmp_path)
    for rows in (costs.compute, costs.collective):
        assert {cost.round: teaches(cost) for _, cost in rows} == {0: True, 1: False}
    assert collect(costs.compute, lambda cost: cost.total_ms).ms.tolist() == [6.0]


def test_a_run_goes_on_where_another_stopped(tmp_path, tables, compute):
    with CostWriter(tmp_path, BENCH, tables) as writer:
        writer.add(compute[0], timed(compute[0]))
    with CostWriter(tmp_path, BENCH, tables) as writer:
        assert writer.done == {"compute": {(compute[0].case_id, 0)}, "collective": set(), "tiers": set()}
        for case in compute[:2]:
            writer.add(case, timed(case, 9.9))
    assert [cost.forward_ms for _, cost in read_costs(tmp_path).compute] == [1.5, 9.9]


def test_parts_beyond_99999_are_read_and_none_is_written_over(tmp_path, tables, compute):
    for case in compute[:3]:
        with CostWriter(tmp_path, BENCH, tables) as writer:
            writer.add(case, timed(case))
        (tmp_path / "compute-00000.parquet").rename(tmp_path / "compute-99999.parquet") if case == compute[0] else None
    assert sorted(p.name for p in tmp_path.glob("*.parquet")) == [
        "compute-100000.parquet",
        "compute-100001.parquet",
        "compute-99999.parquet",
    ]
    assert [case for case, _ in read_costs(tmp_path).compute] == compute[:3]


def test_a_round_below_the_label_is_refused(tmp_path, tables, compute):
    with refused(ValidationError, "round"):
        timed(compute[0], round_=-1)


@pytest.mark.slow
def test_a_killed_run_leaves_whole_parts_only(tmp_path, tables):
    """A process that writes parts as fast as it can is killed in the middle, again and again."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from neuroshard.core.case import ComputeCase\n"
        "from neuroshard.core.cost import Bench, ComputeCost\n"
        "from neuroshard.core.table import Table\n"
        "from neuroshard.files.costs import CostWriter\n"
        "bench, table = Bench.model_validate_json(sys.argv[2]), Table.model_validate_json(sys.argv[3])\n"
        "with CostWriter(Path(sys.argv[1]), bench, (table,)) as writer:\n"
        "    print('begun', len(writer.done['compute']), flush=True)\n"
        "    for rows in range(len(writer.done['compute']) + 1, 100_000):\n"
        "        case = ComputeCase(tables=(table.model_copy(update={'rows': rows}),))\n"
        "        writer.add(case, ComputeCost(case_id=case.case_id, forward_ms=1.0, backward_ms=1.0))\n"
        "        writer.flush()\n"
        "        print('part', flush=True)\n"
    )
    arguments = [sys.executable, "-c", program, tmp_path, BENCH.model_dump_json(), tables[0].model_dump_json()]
    held = 0
    for parts in (3, 8):
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == f"begun {held}\n"
            assert [process.stdout.readline() for _ in range(parts)] == ["part\n"] * parts
            os.kill(process.pid, signal.SIGKILL)
        costs = read_costs(tmp_path)
        assert len(costs.compute) >= held + parts
        held = len(costs.compute)
        assert [case.tables[0].rows for case, _ in costs.compute] == list(range(1, held + 1))


def test_a_full_disk_keeps_what_was_there(tmp_path, tables, compute, full_disk):
    writer = CostWriter(tmp_path, BENCH, tables)
    writer.add(compute[0], timed(compute[0]))
    writer.flush()
    writer.add(compute[1], timed(compute[1]))
    with (
        full_disk(),
        refused(NeuroshardError, "compute-00001.parquet", "File too large"),
    ):
        writer.flush()
    assert len(read_costs(tmp_path).compute) == 1
    writer.__exit__(None, None, None)
    assert len(read_costs(tmp_path).compute) == 2


def test_costs_of_two_benches_are_not_mixed(tmp_path, tables):
    with CostWriter(tmp_path, BENCH, tables):
        pass
    other = BENCH.model_copy(update={"batch_size": 1024})
    with refused(InvalidInput, "batch_size", 512, 1024, "-o"):
        CostWriter(tmp_path, other, tables)
    calm = {"calm_compute_ms": {"random reads": 1.0, "small table set": 2.0}, "flush_bytes": 2**20}
    with CostWriter(tmp_path / "calm", BENCH.model_copy(update=calm), tables):
        pass
    for name, value in {"flush_bytes": 2**21, "calm_compute_ms": {"random reads": 1.0, "small table set": 3.0}}.items():
        with refused(InvalidInput, "another bench", name):
            CostWriter(tmp_path / "calm", BENCH.model_copy(update={**calm, name: value}), tables)


def test_a_folder_takes_costs_of_further_tables_and_numbers_of_ranks(tmp_path, tables):
    """A later night asks for more: what was measured before stays, and is not measured anew."""
    with CostWriter(tmp_path, BENCH, tables[:1], (2,)):
        pass
    slower = BENCH.model_copy(
        update={"capped_tables": ("a",), "row_cap_bytes": 2**16, "calm_all_to_all_ms": {"4": 1.0}}
    )
    with CostWriter(tmp_path, slower, tables[1:], (4,)):
        pass
    manifest = read_manifest(tmp_path)
    assert (manifest.tables, manifest.device_counts) == (tables, (2, 4))
    assert manifest.bench == slower


def test_a_table_of_one_name_is_one_table(tmp_path, tables):
    with CostWriter(tmp_path, BENCH, tables):
        pass
    grown = tables[0].model_copy(update={"rows": tables[0].rows + 1})
    with refused(InvalidInput, f"'{tables[0].name}'", "rows", "-o"):
        CostWriter(tmp_path, BENCH, (grown,))


def test_two_runs_do_not_write_one_folder(tmp_path, tables):
    with CostWriter(tmp_path, BENCH, tables), refused(InvalidInput, tmp_path):
        CostWriter(tmp_path, BENCH, tables)
    CostWriter(tmp_path, BENCH, tables).__exit__(None, None, None)


@pytest.mark.parametrize("then", ["nothing", "moved", "begun anew"])
def test_a_folder_that_is_gone_while_costs_are_written_is_reported_and_gets_no_part_without_a_bench(
    tmp_path, tables, compute, then
):
    folder = tmp_path / "costs"

    def write() -> None:
        with CostWriter(folder, BENCH, tables) as writer:
            writer.add(compute[0], timed(compute[0]))
            writer.flush()
            if then == "moved":
                folder.rename(tmp_path / "elsewhere")
            else:
                shutil.rmtree(folder)
            if then == "begun anew":
                CostWriter(folder, BENCH, tables).__exit__(None, None, None)
            writer.add(compute[1], timed(compute[1]))

    with refused(NeuroshardError, folder, "deleted or moved"):
        write()
    assert not list(folder.glob("*.parquet"))
    if then == "moved":
        assert len(read_costs(tmp_path / "elsewhere").compute) == 1


def test_a_row_that_occurs_twice_is_found_out(tmp_path, tables, compute):
    with CostWriter(tmp_path, BENCH, tables) as writer:
        writer.add(compute[0], timed(compute[0]))
    (tmp_path / "compute-00001.parquet").write_bytes((tmp_path / "compute-00000.parquet").read_bytes())
    with refused(InvalidInput, "compute-00001.parquet", "row 0", compute[0].case_id, "round 0"):
        read_costs(tmp_path)


def test_a_truncated_part_is_named(tmp_path, tables, compute):
    with CostWriter(tmp_path, BENCH, tables) as writer:
        writer.add(compute[0], timed(compute[0]))
    part = tmp_path / "compute-00000.parquet"
    part.write_bytes(part.read_bytes()[:-10])
    with refused(InvalidInput, "compute-00000.parquet", "Parquet"):
        read_costs(tmp_path)


def test_a_folder_without_costs_says_how_to_measure(tmp_path):
    with refused(InvalidInput, "costs.json", "`neuroshard measure"):
        read_costs(tmp_path)


def test_a_flipped_bit_is_an_error_or_changes_nothing(tmp_path, tables, compute):
    with CostWriter(tmp_path, BENCH, tables) as writer:
        for case in compute:
            writer.add(case, timed(case))
    good, part, drawn = read_costs(tmp_path), tmp_path / "compute-00000.parquet", random.Random(0)
    data = part.read_bytes()
    noticed = 0
    for _ in range(200):
        damaged = bytearray(data)
        damaged[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
        part.write_bytes(damaged)
        try:
            assert read_costs(tmp_path) == good
        except InvalidInput:
            noticed += 1
    assert noticed > 50  # most bytes are of pages, under a checksum


def test_parts_of_an_unknown_bench_are_not_added_to(tmp_path, tables, compute):
    with CostWriter(tmp_path, BENCH, tables) as writer:
        writer.add(compute[0], timed(compute[0]))
    (tmp_path / "costs.json").unlink()
    with refused(InvalidInput, "compute-00000.parquet", "costs.json"):
        CostWriter(tmp_path, BENCH, tables)
    assert not (tmp_path / "costs.json").exists()


@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_part_that_is_cut_off_is_set_aside_and_measured_again(tmp_path, tables, compute, capsys, left):
    for case in compute[:2]:
        with CostWriter(tmp_path, BENCH, tables) as writer:
            writer.add(case, timed(case))
    cut = tmp_path / "compute-00000.parquet"
    cut.write_bytes(cut.read_bytes()[:left])
    with CostWriter(tmp_path, BENCH, tables) as writer:
        assert writer.done["compute"] == {(compute[1].case_id, 0)}
        writer.add(compute[0], timed(compute[0]))
    notes = capsys.readouterr().err
    assert (notes.count("\n"), "set aside as compute-00000.parquet.broken" in notes) == (1, True)
    assert {cost.case_id for _, cost in read_costs(tmp_path).compute} == {case.case_id for case in compute[:2]}
    assert (tmp_path / "compute-00000.parquet.broken").exists()


def test_machines_that_were_differently_calm_are_one_bench(tmp_path, tables, compute):
    benches = [{"2": 0.5, "4": 1.5}, {"2": 0.25}]
    for place, calm in enumerate(benches):
        bench = BENCH.model_copy(update={"calm_all_to_all_ms": calm})
        with CostWriter(tmp_path / str(place), bench, tables) as writer:
            writer.add(compute[place], timed(compute[place]))
    joined = read_costs(tmp_path / "0", tmp_path / "1")
    assert joined.bench.calm_all_to_all_ms == {"2": 0.25, "4": 1.5}
    assert len(joined.compute) == 2


def test_table_sets_of_a_machine_that_was_less_calm_are_scaled_to_the_calmer_and_still_known_again(
    tmp_path, tables, compute
):
    calm = {READS: 0.4, SMALL_SET: 0.8}
    for place, factor in enumerate((1.0, 2.0)):
        bench = BENCH.model_copy(update={"calm_compute_ms": {part: factor * ms for part, ms in calm.items()}})
        with CostWriter(tmp_path / str(place), bench, tables) as writer:
            writer.add(compute[place], timed(compute[place], 6.0))
    merge_costs([tmp_path / "1", tmp_path / "0"], tmp_path / "both")

    joined = read_costs(tmp_path / "both", tmp_path / "1", tmp_path / "0")
    assert joined.bench.calm_compute_ms == calm
    by_case = {cost.case_id: cost.forward_ms for _, cost in joined.compute}
    assert by_case == {
        compute[0].case_id: 6.0,
        compute[1].case_id: pytest.approx(6.0 / 2 ** sum(SLOWDOWN_EXPONENTS.values())),
    }
    assert len(joined.compute) == 2


def test_all_to_alls_of_a_machine_that_was_less_calm_are_scaled_to_the_calmer_and_still_known_again(
    tmp_path, tables, collective
):
    """All but the waiting: the first device waits 0.5 ms for the second."""
    other = collective.model_copy(update={"device_dims": (4, 8)})
    for place, (case, calm_ms) in enumerate(((collective, 0.25), (other, 0.5))):
        bench = BENCH.model_copy(update={"calm_all_to_all_ms": {"2": calm_ms}})
        cost = CollectiveCost(case_id=case.case_id, forward_ms=(2.5, 2.0), backward_ms=(2.5, 2.0))
        with CostWriter(tmp_path / str(place), bench, tables) as writer:
            writer.add(case, cost)
    merge_costs([tmp_path / "1", tmp_path / "0"], tmp_path / "both")

    joined = read_costs(tmp_path / "both", tmp_path / "1", tmp_path / "0")
    assert {cost.case_id: (cost.forward_ms, cost.backward_ms) for _, cost in joined.collective} == {
        collective.case_id: ((2.5, 2.0), (2.5, 2.0)),
        other.case_id: ((1.5, 1.0), (1.25, 1.0)),
    }
    assert len(joined.collective) == 2


@pytest.mark.parametrize(
    "calm", [{READS: 1.0}, {READS: 1.0, SMALL_SET: 0.0}, {READS: 1.0, SMALL_SET: 1.0, "more": 1.0}]
)
def test_a_calm_that_nothing_can_be_scaled_by_is_reported(tmp_path, tables, calm):
    CostWriter(tmp_path, BENCH, tables).__exit__(None, None, None)
    path = tmp_path / "costs.json"
    manifest = json.loads(path.read_text())
    manifest["bench"]["calm_compute_ms"] = calm
    path.write_text(json.dumps(manifest))
    with refused(InvalidInput, "costs.json", "bench.calm_compute_ms"):
        read_costs(tmp_path)


def test_of_notes_of_which_one_goes_on_is_reported_where_it_does():
    long = "lookups drawn to match the tables' reuse bins, and " * 3
    one, other = (BENCH.model_copy(update={"notes": (note,)}) for note in (long, f"{long}more"))
    assert difference(one, other) == f"notes: …{long[-20:]} there, …{long[-20:]}more now"


def test_of_long_notes_is_reported_where_they_differ():
    before = "of a table set the median of 8 repeats counts, in 4 visits apart, each scaled by what is timed after it, up to "
    one, other = (
        BENCH.model_copy(update={"notes": ("alike", f"{before}{times} as many")}) for times in ("twice", "thrice")
    )
    assert difference(one, other) == (
        "notes: …ed after it, up to twice as many there, …ed after it, up to thrice as many now"
    )
