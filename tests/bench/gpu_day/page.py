"""What the stages found, as one page of Markdown."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neuroshard.augment.tiers import TIER_CASES
from neuroshard.core.text import counted
from neuroshard.files.costs import read_costs, read_manifest
from neuroshard.files.disk import write_bytes


@dataclass(frozen=True)
class Scale:
    """How much is done, on a GPU or, to rehearse, on a CPU."""

    backend: str
    batch_size: int
    other_batch_size: int  # table sets are measured at both
    memory: str  # of a device, for drawing cases
    most_rows: int  # larger tables are cut
    most_pooling: float
    compute_cases: int = 2000
    collective_cases: int = 200
    tier_cases: int = TIER_CASES
    tasks: int = 30
    rounds: int = 7  # of all devices of all plans of a task
    epochs: int | None = None  # of training, at most


SCALES = {
    "cuda": Scale("cuda", 65536, 16384, "40GiB", 20_000_000, 200.0),
    "cpu": Scale("cpu", 1024, 512, "2GiB", 30_000, 60.0, 200, 40, 12, 3, 3),
    "synthetic": Scale("synthetic", 65536, 16384, "40GiB", 20_000_000, 200.0, 200, 40, 12, 2, 3),
}


@dataclass
class Day:
    """One folder of results, and the time that this call may still take."""

    folder: Path
    scale: Scale
    table_sets: Sequence[Path]
    devices: Sequence[int]  # whose all-to-alls are measured; none with one GPU
    ends: float  # by `clock`, in seconds
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = field(default=lambda line: print(line, flush=True))

    @property
    def left_s(self) -> float:
        return self.ends - self.clock()

    def read(self, stage: str) -> Any:
        return json.loads((self.folder / f"{stage}.json").read_text())

    def write(self, stage: str, found: Any) -> None:
        write_bytes(self.folder / f"{stage}.json", (json.dumps(found, indent=1) + "\n").encode())

    def has(self, stage: str) -> bool:
        return (self.folder / f"{stage}.json").exists()


class OutOfTime(Exception):
    """This call has no time left; the next one continues."""


def render(day: Day) -> str:
    """The page, from the files of all stages."""
    lines = [f"# A day on {_device(day)}", ""]
    bad = [each for each in day.read("operators") if not each["good"]]
    count = len(day.read("operators"))
    lines += [
        "## The operator, compared with the CPU's",
        "",
        f"{count - len(bad)} of {count} kinds give the same results.",
    ]
    lines += [f"- {each['what']}: {each['error'] or 'differs by ' + format(each['difference'], '.2g')}" for each in bad]
    costs, model = day.read("costs"), day.read("model")
    lines += ["", "## Costs and the cost model", "", f"{costs['measured']:,} measurements, {costs['errors']} errors."]
    lines += [f"Measured again, table sets differ by {costs['repeatability']:.1%}."] * (
        costs["repeatability"] is not None
    )
    error = model["error_on_unseen_tables"]
    lines += [f"Error on tables never seen: {_share(error)}."]
    lines += [f"- {stand_in}" for stand_in in model["stand_ins"]]
    lines += [f"Tables beyond HBM: {_beyond_hbm(day, costs.get('no_tiers', ''))}."]
    lines += [
        f"- {tier}: {_share(of['mape'])} off on {of['values']} cases held out; by the datasheet {_share(of['datasheet_mape'])}"
        for tier, of in model.get("beyond_hbm", {}).items()
    ]
    lines += [f"- {gap}" for gap in model.get("gaps", ())]
    sheet = day.read("datasheet")
    lines += [
        f"Measured over {sheet['sheet']}{'' if sheet['own'] else ' (not of this device)'}, {sheet['cases']} table sets: "
        f"median {sheet['median']:.2f}, 80 % between {sheet['low']:.2f} and {sheet['high']:.2f}."
    ]
    lines += ["", *(f"    {line}" for line in day.read("noise")["said"])]
    plans = day.read("plans")
    lines += ["", "## Whole plans, measured", ""]
    lines += [
        f"Compute of the slowest of 4 devices on {plans['tasks']} tasks, over that of our plans; 95 % by bootstrap.",
        "",
        "| plans of | mean | interval | worst task for us |",
        "|---|---|---|---|",
        *(_row(name, each) for name, each in plans["gains"].items()),
        "",
        f"Predicted over measured: {plans['predicted_over_measured']:+.1%}, absolute {plans['absolute']:.1%}.",
    ]
    return "\n".join(lines) + "\n"


def _beyond_hbm(day: Day, no_tiers: str) -> str:
    if no_tiers:
        return f"none was measured, as {no_tiers}"
    rows = read_costs(day.folder / "costs").tiers
    return f"{counted(len(rows), 'case')} measured, {counted(sum(bool(cost.error) for _, cost in rows), 'error')}"


def _share(value: float | None) -> str:
    return "not known" if value is None else format(value, ".1%")


def _row(name: str, of: dict[str, Any]) -> str:
    return f"| {name} | {of['mean']:+.1%} | {of['low']:+.1%} to {of['high']:+.1%} | {of['worst']:+.1%} |"


def _device(day: Day) -> str:
    return read_manifest(day.folder / "costs").bench.hardware.name
