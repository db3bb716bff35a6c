"""Rows of a sweep beside searches alone; envelopes; scaling; ends before the end."""

import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import neuroshard as ns
from helpers.sizes import some_tables
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.orders.sizes import Kind, size_order
from neuroshard.search.notes import STOPPED
from neuroshard.search.watch import Watch
from neuroshard.size import run as sweeping
from neuroshard.size.rows import Cell, frontier, memory_frontiers
from neuroshard.size.run import TIME_UP, run
from neuroshard.size.shown import sizes_text
from size.conftest import Swept

TABLES = some_tables([40, 30, 20, 10, 10, 10, 5, 5])


def test_a_cell_is_what_a_search_alone_finds(swept: Swept) -> None:
    for row in swept(TABLES, "2-4", "1GiB").rows:
        alone = ns.search(
            TABLES,
            "analytic:h100",
            devices=row.cell.devices,
            memory="1GiB",
            batch_size=512,
            rounds=1,
            pipeline="none",
            quiet=True,
        )
        assert row.found == alone


def test_more_memory_never_shows_as_slower(swept: Swept) -> None:
    sizes = swept(TABLES, "2-16", "20MiB,33MiB,34MiB,40MiB,66MiB,70MiB,1GiB", never_split=["t0"], no_row_wise=True)
    for devices in (4, 8, 16):
        times = [row.embeddings_ms for row in sizes.rows if row.fits and row.cell.devices == devices]
        bounds = [row.bound_ms for row in sizes.rows if row.fits and row.cell.devices == devices]
        assert len(times) > 2
        assert times == sorted(times, reverse=True)
        assert bounds == sorted(bounds, reverse=True)
    for points in memory_frontiers(sizes.rows):
        assert all(point.ms_a_gib > 0 for point in points[1:])


def test_weak_scaling_gives_a_device_the_same_batch(swept: Swept) -> None:
    rows = swept(TABLES, "2-8", "1GiB", batch_per_device=128).rows
    assert [row.batch_size for row in rows] == [256, 512, 1024]
    assert [row.samples_per_s for row in rows] == pytest.approx([1000 * row.batch_size / row.step_ms for row in rows])


def test_money_and_dense_time(swept: Swept) -> None:
    (row,) = swept(TABLES, "4", "1GiB", price=["3/h"], dense_time=["2ms"]).rows
    assert row.step_ms == row.embeddings_ms + 2
    hours = row.step_ms / 3.6e6 * 1e9 / 512  # of a billion samples
    assert row.money == pytest.approx(3 * 4 * hours)
    low, high = row.interval_ms
    assert (low - 2) * 1.3 == pytest.approx(row.embeddings_ms) == pytest.approx((high - 2) * 0.7)


def test_a_dense_time_of_so_many_samples_a_device_scales_with_them(swept: Swept) -> None:
    strong = swept(TABLES, "2-8", "1GiB", dense_time=["2ms@128"]).rows  # of 512 samples
    assert [row.dense_ms for row in strong] == [4, 2, 1]
    assert all(row.step_ms == row.embeddings_ms + row.dense_ms == row.data["step_ms"] for row in strong)
    assert all(row.bound_step_ms == row.bound_ms + row.dense_ms for row in strong)
    weak = swept(TABLES, "2-8", "1GiB", dense_time=["2ms@128"], batch_per_device=64).rows
    assert [row.dense_ms for row in weak] == [1, 1, 1]
    as_given = swept(TABLES, "2-8", "1GiB", dense_time=["2ms"])
    assert [row.dense_ms for row in as_given.rows] == [2, 2, 2]
    assert "--dense-time 12ms@8192" in " ".join(as_given.notes)


def test_no_row_beats_one_of_the_frontier_and_one_beats_every_other(swept: Swept) -> None:
    models = ["analytic:h100", "analytic:a100", "analytic:b200"]
    rows = swept(TABLES, "1-16", "1GiB", models=models).rows
    best = frontier(rows)
    for row in rows:
        better = [
            other
            for other in rows
            if other.cell.devices <= row.cell.devices and other.sample_ms <= row.sample_ms and other is not row
        ]
        assert (row in best) == (not better)


def test_sizes_that_a_domain_does_not_divide_are_left_out_by_name(swept: Swept) -> None:
    sizes = swept(TABLES, "4,8,12,16", "1GiB", domain=["8"])
    assert [row.cell.devices for row in sizes.rows] == [4, 8, 16]
    assert sizes.rows[0].found.task.topology.domain == 4  # a part of one
    assert "analytic:h100 with 12 devices is left out" in sizes.notes[0]
    with pytest.raises(UsageError, match="no size is left: analytic:h100 with 12 devices"):
        swept(TABLES, "12", "1GiB", domain=["8"])


def test_tiers_hold_what_hbm_does_not(swept: Swept) -> None:
    tables = some_tables([40, 30, 20])
    sizes = swept(tables, "2", "20MiB,64MiB", host_memory=["1GiB"])
    less, more = sizes.rows
    assert less.fits
    assert more.fits
    assert less.host_bytes > more.host_bytes == 0
    assert less.embeddings_ms > more.embeddings_ms
    ((first, second),) = memory_frontiers(sizes.rows)
    assert second.ms_a_gib == pytest.approx((less.step_ms - more.step_ms) / (44 / 1024))
    assert sizes.fewest_devices == {}
    assert first.row is less


def test_a_sweep_that_is_stopped_gives_what_is_there() -> None:
    stop = threading.Event()
    stop.set()
    order = size_order(["analytic:h100"], devices="2-8", memory=["1GiB"], batch_size=512, rounds=1)
    sizes = run(TABLES, order, stop=stop)
    assert {row.state for row in sizes.rows} == {"not tried"}
    assert any("3 sizes not searched" in note for note in sizes.notes)
    assert "not tried" in sizes_text(sizes)


def test_a_sweep_whose_time_is_up_says_so(swept: Swept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "Watch", lambda seconds, stop: Watch(0.0, stop=stop))
    (row,) = swept(TABLES, "4", "1GiB", time_budget="600s").rows
    assert row.found.provenance.notes[-1] == TIME_UP
    assert STOPPED not in row.found.provenance.notes


def test_a_short_budget_is_not_spent_on_starting_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "_in_processes", None)
    order = size_order(["analytic:h100"], devices="2-8", memory=["1GiB"], time_budget="9s", batch_size=512)
    sizes = run(TABLES, order, processes=2)
    assert {row.cell.devices: row.state for row in sizes.rows}[8] == "fits"  # it comes first


def test_the_largest_and_the_smallest_size_come_first_of_however_many() -> None:
    kinds = [Kind("analytic:h100"), Kind("analytic:b200")]
    cells = [[Cell(kind, count, 2**30, 512, None, None)] for kind in kinds for count in range(1, 4097)]
    order = [(group[0].devices, group[0].kind.name[-4:]) for group in sweeping._in_order(cells)]
    assert order[:8] == [(count, kind) for count in (4096, 1, 2048, 3072) for kind in ("h100", "b200")]
    assert len(set(order)) == len(cells)


def test_amounts_of_memory_share_the_time_of_their_size(swept: Swept, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def watch(seconds: float, stop: None) -> Watch:
        given.append(seconds)
        return Watch(0.0, stop=stop)

    monkeypatch.setattr(sweeping, "Watch", watch)
    swept(TABLES, "2", "70MiB,75MiB,1GiB", time_budget="600s", no_row_wise=True)
    assert given[0] <= 200
    assert given[-1] <= 600


def test_a_model_that_can_price_no_size_is_refused(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text("{}")
    with pytest.raises(InvalidInput):
        run(TABLES, size_order([f"given:{costs}"], devices="2", memory=["1GiB"], batch_size=512))


def test_a_network_joins_the_domains_of_a_sweep(swept: Swept) -> None:
    fast, slow = (swept(TABLES, "4,8", "1GiB", domain=["4"], network=network).rows for network in ("400Gb/s", "40Gb/s"))
    assert fast[0].step_ms == slow[0].step_ms  # one domain
    assert fast[1].step_ms < slow[1].step_ms
    with pytest.raises(UsageError, match="a network joins domains"):
        swept(TABLES, "4,8", "1GiB", network="400Gb/s")


def test_a_kind_without_a_known_memory_asks_for_it() -> None:
    with pytest.raises(UsageError, match="--memory analytic:cpu=SIZE"):
        run(TABLES, size_order(["analytic:cpu"], devices="2", batch_size=512))


def test_devices_have_the_memory_of_their_datasheet() -> None:
    order = size_order(["analytic:h100", "analytic:b200"], devices="1", batch_size=512, rounds=0)
    assert [row.cell.memory_bytes // 2**20 for row in run(TABLES, order).rows] == [81_559, 183_359]


@pytest.mark.slow
def test_two_processes_find_the_same() -> None:
    order = size_order(["analytic:h100"], devices="2-4", memory=["1GiB"], batch_size=512, rounds=1)
    assert run(TABLES, order, processes=2).rows == run(TABLES, order).rows


ENDLESS = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from neuroshard.size.run import _begin
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _begin, (context.Event(),)) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(600)
"""


def test_a_process_of_a_killed_sweep_ends(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
        try:
            ended, _, _ = select.select(
                [parent.stdout], [], [], 60
            )  # its end, once the worker has no hold of it either
            assert ended
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
