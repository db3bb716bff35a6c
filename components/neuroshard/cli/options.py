"""Options that several subcommands share."""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from neuroshard.cli.completion import Words, completing, models
from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.files.disk import check_folder_exists, check_other_path
from neuroshard.orders.options import OPTIONS, Option, declared, with_options

OUTPUTS = {"out", "plan_out", "costs_out", "traces_out", "torchrec_stats", "metrics"}
TEXTS = {"acquire", "live", "metrics", "model", "start_from"}  # what may be the path of a file, among other things


def option(word: str, told: str, *flags: str, choices: Words = (), needs: str = "", **more: Any) -> Any:
    """An option, whose value help calls by this word, if it takes one. Tab completes its `choices`. Without the flag that it
    `needs` it is refused."""
    complete = completing(choices) if choices else None
    said = f"With {needs}: {told}" if needs else told
    made = typer.Option(*flags, help=said, metavar=word or None, autocompletion=complete, **more)
    vars(made)["needs"] = needs
    return made


def needs_of(run: Callable[..., None]) -> dict[str, str]:
    """The options of a subcommand that need others, with the flags of those."""
    marked = [(name, getattr(hint, "__metadata__", ())) for name, hint in run.__annotations__.items()]
    return {name: one.needs for name, marks in marked for one in marks if getattr(one, "needs", "")}


def check_needs(context: Any, needs: Mapping[str, str]) -> None:
    """Raise UsageError for an option without the one that it needs, since it would be ignored."""
    typed = {one.name: one.opts for one in context.command.params if was_typed(context, one.name)}
    for name in needs.keys() & typed.keys():
        if not any(needs[name] in flags for flags in typed.values()):
            raise UsageError(f"{typed[name][-1]} is for {needs[name]}")


def shown(one: Option) -> Any:
    """A declared option as typer takes it."""
    bounds: dict[str, Any] = {"min": one.least, "max": one.most}
    choices = models if one.word == "MODEL" else one.choices
    return option(one.word, one.help, *one.flags, choices=choices, envvar=one.envvar, **bounds)


# By the names of options in Python, and of the fields that they set
_FLAGS = {name: one.flags[-1] for one in OPTIONS.values() for name in (one.name, one.field or one.name)}
_FLAGS["device_memory_bytes"] = _FLAGS["memory"]
_NAMED = re.compile(rf"\A(?:the task: )?({'|'.join(_FLAGS)})(?:\[\d+\])?(?=:| must )")


@contextmanager
def named_as_typed() -> Iterator[None]:
    """An error that begins with the name of an option in Python, or of the field that it sets, names what is typed instead."""
    try:
        yield
    except NeuroshardError as error:
        error.args = (_NAMED.sub(lambda found: _FLAGS[found[1]], str(error)),)
        raise


Seed = Annotated[int, shown(OPTIONS["seed"])]
StoreUrl = Annotated[str, option("STORE", "s3://bucket/prefix, or a folder.", "--store")]
SingleWriter = Annotated[
    bool, typer.Option(help="Nobody else deploys: accept a store that ignores conditional writes.")
]
TablesFile = Annotated[Path, typer.Argument(metavar="TABLES", help="tables.json")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]


def out_file(kind: str, more: str = "", *names: str) -> Any:
    return option("PATH", f"{kind} to write{more}.", *(names or ("-o", "--out")))


def takes(
    *declaring: type, without: Collection[str] = (), first: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The subcommand, whose `**options` are those that these classes declare but `without` some, before its own or after them."""
    named = {name: one for kind in declaring for name, one in declared(kind).items() if name not in without}

    def typed(one: Option) -> Any:
        return Annotated[one.kind, shown(one)]

    def decorated(run: Callable[..., None]) -> Callable[..., None]:
        own = with_options(inspect.signature(run), named.values(), typed, first=first)
        vars(run)["__signature__"] = own
        run.__annotations__ = {one.name: one.annotation for one in own.parameters.values()}
        return run

    return decorated


def check_outputs(given: Mapping[str, Any]) -> None:
    """Raise UsageError for an output in a folder that does not exist, or over another file or folder of the command line."""
    paths = {name: _paths(name, value) for name, value in given.items()}
    for name in OUTPUTS & paths.keys():
        for path in paths[name]:
            check_folder_exists(path)
            check_other_path(path, (one for other in paths.keys() - {name} for one in paths[other]))


def _paths(name: str, value: Any) -> list[Path]:
    """The paths in the value of a parameter."""
    if isinstance(value, str) and name in TEXTS and "://" not in value:
        return [Path(value.removeprefix("given:"))]
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, Path)]


def was_typed(context: typer.Context, name: str) -> bool:
    """Whether an option was given on the command line, also with the value that it has by default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
