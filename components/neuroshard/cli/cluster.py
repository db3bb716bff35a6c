"""The pipeline on Kubeflow."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.app import command, say
from neuroshard.cli.options import option
from neuroshard.core.errors import UsageError
from neuroshard.core.units import parse_duration

if TYPE_CHECKING:
    from neuroshard.submit.package import RunSettings

Endpoint = Annotated[
    str, option("URL", "Address of the Kubeflow Pipelines API, as in http://localhost:8888.", envvar="KFP_ENDPOINT")
]
Parameters = Annotated[
    Path | None, option("FILE", "YAML mapping of the pipeline's parameters; others keep their defaults.")
]
ModelsYaml = Annotated[Path | None, option("FILE", "YAML list of the models that want a plan.", "--models")]
Setting = Annotated[
    list[str] | None, option("NAME=VALUE", "A parameter, over those of the file: pods=2; may be repeated.", "--set")
]
Experiment = Annotated[str, option("NAME", "Kubeflow's name for a group of runs.")]
Namespace = Annotated[str | None, option("NAME", "Profile to run in, where Kubeflow has several users.")]
ServiceAccount = Annotated[
    str | None, option("NAME", "Service account of the run's pods [default: what Kubeflow Pipelines gives them].")
]
Deadline = Annotated[str, option("TIME", "Kubeflow ends a run that takes longer.")]
Parallelism = Annotated[
    int | None,
    option(
        "NUMBER",
        "Most models, and most measuring pods, at once; 0 for all [default: what the file says, else 0].",
        min=0,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")]


@command(
    "cluster",
    "neuroshard submit --parameters parameters.yaml --models models.yaml --service-account neuroshard-runner "
    "--endpoint http://localhost:8888",
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
    timeout: Annotated[str, option("TIME", "Longest time to wait.")] = "12h",
    poll: Annotated[str, option("TIME", "Time between two looks at the run.")] = "15s",
    metrics: Annotated[
        str | None,
        option("FILE", "Report the outcome to Prometheus: to a file, or to a Pushgateway (http://…:9091)."),
    ] = None,
    event: Annotated[bool, typer.Option("--event", help="Report the outcome as an event of this pod.")] = False,
    patience: Annotated[
        str, option("TIME", "Retry an API that does not answer for this long; 0 for no retry.")
    ] = "10m",
    give_up: Annotated[
        str | None,
        option("TIME", "End a run of which a pod has not started for this long: 1h [default: wait on]."),
    ] = None,
    deadline: Deadline = "24h",
    parallelism: Parallelism = None,
    check: Annotated[
        bool,
        typer.Option(help="Ask the Kubernetes API first, in a dry run, whether it accepts the pods of a run."),
    ] = True,
    dry_run: DryRun = False,
) -> None:
    """Run the pipeline on Kubeflow Pipelines; wait for a run with the same parameters if one is under way."""
    from neuroshard.submit.kubeflow import Server
    from neuroshard.submit.run import RUNS_NAMESPACE, run, run_admission
    from neuroshard.submit.wait import Waiting

    if not wait and (metrics or event):
        raise UsageError("--metrics and --event report how a run ended; leave out --no-wait")
    if not wait and give_up:
        raise UsageError("--give-up looks at pods while it waits; leave out --no-wait")
    run_settings = _settings(parameters, models_yaml, settings, service_account, deadline, parallelism)
    start_seconds = parse_duration(give_up, "--give-up") if give_up else 0.0
    pods_are_in = namespace or RUNS_NAMESPACE
    waiting = (
        Waiting(
            parse_duration(timeout, "--timeout"),
            parse_duration(poll, "--poll"),
            metrics,
            event,
            start_seconds,
            pods_are_in,
        )
        if wait
        else None
    )
    if waiting and waiting.seconds > run_settings.deadline_seconds:
        raise UsageError(f"--timeout {timeout} is longer than --deadline {deadline}, at which Kubeflow ends the run")
    if waiting and start_seconds >= waiting.seconds:
        raise UsageError(f"--give-up {give_up} never comes: nothing waits for the run after --timeout {timeout}")
    lines = run(
        Server(endpoint, experiment, namespace),
        run_settings,
        waiting,
        dry_run=dry_run,
        patience_seconds=0.0 if patience in ("0", "0s") else parse_duration(patience, "--patience"),
        check=run_admission(run_settings, namespace) if check else None,
    )
    for line in lines:
        say(line)


@command(
    "cluster",
    "neuroshard schedule --cron '0 2 * * *' --parameters parameters.yaml --service-account neuroshard-runner "
    "--endpoint http://localhost:8888 --dry-run",
    "Make or remove a recurring run on Kubeflow Pipelines.",
)
def schedule(
    endpoint: Endpoint,
    cron: Annotated[
        str | None,
        option("CRON", "When: minute, hour, day, month, weekday, in the time zone of Kubeflow's scheduler."),
    ] = None,
    parameters: Parameters = None,
    models_yaml: ModelsYaml = None,
    settings: Setting = None,
    name: Annotated[str, option("NAME", "Name of the recurring run.")] = "neuroshard-nightly",
    experiment: Experiment = "neuroshard",
    namespace: Namespace = None,
    service_account: ServiceAccount = None,
    remove: Annotated[bool, typer.Option("--remove", help="Delete the recurring run instead.")] = False,
    wait: Annotated[
        str | None, option("TIME", "Wait this long for a run under way that would be deleted: 3h [default: refuse].")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Terminate a run under way that would be deleted.")] = False,
    deadline: Deadline = "24h",
    parallelism: Parallelism = None,
    dry_run: DryRun = False,
) -> None:
    """Create or update KFP's own recurring run; called again, it changes nothing."""
    from neuroshard.submit.kubeflow import Server
    from neuroshard.submit.schedule import Nightly, run

    if (cron is None) != remove:
        raise UsageError("give one of --cron and --remove")
    if wait and now:
        raise UsageError("give one of --wait and --now")
    run_settings = _settings(parameters, models_yaml, settings, service_account, deadline, parallelism)
    lines = run(
        Server(endpoint, experiment, namespace),
        name,
        None if cron is None else Nightly(cron, run_settings),
        dry_run=dry_run,
        wait_seconds=parse_duration(wait, "--wait") if wait else 0.0,
        now=now,
    )
    for line in lines:
        say(line)


def _settings(
    parameters: Path | None,
    models_yaml: Path | None,
    settings: list[str] | None,
    service_account: str | None,
    deadline: str,
    parallelism: int | None,
) -> "RunSettings":
    from neuroshard.submit.package import RunSettings, read_parameters, take_parallelism

    given = read_parameters(parameters, models_yaml, settings or ())
    limit = take_parallelism(given, parallelism)
    return RunSettings(given, service_account, parse_duration(deadline, "--deadline"), limit)
