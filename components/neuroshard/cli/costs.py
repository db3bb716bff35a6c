"""From tables to measured costs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neuroshard.augment.settings import AugmentSettings
from neuroshard.cli.app import command, say, say_json, say_text
from neuroshard.cli.options import AsJson, TablesFile, option, out_file, takes, was_typed
from neuroshard.core.cost import BACKENDS
from neuroshard.core.errors import UsageError
from neuroshard.core.text import counted, wrapped
from neuroshard.core.units import parse_share
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.network import NetworkSettings
from neuroshard.orders.options import settings_of

if TYPE_CHECKING:
    from neuroshard.core.case import Cases
    from neuroshard.core.cost import Costs
    from neuroshard.measure.network import NetworkFigures


@command(
    "measure",
    "neuroshard augment tables.json --compute-cases 2000 --collective-cases 400 --devices 4 --memory 32GiB -o cases/",
)
@takes(AugmentSettings)
def augment(
    tables_json: TablesFile,
    *,
    out: Annotated[Path, out_file("Folder of cases")],
    acquire: Annotated[
        str | None,
        option(
            "MODEL",
            "Earlier cost model: draw 4 times as many devices of plans, and keep those that it learns most from.",
        ),
    ] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Draw the table sets and all-to-alls to measure. Table sets are of devices of random plans and random
    ones, all-to-alls from balanced to lopsided."""
    from neuroshard.augment.run import run

    cases = run(tables_json, out, settings_of(AugmentSettings, options), acquire_for=acquire)
    say_json({"out": str(out), **_counts(cases)}) if as_json else say(f"{out}: {_said(cases)}")


# the options of `measure --verify`
VERIFYING = {"verify", "count", "timeout_seconds", "traces", "as_json", "quiet"}


@command("measure", "neuroshard measure cases/ --backend cpu --batch-size 512 --budget 3m -o costs/")
@takes(MeasureSettings)
def measure(
    context: typer.Context,
    cases: Annotated[
        Path | None, typer.Argument(metavar="CASES", help="Folder that `neuroshard augment` wrote.")
    ] = None,
    *,
    out: Annotated[Path | None, out_file("Folder of costs", "; an unfinished one is continued")] = None,
    backend: Annotated[
        str | None,
        option("WORD", "synthetic (a formula), cpu (FBGEMM + gloo) or cuda (FBGEMM + NCCL).", choices=BACKENDS),
    ] = None,
    rounds: Annotated[
        int, option("NUMBER", "Times to measure all cases, one round after another; the mean is the label.")
    ] = 1,
    share: Annotated[
        str | None, option("I/N", "Measure one machine's share of the cases, as in 2/8; `neuroshard merge` joins them.")
    ] = None,
    verify: Annotated[
        Path | None,
        option("FOLDER", "Measure cases of these costs again instead, and fail where labels differ too much."),
    ] = None,
    count: Annotated[int, option("NUMBER", "cases to measure.", "-n", "--count", min=1, needs="--verify")] = 100,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Measure what the cases cost on this machine. Run again, it continues where it stopped."""
    if verify is not None:
        typed = [one for one in context.command.params if was_typed(context, one.name) and one.name not in VERIFYING]
        if unused := sorted("CASES" if one.name == "cases" else one.opts[0] for one in typed):
            raise UsageError(f"--verify measures as its costs were measured: leave out {', '.join(unused)}")
        _verify(verify, count, settings_of(MeasureSettings, options), as_json)
        return
    if cases is None or out is None or backend is None:
        raise UsageError("measure needs a folder of cases, --backend and -o; or --verify and a folder of costs")
    from neuroshard.measure.run import run

    settings = settings_of(MeasureSettings, options)
    summary = run(cases, out, backend, settings, share=(1, 1) if share is None else parse_share(share), rounds=rounds)
    say_json({"out": str(out), **summary.as_json()}) if as_json else say_text("\n".join(wrapped(f"{out}: {summary}")))


def _verify(costs: Path, count: int, settings: MeasureSettings, as_json: bool) -> None:
    from neuroshard.measure.verify import run

    verified = run(costs, count=count, timeout_seconds=settings.timeout_seconds, traces=settings.traces)
    say_json({"agrees": verified.agrees, **asdict(verified)}) if as_json else say_text(str(verified))
    if not verified.agrees:
        raise typer.Exit(1)


@command("measure", "neuroshard merge costs-1/ costs-2/ -o costs/")
def merge(
    folders: Annotated[list[Path], typer.Argument(metavar="COSTS...", help="Folders that `neuroshard measure` wrote.")],
    out: Annotated[Path, out_file("Folder of costs")],
    as_json: AsJson = False,
) -> None:
    """Join costs that several machines of a kind measured. All are of one case set."""
    from neuroshard.files.costs import merge_costs

    costs = merge_costs(folders, out)
    said = f"{out}: {_said(costs)} of {counted(len(folders), 'folder')}"
    say_json({"out": str(out), **_counts(costs)}) if as_json else say(said)


def _counts(some: "Cases | Costs") -> dict[str, int]:
    """How many cases, or rows, there are of each kind."""
    counts = {"table_sets": len(some.compute), "all_to_alls": len(some.collective)}
    return counts | ({"beyond_hbm": len(some.tiers)} if some.tiers else {})


def _said(some: "Cases | Costs") -> str:
    said = [counted(len(some.compute), "table set"), counted(len(some.collective), "all-to-all")]
    if some.tiers:
        said.append(f"{counted(len(some.tiers), 'case')} beyond HBM")
    return ", ".join(said)


@command("measure", "neuroshard network --hosts 2 --host 0 --ranks 8 --address node-a:29400 --backend cuda")
@takes(NetworkSettings)
def network(*, as_json: AsJson = False, **options: Any) -> None:
    """Measure the network between hosts; run it on every host. All run at the same time, and print the same figures."""
    from neuroshard.core.errors import MeasureError
    from neuroshard.measure.network import NetworkFigures, run

    settings = settings_of(NetworkSettings, options)
    figures = NetworkFigures(settings, {})
    try:
        run(figures)
    except MeasureError:
        if any(figures.ms.values()):
            _say_network(figures, as_json)
        raise
    _say_network(figures, as_json)


def _say_network(figures: "NetworkFigures", as_json: bool) -> None:
    say_json(figures.as_json()) if as_json else say_text("\n".join(figures.lines()))
