"""docs/benchmarks/*.json -> docs/benchmarks.md and docs/truth.md. A file is one table: a question, its figures, and how they
came about.

    make bench-page        (or: .venv/bin/python tests/bench/publishing/page.py)

The benches write those files: `--publish` has each leave its tables there and render the page again.
"""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Literal

from neuroshard.devices import cpu
from neuroshard.files.disk import write_bytes

ROOT = Path(__file__).resolve().parents[3]
TABLES, PAGE = ROOT / "docs" / "benchmarks", ROOT / "docs" / "benchmarks.md"
TRUTH, MARK = (
    ROOT / "docs" / "truth.md",
    "<!-- tables: make bench-truth -->\n",
)  # a page of its own, its tables below the mark
SECTIONS = {  # what a table's name begins with
    "search": "Search",
    "cost": "Cost models",
    "measure": "Measuring",
    "cache": "Caches",
    "trainer": "In a trainer",
    "release": "Releases",
    "machines": "Other machines",
    "nights": "Nightly runs",
    "truth": "",
}
COSTS = {
    "formula": "by our formula",
    "measured": "measured",
    "printed": "costs printed by others",
    "others": "measured by others, computed by us",
    "none": "",
}
HEAD = """# Benchmarks

One table answers one question. The benches write the tables (`--publish`), `make bench-page` this page. Figures by our formula
show that the code works. Only measured and printed costs say how good plans are on hardware. No GPU was measured yet.
"""


CostsFrom = Literal["formula", "measured", "printed", "others", "none"]


@dataclass(frozen=True)
class Table:
    """One table of the page. `costs` says what its figures rest on, `date` is ISO's, `rows` are cells as they are shown."""

    question: str
    costs: CostsFrom
    command: str
    date: str
    machine: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if self.costs not in COSTS:
            raise ValueError(f"costs must be {', '.join(COSTS)}, not {self.costs!r}")
        date.fromisoformat(self.date)
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(self.columns)} columns, and a row of {len(row)}: {row}")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(map(str, row))} |" for row in (columns, ["---"] * len(columns), *rows)]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """For who runs a bench."""
    print("\n".join(markdown(columns, rows)), flush=True)


def publish(
    name: str,
    question: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    costs: CostsFrom,
    folder: Path = TABLES,
    page: Path = PAGE,
) -> None:
    """Write one table, of today and this machine, and the page anew. `name` begins with its section: search-time."""
    if name.partition("-")[0] not in SECTIONS:
        raise ValueError(f"{name!r} begins with none of {', '.join(SECTIONS)}")
    cells = tuple(tuple(str(cell).replace("|", "/").strip() for cell in row) for row in rows)
    table = Table(
        question, costs, command(sys.argv), f"{datetime.now(UTC):%Y-%m-%d}", cpu().name, tuple(columns), cells
    )
    write_bytes(folder / f"{name}.json", (json.dumps(asdict(table), indent=1, ensure_ascii=False) + "\n").encode())
    write_bytes(page, render(folder).encode())
    if page == PAGE:
        write_bytes(TRUTH, render_truth().encode())


def command(arguments: Sequence[str]) -> str:
    """How the bench was run, without `--publish`, `--out` and this machine's own paths."""
    script, words, shown = os.path.relpath(arguments[0], ROOT), iter(arguments[1:]), list[str]()
    for word in words:
        if word == "--out":
            next(words)
        elif word != "--publish":
            shown.append("…" if os.path.isabs(word) else shlex.quote(word))
    return " ".join(["python", script, *shown])


def read(path: Path) -> Table:
    found = json.loads(path.read_text())
    found["columns"], found["rows"] = tuple(found["columns"]), tuple(map(tuple, found["rows"]))
    return Table(**found)


def render(folder: Path = TABLES) -> str:
    """The page of benchmarks: sections in their order, tables by their names."""
    tables = {path.stem: read(path) for path in sorted(folder.glob("*.json")) if not path.stem.startswith("truth-")}
    machines = {table.machine for table in tables.values()}
    same = f"All on one machine: {machines.pop()}.\n" if len(machines) == 1 else ""
    blocks = [HEAD + same]
    for prefix, title in SECTIONS.items():
        shown = [_shown(tables[name], same) for name in tables if name.startswith(f"{prefix}-")]
        blocks += [f"## {title}\n"] * bool(shown) + shown
    return "\n".join(blocks)


def render_truth() -> str:
    """The page of other people's figures: what stands above the mark, and the tables."""
    tables = [read(path) for path in sorted(TABLES.glob("truth-*.json"))]
    above, mark, _ = TRUTH.read_text().partition(MARK)
    return above + mark + "\n" + "\n".join(_shown(table, same=True) for table in tables)


def _shown(table: Table, same: str | bool) -> str:
    facts = ", ".join(filter(None, [table.date, "" if same else table.machine, COSTS[table.costs]]))
    lines = ["|".join(table.columns), "|".join(["---"] * len(table.columns)), *map("|".join, table.rows)]
    cells = "\n".join(f"|{line}|" for line in lines)
    return f"**{table.question}** {facts}. `{table.command}`\n\n{cells}\n"


if __name__ == "__main__":
    write_bytes(PAGE, render().encode())
    write_bytes(TRUTH, render_truth().encode())
