"""The pipeline on Kubeflow."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from neuroshard.cli.app import command, say
from neuroshard.cli.options import option, takes
from neuroshard.orders import values as take
from neuroshard.orders.options import Option, settings_of
from neuroshard.orders.parameters import MAX_PARALLELISM, PARALLELISM

if TYPE_CHECKING:
    from neuroshard.submit.kubeflow import Server
    from neuroshard.submit.package import RunSettings


class RunOptions(NamedTuple):
    """What a run is given, and where it goes: of every command that makes runs."""

    endpoint: Annotated[
        str,
        "Address of the Kubeflow Pipelines API, as in http://localhost:8888.",
        Option(str, "URL", envvar="KFP_ENDPOINT"),
    ] = ""
    parameters: Annotated[
        Path | None, "YAML mapping of the pipeline's parameters; others keep their defaults.", Option(Path, "FILE")
    ] = None
    models_yaml: Annotated[
        Path | None, "YAML list of the models that want a plan.", Option(Path, "FILE", flag="--models")
    ] = None
    settings: Annotated[
        Sequence[str],
        "A parameter, over those of the file: pods=2; may be repeated.",
        Option(list[str], "NAME=VALUE", flag="--set"),
    ] = ()
    experiment: Annotated[str, "Kubeflow's name for a group of runs.", Option(str, "NAME")] = "neuroshard"
    namespace: Annotated[str | None, "Profile to run in, where Kubeflow has several users.", Option(str, "NAME")] = None
    service_account: Annotated[
        str | None,
        "Service account of the run's pods [default: what Kubeflow Pipelines gives them].",
        Option(str, "NAME"),
    ] = None
    deadline: Annotated[float, "Kubeflow ends a run that takes longer.", Option(take.duration, "TIME", "24h")] = 86400.0
    parallelism: Annotated[
        int | None,
        "Most models, and most measuring pods, at once; 0 for all [default: what the file says, else 0].",
        Option(int, least=0, most=MAX_PARALLELISM),
    ] = None

    def read(self, *, asks_server: bool = True) -> "tuple[Server, RunSettings]":
        """Raises InvalidInput and UsageError."""
        from neuroshard.submit.kubeflow import Server
        from neuroshard.submit.package import RunSettings, read_parameters

        take.refuse(
            {"give --endpoint, the address of the API (or set KFP_ENDPOINT)": asks_server and not self.endpoint}
        )
        given = read_parameters(self.parameters, self.models_yaml, self.settings)
        limit = given.pop(PARALLELISM, 0)
        limit = limit if self.parallelism is None else self.parallelism
        server = Server(self.endpoint, self.experiment, self.namespace)
        return server, RunSettings(given, self.service_account, self.deadline, limit)


DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")]


@command(
    "cluster",
    "neuroshard submit --parameters parameters.yaml --models models.yaml --service-account neuroshard-runner "
    "--endpoint http://localhost:8888",
)
@takes(RunOptions, first=True)
def submit(
    *,
    wait: Annotated[bool, typer.Option(help="Wait for the end of the run, and fail where it fails.")] = True,
    timeout: Annotated[str, option("TIME", "Longest time to wait.")] = "12h",
    poll: Annotated[str, option("TIME", "Longest time between two looks at the run.")] = "15s",
    metrics: Annotated[
        str | None, option("FILE", "Report the outcome to Prometheus: to a file, or to a Pushgateway (http://…:9091).")
    ] = None,
    event: Annotated[bool, typer.Option("--event", help="Report the outcome as an event of this pod.")] = False,
    patience: Annotated[
        str, option("TIME", "Retry an API that does not answer for this long; 0 for no retry.")
    ] = "10m",
    give_up: Annotated[
        str | None, option("TIME", "End a run of which a pod has not started for this long: 1h [default: wait on].")
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Ask the Kubernetes API first, in a dry run, whether it accepts the pods of a run.")
    ] = True,
    dry_run: DryRun = False,
    print_command: Annotated[
        bool,
        typer.Option("--print-command", help="Print kfp's own command for such a run instead, quoted as it must be."),
    ] = False,
    **options: Any,
) -> None:
    """Run the pipeline on Kubeflow Pipelines. If a run with the same parameters is under way, that one is waited for."""
    from neuroshard.submit.package import kfp_command
    from neuroshard.submit.run import RUNS_NAMESPACE, run, run_admission
    from neuroshard.submit.wait import Waiting

    asked = settings_of(RunOptions, options)
    seconds, start_seconds = (
        take.duration("--timeout", timeout),
        take.duration("--give-up", give_up) if give_up else 0.0,
    )
    no_wait = not wait
    take.refuse(
        {
            "--metrics and --event report how a run ended; leave out --no-wait": no_wait and (metrics or event),
            "--give-up looks at pods while it waits; leave out --no-wait": no_wait and give_up,
            f"--timeout {timeout} is longer than --deadline {options['deadline']}, at which Kubeflow ends the run": (
                wait and seconds > asked.deadline
            ),
            f"--give-up {give_up} never comes: nothing waits for the run after --timeout {timeout}": (
                wait and start_seconds >= seconds
            ),
        }
    )
    server, settings = asked.read(asks_server=not print_command)
    if print_command:
        say(kfp_command(server.experiment, settings.parameters))
        return
    poll_seconds, pods_are_in = take.duration("--poll", poll), server.namespace or RUNS_NAMESPACE
    lines = run(
        server,
        settings,
        Waiting(seconds, poll_seconds, metrics, event, start_seconds, pods_are_in) if wait else None,
        dry_run=dry_run,
        patience_seconds=0.0 if patience in ("0", "0s") else take.duration("--patience", patience),
        check=run_admission(settings, server.namespace) if check else None,
    )
    for line in lines:
        say(line)


@command(
    "cluster",
    "neuroshard schedule --cron '0 2 * * *' --parameters parameters.yaml --service-account neuroshard-runner "
    "--endpoint http://localhost:8888 --dry-run",
)
@takes(RunOptions, first=True)
def schedule(
    *,
    cron: Annotated[
        str | None, option("CRON", "When: minute, hour, day, month, weekday, in the time zone of Kubeflow's scheduler.")
    ] = None,
    name: Annotated[str, option("NAME", "Name of the recurring run.")] = "neuroshard-nightly",
    remove: Annotated[bool, typer.Option("--remove", help="Delete the recurring run instead.")] = False,
    wait: Annotated[
        str | None, option("TIME", "Wait this long for a run under way that would be deleted: 3h [default: refuse].")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Terminate a run under way that would be deleted.")] = False,
    dry_run: DryRun = False,
    **options: Any,
) -> None:
    """Make or remove a recurring run on Kubeflow Pipelines. It is KFP's own; called again, this changes nothing."""
    from neuroshard.submit.schedule import Nightly, run

    take.refuse(
        {"give one of --cron and --remove": (cron is None) != remove, "give one of --wait and --now": wait and now}
    )
    server, settings = settings_of(RunOptions, options).read()
    nightly = None if cron is None else Nightly(cron, settings)
    wait_seconds = take.duration("--wait", wait) if wait else 0.0
    for line in run(server, name, nightly, dry_run=dry_run, wait_seconds=wait_seconds, now=now):
        say(line)
