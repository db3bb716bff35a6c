"""Figures in sentences of pages are those of docs/benchmarks/*.json: after another run of a bench, what to mend is seen here."""

import re
from pathlib import Path

import pytest

from bench.publishing.page import ROOT, TABLES, read

# A page, and a sentence with {table row column number} for each figure, counted from 0. A format may follow: {… .1f}, or without
# the sign {… |.1f}
SENTENCES = [
    (
        "README.md",
        "off by {cost-measured-1700 1 1 0} %, with NeuroShard's nets as published by {cost-measured-1700 0 1 0} % (two "
        "measurements differ by {cost-measured-1700 1 3 0} %)",
    ),
    (
        "README.md",
        "{search-time 0 2 0 .3f}, {search-time 1 2 0 .3f}, {search-time 2 2 0 .3f}; the published search takes "
        "{search-time 0 1 0 .1f}, {search-time 1 1 0 .1f}, {search-time 2 1 0 .0f}",
    ),
    (
        "README.md",
        "computes {search-measured 3 2 0} % longer with TorchRec's plan than with ours (95 % interval {search-measured 3 2 1} to "
        "{search-measured 3 2 2}), {search-measured 2 2 0} % with the best heuristic's ({search-measured 2 2 1} to "
        "{search-measured 2 2 2}), {search-measured 1 2 0} % with the published search's ({search-measured 1 2 1} to "
        "{search-measured 1 2 2})",
    ),
    ("README.md", "a step of TorchRec takes {trainer-hosts 2 5 0 .0f} to {trainer-hosts 1 5 0 .0f} % less time"),
    (
        "README.md",
        "a step takes {trainer-steps 0 2 0} % longer with the published search's plans than with ours (95 % interval "
        "{trainer-steps 0 2 1} to {trainer-steps 0 2 2}), {trainer-steps 4 2 0} to {trainer-steps 5 2 0} % with heuristics' "
        "plans, {trainer-steps 6 2 0} % with TorchRec's ({trainer-steps 6 2 1} to {trainer-steps 6 2 2}). Of two plans predicted "
        "10 % apart or more, the one predicted slower is slower in {trainer-steps 7 0 1} of {trainer-steps 7 0 2} pairs",
    ),
    ("README.md", "slowest rank takes {search-printed 0 1 0} ms, ours {search-printed 2 1 0} ms"),
    (
        "docs/cost-model.md",
        "the error is {cost-measured-1700 1 1 0} %, and labels repeat to {cost-measured-1700 1 3 0} %",
    ),
    (
        "docs/cost-model.md",
        "With 50, 200 and 1,400 of these cases our net is {cost-few 0 3 0}, {cost-few 2 3 0} and {cost-few 5 3 0} % off",
    ),
    (
        "docs/augment.md",
        "lowers the error on devices of plans from {cost-cases 2 2 0} to {cost-cases 3 2 0} %, by our formula, where 4,000 "
        "random cases have {cost-cases 4 2 0} %",
    ),
    ("README.md", "are {truth-operator 3 3 0 |.0f} to {truth-operator 0 3 0 |.0f} % below what others measured"),
    ("docs/benchmarks.md", "are within {truth-operator 12 3 0 |.0f} % on an H100"),
    ("docs/benchmarks.md", "of four kinds of GPU are within {truth-all-to-alls 3 3 0 |.0f} %"),
    ("docs/dlrmv4.md", "priced at {search-dlrmv4 9 3 0} ms, TorchRec's plan at {search-dlrmv4 0 3 0}"),
    ("docs/dlrmv4.md", "{trainer-dlrmv4 9 1 0} times that of TorchRec's plan, {trainer-dlrmv4 9 4 0} of its memory"),
    ("docs/cost-model.md", "a step takes {trainer-hosts 2 5 0 .0f} to {trainer-hosts 1 5 0 .0f} % less time"),
    ("docs/cache.md", "misses of the second half were up to {cache-real 4 2 1 |.1f} points off"),
    ("docs/cache.md", "counted on the second half itself is at most {cache-real 0 3 1 |.1f} points off"),
    ("docs/cache.md", "the same lookups are predicted to {cache-real 1 2 1 |.1f} points"),
    ("docs/cache.md", "approximation was up to {cache-real 4 4 1 |.0f} points off"),
    (
        "docs/cache.md",
        "up to {cache-distributions 7 4 1 |.0f} points off on tables read by Zipf, and {cache-distributions 10 4 1 |.0f}",
    ),
]


@pytest.mark.parametrize(("page", "sentence"), SENTENCES, ids=[f"{page} {text[:30]}" for page, text in SENTENCES])
def test_a_sentence_has_the_figures_of_its_table(page: str, sentence: str) -> None:
    said = re.sub(r"\{([^}]*)\}", lambda found: _figure(*found[1].split()), sentence)
    assert said in " ".join(Path(ROOT / page).read_text().split())


def _figure(table: str, row: str, column: str, number: str, rounded: str = "") -> str:
    cell = read(TABLES / f"{table}.json").rows[int(row)][int(column)]
    found: str = re.findall(r"-?\d[\d,.]*", cell)[int(number)].rstrip(".,")
    if not rounded:
        return found
    value = abs(float(found)) if rounded.startswith("|") else float(found)
    return format(value, rounded.removeprefix("|"))
