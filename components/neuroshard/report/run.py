"""A plan, its cost model and the live plan -> one self-contained HTML page.

neuroshard report plan.json --model model/ --live s3://bucket/prefix#ads-ranker --costs costs/ -o report.html
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from neuroshard.core.cost import Costs
from neuroshard.core.errors import InvalidInput
from neuroshard.core.moves import carried_over, changed_state, said_ids_lost
from neuroshard.core.operator_limits import device_of
from neuroshard.core.output_order import reordered, said_reordered
from neuroshard.core.plan import Plan
from neuroshard.core.row_order import LISTS_FOLDER
from neuroshard.core.text import counted, first_few
from neuroshard.core.units import format_bytes
from neuroshard.core.value import sha256
from neuroshard.costmodel.bundle import MANIFEST
from neuroshard.costmodel.pricing import check_searched_with, price_shards
from neuroshard.costmodel.protocol import CostModel
from neuroshard.files.costs import read_costs
from neuroshard.files.disk import read_bytes
from neuroshard.models.open import open_cost_model
from neuroshard.orders.options import checked
from neuroshard.report.charts import chart_data
from neuroshard.report.facts import cards, fleet_rows, model_facts, plan_facts
from neuroshard.report.live import LivePlan, PlanChange, change, open_live, sides
from neuroshard.report.numbers import hosts_memory, measured, memory_counts, row_wise_tables, source
from neuroshard.report.options import ReportOptions
from neuroshard.report.page import scripted_page, write_page
from neuroshard.report.text import size
from neuroshard.report.trust import Evaluated, read_evaluation


def report(
    plan: Plan,
    *,
    model: CostModel | None = None,
    live: LivePlan | None = None,
    costs: Costs | None = None,
    fleet: tuple[str, list[dict[str, Any]]] | None = None,
    evaluated: Evaluated | None = None,
    nothing_live: bool = False,
    files: Mapping[str, str] | None = None,
) -> str:
    """The page as HTML. What is not given is not drawn, and the page says how to give it.

    `files` maps the names of the files that were read to their sha256. `nothing_live` means that there is no live plan to
    give. The same values give the same page, byte for byte. Raises InvalidInput where the cost model is not the plan's, or
    the costs are of other hardware than the cost model.
    """
    if model is not None:
        check_searched_with(plan, model, "the cost model given is")
    if costs is not None and (model is None or model.manifest is None):
        raise InvalidInput("costs are shown with the cost model that learned from them; give it too (--model)")
    changed = None if live is None else change(plan, live, model)
    prices = None if model is None else price_shards(model, plan.held, plan.shards)
    data, by = chart_data(plan, changed, evaluated, prices, model, costs), plan.provenance
    fields = {
        "title": f"Sharding plan {plan.digest()[:12]}",
        "what": size(plan),
        "measured": measured(by.cost_model_backend),
        "source": source(by.cost_model_backend, by.cost_model_device),
        "cards": cards(plan, changed, model, evaluated, nothing_live),
        "notes": (*([f"Less certain: {by.instead}"] if by.instead else []), *by.notes),
        "without": [f"{one.algorithm}: no plan: {one.error}" for one in plan.baselines if one.error],
        "assumptions": plan.bound_assumptions if plan.gap is not None else (),
        "costed": plan.cost_ms is not None,
        "memory_counts": memory_counts(plan),
        "hosts_memory": "; ".join(hosts_memory(plan)),
        "priced": prices is not None,
        "row_wise": bool(row_wise_tables(plan)),
        "evaluated": None if evaluated is None else evaluated.what,
        "plan_file": next(iter(files or {}), "plan.json"),
        "backend": "synthetic"
        if by.cost_model_backend == "synthetic"
        else device_of(by.cost_model_backend, by.cost_model),
        "nothing_live": nothing_live,
        "change": None if changed is None else _change_fields(plan, changed),
        "trained": model is not None and model.manifest is not None,
        "fleet": fleet,
        "plan_facts": plan_facts(plan, files or {}),
        "model_facts": [] if model is None else model_facts(model),
        "sets": {name: {of: len(values) for of, values in columns.items()} for name, columns in data["sets"].items()},
        "costs": costs is not None,
        "points": [name for name in data["charts"] if name.startswith("points-")],
        "curves": [name for name in data["charts"] if name.startswith("curves-")],
        "smaller": sum(data["sets"].get("smaller", {"count": []})["count"]),
    }
    return scripted_page(fields, data)


def _change_fields(plan: Plan, changed: PlanChange) -> dict[str, Any]:
    live = changed.live.plan
    names, lost = changed_state(live, plan), said_ids_lost(live, plan.task)
    modules = [module for module, *_ in reordered(live, plan)]
    state = f"{carried_over(len(names))}: {first_few(names)}" if names else ""
    return {
        "name": changed.live.name,
        "digest": live.digest()[:12],
        "why": changed.why,
        "compared": changed.cost_ms is not None,
        "counted": changed.counted,
        "to_move": changed.to_move,
        "made": format_bytes(sum(changed.devices["made anew"])),
        "pieces": counted(changed.pieces, "piece"),
        "state": "; ".join(filter(None, (lost, state))),
        "reordered": said_reordered(modules) if modules else None,
        "left_out": changed.left_out,
        "sides": sides(plan, changed),
    }


def run(plan_path: Path, out: Path, **beside: Unpack[ReportOptions]) -> int:
    """Read a plan.json and what goes with it, and write the page to `out`. Returns its size in bytes.

    Raises NeuroshardError in one line; then nothing is written."""
    plan, files = read_for_report(plan_path)
    return write_page(out, report_of(plan, files=files, lists=plan_path.parent / LISTS_FOLDER, **beside))


def read_for_report(path: Path) -> tuple[Plan, dict[str, str]]:
    """The plan of a plan.json, and the file's sha256 by its name. Raises InvalidInput or NewerFormat in one line."""
    data = read_bytes(path)
    return Plan.from_json(data, str(path)), {path.name: sha256(data)}


def report_of(
    plan: Plan, *, files: Mapping[str, str] | None = None, lists: Path | None = None, **beside: Unpack[ReportOptions]
) -> str:
    """The page of a plan as HTML, with what else `run` reads. `files` maps names of files already read to their sha256. The
    folder `lists` may have the lists of hot rows that the plan names."""
    read, asked = dict(files or {}), checked(ReportOptions, beside, "report")
    model, live, costs, fleet, evaluation = (asked[name] for name in ("model", "live", "costs", "fleet", "evaluation"))
    opened = None if model is None else open_cost_model(model, plan.task.batch_size)
    if model is not None and (Path(model) / MANIFEST).is_file():
        read[f"{Path(model).name}/{MANIFEST}"] = sha256(read_bytes(Path(model) / MANIFEST))
    for folder in costs:
        parts = sorted(folder.glob("*-*.parquet"))
        digests = "".join(sha256(read_bytes(part)) for part in parts)
        read[f"the sha256 of {len(parts)} parts of {folder.name}"] = sha256(digests.encode())
    found = None if live is None else open_live(live, plan, lists)
    return report(
        plan,
        model=opened,
        live=found,
        nothing_live=live is not None and found is None,
        costs=read_costs(*costs) if costs else None,
        fleet=None if fleet is None else fleet_rows(fleet),
        evaluated=None if evaluation is None else read_evaluation(evaluation, plan),
        files=read,
    )
