"""Search, show, report, evaluate and compare plans."""

from pathlib import Path
from typing import Annotated, Any

import typer

from neuroshard.cli.app import command, say, say_json, say_text
from neuroshard.cli.interrupt import asked_to_stop
from neuroshard.cli.options import AsJson, PlanFile, Seed, named_as_typed, out_file, with_search_options
from neuroshard.core.errors import UsageError
from neuroshard.core.text import wrapped
from neuroshard.core.units import format_bytes, parse_bytes


def _cost_model(model: str | None, store: str | None, hardware: str | None) -> str:
    """The value for `--model`, from it or from --store and --hardware. Raises UsageError unless exactly one is given."""
    if (model is None) == (hardware is None) or (hardware is None) != (store is None):
        raise UsageError("give one cost model: --model MODEL, or --store STORE --hardware NAME")
    return model if model is not None else f"{store}#{hardware}"


@command(
    "plan",
    "neuroshard search tables.json --model model/ --devices 4 --memory 32GiB -o plan.json",
    "Search the plan whose slowest device is fastest.",
)
@with_search_options
def search(
    tables_json: Annotated[Path, typer.Argument(metavar="TABLES", help="tables.json")],
    *,
    out: Annotated[Path, out_file("plan.json")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Cost model: a folder that `neuroshard pretrain` wrote, STORE#HARDWARE, analytic:h100 (or another GPU), or "
            "given:costs.json."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="With --hardware: the store whose live cost model to take (--model STORE#HARDWARE)."),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Fingerprint, or part of the device's name (h200), as `neuroshard models` shows.")
    ] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Search the plan whose slowest device is fastest, by the cost model. Ctrl-C writes the best plan so far."""
    from neuroshard import api
    from neuroshard.report.text import plan_json, plan_text

    with named_as_typed(), asked_to_stop("the best plan so far is written") as stop:
        plan = api.search(tables_json, _cost_model(model, store, hardware), out=out, stop=stop, **options)
    if as_json:
        say_json({"out": str(out), **plan_json(plan)})
    else:
        say_text(plan_text(plan))
        say(f"{out}: written")
    if stop.is_set():
        raise typer.Exit(stop.exit_code)


@command("plan", "neuroshard show plan.json", "Show a plan, as numbers and bars.")
def show(
    plan: PlanFile,
    bound: Annotated[bool, typer.Option("--bound", help="Say what the lower bound assumes, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a plan: cost against the baselines, and every device's cost and memory."""
    from neuroshard.files.plan import read_plan
    from neuroshard.report.text import plan_json, plan_text

    shown = read_plan(plan)
    say_json(plan_json(shown)) if as_json else say_text(plan_text(shown, bound=bound))


@command(
    "plan",
    "neuroshard report plan.json --model model/ --costs costs/ --live s3://bucket/prefix#ads-ranker -o report.html",
    "Turn a plan and its run into one HTML page.",
)
def report(
    plan: PlanFile,
    out: Annotated[Path, out_file("HTML page")],
    model: Annotated[str | None, typer.Option(help="The plan's cost model, as for search.")] = None,
    live: Annotated[str | None, typer.Option(help="The plan to compare with: a plan.json, or STORE#MODEL.")] = None,
    costs: Annotated[
        list[Path] | None, typer.Option(help="Costs that the cost model learned from; may be repeated.")
    ] = None,
    fleet: Annotated[Path | None, typer.Option(help="What `neuroshard fleet --json` printed.")] = None,
    evaluation: Annotated[Path | None, typer.Option(help="What `neuroshard evaluate -o` wrote of this plan.")] = None,
    as_json: AsJson = False,
) -> None:
    """Turn a plan, and other results of its run, into one HTML page."""
    from neuroshard import api

    made = api.report(plan, model=model, live=live, costs=costs or (), fleet=fleet, evaluation=evaluation)
    size = made.save(out)
    say_json({"out": str(out), "bytes": size}) if as_json else say(f"{out}: {format_bytes(size)}")


@command(
    "measure",
    "neuroshard evaluate plan.json --backend cpu",
    "Run a plan's table sets and all-to-alls against its prediction.",
)
def evaluate(
    plan: PlanFile,
    backend: Annotated[
        str, typer.Option(help="cpu (FBGEMM + gloo), cuda (FBGEMM + NCCL) or synthetic (a formula, exact).")
    ],
    rounds: Annotated[int, typer.Option(min=1, help="Times each device's tables are measured; the median counts.")] = 3,
    processes: Annotated[
        int, typer.Option(min=1, help="Measure the all-to-all of plans of at most this many devices (cpu).")
    ] = 8,
    optimizer: Annotated[
        str, typer.Option(help="Optimizer fused into backward: sgd, rowwise_adagrad or adagrad.")
    ] = "rowwise_adagrad",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads a device may use (cpu).")] = 1,
    memory_limit: Annotated[
        str | None,
        typer.Option(help="Most memory for weights and optimizer state of a case: larger tables get fewer rows."),
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help="Real lookups, as `neuroshard tables --traces` wrote them.")
    ] = None,
    as_json: AsJson = False,
    out: Annotated[Path | None, out_file("JSON", " as well")] = None,
    seed: Seed = 0,
) -> None:
    """Measure the table set of each device of a plan, and show measured and predicted times."""
    from neuroshard.measure.evaluate import run

    evaluation = run(
        plan,
        out,
        backend=backend,
        rounds=rounds,
        most_processes=processes,
        optimizer=optimizer,
        threads=threads,
        memory_limit_bytes=None if memory_limit is None else parse_bytes(memory_limit, "--memory-limit"),
        traces=traces,
        seed=seed,
    )
    say_text(evaluation.canonical_json().decode() if as_json else str(evaluation))
    if evaluation.errors:
        raise typer.Exit(1)


@command("plan", "neuroshard diff old.json new.json", "Show what moves from one plan to another.")
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="plan.json")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="plan.json")],
    model: Annotated[
        str | None, typer.Option(help="Price both by this cost model, as for search [default: as the plans say].")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what moves from one plan to another, how many bytes, and what is gained."""
    from neuroshard import api

    found = api.diff(old, new, model)
    say_json(found.data) if as_json else say_text(found.text)


@command("plan", "neuroshard price plan.json other.json --model analytic:h100", "Price plans by one cost model.")
def price(
    plans: Annotated[
        list[Path], typer.Argument(metavar="PLAN...", help="plan.json; several are compared with the first.")
    ],
    model: Annotated[str, typer.Option(help="Cost model, as for search; it need not be the plans' own.")],
    as_json: AsJson = False,
) -> None:
    """Price plans by one cost model: compute and all-to-all of every device in ms, and the slowest device."""
    from neuroshard import api
    from neuroshard.core.comparable import other_groups, other_work
    from neuroshard.files.plan import read_plan
    from neuroshard.report.numbers import against

    read = [read_plan(plan) for plan in plans]
    priced = [(str(file), api.price(plan, model)) for file, plan in zip(plans, read, strict=True)]
    tasks = [plan.task for plan in read]
    apart = [other_work(tasks[0], task) or other_groups(tasks[0], task) for task in tasks]
    if as_json:
        several = len(priced) > 1
        rows = zip(priced, apart, strict=True)
        say_json(
            [
                {"file": file, **price.data} | ({"not_compared": why or None} if several else {})
                for (file, price), why in rows
            ]
        )
        return
    if len(priced) == 1:
        say_text(str(priced[0][1]))
        return
    for (file, _), why in zip(priced, apart, strict=True):
        if why:
            say_text("\n".join(wrapped(f"{file} is not compared with {priced[0][0]}: {why}")))
    say_text("\n\n".join(f"{file}:\n{price}" for file, price in priced))
    say_text("\npredicted, slowest device")
    reference = priced[0][1]
    for (file, price), why in zip(priced, apart, strict=True):
        change = "not compared" if why else against(price.cost_ms, reference.cost_ms, "{:.1%}".format)
        say(f"{price.cost_ms:10.3f} ms  {'' if price is reference else change:<16} {file}")
