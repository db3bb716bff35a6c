"""From tables to measured costs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.app import command, say, say_json, say_text
from neuroshard.cli.options import AsJson, Seed, out_file, was_typed
from neuroshard.core.errors import UsageError
from neuroshard.core.text import counted, wrapped
from neuroshard.core.units import parse_bytes, parse_counts, parse_duration, parse_share

if TYPE_CHECKING:
    from neuroshard.core.case import Cases
    from neuroshard.core.cost import Costs
    from neuroshard.measure.network import NetworkFigures


@command(
    "measure",
    "neuroshard augment tables.json --compute-cases 2000 --collective-cases 400 --devices 4 --memory 32GiB -o cases/",
    "Draw the table sets and all-to-alls to measure.",
)
def augment(
    tables_json: Annotated[Path, typer.Argument(metavar="TABLES", help="tables.json")],
    out: Annotated[Path, out_file("Folder of cases")],
    devices: Annotated[str, typer.Option(help="Numbers of devices whose all-to-all to measure: 4, or 2,4,8.")],
    memory: Annotated[str, typer.Option(help="Memory of a device: bytes or a unit (32GiB).")],
    compute_cases: Annotated[int, typer.Option(min=1, help="Table sets to measure on one device.")] = 2000,
    collective_cases: Annotated[
        int, typer.Option(min=0, help="All-to-alls to measure, over all numbers of devices.")
    ] = 400,
    tier_cases: Annotated[
        int,
        typer.Option(min=0, help="Cases of tables beyond HBM, cached and in host memory; GPUs only: 48 are enough."),
    ] = 0,
    max_dim: Annotated[int, typer.Option(help="Widest shard to measure.")] = 128,
    max_tables: Annotated[
        int | None, typer.Option(min=1, help="Most tables in a set [default: 15, and more where a device has more].")
    ] = None,
    max_delay: Annotated[float, typer.Option(min=0, help="Latest start of a device in an all-to-all, in ms.")] = 20.0,
    test_share: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of tables kept from training, to test on.")
    ] = 0.2,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            help="Batch sizes of the table sets, one for each set: 256,512,1024 [default: that of `measure`]."
        ),
    ] = None,
    acquire: Annotated[
        str | None,
        typer.Option(
            help="Earlier cost model: draw 4 times as many devices of plans, and keep those that it learns most from."
        ),
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Draw the cases to measure: devices of random plans, random table sets, and all-to-alls from balanced to lopsided."""
    from neuroshard.augment.run import run
    from neuroshard.augment.settings import AugmentSettings

    settings = AugmentSettings(
        compute_cases=compute_cases,
        collective_cases=collective_cases,
        tier_cases=tier_cases,
        devices=parse_counts(devices, "--devices"),
        memory_bytes=parse_bytes(memory, "--memory"),
        max_dim=max_dim,
        max_tables=max_tables,
        max_delay_ms=max_delay,
        test_share=test_share,
        batch_sizes=() if batch_sizes is None else parse_counts(batch_sizes, "--batch-sizes"),
        seed=seed,
    )
    cases = run(tables_json, out, settings, acquire_for=acquire)
    if as_json:
        say_json({"out": str(out), **_counts(cases)})
    else:
        say(f"{out}: {_said(cases)}")


VERIFYING = {"verify", "count", "timeout", "traces", "as_json", "quiet"}  # the options of `measure --verify`


@command(
    "measure",
    "neuroshard measure cases/ --backend cpu --batch-size 512 --budget 3m -o costs/",
    "Measure what the cases cost on this machine.",
)
def measure(
    context: typer.Context,
    cases: Annotated[
        Path | None, typer.Argument(metavar="CASES", help="Folder that `neuroshard augment` wrote.")
    ] = None,
    out: Annotated[Path | None, out_file("Folder of costs", "; an unfinished one is continued")] = None,
    backend: Annotated[
        str | None, typer.Option(help="synthetic (a formula), cpu (FBGEMM + gloo) or cuda (FBGEMM + NCCL).")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples a step over all devices.")] = 65536,
    budget: Annotated[
        str | None, typer.Option(help="Stop after this long: 90s, 3m, 1h [default: when all is done].")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="Optimizer fused into backward: sgd, rowwise_adagrad or adagrad.")
    ] = "rowwise_adagrad",
    warmup: Annotated[int, typer.Option(min=0, help="Repeats discarded first.")] = 1,
    repeats: Annotated[
        int, typer.Option(min=1, help="Repeats of a case; up to twice as many while they disagree.")
    ] = 7,
    rounds: Annotated[
        int, typer.Option(help="Times to measure all cases, one round after another; the mean is the label.")
    ] = 1,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads a device may use (cpu).")] = 1,
    memory_limit: Annotated[
        str | None,
        typer.Option(help="Most memory for weights and optimizer state of a case: larger tables get fewer rows."),
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help="Real lookups, as `neuroshard tables --traces` wrote them.")
    ] = None,
    timeout: Annotated[str, typer.Option(help="Longest time of a case; a slower one is an error.")] = "60s",
    share: Annotated[
        str | None,
        typer.Option(help="Measure one machine's share of the cases, as in 2/8; `neuroshard merge` joins them."),
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option(help="Measure cases of these costs again instead, and fail where labels differ too much."),
    ] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Cases to verify.")] = 100,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure what the cases cost on this machine. Run again, it continues where it stopped."""
    if verify is not None:
        _check_verifying(context)
        _verify(verify, count, timeout, traces, as_json)
        return
    if cases is None or out is None or backend is None:
        raise UsageError("measure needs a folder of cases, --backend and -o; or --verify and a folder of costs")
    from neuroshard.measure.backends import MeasureSettings
    from neuroshard.measure.run import run

    settings = MeasureSettings(
        batch_size=batch_size,
        budget_seconds=None if budget is None else parse_duration(budget, "--budget"),
        warmup=warmup,
        repeats=repeats,
        optimizer=optimizer,
        threads=threads,
        memory_limit_bytes=None if memory_limit is None else parse_bytes(memory_limit, "--memory-limit"),
        traces=traces,
        timeout_seconds=parse_duration(timeout, "--timeout"),
        seed=seed,
    )
    summary = run(cases, out, backend, settings, share=(1, 1) if share is None else parse_share(share), rounds=rounds)
    say_json({"out": str(out), **asdict(summary)}) if as_json else say_text("\n".join(wrapped(f"{out}: {summary}")))


def _check_verifying(context: typer.Context) -> None:
    """Raise UsageError where `measure --verify` came with options of a run: it takes those from the costs."""
    if unused := [_as_typed(name) for name in context.params if name not in VERIFYING and was_typed(context, name)]:
        raise UsageError(f"--verify measures as its costs were measured: leave out {', '.join(sorted(unused))}")


def _as_typed(name: str) -> str:
    return {"cases": "CASES", "out": "-o"}.get(name) or "--" + name.replace("_", "-")


def _verify(costs: Path, count: int, timeout: str, traces: Path | None, as_json: bool) -> None:
    from neuroshard.measure.verify import run

    verified = run(costs, count=count, timeout_seconds=parse_duration(timeout, "--timeout"), traces=traces)
    say_json({"agrees": verified.agrees, **asdict(verified)}) if as_json else say_text(str(verified))
    if not verified.agrees:
        raise typer.Exit(1)


@command(
    "measure", "neuroshard merge costs-1/ costs-2/ -o costs/", "Join costs that several machines of a kind measured."
)
def merge(
    folders: Annotated[list[Path], typer.Argument(metavar="COSTS...", help="Folders that `neuroshard measure` wrote.")],
    out: Annotated[Path, out_file("Folder of costs")],
    as_json: AsJson = False,
) -> None:
    """Join costs of one case set that several machines of a kind measured."""
    from neuroshard.measure.shares.merge import run

    costs = run(folders, out)
    if as_json:
        say_json({"out": str(out), **_counts(costs)})
        return
    say(f"{out}: {_said(costs)} of {counted(len(folders), 'folder')}")


def _counts(some: "Cases | Costs") -> dict[str, int]:
    """How many cases, or rows, there are of each kind."""
    counts = {"table_sets": len(some.compute), "all_to_alls": len(some.collective)}
    return counts | ({"beyond_hbm": len(some.tiers)} if some.tiers else {})


def _said(some: "Cases | Costs") -> str:
    said = [counted(len(some.compute), "table set"), counted(len(some.collective), "all-to-all")]
    if some.tiers:
        said.append(f"{counted(len(some.tiers), 'case')} beyond HBM")
    return ", ".join(said)


@command(
    "measure",
    "neuroshard network --hosts 2 --host 0 --ranks 8 --address node-a:29400 --backend cuda",
    "Measure the network between hosts; run it on every host.",
)
def network(
    hosts: Annotated[int, typer.Option(min=2, help="Hosts that take part.")],
    host: Annotated[int, typer.Option(min=0, help="The number of this one, from 0.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of a host: its GPUs.")],
    address: Annotated[str, typer.Option(help="HOST:PORT of host 0, where all meet; hosts also use other ports.")],
    backend: Annotated[str, typer.Option(help="cuda (NCCL) or cpu (gloo).")],
    domain: Annotated[
        int | None, typer.Option(min=1, help="Ranks that share fast links (NVLink) [default: those of a host].")
    ] = None,
    timeout: Annotated[str, typer.Option(help="Longest time of an all-to-all.")] = "60s",
    meet: Annotated[str, typer.Option(help="Longest time until all hosts have met.")] = "4m",
    as_json: AsJson = False,
) -> None:
    """Measure the network between hosts: run it on each host at the same time. All print the same figures."""
    from neuroshard.core.errors import MeasureError
    from neuroshard.measure.network import NetworkFigures, NetworkSettings, run

    settings = NetworkSettings(
        hosts=hosts,
        host=host,
        ranks=ranks,
        address=address,
        kind=backend,
        domain=domain,
        timeout_seconds=parse_duration(timeout, "--timeout"),
        meet_seconds=parse_duration(meet, "--meet"),
    )
    figures = NetworkFigures(settings, {})
    try:
        run(figures)
    except MeasureError:
        if any(figures.ms.values()):
            _say_network(figures, as_json)
        raise
    _say_network(figures, as_json)


def _say_network(figures: "NetworkFigures", as_json: bool) -> None:
    if as_json:
        say_json(figures.as_json())
    else:
        say_text("\n".join(figures.lines()))
