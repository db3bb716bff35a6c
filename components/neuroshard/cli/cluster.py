"""The pipeline on Kubeflow."""

from pathlib import Path
from typing import Annotated

import typer

from neuroshard.cli.app import command, say
from neuroshard.core.errors import UsageError
from neuroshard.core.units import parse_duration

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
Deadline = Annotated[str, typer.Option(help="Kubeflow ends a run that takes longer, whatever becomes of it.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


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
    patience: Annotated[
        str, typer.Option(help="Ask an API that does not answer again for so long; 0 for not at all.")
    ] = "10m",
    deadline: Deadline = "24h",
    check: Annotated[
        bool,
        typer.Option(help="Ask the Kubernetes API first, in a dry run, whether it takes the pods of a run."),
    ] = True,
    dry_run: DryRun = False,
) -> None:
    """Run the pipeline on Kubeflow Pipelines; one with the same parameters that is under way is waited for."""
    from neuroshard.submit.package import read_parameters
    from neuroshard.submit.run import Watch, run, run_admission

    if not wait and (metrics or event):
        raise UsageError("--metrics and --event tell how a run ended; leave out --no-wait")
    given = read_parameters(parameters, models_yaml, settings or ())
    watch = Watch(parse_duration(timeout), parse_duration(poll), metrics, event) if wait else None
    if watch and watch.seconds > parse_duration(deadline):
        raise UsageError(f"--timeout {timeout} is longer than --deadline {deadline}, at which Kubeflow ends the run")
    told = run(
        endpoint,
        given,
        watch,
        experiment,
        namespace,
        service_account,
        dry_run=dry_run,
        patience_seconds=0.0 if patience in ("0", "0s") else parse_duration(patience),
        deadline_seconds=parse_duration(deadline),
        check=run_admission(namespace, service_account) if check else None,
    )
    for line in told:
        say(line)


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
    wait: Annotated[
        str | None, typer.Option(help="Wait so long for a run under way that would be deleted: 3h [default: refuse].")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Terminate a run under way that would be deleted.")] = False,
    deadline: Deadline = "24h",
    dry_run: DryRun = False,
) -> None:
    """Make KFP's own recurring run what these ask for; run it again and nothing changes."""
    from neuroshard.submit.package import read_parameters
    from neuroshard.submit.schedule import run, wanted

    if (cron is None) != remove:
        raise UsageError("give one of --cron and --remove")
    given = read_parameters(parameters, models_yaml, settings or ())
    if wait and now:
        raise UsageError("give one of --wait and --now")
    seconds = parse_duration(deadline)
    want = None if cron is None else wanted(cron, given, service_account, seconds)
    told = run(
        endpoint,
        name,
        want,
        experiment,
        namespace,
        dry_run=dry_run,
        deadline_seconds=seconds,
        wait_seconds=parse_duration(wait) if wait else 0.0,
        now=now,
    )
    for line in told:
        say(line)
