"""Options that several subcommands share."""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from neuroshard.core.errors import NeuroshardError
from neuroshard.files.disk import check_folder_exists, check_other_path
from neuroshard.orders.options import OPTIONS, Option, with_options

OUTPUTS = {"out", "plan_out", "costs_out", "traces_out", "torchrec_stats", "metrics"}
TEXTS = {"acquire", "live", "metrics", "model", "start_from"}  # what may be the path of a file, among other things


def _flag(option: Option) -> str:
    return option.flag or f"--{option.name.replace('_', '-')}"


# By the names of options in Python, and of the fields that they set
_FLAGS = {name: _flag(one) for one in OPTIONS.values() for name in (one.name, one.field or one.name)}
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


def shown(option: Option) -> Any:
    """An option of a search as typer takes it."""
    return typer.Option(_flag(option), help=option.help, min=option.least, max=option.most, metavar=option.word)


Seed = Annotated[int, shown(OPTIONS["seed"])]
StoreUrl = Annotated[str, typer.Option("--store", help="s3://bucket/prefix, or a folder.")]
SingleWriter = Annotated[
    bool, typer.Option(help="Nobody else deploys: accept a store that ignores conditional writes.")
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]


def out_file(kind: str, more: str = "", *names: str) -> Any:
    return typer.Option(*(names or ("-o", "--out")), help=f"{kind} to write{more}.")


def with_search_options(run: Callable[..., None]) -> Callable[..., None]:
    """The subcommand, whose `**options` are those of a search."""
    return with_some_options(frozenset())(run)


def with_some_options(without: Collection[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same without these options."""

    def decorated(run: Callable[..., None]) -> Callable[..., None]:
        signature = with_options(inspect.signature(run), lambda option: Annotated[option.kind, shown(option)], without)
        vars(run)["__signature__"] = signature
        run.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
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
