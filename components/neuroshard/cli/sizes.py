"""How many devices, and which."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from neuroshard.cli import completion
from neuroshard.cli.app import command, say, say_json, say_text
from neuroshard.cli.interrupt import asked_to_stop
from neuroshard.cli.options import AsJson, TablesFile, option, out_file, takes
from neuroshard.orders.options import SearchOptions
from neuroshard.orders.sizes import MOST_PROCESSES, OWN

_Values = list[str] | None


def _of_kinds(word: str, text: str) -> Any:
    return typer.Option(metavar=word, help=f"{text} For one kind: KIND={word}; may be repeated.")


@command(
    "plan",
    "neuroshard size tables.json --model analytic:h100 --model analytic:b200 --devices 4-128 --batch-size 65536",
    "How many devices, of which kind, for which step time and money.",
)
@takes(SearchOptions, without=OWN)
def size(
    tables_json: TablesFile,
    *,
    model: Annotated[
        list[str],
        option("MODEL", "Cost model of a kind of hardware, as for search; may be repeated.", choices=completion.models),
    ],
    devices: Annotated[
        str,
        option("NUMBERS", "Numbers of devices: 4-128 doubles from 4 on, 8-64/8 goes in steps of 8; or 4,12,16."),
    ],
    memory: Annotated[
        _Values,
        _of_kinds(
            "SIZES", "Memory of a device, several with commas (20GiB,40GiB) [default: as measured, or by datasheet]."
        ),
    ] = None,
    host_memory: Annotated[_Values, _of_kinds("SIZE", "Memory of a host for tables that HBM does not hold.")] = None,
    domain: Annotated[
        _Values, _of_kinds("NUMBER", "Ranks that share fast links; sizes that it does not divide are left out.")
    ] = None,
    local_world_size: Annotated[_Values, _of_kinds("NUMBER", "Ranks of a host.")] = None,
    price: Annotated[_Values, _of_kinds("PRICE", "Price of a device and hour, 2.40/h or 2.40EUR/h.")] = None,
    dense_time: Annotated[
        _Values,
        _of_kinds(
            "TIME",
            "Time of a step that is not of embeddings: 12ms at every size, or 12ms@8192 with 8,192 samples a device, and in "
            "proportion with others.",
        ),
    ] = None,
    batch_per_device: Annotated[
        int | None, option("NUMBER", "Samples of a device a step: weak scaling, in place of --batch-size.", min=1)
    ] = None,
    time_budget: Annotated[
        str | None, option("TIME", "Search for this long at most, all sizes together: 60s, 5m.")
    ] = None,
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
            devices=devices,
            memory=memory or (),
            host_memory=host_memory or (),
            domain=domain or (),
            local_world_size=local_world_size or (),
            price=price or (),
            dense_time=dense_time or (),
            batch_per_device=batch_per_device,
            time_budget=time_budget,
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
