"""The command line: one command, `neuroshard`, one subcommand a room.

Errors end in one line on stderr and exit code 1 (the world: a broken file, a store that denies) or 2 (usage). Rooms are
imported when their subcommand runs, so that `--help` and `show` answer at once.
"""

import io
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
except ModuleNotFoundError:  # a trainer installs neither; its client has no need of them
    sys.exit("error: the neuroshard command needs typer and rich: pip install 'neuroshard[all]'")

from neuroshard import __version__
from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.core.text import counted, wrapped
from neuroshard.core.units import format_bytes, parse_bytes, parse_counts, parse_duration, parse_memory, parse_share

if TYPE_CHECKING:
    from neuroshard.core.release import ModelRelease

app = typer.Typer(
    name="neuroshard",
    help='Sharding plans for embedding tables: pre-train cost models, and search ("neuroshard COMMAND --help").',
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Seed = Annotated[int, typer.Option(help="Seed of everything that is left to chance.", min=0, max=2**31 - 1)]
Memory = Annotated[
    str, typer.Option(help="Memory a device: bytes or a unit (32GiB); one, or one per device, by commas.")
]
StoreUrl = Annotated[str, typer.Option("--store", help="s3://bucket/prefix, or a folder.")]
SingleWriter = Annotated[
    bool, typer.Option(help="Nobody else deploys: accept a store that ignores conditional writes.")
]
ModelName = Annotated[str, typer.Option("--name", help="The model whose plans these are, as in ads-ranker.")]
LineName = Annotated[
    str, typer.Option("--name", help="A model (its plans), or hardware/FINGERPRINT (its cost models).")
]
Endpoint = Annotated[
    str, typer.Option(envvar="KFP_ENDPOINT", help="Address of the Kubeflow Pipelines API, as in http://localhost:8888.")
]
Parameters = Annotated[
    Path | None, typer.Option(help="YAML mapping of the pipeline's parameters; what it leaves out keeps the default.")
]
ModelsYaml = Annotated[Path | None, typer.Option("--models", help="YAML list of the models that want a plan.")]
Setting = Annotated[
    list[str] | None, typer.Option("--set", help="A parameter, over those of the file: pods=2; may be repeated.")
]
Experiment = Annotated[str, typer.Option(help="Kubeflow's name for a group of runs.")]
Namespace = Annotated[str | None, typer.Option(help="Profile to run in, where Kubeflow has several users.")]
ServiceAccount = Annotated[
    str | None, typer.Option(help="Of the run's pods [default: what Kubeflow Pipelines gives them].")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]
MaxModelError = Annotated[float, typer.Option(help="Largest error on unseen tables to go live with: 0.2 is 20 %.")]


def _out(kind: str, more: str = "") -> Any:
    return typer.Option("-o", "--out", help=f"{kind} to write{more}.")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"neuroshard {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def command(example: str, in_short: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a subcommand whose --help ends with `example`, and which the list of commands tells of `in_short`."""
    options = re.sub(r" (?!-)", "\N{NO-BREAK SPACE}", example)  # lines end before an option, never within quotes
    lines = " \\\n    ".join(wrapped(options, indent=0, width=70)).replace("\N{NO-BREAK SPACE}", " ")
    return app.command(epilog=f"\b\nExample:\n  {lines}", short_help=in_short)  # \b: not to be wrapped again


def _cost_model(model: str | None, store: str | None, hardware: str | None) -> str:
    """The one cost model that is named, as `--model` names it. Raises UsageError."""
    if (model is None) == (hardware is None) or (hardware is None) != (store is None):
        raise UsageError("give one cost model: --model MODEL, or --store STORE --hardware NAME")
    return model if model is not None else f"{store}#{hardware}"


def _say_live(store: str, release: "ModelRelease") -> None:
    error = "not known" if release.error is None else f"{release.error:.1%}"
    typer.echo(
        f"{store}: cost model {release.bundle_digest[:12]} is live for {release.device_name} ({release.name}, release "
        f"{release.number}); error on unseen tables {error}"
    )


def note(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(f"note: {line}", err=True)


@command("neuroshard fleet --against s3://bucket/prefix", "What hardware is there, and what needs measuring.")
def fleet(
    kubernetes: Annotated[
        bool | None,
        typer.Option(
            "--kubernetes/--local", help="Ask the cluster, or this machine alone [default: the cluster, in its pods]."
        ),
    ] = None,
    nodes: Annotated[
        Path | None, typer.Option(help="What `kubectl get nodes -o json` wrote, in place of a cluster.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Of the kubeconfig [default: its current one].")] = None,
    selector: Annotated[str, typer.Option(help='Labels that a node must have, as JSON: {"pool": "train"}.')] = "{}",
    tolerations: Annotated[
        str, typer.Option(help="Taints that measuring bears, as JSON.")
    ] = '[{"key": "nvidia.com/gpu", "operator": "Exists"}]',
    store: Annotated[
        str | None, typer.Option("--against", help="Say which kinds no live cost model of this store covers, and why.")
    ] = None,
    max_age: Annotated[
        str | None, typer.Option(help="With --against: a cost model older than this is too old.")
    ] = None,
    max_error: Annotated[
        float | None, typer.Option(help="With --against: largest error on unseen tables: 0.1 is 10 %.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What kinds of hardware are there, and which of them need measuring."""
    from datetime import UTC, datetime

    from neuroshard.fleet.cluster import in_cluster
    from neuroshard.fleet.run import against, fleet_json, fleet_text, json_option, kubernetes_fleet, local_fleet

    asked = kubernetes if kubernetes is not None else bool(nodes or context) or in_cluster()
    if not asked and (nodes or context):
        raise UsageError("--local asks this machine alone; leave out --nodes and --context")
    if store is None and (max_age is not None or max_error is not None):
        raise UsageError("--max-age and --max-error are for --against STORE")
    there = (
        kubernetes_fleet(
            recorded=nodes,
            context=context,
            node_selector=json_option(selector, dict, "--selector"),
            tolerations=json_option(tolerations, list, "--tolerations"),
        )
        if asked
        else local_fleet()
    )
    age_seconds = None if max_age is None else parse_duration(max_age)
    stands = (
        against(there, store, now=datetime.now(UTC), max_age_seconds=age_seconds, max_error=max_error) if store else ()
    )
    typer.echo(fleet_json(there, stands) if as_json else fleet_text(there, stands))
    note(there.notes)


@command(
    "neuroshard doctor --store s3://bucket/prefix --kfp http://localhost:8080",
    "What this machine can do, and how to mend what it cannot.",
)
def doctor(
    store: Annotated[
        str | None,
        typer.Option("--store", help="Try this store: s3://bucket/prefix, or a folder; leaves no object there."),
    ] = None,
    kfp: Annotated[str | None, typer.Option("--kfp", help="Ask Kubeflow Pipelines at this address.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine can do, and how to mend what it cannot. Exit status 1 where something failed."""
    from neuroshard.doctor.checks import check_lines, checks_json, last_line
    from neuroshard.doctor.run import examine

    checks = []
    for check in examine(Path.cwd(), store=store, kfp=kfp):
        checks.append(check)
        if not as_json:
            typer.echo("\n".join(check_lines(check)))
    typer.echo(checks_json(checks) if as_json else last_line(checks))
    if any(check.verdict == "fail" for check in checks):
        raise typer.Exit(1)


@command(
    "neuroshard tables --from-torchrec my_package.model:make_model --pooling-factor user_id=3 -o tables.json",
    "Tables from a model, a file or a printout; or check them.",
)
def tables(
    out: Annotated[Path | None, _out("tables.json")] = None,
    preset: Annotated[str | None, typer.Option(help="A built-in table set: mlperf-dlrm-dcnv2.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="JSON, CSV, Parquet, or a .pt/.pt.gz of Meta's dlrm_datasets.")
    ] = None,
    torchrec: Annotated[
        str | None,
        typer.Option(
            "--from-torchrec",
            help="package.module:make_model, a function that returns a model with EmbeddingBagCollections; it is called on the "
            "meta device, so no weights are made. The working directory is on the path.",
        ),
    ] = None,
    stats: Annotated[
        Path | None,
        typer.Option("--from-stats", help="What TorchRec's planner printed (debug=True), alone or in a log."),
    ] = None,
    pooling_factor: Annotated[
        list[str] | None,
        typer.Option(help="With --from-torchrec: lookups a sample of a table or feature, user_id=3; may be repeated."),
    ] = None,
    pooling_factors: Annotated[
        Path | None, typer.Option(help='With --from-torchrec: the same from a file, {"user_id": 3} or CSV.')
    ] = None,
    default_pooling_factor: Annotated[
        float | None, typer.Option(min=0, help="With --from-torchrec: lookups of any other feature [default: 1].")
    ] = None,
    plan_out: Annotated[
        Path | None, typer.Option(help="With --from-stats: also write the printed plan, as a plan.json.")
    ] = None,
    costs_out: Annotated[
        Path | None,
        typer.Option(help="With --from-stats: also write the printed costs, for search --model given:FILE."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="With --plan-out: memory a device [default: what the planner planned with].")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Say what is odd about each table. Exit status 0: nothing; 1: some cannot be sharded; 3: odd ones.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --check: the findings as JSON, for programs.")] = False,
    access: Annotated[
        str, typer.Option(help="How rows are looked up where the source does not say: uniform or zipf:EXPONENT.")
    ] = "uniform",
    dtype: Annotated[
        str | None, typer.Option(help="Element type where the source does not say: fp32 or fp16 [default: fp32].")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="Whose state memory counts: sgd, rowwise_adagrad, adagrad or adam.")
    ] = "rowwise_adagrad",
    dim: Annotated[int, typer.Option(help="Columns of the tables of a dlrm_datasets file, which has none.")] = 128,
    traces: Annotated[Path | None, typer.Option(help="Also write the file's own lookups here (dlrm_datasets).")] = None,
) -> None:
    """Make a tables.json from a preset, a file, your TorchRec model or its planner's printout; or check tables."""
    from neuroshard.core.value import canonical_json
    from neuroshard.files import tables_source
    from neuroshard.files.check_tables import findings_json, findings_text
    from neuroshard.files.disk import write_bytes
    from neuroshard.files.plan import write_plan
    from neuroshard.files.pooling_factors import pooling_factors as read_factors
    from neuroshard.files.sharding_stats_plan import given_costs, stats_plan
    from neuroshard.files.tables import write_tables
    from neuroshard.files.traces import write_traces

    if out is None and not check:
        raise UsageError("say where to write: -o tables.json; or --check")
    for option, given, needed, there in (
        ("--json", as_json, "--check", check),
        ("--pooling-factor", pooling_factor, "--from-torchrec", torchrec),
        ("--pooling-factors", pooling_factors, "--from-torchrec", torchrec),
        ("--default-pooling-factor", default_pooling_factor is not None, "--from-torchrec", torchrec),
        ("--plan-out", plan_out, "--from-stats", stats),
        ("--costs-out", costs_out, "--from-stats", stats),
        ("--memory", memory, "--plan-out", plan_out),
    ):
        if given and not there:
            raise UsageError(f"{option} is for {needed}")
    word = dtype or "fp32"
    match preset, source, torchrec, stats:
        case str(), None, None, None:
            found = tables_source.from_preset(preset, access=access, dtype=word, optimizer=optimizer)
        case None, Path(), None, None:
            found = tables_source.from_file(source, access=access, dtype=word, optimizer=optimizer, dim=dim)
        case None, None, str(), None:
            found = tables_source.from_torchrec(
                torchrec,
                access=access,
                optimizer=optimizer,
                pooling_factors=read_factors(pooling_factors, pooling_factor or ()),
                default_pooling_factor=default_pooling_factor,
            )
        case None, None, None, Path():
            found = tables_source.from_stats(stats, access=access, dtype=dtype, optimizer=optimizer)
        case _:
            raise UsageError(
                "give one of --preset NAME, --from FILE, --from-torchrec package.module:function and --from-stats FILE"
            )
    if traces is not None and found.traces is None:
        raise UsageError(f"{found.where} holds no lookups to write to --traces; only dlrm_datasets files do")
    findings = found.findings() if check else ()
    if check:
        typer.echo(findings_json(findings) if as_json else findings_text(findings, len(found.entries)))
    if out is not None:
        imported = found.tables()
        note(imported.notes)
        if found.printed is not None and plan_out is not None:
            memory_bytes = None if memory is None else parse_bytes(memory)
            plan = stats_plan(found.printed, imported.tables, found.where, memory_bytes)
            note(f"{plan_out}: {line}" for line in plan.provenance.notes)
            write_plan(plan_out, plan)
        if found.printed is not None and costs_out is not None:
            write_bytes(costs_out, canonical_json(given_costs(found.printed, imported.tables, found.where)))
        if found.traces is not None and traces is not None:
            write_traces(traces, found.traces)
        write_tables(out, imported.tables)
        total = sum(table.memory_bytes for table in imported.tables)
        typer.echo(
            f"{out}: {counted(len(imported.tables), 'table')}, {format_bytes(total)} with optimizer state", err=as_json
        )
    if findings:
        raise typer.Exit(1 if any(finding.severity == "fault" for finding in findings) else 3)


@command(
    "neuroshard augment tables.json --compute-cases 2000 --comm-cases 400 --devices 4 --memory 32GiB -o cases/",
    "Draw the table sets and exchanges to measure.",
)
def augment(
    tables_json: Annotated[Path, typer.Argument(metavar="TABLES", help="tables.json")],
    out: Annotated[Path, _out("Folder of cases")],
    devices: Annotated[str, typer.Option(help="Numbers of devices whose exchange to measure: 4, or 2,4,8.")],
    memory: Annotated[str, typer.Option(help="Memory of a device: bytes or a unit (32GiB).")],
    compute_cases: Annotated[int, typer.Option(min=1, help="Table sets to measure on one device.")] = 2000,
    comm_cases: Annotated[int, typer.Option(min=0, help="Exchanges to measure, over all numbers of devices.")] = 400,
    max_dim: Annotated[int | None, typer.Option(help="Widest shard to measure [default: 128].")] = None,
    max_tables: Annotated[
        int | None, typer.Option(min=1, help="Most tables in a set [default: 15, and more where a device has more].")
    ] = None,
    max_delay: Annotated[float, typer.Option(min=0, help="Latest start of a device in an exchange, in ms.")] = 20.0,
    test_share: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of tables kept from training, to test on.")
    ] = 0.2,
    batch_sizes: Annotated[
        str | None,
        typer.Option(help="Batch sizes of the table sets, one each: 256,512,1024 [default: what is measured]."),
    ] = None,
    acquire: Annotated[
        str | None,
        typer.Option(help="Cost model: of 20 times as many training sets keep those that it is least sure of."),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Draw the cases to measure: devices of random plans, random table sets, and exchanges from balanced to lopsided."""
    from neuroshard.augment.run import run

    cases = run(
        tables_json,
        out,
        compute_cases=compute_cases,
        comm_cases=comm_cases,
        devices=parse_counts(devices, "--devices"),
        memory_bytes=parse_bytes(memory),
        max_dim=max_dim,
        max_tables=max_tables,
        max_delay_ms=max_delay,
        test_share=test_share,
        batch_sizes=() if batch_sizes is None else parse_counts(batch_sizes, "--batch-sizes"),
        acquire_for=acquire,
        seed=seed,
    )
    typer.echo(f"{out}: {len(cases.compute)} compute cases, {len(cases.comm)} exchange cases")


@command(
    "neuroshard measure cases/ --backend cpu --batch-size 512 --budget 3m -o costs/",
    "Measure what the cases cost on this machine.",
)
def measure(
    cases: Annotated[Path | None, typer.Argument(help="Folder that `neuroshard augment` wrote.")] = None,
    out: Annotated[Path | None, _out("Folder of costs", "; one that a cut-off run left is continued")] = None,
    backend: Annotated[
        str | None, typer.Option(help="synthetic (a formula), cpu (FBGEMM + gloo) or cuda (FBGEMM + NCCL).")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples a step over all devices.")] = 65536,
    budget: Annotated[
        str | None, typer.Option(help="Stop after this long: 90s, 3m, 1h [default: when all is done].")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="Fused into backward: sgd, rowwise_adagrad or adagrad.")
    ] = "rowwise_adagrad",
    warmup: Annotated[int | None, typer.Option(min=0, help="Repeats thrown away first [default: 1].")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Repeats whose median counts [default: 7].")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads a device may use (cpu).")] = 1,
    memory_limit: Annotated[
        str | None, typer.Option(help="Weights at most: larger tables are measured with fewer rows.")
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help="Real lookups, as `neuroshard tables --traces` wrote them.")
    ] = None,
    timeout: Annotated[str, typer.Option(help="A case that takes longer is given up, its worker replaced.")] = "60s",
    shard: Annotated[
        str | None,
        typer.Option(help="Measure one machine's share of the cases, as in 2/8; `neuroshard merge` joins them."),
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option(help="Instead: measure cases of these costs again, and fail where the labels are not had."),
    ] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Cases to verify.")] = 100,
    seed: Seed = 0,
) -> None:
    """Measure what the cases cost on this machine. Started again, it goes on where it stopped."""
    if verify is not None:
        _verify(verify, count, timeout, traces)
        return
    if cases is None or out is None or backend is None:
        raise UsageError("measure needs a folder of cases, --backend and -o; or --verify and a folder of costs")
    from neuroshard.measure.run import run

    chosen: dict[str, Any] = {
        name: value for name, value in {"warmup": warmup, "repeats": repeats}.items() if value is not None
    }
    summary = run(
        cases,
        out,
        backend=backend,
        batch_size=batch_size,
        budget_seconds=None if budget is None else parse_duration(budget),
        optimizer=optimizer,
        threads=threads,
        memory_limit_bytes=None if memory_limit is None else parse_bytes(memory_limit),
        traces=traces,
        timeout_seconds=parse_duration(timeout),
        share=(1, 1) if shard is None else parse_share(shard),
        seed=seed,
        **chosen,
    )
    typer.echo("\n".join(wrapped(f"{out}: {summary}")))


def _verify(costs: Path, count: int, timeout: str, traces: Path | None) -> None:
    from neuroshard.measure.verify import run

    verified = run(costs, count=count, timeout_seconds=parse_duration(timeout), traces=traces)
    typer.echo(str(verified))
    if not verified.agrees:
        raise typer.Exit(1)


@command("neuroshard merge costs-1/ costs-2/ -o costs/", "Join costs that several machines of a kind measured.")
def merge(
    folders: Annotated[list[Path], typer.Argument(metavar="COSTS...", help="Folders that `neuroshard measure` wrote.")],
    out: Annotated[Path, _out("Folder of costs")],
) -> None:
    """Join costs of one case set that several machines of a kind measured."""
    from neuroshard.measure.merge import run

    costs = run(folders, out)
    typer.echo(f"{out}: {len(costs.compute)} table sets and {len(costs.comm)} exchanges of {len(folders)} folders")


@command("neuroshard pretrain costs/ -o model/", "Train cost models from costs, and tell their error.")
def pretrain(
    costs: Annotated[list[Path], typer.Argument(help="Folders that `neuroshard measure` wrote, all of one bench.")],
    out: Annotated[Path, _out("Folder of the cost model", "; a cut-off training left there is continued")],
    start_from: Annotated[
        Path | None, typer.Option(help="Cost model of other hardware, or older, to begin from: needs fewer cases.")
    ] = None,
    convex: Annotated[
        bool, typer.Option(help="A compute net that lets a search prove bounds, and in which no table lowers a cost.")
    ] = True,
    epochs: Annotated[int | None, typer.Option(min=1, help="Most passes over the data; it stops early.")] = None,
    publish: Annotated[
        str | None, typer.Option(help="Store in which to make it its hardware's live one, as publish-model does.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Train the cost models, and tell their error on sets and on tables that they never saw."""
    from neuroshard.pretrain.run import run

    model = run(costs[0], out, *costs[1:], seed=seed, epochs=epochs, convex=convex, start_from=start_from)
    typer.echo(model.report.text())
    source = "by a formula, not measured" if model.backend == "synthetic" else f"measured on {model.backend}"
    typer.echo(f"{out}: cost model {model.name[:12]} of costs {source} ({model.device_name})")
    if publish is not None:
        from neuroshard.deploy.bundles import run as publish_bundle

        _say_live(publish, publish_bundle(out, publish))


@command(
    "neuroshard publish-model model/ --store s3://bucket/prefix",
    "Put a cost model in a store, and live if good enough.",
)
def publish_model(
    model: Annotated[Path, typer.Argument(help="Folder that `neuroshard pretrain` wrote.")],
    store: StoreUrl,
    max_error: MaxModelError = 0.2,
    force: Annotated[bool, typer.Option(help="Go live whatever its error is; the release says so.")] = False,
    single_writer: SingleWriter = False,
) -> None:
    """Put a cost model in the store under its hardware, and make it the live one there if its error allows."""
    from neuroshard.deploy.bundles import run

    _say_live(store, run(model, store, max_error=max_error, force=force, single_writer=single_writer))


@command("neuroshard models --store s3://bucket/prefix", "List a store's cost models by their hardware.")
def models(
    store: StoreUrl,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with all that is known of each.")] = False,
) -> None:
    """List a store's cost models by their hardware, with their errors on tables they never saw."""
    from neuroshard.costmodel.published import list_published, listing_json, listing_text
    from neuroshard.store.open import open_store

    found = list_published(open_store(store))
    typer.echo(listing_json(found) if as_json else listing_text(found, store))


@command(
    "neuroshard search tables.json --model model/ --devices 4 --memory 32GiB -o plan.json",
    "Search the plan whose slowest device is fastest.",
)
def search(
    tables_json: Annotated[Path, typer.Argument(metavar="TABLES", help="tables.json")],
    devices: Annotated[int, typer.Option(min=1, max=4096, help="Number of devices.")],
    memory: Memory,
    out: Annotated[Path, _out("plan.json")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Cost model: a folder that `neuroshard pretrain` wrote, STORE#HARDWARE, analytic:h100 (h200, a100, cpu), or "
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
    algorithm: Annotated[
        str, typer.Option(help="neuroshard, paper, random, size, dim, lookup or size-lookup.")
    ] = "neuroshard",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples a step [default: the cost model's].")] = None,
    rounds: Annotated[int | None, typer.Option(min=0, help="Rounds of improvement [default: 40].")] = None,
    time_budget: Annotated[
        str | None, typer.Option(help="Improve for this long instead: 10s, 2m. The plan then depends on the machine.")
    ] = None,
    constraints: Annotated[
        Path | None, typer.Option(help="constraints.json: pins, tables kept together, least widths (docs/formats.md).")
    ] = None,
    reserve: Annotated[str | None, typer.Option(help="Memory of every device that is not for tables: 2GiB.")] = None,
    min_dim: Annotated[int | None, typer.Option(help="Least columns of a shard, a multiple of 4 [default: 4].")] = None,
    max_shards: Annotated[int | None, typer.Option(help="Most shards of a table.")] = None,
    never_split: Annotated[
        list[str] | None, typer.Option(help="Tables (a name or a pattern) that stay whole; may be repeated.")
    ] = None,
    pin: Annotated[
        list[str] | None, typer.Option(help="Devices that may hold tables: 'user_*=0,1'; may be repeated.")
    ] = None,
    together: Annotated[
        list[str] | None, typer.Option(help="Tables to keep on one device: user_id,user_history; may be repeated.")
    ] = None,
    previous: Annotated[Path | None, typer.Option("--from", help="plan.json to start from.")] = None,
    move_budget: Annotated[
        str | None, typer.Option(help="With --from: weights and optimizer state to move at most: 50GiB.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Search the plan whose slowest device is fastest, by the cost model."""
    from neuroshard.files.constraints import ConstraintsFile, read_constraints, with_flags
    from neuroshard.report.text import plan_text
    from neuroshard.search.run import run

    given = ConstraintsFile() if constraints is None else read_constraints(constraints)
    plan = run(
        tables_json,
        _cost_model(model, store, hardware),
        out,
        devices=devices,
        memory_bytes=parse_memory(memory, devices),
        batch_size=batch_size,
        algorithm=algorithm,
        seed=seed,
        rounds=rounds,
        time_budget_s=None if time_budget is None else parse_duration(time_budget),
        constraints=with_flags(
            given,
            reserve=reserve,
            min_dim=min_dim,
            max_shards=max_shards,
            never_split=never_split or (),
            pins=pin or (),
            together=together or (),
        ),
        previous=previous,
        move_budget_bytes=None if move_budget is None else parse_bytes(move_budget),
    )
    typer.echo(plan_text(plan))
    typer.echo(f"{out}: written")


@command("neuroshard show plan.json", "Show a plan, as numbers and bars.")
def show(plan: Annotated[Path, typer.Argument(help="plan.json")], as_json: AsJson = False) -> None:
    """Show a plan: cost against the baselines, and every device's cost and memory."""
    import json

    from neuroshard.files.plan import read_plan
    from neuroshard.report.text import plan_json, plan_text

    shown = read_plan(plan)
    typer.echo(json.dumps(plan_json(shown), indent=2) if as_json else plan_text(shown))


@command(
    "neuroshard report plan.json --model model/ --costs costs/ --live s3://bucket/prefix#ads-ranker -o report.html",
    "Turn a plan and its run into one HTML page.",
)
def report(
    plan: Annotated[Path, typer.Argument(help="plan.json")],
    out: Annotated[Path, _out("HTML page")],
    model: Annotated[str | None, typer.Option(help="The plan's cost model, as for search.")] = None,
    live: Annotated[str | None, typer.Option(help="The plan to compare with: a plan.json, or STORE#MODEL.")] = None,
    costs: Annotated[
        list[Path] | None, typer.Option(help="Costs that the cost model learned from; may be repeated.")
    ] = None,
    fleet: Annotated[Path | None, typer.Option(help="What `neuroshard fleet --json` printed.")] = None,
    evaluation: Annotated[Path | None, typer.Option(help="What `neuroshard evaluate -o` wrote of this plan.")] = None,
) -> None:
    """Turn a plan, and what a run left beside it, into one HTML page to look at."""
    from neuroshard.report.run import run

    size = run(plan, out, model=model, live=live, costs=costs or (), fleet=fleet, evaluation=evaluation)
    typer.echo(f"{out}: {format_bytes(size)}")


@command("neuroshard evaluate plan.json --backend cpu", "Run a plan's device sets for real, beside the prediction.")
def evaluate(
    plan: Annotated[Path, typer.Argument(help="plan.json")],
    backend: Annotated[
        str, typer.Option(help="cpu (FBGEMM + gloo), cuda (FBGEMM + NCCL) or synthetic (a formula, exact).")
    ],
    rounds: Annotated[int, typer.Option(min=1, help="Times each device's tables are measured; the median counts.")] = 3,
    processes: Annotated[int, typer.Option(min=1, help="Measure the exchange of plans of up to so many devices.")] = 8,
    optimizer: Annotated[
        str, typer.Option(help="Fused into backward: sgd, rowwise_adagrad or adagrad.")
    ] = "rowwise_adagrad",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads a device may use (cpu).")] = 1,
    memory_limit: Annotated[
        str | None, typer.Option(help="Weights at most: larger tables are run with fewer rows.")
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help="Real lookups, as `neuroshard tables --traces` wrote them.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="JSON to write as well.")] = None,
    seed: Seed = 0,
) -> None:
    """Run a plan's device sets for real, and show measured beside predicted for every device."""
    from neuroshard.measure.evaluate import run

    evaluation = run(
        plan,
        out,
        backend=backend,
        rounds=rounds,
        most_processes=processes,
        optimizer=optimizer,
        threads=threads,
        memory_limit_bytes=None if memory_limit is None else parse_bytes(memory_limit),
        traces=traces,
        seed=seed,
    )
    typer.echo(evaluation.canonical_json().decode() if json_ else str(evaluation))
    if evaluation.errors:
        raise typer.Exit(1)


@command("neuroshard diff old.json new.json", "Show what moves from one plan to another.")
def diff(
    old: Annotated[Path, typer.Argument(help="plan.json")],
    new: Annotated[Path, typer.Argument(help="plan.json")],
    as_json: AsJson = False,
) -> None:
    """Show what moves from one plan to another, how many bytes, and what is gained."""
    import json

    from neuroshard.files.plan import read_plan
    from neuroshard.report.moves import diff_json, diff_text

    plans = read_plan(old), read_plan(new)
    typer.echo(json.dumps(diff_json(*plans), indent=2) if as_json else diff_text(*plans))


@command(
    "neuroshard deploy plan.json --store s3://bucket/prefix --name ads-ranker --tables tables.json --model model/",
    "Put a plan in a store, and live if the gate agrees.",
)
def deploy(
    plan: Annotated[Path, typer.Argument(help="plan.json")],
    store: StoreUrl,
    name: ModelName,
    tables_json: Annotated[
        Path | None, typer.Option("--tables", help="Today's tables.json, which the plan must be for.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The plan's cost model, as for search, to price the live plan on the plan's own tables."),
    ] = None,
    memory_margin: Annotated[float, typer.Option(help="Share of a device's memory to leave free.")] = 0.0,
    max_error: Annotated[
        float | None, typer.Option(help="Largest error of its cost model on unseen tables: 0.1 is 10 %.")
    ] = None,
    min_gain: Annotated[
        float | None,
        typer.Option(help="Share by which it must be better than the live plan [default: its cost model's error]."),
    ] = None,
    force: Annotated[bool, typer.Option(help="Go live whatever the gate finds; the release says so.")] = False,
    single_writer: SingleWriter = False,
) -> None:
    """Publish a plan under its digest, ask the gate, then make it the live one, or keep the one that is better."""
    from neuroshard.deploy.run import run

    release, decision = run(
        plan,
        store,
        name,
        tables=tables_json,
        cost_model=model,
        memory_margin=memory_margin,
        max_error=max_error,
        min_gain=min_gain,
        force=force,
        single_writer=single_writer,
    )
    if decision and not decision.goes_live:
        typer.echo(f"{store}: kept the live plan: {name} release {release.number}, plan {release.plan_digest[:12]}")
    else:
        typer.echo(f"{store}: {name} release {release.number} is live, plan {release.plan_digest[:12]}")
    if decision:
        typer.echo(f"gate: {'forced; ' if decision.forced else ''}{decision.why}")


@command(
    "neuroshard publish plan.json --store s3://bucket/prefix --name ads-ranker",
    "Put a plan in a store, without making it live.",
)
def publish(
    plan: Annotated[Path, typer.Argument(help="plan.json")],
    store: StoreUrl,
    name: ModelName,
    single_writer: SingleWriter = False,
) -> None:
    """Put a plan in the store under its digest, without making it live."""
    from neuroshard.deploy.run import run_publish

    digest = run_publish(plan, store, name, single_writer=single_writer)
    typer.echo(f"{store}: plan {digest} of {name} is published")


@command(
    "neuroshard promote 3f2a9c01d4e7 --store s3://bucket/prefix --name ads-ranker",
    "Make a published plan or cost model live.",
)
def promote(
    digest: Annotated[str, typer.Argument(help="The digest of a plan or cost model, or at least 8 digits of it.")],
    store: StoreUrl,
    name: LineName,
    single_writer: SingleWriter = False,
) -> None:
    """Make a published plan or cost model live, whatever the gate would say."""
    from neuroshard.deploy.lines import line_of, run_promote

    release = run_promote(store, name, digest, single_writer=single_writer)
    typer.echo(f"{store}: {name} release {release.number} is live, {line_of(name).noun} {release.artifact[:12]}")


@command("neuroshard releases --store s3://bucket/prefix --name ads-ranker", "List what went live, newest first.")
def releases(
    store: StoreUrl,
    name: LineName,
    refused: Annotated[bool, typer.Option("--refused", help="List the plans that the gate held back.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the releases of a model's plans or a hardware's cost models, newest first."""
    import json

    from neuroshard.core.value import Value
    from neuroshard.deploy.lines import line_of
    from neuroshard.report.text import refusals_text, releases_text
    from neuroshard.store.line import all_releases
    from neuroshard.store.open import open_store
    from neuroshard.store.releases import read_refusals

    found: Sequence[Value]
    if refused:
        found = held_back = read_refusals(open_store(store), name)
        text = refusals_text(held_back)
    else:
        found = went_live = all_releases(open_store(store), line_of(name))
        text = releases_text(went_live)
    typer.echo(json.dumps([one.model_dump(mode="json") for one in found], indent=2) if as_json else text)


@command(
    "neuroshard rollback --store s3://bucket/prefix --name ads-ranker", "Make live again what the live one replaced."
)
def rollback(store: StoreUrl, name: LineName, single_writer: SingleWriter = False) -> None:
    """Make live again what the live plan or cost model replaced."""
    from neuroshard.deploy.lines import line_of, run_rollback

    release = run_rollback(store, name, single_writer=single_writer)
    typer.echo(
        f"{store}: {name} release {release.number} is live, {line_of(name).noun} {release.artifact[:12]} (rolled back)"
    )


@command(
    "neuroshard gc --store s3://bucket/prefix --name ads-ranker --keep 10 --older-than 168h --apply",
    "Delete old plans, cost models, releases and refusals.",
)
def gc(
    store: StoreUrl,
    name: LineName,
    keep: Annotated[int, typer.Option(min=1, help="Releases to keep, with their plans, besides the live one.")] = 10,
    older_than: Annotated[str, typer.Option(help="Keep whatever is younger than this.")] = "168h",
    apply: Annotated[bool, typer.Option("--apply", help="Delete; else only list what would be.")] = False,
) -> None:
    """Delete old plans or cost models, releases and refusals; without --apply only list them."""
    from neuroshard.deploy.gc import run

    garbage = run(store, name, keep=keep, age_seconds=parse_duration(older_than), apply=apply)
    for entry in garbage.entries:
        typer.echo(f"{'deleted' if apply else 'would delete'} {entry.key} ({format_bytes(entry.size)})")
    size = f"{len(garbage.entries)} objects, {format_bytes(garbage.nbytes)}; {garbage.kept} are kept"
    typer.echo(f"{store}: {size}" + ("" if apply or not garbage.entries else "; --apply deletes them"))


@command(
    "neuroshard submit --parameters parameters.yaml --models models.yaml --endpoint http://localhost:8888",
    "Run the pipeline on Kubeflow Pipelines.",
)
def submit(
    endpoint: Endpoint,
    parameters: Parameters = None,
    models_yaml: ModelsYaml = None,
    settings: Setting = None,
    experiment: Experiment = "neuroshard",
    namespace: Namespace = None,
    service_account: ServiceAccount = None,
    wait: Annotated[bool, typer.Option(help="Wait for the end of the run, and fail where it fails.")] = True,
    timeout: Annotated[str, typer.Option(help="Longest to wait.")] = "12h",
    poll: Annotated[str, typer.Option(help="Ask this often how the run stands.")] = "15s",
    metrics: Annotated[
        str | None, typer.Option(help="Say how it went for Prometheus: in a file, or at a Pushgateway (http://…:9091).")
    ] = None,
    event: Annotated[bool, typer.Option("--event", help="Say how it went in an event at this pod.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Run the pipeline on Kubeflow Pipelines; one with the same parameters that is under way is waited for."""
    from neuroshard.submit.package import read_parameters
    from neuroshard.submit.run import Watch, run

    if not wait and (metrics or event):
        raise UsageError("--metrics and --event tell how a run ended; leave out --no-wait")
    given = read_parameters(parameters, models_yaml, settings or ())
    watch = Watch(parse_duration(timeout), parse_duration(poll), metrics, event) if wait else None
    for line in run(endpoint, given, watch, experiment, namespace, service_account, dry_run=dry_run):
        typer.echo(line)


@command(
    "neuroshard schedule --cron '0 2 * * *' --parameters parameters.yaml --endpoint http://localhost:8888 --dry-run",
    "Make or remove a recurring run on Kubeflow Pipelines.",
)
def schedule(
    endpoint: Endpoint,
    cron: Annotated[
        str | None,
        typer.Option(help="When: minute, hour, day, month, weekday, in the time zone of Kubeflow's scheduler."),
    ] = None,
    parameters: Parameters = None,
    models_yaml: ModelsYaml = None,
    settings: Setting = None,
    name: Annotated[str, typer.Option(help="What the recurring run is called.")] = "neuroshard-nightly",
    experiment: Experiment = "neuroshard",
    namespace: Namespace = None,
    service_account: ServiceAccount = None,
    remove: Annotated[bool, typer.Option("--remove", help="Delete it instead.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Make KFP's own recurring run what these ask for; run it again and nothing changes."""
    from neuroshard.submit.package import read_parameters
    from neuroshard.submit.schedule import run, wanted

    if (cron is None) != remove:
        raise UsageError("give one of --cron and --remove")
    given = read_parameters(parameters, models_yaml, settings or ())
    want = None if cron is None else wanted(cron, given, service_account)
    for line in run(endpoint, name, want, experiment, namespace, dry_run=dry_run):
        typer.echo(line)


def main() -> None:
    """Entry point of the `neuroshard` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without our characters gets ? for them
    try:
        app()
    except NeuroshardError as error:
        message = " ".join(str(error).split())
        typer.echo(f"error: {message}", err=True)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "neuroshard":
            raise
        typer.echo(f"error: this needs the package {error.name}, of an extra: pip install 'neuroshard[all]'", err=True)
        sys.exit(1)
    except BrokenPipeError:  # `neuroshard show plan.json | head`
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:  # the disk is full, say; no room writes half a file (files/disk.py)
        typer.echo(f"error: {error.filename or 'this machine'}: {error.strerror or error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
