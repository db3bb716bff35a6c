"""Options that several subcommands share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from neuroshard.files.disk import check_folder_exists

Seed = Annotated[int, typer.Option(help="Seed of all random choices.", min=0, max=2**31 - 1)]
StoreUrl = Annotated[str, typer.Option("--store", help="s3://bucket/prefix, or a folder.")]
SingleWriter = Annotated[
    bool, typer.Option(help="Nobody else deploys: accept a store that ignores conditional writes.")
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]


def out_file(kind: str, more: str = "", *names: str) -> Any:
    return typer.Option(*(names or ("-o", "--out")), help=f"{kind} to write{more}.", callback=_in_a_folder)


def _in_a_folder(path: Path | None) -> Path | None:
    if path is not None:
        check_folder_exists(path)
    return path


def was_typed(context: typer.Context, name: str) -> bool:
    """Whether an option was given on the command line, also with the value that it has by default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
