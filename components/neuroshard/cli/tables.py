"""The tables of a model."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from neuroshard.cli.app import command, note, say, say_text
from neuroshard.cli.options import out_file, was_typed
from neuroshard.core.errors import UsageError
from neuroshard.core.text import counted
from neuroshard.core.topology import Topology, topology_of
from neuroshard.core.units import format_bytes, parse_bytes


@command(
    "plan",
    "neuroshard tables --from-torchrec my_package.model:make_model --pooling-factor user_id=3 -o tables.json",
    "Tables from a model, a file or a printout; or check them.",
)
def tables(
    context: typer.Context,
    out: Annotated[Path | None, out_file("tables.json")] = None,
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
        str | None, typer.Option(help="With --plan-out: memory of a device [default: what the planner planned with].")
    ] = None,
    local_world_size: Annotated[
        int | None, typer.Option(help="With --plan-out: ranks of a host [default: all are on one].")
    ] = None,
    domain: Annotated[
        int | None, typer.Option(help="With --plan-out: ranks that share fast links [default: those of a host].")
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="With --plan-out: the network between domains, as for search: 50GB/s,0.06ms.")
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
        list[str] | None,
        typer.Option(
            help="How rows are looked up where the source does not say: uniform or zipf:EXPONENT; or of tables by name, "
            "whatever it says: 'user_*=zipf:1.2'; may be repeated [default: uniform]."
        ),
    ] = None,
    access_from: Annotated[
        list[str] | None,
        typer.Option(
            help="Count how rows are looked up on this traces file; may be repeated, in the order of time. Memory stays small, "
            "however many batches there are. Or a model in a store, s3://bucket/prefix/ads-ranker: what its trainer recorded."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="With --access-from FILE: samples of a global batch, over all ranks.")
    ] = None,
    order: Annotated[
        str, typer.Option(help="With --access-from FILE: time, if batches are in the order of training, or shuffled.")
    ] = "time",
    row_orders: Annotated[
        bool,
        typer.Option(
            "--row-orders",
            help="With --access-from: also find the hottest rows of each table; their lists go to rows/ beside tables.json.",
        ),
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="Element type where the source does not say: fp32 or fp16 [default: fp32].")
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            help="Optimizer whose state memory counts: sgd, rowwise_adagrad, adagrad, adam, partial_rowwise_adam, lamb, "
            "partial_rowwise_lamb or lars_sgd. What apply_optimizer_in_backward has put on a model's table counts before it."
        ),
    ] = "rowwise_adagrad",
    dim: Annotated[int, typer.Option(help="Columns of the tables of a dlrm_datasets file, which has none.")] = 128,
    traces_out: Annotated[
        Path | None, typer.Option("--traces", help="Also write the file's own lookups here (dlrm_datasets).")
    ] = None,
) -> None:
    """Make a tables.json from a preset, a file, your TorchRec model or its planner's printout; or check tables."""
    from neuroshard.core.row_order import LISTS_FOLDER
    from neuroshard.core.value import canonical_json
    from neuroshard.files.disk import check_can_write, only_writer_of, write_bytes
    from neuroshard.files.importers import tables_source
    from neuroshard.files.importers.check_tables import findings_json, findings_text
    from neuroshard.files.importers.import_tables import has_lookups
    from neuroshard.files.importers.pooling_factors import pooling_factors as read_factors
    from neuroshard.files.importers.sharding_stats_plan import given_costs, stats_plan
    from neuroshard.files.importers.table_access import access_options, check_order, with_access
    from neuroshard.files.plan import write_plan
    from neuroshard.files.tables import write_tables
    from neuroshard.files.traces import write_traces
    from neuroshard.store.traces import fetch_trace_of

    if out is None and not check:
        raise UsageError("say where to write: -o tables.json; or --check")
    in_store = [place for place in access_from or [] if "://" in place or Path(place).is_dir()]
    traces = [Path(place) for place in access_from or [] if place not in in_store]
    for path in traces:
        if not path.exists():
            raise UsageError(
                f"--access-from {path}: neither a traces file nor the folder of a model in a store is there"
            )
    if len(in_store) + bool(traces) > 1:
        raise UsageError(f"--access-from is one model in a store, {in_store[0]}, or traces files; leave out the others")
    of_models = "--from-torchrec: other sources say pooling_factor of each table"
    for option, given, needed, there in (
        ("--json", as_json, "--check", check),
        ("--pooling-factor", pooling_factor, of_models, torchrec),
        ("--pooling-factors", pooling_factors, of_models, torchrec),
        ("--default-pooling-factor", default_pooling_factor is not None, of_models, torchrec),
        ("--plan-out", plan_out, "--from-stats", stats),
        ("--costs-out", costs_out, "--from-stats", stats),
        ("--memory", memory, "--plan-out", plan_out),
        ("--local-world-size", local_world_size is not None, "--plan-out", plan_out),
        ("--domain", domain is not None, "--plan-out", plan_out),
        ("--network", network, "--plan-out", plan_out),
        ("--batch-size", batch_size is not None, "--access-from FILE", traces),
        ("--order", was_typed(context, "order"), "--access-from FILE", traces),
        ("--row-orders", row_orders, "--access-from", access_from),
        ("--access-from", access_from, "-o tables.json", out),
        ("--dtype", dtype, "--preset, --from and --from-stats: a model says it by data_type=", torchrec is None),
        ("--dim", was_typed(context, "dim"), "--from FILE.pt", source is not None and has_lookups(source)),
        ("--plan-out", plan_out, "-o tables.json", out),
        ("--costs-out", costs_out, "-o tables.json", out),
        ("--traces", traces_out, "-o tables.json", out),
    ):
        if given and not there:
            raise UsageError(f"{option} is for {needed}")
    for path in filter(None, (out, plan_out, costs_out, traces_out)):
        check_can_write(path)  # of several files all or none, and lookups take minutes to read
    check_order(order)
    word, words = dtype or "fp32", access or []
    default_access, _ = access_options(words)
    match preset, source, torchrec, stats:
        case str(), None, None, None:
            found = tables_source.from_preset(preset, access=default_access, dtype=word, optimizer=optimizer)
        case None, Path(), None, None:
            found = tables_source.from_file(source, access=default_access, dtype=word, optimizer=optimizer, dim=dim)
        case None, None, str(), None:
            found = tables_source.from_torchrec(
                torchrec,
                access=default_access,
                optimizer=optimizer,
                pooling_factors=read_factors(pooling_factors, pooling_factor or ()),
                default_pooling_factor=default_pooling_factor,
            )
        case None, None, None, Path():
            found = tables_source.from_stats(stats, access=default_access, dtype=dtype, optimizer=optimizer)
        case _:
            raise UsageError(
                "give one of --preset NAME, --from FILE, --from-torchrec package.module:function and --from-stats FILE"
            )
    if traces_out is not None and found.traces is None:
        raise UsageError(f"{found.where} holds no lookups to write to --traces; only dlrm_datasets files do")
    findings = found.findings() if check else ()
    if check:
        say_text(findings_json(findings) if as_json else findings_text(findings, len(found.entries)))
    if out is not None:
        lists = out.parent / LISTS_FOLDER if row_orders else None
        imported = found.tables(sequences=costs_out is None)
        with TemporaryDirectory() as folder:
            paths = traces or [fetch_trace_of(place, Path(folder)) for place in in_store]
            imported = with_access(imported, words, paths, batch_size, order, lists)
        note(imported.notes)
        with only_writer_of(filter(None, (out, plan_out, costs_out, traces_out))):
            if found.printed is not None and plan_out is not None:
                memory_bytes = None if memory is None else parse_bytes(memory, "--memory")

                def hosts(ranks: int) -> Topology | None:
                    return topology_of(ranks, domain, local_world_size, network)

                plan = stats_plan(found.printed, imported.tables, found.where, memory_bytes, hosts)
                note(f"{plan_out}: {line}" for line in plan.provenance.notes)
                write_plan(plan_out, plan)
            if found.printed is not None and costs_out is not None:
                write_bytes(costs_out, canonical_json(given_costs(found.printed, imported.tables, found.where)))
            if found.traces is not None and traces_out is not None:
                write_traces(traces_out, found.traces)
            write_tables(out, imported.tables)
        total = sum(table.memory_bytes for table in imported.tables)
        say(f"{out}: {counted(len(imported.tables), 'table')}, {format_bytes(total)} with optimizer state", err=as_json)
    if findings:
        raise typer.Exit(1 if any(finding.severity == "fault" for finding in findings) else 3)
