"""`neuroshard tables --check`: a plain word on each odd table."""

import json

import pytest

from neuroshard.core.table import Table
from neuroshard.files.importers.check_tables import check_entries, check_table, findings_text
from neuroshard.files.importers.imported import TableEntry, table_defaults

PLAIN = {"name": "plain", "rows": 1_000_000, "dim": 64, "pooling_factor": 3.0}


@pytest.mark.parametrize(
    ("change", "what", "words"),
    [
        ({"pooling_factor": 0}, ["unread"], "never read, but occupies 248.0 MiB"),
        ({"reuse_bins": [0.0] * 17}, ["unread"], "no row is read"),
        ({"pooling_factor": 0.001}, ["rare"], "once in 1,000 samples"),
        ({"pooling_factor": 6066}, ["many-lookups"], "6,066 lookups"),
        ({"rows": 1, "pooling_factor": 1}, ["one-row"], "a bias"),
        ({"rows": 5, "pooling_factor": 50}, ["few-rows"], "50 lookups a sample of 5 rows"),
        ({"dim": 4}, ["cache-line"], "a row of 16 bytes leaves 75%"),
        ({"dim": 4, "rows": 50}, [], ""),  # such a table is in the cache anyway
        ({"dim": 36}, [], ""),
        ({"dim": 16, "element_bytes": 2}, ["cache-line"], "a row of 32 bytes leaves 50%"),
        ({"rows": 10**9}, ["huge"], "must be cut column-wise"),
        ({"rows": 10**10, "dim": 128}, ["int64-ids", "too-tall"], "even 4 of its columns take 186.3 GiB"),
        ({"dim": 1500}, ["too-wide"], "a search cuts it into 2 shards or more"),
        ({"dim": 1028, "pooling": "none"}, ["too-wide"], "make it 1,032"),
        ({"dim": 1024}, [], ""),
        ({}, [], ""),
    ],
)
def test_each_oddity_has_its_word(change, what, words):
    found = list(check_table(Table(**{**PLAIN, **change})))
    assert [finding.what for finding in found] == what
    assert words in "".join(finding.message for finding in found)


def test_all_faults_are_listed_not_only_the_first_with_a_fix():
    fields = [
        {**PLAIN, "dim": 6},
        {**PLAIN, "rows": 0, "name": "b"},
        {**PLAIN, "name": "b"},
        {**PLAIN, "name": "s", "pooling": "none", "weighted": True},
    ]
    found = check_entries([TableEntry(f"t[{i}]", one) for i, one in enumerate(fields)], table_defaults())

    assert [(f.severity, f.what) for f in found] == [
        ("odd", "duplicate"),
        ("fault", "rule"),
        ("fault", "rule"),
        ("fault", "rule"),
    ]
    assert found[1].message.endswith("make it 8")
    assert max(map(len, findings_text(found, 4).splitlines())) <= 80


def test_of_many_of_a_kind_the_first_few_are_listed_and_how_many_more():
    entries = [TableEntry(f"t[{i}]", {**PLAIN, "name": f"t{i}", "dim": 4}) for i in range(1000)]
    lines = findings_text(check_entries(entries, table_defaults()), 1000).splitlines()
    assert lines[0] == "1,000 tables: 0 faults, 1,000 odd"
    assert lines[-1] == "  and 995 more cache-line (--json lists all)"
    assert len(lines) < 20


def test_the_exit_status_says_what_was_found(tmp_path, neuroshard):
    def check(*tables, more=()):
        path = tmp_path / "tables.json"
        path.write_text(json.dumps({"tables": list(tables)}))
        return neuroshard("tables", "--from", path, "--check", *more)

    assert check(PLAIN).returncode == 0
    odd = check({**PLAIN, "dim": 4}, more=("--json",))
    assert (odd.returncode, [one["what"] for one in json.loads(odd.stdout)]) == (3, ["cache-line"])
    fault = check({**PLAIN, "dim": 6}, more=("-o", tmp_path / "out.json"))
    assert (fault.returncode, fault.stderr.count("error: "), (tmp_path / "out.json").exists()) == (1, 1, False)
