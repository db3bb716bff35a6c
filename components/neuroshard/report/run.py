"""A plan, its cost model and the live plan -> one self-contained HTML page.

neuroshard report plan.json --model model/ --live s3://bucket/prefix#ads-ranker --costs costs/ -o report.html
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuroshard.core.cost import Costs
from neuroshard.core.errors import InvalidInput
from neuroshard.core.moves import carried_over, said_ids_lost
from neuroshard.core.operator_limits import device_of
from neuroshard.core.output_order import said_reordered
from neuroshard.core.plan import Plan
from neuroshard.core.row_order import LISTS_FOLDER
from neuroshard.core.text import counted, first_few
from neuroshard.core.units import format_bytes
from neuroshard.core.value import sha256
from neuroshard.costmodel.bundle import MANIFEST
from neuroshard.costmodel.manifest import Manifest
from neuroshard.costmodel.pricing import Prices, check_searched_with, price_shards
from neuroshard.costmodel.protocol import CostModel
from neuroshard.files.costs import read_costs
from neuroshard.files.disk import read_bytes, write_bytes
from neuroshard.models.open import open_cost_model
from neuroshard.report.evaluated import Evaluated, read_evaluation
from neuroshard.report.headline import bars, cards, size, without_a_plan
from neuroshard.report.live import LivePlan, PlanChange, change, open_live
from neuroshard.report.numbers import hosts_memory, memory_counts, row_wise_tables, short, source
from neuroshard.report.origin import fleet_rows, measured, model_facts, plan_facts
from neuroshard.report.page import render
from neuroshard.report.placement import device_columns, evaluated_columns, shard_columns, table_columns
from neuroshard.report.sides import sides
from neuroshard.report.trust import curves, error_rows, points


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
    manifest = None if model is None else model.manifest
    if costs is not None and manifest is None:
        raise InvalidInput("costs are shown with the cost model that learned from them; give it too (--model)")
    shown = Shown(
        plan=plan,
        model=model,
        manifest=manifest,
        changed=None if live is None else change(plan, live, model),
        costs=costs,
        evaluated=evaluated,
        prices=None if model is None else price_shards(model, plan.held, plan.shards),
        learned=[] if manifest is None else curves(manifest.report),
    )
    shards, smaller = shard_columns(plan, shown.prices)
    fields = {
        **_fields(shown, nothing_live),
        "smaller": 0 if smaller is None else sum(smaller["count"]),
        "plan_facts": plan_facts(plan, files or {}),
        "plan_file": next(iter(files or {}), "plan.json"),
        "fleet": fleet,
    }
    return render(fields, {**_data(shown), "shards": shards, "smaller": smaller})


@dataclass(frozen=True)
class Shown:
    """All that the page shows of a plan."""

    plan: Plan
    model: CostModel | None
    manifest: Manifest | None
    changed: PlanChange | None
    costs: Costs | None
    evaluated: Evaluated | None
    prices: Prices | None
    learned: list[dict[str, Any]]


def _fields(shown: Shown, nothing_live: bool) -> dict[str, Any]:
    """What the template's text needs."""
    plan, changed, model, evaluated = shown.plan, shown.changed, shown.model, shown.evaluated
    by = plan.provenance
    return {
        "title": f"Sharding plan {plan.digest()[:12]}",
        "size": size(plan),
        "measured": measured(by.cost_model_backend),
        "source": source(by.cost_model_backend, by.cost_model_device),
        "cards": cards(plan, changed, model, evaluated, nothing_live),
        "nothing_live": nothing_live,
        "evaluated": None if evaluated is None else evaluated.what,
        "backend": "synthetic"
        if by.cost_model_backend == "synthetic"
        else device_of(by.cost_model_backend, by.cost_model),
        "without": without_a_plan(plan),
        "notes": (*([f"Less certain: {by.instead}"] if by.instead else []), *by.notes),
        "assumptions": plan.bound_assumptions if plan.gap is not None else (),
        "costed": plan.cost_ms is not None,
        "predicted": plan.predicted is not None,
        "memory_counts": memory_counts(plan),
        "hosts_memory": hosts_memory(plan),
        "priced": shown.prices is not None,
        "row_wise": bool(row_wise_tables(plan)),
        "change": None if changed is None else _change_fields(plan, changed),
        "trained": shown.manifest is not None,
        "model": model is not None,
        "costs": shown.costs is not None,
        "model_facts": [] if model is None else model_facts(model),
        "improved": bool(plan.improvements),
        "learned": bool(shown.learned),
    }


def _change_fields(plan: Plan, changed: PlanChange) -> dict[str, Any]:
    return {
        "name": changed.live.name,
        "digest": changed.live.plan.digest()[:12],
        "why": changed.why,
        "compared": changed.cost_ms is not None,
        "counted": changed.counted,
        "to_move": changed.to_move,
        "made": format_bytes(changed.made_bytes),
        "pieces": counted(changed.pieces, "piece"),
        "state": _state(plan, changed),
        "reordered": said_reordered(changed.reordered) if changed.reordered else None,
        "left_out": changed.left_out,
        "sides": sides(plan, changed),
    }


def _state(plan: Plan, changed: PlanChange) -> str | None:
    """What of the ids' rows and of the optimizer's state does not carry over exactly; None where all does."""
    names, lost = changed.changed_state, said_ids_lost(changed.live.plan, plan.task)
    state = f"{carried_over(len(names))}: {first_few(names)}" if names else ""
    return "; ".join(filter(None, (lost, state))) or None


def _data(shown: Shown) -> dict[str, Any]:
    """What the scripts draw."""
    plan, changed, evaluated, manifest = shown.plan, shown.changed, shown.evaluated, shown.manifest
    return {
        "measured": measured(plan.provenance.cost_model_backend),
        "bars": bars(plan, changed),
        "ranksAHost": None if plan.task.topology is None else plan.task.topology.local_world_size,
        "bound": None if plan.lower_bound_ms is None else short([plan.lower_bound_ms])[0],
        "devices": device_columns(plan, None if changed is None else changed.live_ms),
        "evaluated": None if evaluated is None else evaluated_columns(plan, evaluated),
        "evaluated_how": None if evaluated is None else evaluated.how,
        "tables": table_columns(plan, shown.prices),
        "change": changed.devices if changed is not None and changed.counted else None,
        "moves": changed.moves if changed is not None and changed.counted else None,
        "errors": [] if manifest is None else error_rows(manifest.report),
        "points": {} if shown.model is None or shown.costs is None else points(shown.model, shown.costs),
        "curves": shown.learned,
        "steps": [improvement.step for improvement in plan.improvements],
        "costs": short(improvement.cost_ms for improvement in plan.improvements),
    }


def run(
    plan_path: Path,
    out: Path,
    *,
    model: str | None = None,
    live: str | None = None,
    costs: Sequence[Path] = (),
    fleet: Path | None = None,
    evaluation: Path | None = None,
) -> int:
    """Read a plan.json and what goes with it, and write the page to `out`. Returns its size in bytes.

    `model` names the cost model as for a search. `live` is a plan.json or STORE#MODEL, which may have nothing live. `costs` are
    the folders that the cost model learned from. `fleet` is a file with the output of `neuroshard fleet --json`, `evaluation`
    a file that `neuroshard evaluate -o` wrote.

    Raises NeuroshardError in one line; then nothing is written.
    """
    plan, files = read_for_report(plan_path)
    html = report_of(
        plan,
        model=model,
        live=live,
        costs=costs,
        fleet=fleet,
        evaluation=evaluation,
        files=files,
        lists=plan_path.parent / LISTS_FOLDER,
    )
    return write_page(out, html)


def read_for_report(path: Path) -> tuple[Plan, dict[str, str]]:
    """The plan of a plan.json, and the file's sha256 by its name. Raises InvalidInput or NewerFormat in one line."""
    data = read_bytes(path)
    return Plan.from_json(data, str(path)), {path.name: sha256(data)}


def write_page(out: Path, html: str) -> int:
    """Write the page, whole or not at all; its size in bytes."""
    data = html.encode(errors="replace")  # the name of a file may not be text
    write_bytes(out, data)
    return len(data)


def report_of(
    plan: Plan,
    *,
    model: str | None = None,
    live: str | None = None,
    costs: Sequence[Path] = (),
    fleet: Path | None = None,
    evaluation: Path | None = None,
    files: Mapping[str, str] | None = None,
    lists: Path | None = None,
) -> str:
    """The page of a plan as HTML, with what else `run` reads. `files` maps names of files already read to their sha256. The
    folder `lists` may have the lists of hot rows that the plan names."""
    read = dict(files or {})
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
