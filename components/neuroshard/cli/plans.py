"""Search, show, report, evaluate and compare plans; and what is known before there is one: caches and sizes."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from neuroshard.cli import completion
from neuroshard.cli.app import command, say, say_json, say_text
from neuroshard.cli.interrupt import asked_to_stop
from neuroshard.cli.options import AsJson, PlanFile, TablesFile, named_as_typed, option, out_file, takes
from neuroshard.core.cost import BACKENDS
from neuroshard.core.errors import UsageError
from neuroshard.core.text import wrapped
from neuroshard.core.units import format_bytes
from neuroshard.measure.backends import MeasureSettings
from neuroshard.orders.options import SearchOptions, settings_of
from neuroshard.orders.sizes import MOST_PROCESSES, SizeOptions
from neuroshard.report.options import ReportOptions

_model = partial(option, "MODEL", choices=completion.models)


@command("plan", "neuroshard cache tables.json --batch-size 65536 --load-factor 5% --load-factor 20%")
def cache(
    tables_json: TablesFile,
    batch_size: Annotated[int, option("NUMBER", "Samples of a step, over all ranks.", min=1, max=2**31)],
    load_factor: Annotated[
        list[str] | None,
        option("SHARE", "Share of a table's rows that is cached; may be repeated [default: 1, 5, 10, 20 and 50 %]."),
    ] = None,
    torchrec_stats: Annotated[
        Path | None,
        option("FILE", "Also write the arguments of TorchRec's EmbeddingOffloadStats here, by table, as JSON."),
    ] = None,
    out: Annotated[Path | None, out_file("Page (HTML) with the curves")] = None,
    as_json: AsJson = False,
) -> None:
    """What a cache in HBM misses, and how much HBM all caches need. Rows that an LRU cache of each table misses a step are
    predicted by rows kept in HBM.

    Cached tables lie in host memory; HBM keeps the rows that were read last. Rows are read as a table's access curve says, else
    as its reuse bins do.
    """
    from neuroshard import api
    from neuroshard.core.units import format_bytes
    from neuroshard.core.value import canonical_json
    from neuroshard.files.disk import check_can_write, write_bytes

    for path in filter(None, (torchrec_stats, out)):
        check_can_write(path)
    found = api.cache(tables_json, batch_size=batch_size, load_factors=load_factor)
    say_json(found.data) if as_json else say_text(str(found))
    if out is not None:
        say(f"{out}: {format_bytes(found.save(out))}", err=True)
    if torchrec_stats is not None:
        write_bytes(torchrec_stats, canonical_json({"format_version": 1, "tables": found.torchrec_stats}))
        say(f"{torchrec_stats}: statistics for TorchRec's planner", err=True)


def _cost_model(model: str | None, store: str | None, hardware: str | None) -> str:
    """The value for `--model`, from it or from --store and --hardware. Raises UsageError unless exactly one is given."""
    if (model is None) == (hardware is None) or (hardware is None) != (store is None):
        raise UsageError("give one cost model: --model MODEL, or --store STORE --hardware NAME")
    return model if model is not None else f"{store}#{hardware}"


@command("plan", "neuroshard search tables.json --model model/ --devices 4 --memory 32GiB -o plan.json")
@takes(SearchOptions)
def search(
    tables_json: TablesFile,
    *,
    out: Annotated[Path, out_file("plan.json")],
    model: Annotated[
        str | None,
        _model(
            "Cost model: a folder that `neuroshard pretrain` wrote, STORE#HARDWARE, analytic:h100 (or another GPU), or "
            "given:costs.json.",
        ),
    ] = None,
    store: Annotated[
        str | None,
        option("STORE", "With --hardware: the store whose live cost model to take (--model STORE#HARDWARE)."),
    ] = None,
    hardware: Annotated[
        str | None,
        option("HARDWARE", "Fingerprint, or part of the device's name (h200), as `neuroshard models` shows."),
    ] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Search the plan whose slowest device is fastest. Costs are the cost model's. Ctrl-C writes the best plan so far."""
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


@command("plan", "neuroshard show plan.json")
def show(
    plan: PlanFile,
    bound: Annotated[bool, typer.Option("--bound", help="Say what the lower bound assumes, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a plan, as numbers and bars. Its cost is shown against the baselines, with every device's cost and memory."""
    from neuroshard.files.plan import read_plan
    from neuroshard.report.text import plan_json, plan_text

    shown = read_plan(plan)
    say_json(plan_json(shown)) if as_json else say_text(plan_text(shown, bound=bound))


@command(
    "plan",
    "neuroshard report plan.json --model model/ --costs costs/ --live s3://bucket/prefix#ads-ranker -o report.html",
)
@takes(ReportOptions)
def report(
    plan: PlanFile, *, out: Annotated[Path, out_file("HTML page")], as_json: AsJson = False, **options: Any
) -> None:
    """Turn a plan and its run into one HTML page."""
    from neuroshard import api

    size = api.report(plan, **options).save(out)
    say_json({"out": str(out), "bytes": size}) if as_json else say(f"{out}: {format_bytes(size)}")


@command("measure", "neuroshard evaluate plan.json --backend cpu")
@takes(MeasureSettings, without=("batch_size", "warmup", "repeats", "timeout_seconds", "budget_seconds"))
def evaluate(
    plan: PlanFile,
    *,
    backend: Annotated[
        str,
        option("WORD", "cpu (FBGEMM + gloo), cuda (FBGEMM + NCCL) or synthetic (a formula, exact).", choices=BACKENDS),
    ],
    rounds: Annotated[int, option("NUMBER", "Times each device's tables are measured; the median counts.", min=1)] = 3,
    processes: Annotated[
        int, option("NUMBER", "Measure the all-to-all of plans of at most this many devices (cpu).", min=1)
    ] = 8,
    out: Annotated[Path | None, out_file("JSON", " as well")] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Run a plan's table sets and all-to-alls against its prediction. Measured and predicted times of each device are shown."""
    from neuroshard.measure.evaluate import run

    settings = settings_of(MeasureSettings, {"batch_size": 1, **options})  # the plan's batch is taken
    evaluation = run(plan, out, backend, settings, rounds=rounds, most_processes=processes)
    say_text(evaluation.canonical_json().decode() if as_json else str(evaluation))
    if evaluation.errors:
        raise typer.Exit(1)


@command("plan", "neuroshard diff old.json new.json")
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="plan.json")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="plan.json")],
    model: Annotated[
        str | None,
        _model("Price both by this cost model, as for search [default: as the plans say]."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what moves from one plan to another. It says how many bytes, and what is gained."""
    from neuroshard import api

    found = api.diff(old, new, model)
    say_json(found.data) if as_json else say_text(found.text)


@command("plan", "neuroshard price plan.json other.json --model analytic:h100")
def price(
    plans: Annotated[
        list[Path], typer.Argument(metavar="PLAN...", help="plan.json; several are compared with the first.")
    ],
    model: Annotated[str, _model("Cost model, as for search; it need not be the plans' own.")],
    as_json: AsJson = False,
) -> None:
    """Price plans by one cost model. It says the compute and all-to-all of every device in ms, and the slowest device."""
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


@command(
    "plan", "neuroshard size tables.json --model analytic:h100 --model analytic:b200 --devices 4-128 --batch-size 65536"
)
@takes(SizeOptions)
def size(
    tables_json: TablesFile,
    *,
    model: Annotated[list[str], _model("Cost model of a kind of hardware, as for search; may be repeated.")],
    processes: Annotated[
        int | None,
        option(
            "NUMBER", "Processes that search [default: 2, or as many as there are cores].", min=1, max=MOST_PROCESSES
        ),
    ] = None,
    write: Annotated[Path | None, option("FOLDER", "Folder for the plans of the frontiers.")] = None,
    out: Annotated[Path | None, out_file("HTML page")] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """How many devices, of which kind, for which step time and money. A plan is searched for every kind of hardware, number of
    devices and memory: which fit, and which no other beats.

    A size that does not fit is said to be proven so where its bytes or a search of all packings prove it. Ctrl-C ends the sweep
    with what was found.
    """
    from neuroshard import api
    from neuroshard.core.units import format_bytes
    from neuroshard.files.disk import check_can_write

    for path, folder in ((out, False), (write, True)):
        if path is not None:
            check_can_write(path, folder=folder)
    with asked_to_stop("sizes that were searched are shown") as stop:
        found = api.size(
            tables_json,
            model,
            processes=processes or min(2, os.cpu_count() or 1),  # each takes some 200 MB
            stop=stop,
            **options,
        )
    say_json(found.data) if as_json else say_text(str(found))
    if write is not None:
        for plan in found.write(write):
            say(f"{plan}: written", err=True)
    if out is not None:
        say(f"{out}: {format_bytes(found.save(out))}", err=True)
    if stop.is_set():
        raise typer.Exit(stop.exit_code)
