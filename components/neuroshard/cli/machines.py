"""Subcommands about hardware: the fleet and this machine."""

from pathlib import Path
from typing import Annotated

import typer

from neuroshard.cli.app import command, note, say_text
from neuroshard.cli.options import AsJson, option, was_typed
from neuroshard.core.errors import UsageError
from neuroshard.core.units import parse_duration


@command("measure", "neuroshard fleet --kubernetes --against s3://bucket/prefix")
def fleet(
    command_line: typer.Context,
    kubernetes: Annotated[
        bool | None,
        typer.Option(
            "--kubernetes/--local", help="Ask the cluster, or this machine alone [default: the cluster, in its pods]."
        ),
    ] = None,
    nodes: Annotated[
        Path | None, option("FILE", "What `kubectl get nodes -o json` wrote, in place of a cluster.")
    ] = None,
    context: Annotated[str | None, option("NAME", "Context of the kubeconfig [default: its current one].")] = None,
    selector: Annotated[str, option("JSON", 'Labels that a node must have, as JSON: {"pool": "train"}.')] = "{}",
    tolerations: Annotated[
        str, option("JSON", "Tolerations of the measuring pods, as JSON.")
    ] = '[{"key": "nvidia.com/gpu", "operator": "Exists"}]',
    store: Annotated[
        str | None, option("STORE", "Say which kinds no live cost model of this store covers, and why.", "--against")
    ] = None,
    max_age: Annotated[
        str | None, option("TIME", "a cost model older than this is too old.", needs="--against")
    ] = None,
    max_error: Annotated[
        float | None, option("SHARE", "largest error on unseen tables: 0.1 is 10 %.", needs="--against")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What hardware is there, and what needs measuring."""
    from datetime import UTC, datetime

    from neuroshard.fleet.cluster import in_cluster
    from neuroshard.fleet.run import against, fleet_json, fleet_text, json_option, kubernetes_fleet, local_fleet

    asked = kubernetes if kubernetes is not None else bool(nodes or context) or in_cluster()
    if not asked and any(was_typed(command_line, name) for name in ("nodes", "context", "selector", "tolerations")):
        raise UsageError(
            "--local asks this machine alone; leave out --nodes, --context, --selector and --tolerations, or give --kubernetes"
        )
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
    age_seconds = None if max_age is None else parse_duration(max_age, "--max-age")
    stands = (
        against(there, store, now=datetime.now(UTC), max_age_seconds=age_seconds, max_error=max_error) if store else ()
    )
    say_text(fleet_json(there, stands) if as_json else fleet_text(there, stands))
    note(there.notes)


@command("measure", "neuroshard doctor --store s3://bucket/prefix --kfp http://localhost:8888")
def doctor(
    store: Annotated[
        str | None,
        option("STORE", "Try this store: s3://bucket/prefix, or a folder; leaves no object there.", "--store"),
    ] = None,
    kfp: Annotated[str | None, option("URL", "Ask Kubeflow Pipelines at this address.", "--kfp")] = None,
    service_account: Annotated[
        str | None,
        option("NAME", "Ask the Kubernetes API, in a dry run, whether it takes a run's pods under this account."),
    ] = None,
    namespace: Annotated[str, option("NAME", "where runs go.", needs="--service-account")] = "kubeflow",
    as_json: AsJson = False,
) -> None:
    """What this machine can do, and how to fix what it cannot. The exit status is 1 if a check failed."""
    from neuroshard.doctor.checks import check_lines, checks_json, last_line
    from neuroshard.doctor.services import examine

    checks = []
    for check in examine(Path.cwd(), store=store, kfp=kfp, account=service_account, namespace=namespace):
        checks.append(check)
        if not as_json:
            say_text("\n".join(check_lines(check)))
    say_text(checks_json(checks) if as_json else last_line(checks))
    if any(check.verdict == "fail" for check in checks):
        raise typer.Exit(1)
