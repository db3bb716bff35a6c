"""How many devices, and which."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from neuroshard.cli import completion
from neuroshard.cli.app import command, say, say_json, say_text
from neuroshard.cli.interrupt import asked_to_stop
from neuroshard.cli.options import AsJson, TablesFile, option, out_file, takes
from neuroshard.orders.sizes import MOST_PROCESSES, SizeOptions


@command(
    "plan",
    "neuroshard size tables.json --model analytic:h100 --model analytic:b200 --devices 4-128 --batch-size 65536",
    "How many devices, of which kind, for which step time and money.",
)
@takes(SizeOptions)
def size(
    tables_json: TablesFile,
    *,
    model: Annotated[
        list[str],
        option("MODEL", "Cost model of a kind of hardware, as for search; may be repeated.", choices=completion.models),
    ],
    processes: Annotated[
        int | None,
        option(
            "NUMBER", "Processes that search [default: 2, or as many as there are cores].", min=1, max=MOST_PROCESSES
        ),
    ] = None,
    write: Annotated[Path | None, option("FOLDER", "Folder for the plans of the frontiers.")] = None,
    out: Annotated[Path | None, out_file("HTML page")] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Search a plan for every kind of hardware, number of devices and memory; say which fit, and which no other beats.

    A size that does not fit is said to be proven so where its bytes or a search of all packings prove it. Ctrl-C ends the sweep
    with what was found.
    """
    from neuroshard import api
    from neuroshard.core.units import format_bytes
    from neuroshard.files.disk import check_can_write

    for path, folder in ((out, False), (write, True)):
        if path is not None:
            check_can_write(path, folder=folder)
    with asked_to_stop("sizes that were searched are shown") as stop:
        found = api.size(
            tables_json,
            model,
            processes=processes or min(2, os.cpu_count() or 1),  # each takes some 200 MB
            stop=stop,
            **options,
        )
    say_json(found.data) if as_json else say_text(str(found))
    if write is not None:
        for plan in found.write(write):
            say(f"{plan}: written", err=True)
    if out is not None:
        say(f"{out}: {format_bytes(found.save(out))}", err=True)
    if stop.is_set():
        raise typer.Exit(stop.exit_code)
