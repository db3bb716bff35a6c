"""docs/benchmarks/*.json -> docs/benchmarks.md. A file is one table: a question, its figures, and how they came about. The page's
own words are kept; the tables stand below marks. Below `<!-- tables: search measured plans -->` these are search-measured and
search-plans; all others whose names begin with `search-` are named below as files.

    make bench-page        (or: .venv/bin/python tests/bench/publishing/page.py)

The benches write those files: `--publish` has each leave its tables there and render the page again.
"""

import argparse
import json
import os
import re
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
MACHINE = "<!-- machine -->\n"
MARK = re.compile(r"(<!-- tables: (\w+)([-\w ]*) -->\n).*?(?=\n## |\Z)", re.S)
COSTS = {
    "formula": "by our formula",
    "measured": "measured",
    "printed": "costs printed by others",
    "others": "measured by others, computed by us",
    "none": "",
}
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


def parser(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """A bench's parser with the options of all: `quick` says what `--quick` leaves of it."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--publish", action="store_true", help="write the tables into docs/benchmarks/, and the page")
    return made


def asked(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What was asked of a bench; only whole runs are published."""
    options = parser.parse_args()
    if options.publish and options.quick:
        parser.error("--publish is for whole runs, not for --quick")
    return options


def show(
    name: str,
    question: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    costs: CostsFrom,
    *,
    published: bool,
) -> None:
    """Print a table below its question, and publish it where that is asked."""
    print(f"\n{question}\n")
    print_table(columns, rows)
    if published:
        publish(name, question, columns, rows, costs)


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
    words = page.read_text()
    if name.partition("-")[0] not in sections(words):
        raise ValueError(f"{name!r} begins with none of {', '.join(sections(words))}")
    cells = tuple(tuple(str(cell).replace("|", "/").strip() for cell in row) for row in rows)
    table = Table(
        question, costs, command(sys.argv), f"{datetime.now(UTC):%Y-%m-%d}", cpu().name, tuple(columns), cells
    )
    write_bytes(folder / f"{name}.json", (json.dumps(asdict(table), indent=1, ensure_ascii=False) + "\n").encode())
    write_bytes(page, render(words, folder).encode())


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


def sections(page: str) -> list[str]:
    """What names of tables begin with, in the order of the page."""
    return [prefix for _, prefix, _ in MARK.findall(page)]


def render(page: str, folder: Path = TABLES) -> str:
    """The page with its tables as they are."""
    tables = {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
    ours = {table.machine for table in tables.values() if table.costs != "others"}
    same = f"All of ours on one machine: {ours.pop()}.\n" if len(ours) == 1 else ""

    def shown(found: re.Match[str]) -> str:
        named = [name for one in found[3].split() if (name := f"{found[2]}-{one}") in tables]
        others = [name for name in tables if name.startswith(f"{found[2]}-") and name not in named]
        whole = "".join(f"\n{_about(tables[name], bool(same))}\n\n{_cells(tables[name])}" for name in named)
        files = f"\nIn files alone (`{folder.name}/{found[2]}-….json`): {', '.join(map(_rest, others))}.\n"
        return found[1] + whole + files * bool(others)

    above, mark, below = page.partition(MACHINE)
    below = below[below.index("\n## ") :] if mark else ""
    return MARK.sub(shown, above + mark + ("\n" + same) * bool(same) + below)


def _about(table: Table, same: bool) -> str:
    machine = "" if same or table.costs == "others" else table.machine
    facts = ", ".join(filter(None, [table.date, machine, COSTS[table.costs]]))
    return f"**{table.question}** {facts}. `{table.command}`"


def _rest(name: str) -> str:
    """The name without its section."""
    return name.partition("-")[2]


def _cells(table: Table) -> str:
    lines = ["|".join(table.columns), "|".join(["---"] * len(table.columns)), *map("|".join, table.rows)]
    return "".join(f"|{line}|\n" for line in lines)


if __name__ == "__main__":
    write_bytes(PAGE, render(PAGE.read_text()).encode())
