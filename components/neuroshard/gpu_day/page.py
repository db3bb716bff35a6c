"""What the stages found, as one page of Markdown."""

from typing import Any

from neuroshard.core.text import counted
from neuroshard.files.costs import read_costs, read_manifest
from neuroshard.gpu_day.day import Day


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
