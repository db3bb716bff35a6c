"""What caches of tables in HBM miss."""

from pathlib import Path
from typing import Annotated

from neuroshard.cli.app import command, say, say_json, say_text
from neuroshard.cli.options import AsJson, TablesFile, option, out_file


@command(
    "plan",
    "neuroshard cache tables.json --batch-size 65536 --load-factor 5% --load-factor 20%",
    "What a cache in HBM misses, and how much HBM all caches need.",
)
def cache(
    tables_json: TablesFile,
    batch_size: Annotated[int, option("NUMBER", "Samples of a step, over all ranks.", min=1, max=2**31)],
    load_factor: Annotated[
        list[str] | None,
        option("SHARE", "Share of a table's rows that is cached; may be repeated [default: 1, 5, 10, 20 and 50 %]."),
    ] = None,
    torchrec_stats: Annotated[
        Path | None,
        option("FILE", "Also write the arguments of TorchRec's EmbeddingOffloadStats here, by table, as JSON."),
    ] = None,
    out: Annotated[Path | None, out_file("Page (HTML) with the curves")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the rows that an LRU cache of each table misses a step, by rows kept in HBM.

    Cached tables lie in host memory; HBM keeps the rows that were read last. Rows are read as a table's access curve says, else
    as its reuse bins do.
    """
    from neuroshard import api
    from neuroshard.core.units import format_bytes
    from neuroshard.core.value import canonical_json
    from neuroshard.files.disk import check_can_write, write_bytes

    for path in filter(None, (torchrec_stats, out)):
        check_can_write(path)
    found = api.cache(tables_json, batch_size=batch_size, load_factors=load_factor)
    if as_json:
        say_json(found.data)
    else:
        say_text(str(found))
    if out is not None:
        say(f"{out}: {format_bytes(found.save(out))}", err=True)
    if torchrec_stats is not None:
        write_bytes(torchrec_stats, canonical_json({"format_version": 1, "tables": found.torchrec_stats}))
        say(f"{torchrec_stats}: statistics for TorchRec's planner", err=True)
