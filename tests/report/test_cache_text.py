"""What `neuroshard cache` says: figures, text, and the statistics that TorchRec's planner takes."""

import json
import warnings
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import neuroshard as ns
from neuroshard.core.errors import UsageError
from neuroshard.core.id_map import IdMap
from neuroshard.core.table import Table
from neuroshard.files.tables import write_tables
from neuroshard.report.cache import LOAD_FACTORS, cache_misses, cache_text, slots

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats

BATCH = 2000


def table(name: str, rows: int, access: object = None, **fields: object) -> Table:
    said = {} if access is None else {"access": access}
    return Table.parse({"name": name, "rows": rows, "dim": 16, "pooling_factor": 1.0, **said, **fields}, name)


TABLES = (
    table("user", 100_000, "zipf:1.05"),
    table("item", 20_000, "zipf:0.7", dim=64),
    table("small", 40, "uniform"),
    table("unread", 1000, pooling_factor=0.0),
)


def test_figures_are_by_table_and_load_factor() -> None:
    data = cache_misses(TABLES, BATCH).data
    user = data["tables"][0]
    assert (user["table"], user["rows"], user["row_bytes"], user["source"]) == ("user", 100_000, 64, "zipf:1.05")
    assert user["cached_rows"] == [1024, 5024, 10_016, 20_000, 50_016]  # whole sets of 32
    assert len(user["missed_rows"]) == len(user["warm_up_batches"]) == len(LOAD_FACTORS)
    assert user["missed_rows"] == sorted(user["missed_rows"], reverse=True)
    assert user["crowded"] == [True, False, False, False, False]
    assert json.loads(json.dumps(data)) == data


def test_hbm_that_the_model_needs_is_what_leaves_so_many_misses() -> None:
    misses = cache_misses(TABLES, BATCH)
    model = misses.data["model"]
    assert [need["missed_share"] for need in model["needs"]] == [0.01, 0.05, 0.2]
    for need in model["needs"]:
        cached = [need["cached_rows"][one.name] for one in TABLES]
        missed = sum(
            float(curve.hull().missed(rows)) * one.dim * 4
            for curve, rows, one in zip(misses.curves, cached, TABLES, strict=True)
        )
        assert missed == pytest.approx(need["missed_share"] * model["distinct_bytes"], rel=0.01)
        slots_bytes = sum(rows * (one.dim * 4 + 16) for rows, one in zip(cached, TABLES, strict=True))
        assert need["hbm_bytes"] == pytest.approx(slots_bytes, rel=0.01)
    assert model["apart_bytes"] == sum(one.rows * 8 for one in TABLES)


def test_slots_are_whole_sets_of_fbgemm() -> None:
    assert [slots(1000, factor) for factor in (0, 0.001, 0.032, 0.033, 1)] == [0, 32, 32, 64, 1000]
    assert slots(20, 0.5) == 20


def test_the_text_fits_in_80_columns_and_names_what_misses_most() -> None:
    many = tuple(table(f"a_table_with_a_long_name_{n}", 10**9 + n, "zipf:1.05") for n in range(30))
    text = cache_text(cache_misses((*TABLES, *many), 10**6, [0.001 * n for n in range(1, 8)]))
    assert max(map(len, text.splitlines())) <= 80
    assert "10 tables more, of fewer bytes, with --json" in text
    assert "2 load factors more with --json" in text
    few = cache_text(cache_misses(TABLES, BATCH)).splitlines()
    names = [line.split()[0] for line in few if line.startswith(("user", "item", "small", "unread"))]
    assert names == ["item", "user", "small", "unread"]
    user = next(line for line in few if line.startswith("user")).split()
    assert user[1:4] == ["100k", "987", "77%!"]
    assert [line.split()[0] for line in few if "MiB" in line and "%" in line] == ["20%", "5%", "1%"]


def test_notes_say_what_is_assumed() -> None:
    stream = {
        "order": "shuffled", "batches": 9, "distinct_rows": 50.0, "first_touches": 0.0,
        "cached_rows": [0, 100], "missed_rows": [50.0, 0.0],
    }  # fmt: skip
    counted = {"batch_size": 100, "group_rows": [100], "lookups_per_row": [1.0], "stream": stream}
    notes = cache_misses((table("a", 100, counted), table("b", 100)), BATCH).data["notes"]
    assert [note.split(":")[0] for note in notes] == [
        "1 table says no access curve",
        "1 table counted on shuffled batches",
        "1 table counted at a batch size of 100",
        "! fewer than 1.5 times the distinct rows of a batch",
    ]
    assert cache_misses((table("a", 10**6, "zipf:1.05"),), BATCH, [0.5]).data["notes"] == []
    mapped = table("a", 10**6, "zipf:1.05").model_copy(update={"id_map": IdMap(kind="mch", bytes_per_row=16)})
    [note] = cache_misses((mapped,), BATCH, [0.5]).data["notes"]
    assert "no plan holds such a table behind a cache" in note


@pytest.mark.parametrize(
    ("fields", "factor", "said"),
    [
        ({"varies": 0.1}, 0.1, ["misses vary by up to 10.0%"]),
        ({"varies": 0.01}, 0.1, []),
        ({"first_touches": 5.0}, 0.1, []),
        ({"first_touches": 5.0}, 0.9, ["read fewer rows than the largest cache holds"]),
        ({"first_touches": 5.0}, 1.0, []),  # all of it is in HBM
        ({"first_touches": 0.0}, 0.9, []),  # all rows that are ever read were
    ],
)
def test_notes_say_how_far_a_stream_can_be_trusted(fields: dict[str, float], factor: float, said: list[str]) -> None:
    stream: dict[str, Any] = {
        "order": "time", "batches": 90, "distinct_rows": 50.0, "first_touches": 0.0, "cached_rows": [0, 500], **fields,
    }  # fmt: skip
    stream["missed_rows"] = [50.0 - stream["first_touches"], 0.0]
    counted = {"batch_size": BATCH, "group_rows": [500], "lookups_per_row": [BATCH / 500], "stream": stream}
    table_of_stream = table("a", 1000, counted)
    notes = cache_misses((table_of_stream,), BATCH, [factor]).data["notes"]
    assert [words in note for words, note in zip(said, notes, strict=True)] == [True] * len(said)


@pytest.mark.parametrize("name", ["user", "item", "small"])
def test_statistics_for_torchrec_have_our_misses_at_any_load_factor(name: str) -> None:
    misses = cache_misses(TABLES, BATCH)
    place = [one.name for one in TABLES].index(name)
    stated = misses.torchrec_stats()[name]
    made = EmbeddingOffloadStats(
        stated["cacheability"], stated["expected_lookups"], torch.tensor(stated["mrc_hist_counts"]), stated["height"]
    )
    curve, rows = misses.curves[place], TABLES[place].rows
    for factor in (0.0008, 0.01, 0.1, 0.3337, 0.7, 0.95):
        ours = float(curve.missed(factor * rows)) / curve.distinct_rows
        assert made.expected_miss_rate(factor) == pytest.approx(ours, abs=0.02), factor
    assert made.expected_miss_rate(1.0) == pytest.approx(0, abs=1e-6)
    assert made.expected_lookups == pytest.approx(curve.distinct_rows, abs=1)
    wide = np.linspace(0, rows, 5000)
    assert made.cacheability == pytest.approx(np.mean(curve.missed(wide)) / curve.distinct_rows, abs=0.005)


def test_a_table_that_is_never_read_has_statistics_of_zeros() -> None:
    stated = cache_misses(TABLES, BATCH).torchrec_stats()["unread"]
    assert (stated["cacheability"], stated["expected_lookups"], sum(stated["mrc_hist_counts"])) == (0, 0, 0)


def test_the_command_prints_text_or_json_and_writes_statistics(neuroshard, tmp_path: Path) -> None:
    write_tables(tmp_path / "tables.json", TABLES)
    command = ("cache", tmp_path / "tables.json", "--batch-size", BATCH)
    text = neuroshard(*command, "--load-factor", "5%", "--load-factor", "0.2", "--torchrec-stats", tmp_path / "stats")
    assert text.returncode == 0, text.stderr
    assert "5%" in text.stdout
    assert "note: 1 table says no access curve" in text.stderr
    stats = json.loads((tmp_path / "stats").read_text())
    assert stats["tables"] == cache_misses(TABLES, BATCH).torchrec_stats()
    printed = neuroshard(*command, "--json", "--quiet")
    assert json.loads(printed.stdout) == cache_misses(TABLES, BATCH).data
    assert printed.stderr == ""


@pytest.mark.parametrize(
    ("factor", "said"), [("2", "a load factor is a share of a table's rows, from 0 to 1, not 2"), ("x%", "'x%'")]
)
def test_a_load_factor_that_is_no_share_is_refused(factor: str, said: str, neuroshard, tmp_path: Path) -> None:
    write_tables(tmp_path / "tables.json", TABLES)
    done = neuroshard("cache", tmp_path / "tables.json", "--batch-size", BATCH, "--load-factor", factor)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_python_says_the_same() -> None:
    found = ns.cache(TABLES, batch_size=BATCH, quiet=True)
    assert found.data == cache_misses(TABLES, BATCH).data
    assert str(found) == cache_text(cache_misses(TABLES, BATCH))
    frame = found.to_frame()
    assert list(frame.columns) == [
        "table", "rows", "distinct_rows", "load_factor", "cached_rows", "missed_rows", "warm_up_batches",
    ]  # fmt: skip
    assert len(frame) == len(TABLES) * len(LOAD_FACTORS)
    assert "user" in found._repr_html_()
    assert found.torchrec_stats["user"]["height"] == 100_000
    for wrong, said in (({"batch_size": 0}, "batch size is from 1"), ({"load_factors": 0.1}, "is a list of shares")):
        with pytest.raises(UsageError, match=said):
            ns.cache(TABLES, **{"batch_size": BATCH, "quiet": True, **wrong})  # type: ignore[arg-type]


def test_the_page_has_the_curves_and_all_figures_and_runs_nothing(tmp_path: Path) -> None:
    named = (*TABLES, table("<script>alert(1)</script>", 5000, "zipf:0.9"))
    found = ns.cache(named, batch_size=BATCH, quiet=True)
    assert found.save(tmp_path / "page.html") == (tmp_path / "page.html").stat().st_size
    html = (tmp_path / "page.html").read_text()
    assert "<script" not in html
    assert html.count("<svg") == 2
    assert "default-src 'none'; script-src 'none'" in unescape(html)
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 2  # in the list, and in the picture's legend
    user = found.data["tables"][0]
    assert f"{user['missed_rows'][1] / user['distinct_rows']:.1%}" in html
    assert html.count("<tr>") == len(named) + 1


def test_the_command_writes_the_page(neuroshard, tmp_path: Path) -> None:
    write_tables(tmp_path / "tables.json", TABLES)
    done = neuroshard("cache", tmp_path / "tables.json", "--batch-size", BATCH, "-o", tmp_path / "page.html", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["batch_size"] == BATCH
    assert "page.html: " in done.stderr
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
