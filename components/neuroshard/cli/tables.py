"""The tables of a model."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from neuroshard.cli import completion
from neuroshard.cli.app import command, note, say, say_text
from neuroshard.cli.options import option, out_file, was_typed
from neuroshard.core.errors import UsageError
from neuroshard.core.table import ELEMENT_BYTES, OPTIMIZER_BYTES
from neuroshard.core.text import counted
from neuroshard.core.topology import Topology, topology_of
from neuroshard.core.units import format_bytes, parse_bytes
from neuroshard.orders import values as take


@command(
    "plan", "neuroshard tables --from-torchrec my_package.model:make_model --pooling-factor user_id=3 -o tables.json"
)
def tables(
    context: typer.Context,
    out: Annotated[Path | None, out_file("tables.json")] = None,
    preset: Annotated[
        str | None,
        option("WORD", "A built-in table set: mlperf-dlrm-dcnv2, mlperf-dlrmv4.", choices=completion.presets),
    ] = None,
    source: Annotated[
        Path | None, option("FILE", "JSON, CSV, Parquet, or a .pt/.pt.gz of Meta's dlrm_datasets.", "--from")
    ] = None,
    torchrec: Annotated[
        str | None,
        option(
            "FUNCTION",
            "package.module:make_model, a function that returns a model with EmbeddingBagCollections; it is called on the "
            "meta device, so no weights are made. The working directory is on the path.",
            "--from-torchrec",
        ),
    ] = None,
    stats: Annotated[
        Path | None, option("FILE", "What TorchRec's planner printed (debug=True), alone or in a log.", "--from-stats")
    ] = None,
    pooling_factor: Annotated[
        list[str] | None,
        option(
            "TABLE=NUMBER", "With --from-torchrec: lookups a sample of a table or feature, user_id=3; may be repeated."
        ),
    ] = None,
    pooling_factors: Annotated[
        Path | None, option("FILE", 'With --from-torchrec: the same from a file, {"user_id": 3} or CSV.')
    ] = None,
    default_pooling_factor: Annotated[
        float | None, option("NUMBER", "With --from-torchrec: lookups of any other feature [default: 1].", min=0)
    ] = None,
    plan_out: Annotated[
        Path | None, option("FILE", "also write the printed plan, as a plan.json.", needs="--from-stats")
    ] = None,
    costs_out: Annotated[
        Path | None,
        option("FILE", "also write the printed costs, for search --model given:FILE.", needs="--from-stats"),
    ] = None,
    memory: Annotated[
        str | None, option("SIZE", "memory of a device [default: what the planner planned with].", needs="--plan-out")
    ] = None,
    local_world_size: Annotated[
        int | None, option("NUMBER", "ranks of a host [default: all are on one].", needs="--plan-out")
    ] = None,
    domain: Annotated[
        int | None, option("NUMBER", "ranks that share fast links [default: those of a host].", needs="--plan-out")
    ] = None,
    network: Annotated[
        str | None, option("RATE", "the network between domains, as for search: 50GB/s,0.06ms.", needs="--plan-out")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Say what is odd about each table. Exit status 0: nothing; 1: some cannot be sharded; 3: odd ones.",
        ),
    ] = False,
    as_json: Annotated[bool, option("", "the findings as JSON, for programs.", "--json", needs="--check")] = False,
    access: Annotated[
        list[str] | None,
        option(
            "WORD",
            "How rows are looked up where the source does not say: uniform or zipf:EXPONENT; or of tables by name, "
            "whatever it says: 'user_*=zipf:1.2'; may be repeated [default: uniform].",
        ),
    ] = None,
    access_from: Annotated[
        list[str] | None,
        option(
            "FILE",
            "Count how rows are looked up on this traces file; may be repeated, in the order of time. Memory stays small, "
            "however many batches there are. Or a model in a store, s3://bucket/prefix/ads-ranker: what its trainer recorded.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None, option("NUMBER", "With --access-from FILE: samples of a global batch, over all ranks.", min=1)
    ] = None,
    order: Annotated[
        str, option("WORD", "With --access-from FILE: time, if batches are in the order of training, or shuffled.")
    ] = "time",
    row_orders: Annotated[
        bool,
        option(
            "",
            "also find the hottest rows of each sequence; their lists go to rows/ beside tables.json.",
            "--row-orders",
            needs="--access-from",
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        option(
            "WORD", "Element type where the source does not say: fp32 or fp16 [default: fp32].", choices=ELEMENT_BYTES
        ),
    ] = None,
    optimizer: Annotated[
        str,
        option(
            "WORD",
            "Optimizer whose state memory counts: sgd, rowwise_adagrad, adagrad, adam, partial_rowwise_adam, lamb, "
            "partial_rowwise_lamb or lars_sgd. What apply_optimizer_in_backward has put on a model's table counts before it.",
            choices=OPTIMIZER_BYTES,
        ),
    ] = "rowwise_adagrad",
    dim: Annotated[int, option("NUMBER", "Columns of the tables of a dlrm_datasets file, which has none.")] = 128,
    traces_out: Annotated[
        Path | None, option("FILE", "Also write the file's own lookups here (dlrm_datasets).", "--traces")
    ] = None,
) -> None:
    """Tables from a model, a file or a printout; or check them. A preset, a file, your TorchRec model or its
    planner's printout becomes a tables.json."""
    from neuroshard.core.row_order import LISTS_FOLDER
    from neuroshard.core.value import canonical_json
    from neuroshard.files.disk import check_can_write, only_writer_of, write_bytes
    from neuroshard.files.importers import tables_source
    from neuroshard.files.importers.check_tables import findings_json, findings_text
    from neuroshard.files.importers.sharding_stats_plan import given_costs, stats_plan
    from neuroshard.files.importers.table_access import access_options, check_order, with_access
    from neuroshard.files.importers.tables_source import has_lookups
    from neuroshard.files.importers.tables_source import pooling_factors as read_factors
    from neuroshard.files.plan import write_plan
    from neuroshard.files.tables import write_tables
    from neuroshard.files.traces import write_traces
    from neuroshard.store.traces import fetch_trace_of

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
    take.refuse(
        {
            "say where to write: -o tables.json; or --check": out is None and not check,
            f"--pooling-factor is for {of_models}": pooling_factor and not torchrec,
            f"--pooling-factors is for {of_models}": pooling_factors and not torchrec,
            f"--default-pooling-factor is for {of_models}": default_pooling_factor is not None and not torchrec,
            "--batch-size is for --access-from FILE": batch_size is not None and not traces,
            "--order is for --access-from FILE": was_typed(context, "order") and not traces,
            "--access-from is for -o tables.json": access_from and not out,
            "--dtype is for --preset, --from and --from-stats: a model says it by data_type=": dtype
            and torchrec is not None,
            "--dim is for --from FILE.pt": was_typed(context, "dim")
            and not (source is not None and has_lookups(source)),
            "--plan-out is for -o tables.json": plan_out and not out,
            "--costs-out is for -o tables.json": costs_out and not out,
            "--traces is for -o tables.json": traces_out and not out,
        }
    )
    for path in filter(None, (out, plan_out, costs_out, traces_out)):
        check_can_write(path)  # of several files all or none, and lookups take minutes to read
    check_order(order)
    default_access, _ = access_options(access or ())
    factors = read_factors(pooling_factors, pooling_factor or ())
    asked = tables_source.Asked(default_access, dtype, optimizer, dim, factors, default_pooling_factor)
    sources: tuple[tuple[Callable[[Any, tables_source.Asked], tables_source.Source], Any], ...] = (
        (tables_source.from_preset, preset),
        (tables_source.from_file, source),
        (tables_source.from_torchrec, torchrec),
        (tables_source.from_stats, stats),
    )
    chosen = [(read, given) for read, given in sources if given is not None]
    if len(chosen) != 1:
        raise UsageError(
            "give one of --preset NAME, --from FILE, --from-torchrec package.module:function and --from-stats FILE"
        )
    [(read, given)] = chosen
    found = read(given, asked)
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
            imported = with_access(imported, access or (), paths, batch_size, order, lists)
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
