"""Tables from whatever a notebook has at hand: a preset, a file, a TorchRec model, a DataFrame, a list."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from neuroshard.api.arguments import public
from neuroshard.api.results import Tables
from neuroshard.core.clean import log
from neuroshard.core.errors import UsageError
from neuroshard.core.table import Table
from neuroshard.core.value import shown
from neuroshard.orders import values as take
from neuroshard.orders.values import FilePath

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from neuroshard.files.importers.imported import Imported
    from neuroshard.files.importers.tables_source import Asked, Source

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@public
def tables(
    source: FilePath | nn.Module | pd.DataFrame | Iterable[Table | Mapping[str, Any]],
    *,
    pooling_factors: Mapping[str, float | Sequence[float]] | None = None,
    default_pooling_factor: float | None = None,
    access: str | Mapping[str, str] = "uniform",
    batches: Iterable[Any] | None = None,
    traces: FilePath | Sequence[FilePath] | None = None,
    batch_size: int | None = None,
    order: str = "time",
    counted: str | None = None,
    row_orders: FilePath | None = None,
    dtype: str = "fp32",
    optimizer: str = "rowwise_adagrad",
    dim: int = 128,
    quiet: bool = False,
) -> Tables:
    """The embedding tables of a model, as `neuroshard tables` finds them.

    `source` is a preset's name, a file (.json, .csv, .parquet, .pt of dlrm_datasets), such a file's URL
    in a store, `"package.module:make_model"`, a torch
    module with TorchRec collections, a pandas DataFrame with a row a table (name, rows, dim, pooling_factor and the other
    fields of `Table`), or a list of `Table` or of mappings with those fields.

    `pooling_factors` are the lookups a sample of a model's tables or features by name (a list, as TorchRec's constraints have one
    for each feature of a table, counts as its sum), `default_pooling_factor` those of any other feature. `access` (uniform or
    zipf:EXPONENT), `dtype` (fp32 or fp16) and `optimizer` (the fused one, such as sgd, rowwise_adagrad, adagrad or adam) hold
    where the source does not say, `dim` for .pt files, which have no dims. Notes on what was assumed go to stderr unless `quiet`,
    and stay in `.notes`.

    How rows are read may be counted, as may pooling factors then: on `batches` of a model, any number of KeyedJaggedTensors or
    TensorDicts (or lists or dicts of them) of a global batch each, one at a time; or on `traces`, files that `write_traces`
    wrote, cut into batches of `batch_size` samples. `order` is "time" where they come as they are trained, else "shuffled". A
    mapping as `access`, such as {"user_*": "zipf:1.2"}, replaces what the tables of these names say. `counted` is a model in a
    store, such as "s3://bucket/prefix/ads-ranker": then the trace is what its trainer recorded. With `row_orders`, a folder,
    sequences also have orders of their rows by what is counted, whose lists of hot rows are written there.

    Raises UsageError for an unknown kind of source, InvalidInput for a fault in it; both are NeuroshardError, in one line.

    >>> import neuroshard as ns
    >>> ns.tables([{"name": "user", "rows": 1_000_000, "dim": 64, "pooling_factor": 3.0}])
    Tables: 1 table, 248.0 MiB with optimizer state
    """
    from neuroshard.files.importers import table_access, tables_source
    from neuroshard.files.importers.presets import PRESETS
    from neuroshard.store.traces import fetch_trace_of

    words = _words(access)
    access, _ = table_access.access_options(words)
    dtype, optimizer, order = (
        take.name(option, value, f"text, as in {example!r}")
        for option, value, example in (
            ("dtype", dtype, "fp16"),
            ("optimizer", optimizer, "rowwise_adagrad"),
            ("order", table_access.check_order(order), "time"),
        )
    )
    listed = [] if traces is None else traces if isinstance(traces, list | tuple) else [traces]
    paths = [take.path("traces", one) for one in listed]
    batch_size = take.maybe(take.whole, "batch_size", batch_size)
    dim, quiet = take.whole("dim", dim), take.switch("quiet", quiet)
    of_models = pooling_factors is not None or default_pooling_factor is not None
    is_model = _is_a("torch.nn", "Module", source) or (
        isinstance(source, str)
        and source not in PRESETS
        and bool(_FUNCTION.fullmatch(source))
        and not Path(source).exists()
    )
    counted, folder = take.maybe(_place, "counted", counted), take.maybe(take.path, "row_orders", row_orders)
    counts = paths or batches is not None
    take.refuse(
        {
            "batch_size is for traces; batches have one": batch_size is not None and not paths,
            "pooling factors are for a model; other sources say pooling_factor of each table": of_models
            and not is_model,
            "batches are for a model, without traces and without pooling factors, which they count; other sources take traces": (
                batches is not None and (paths or of_models or not is_model)
            ),
            "counted is what a trainer recorded; leave out traces and batches, which would be counted too": (
                counted is not None and counts
            ),
            "row_orders is for traces, batches or counted, by which rows are ordered": (
                folder is not None and not counts and counted is None
            ),
        }
    )
    if isinstance(source, str) and "://" in source:
        if (words, dtype, optimizer, dim, paths, counted) != (["uniform"], "fp32", "rowwise_adagrad", 128, [], None):
            raise UsageError(
                f"{source}: access, traces, counted, dtype, optimizer and dim are for files; copy it to one, or leave them out"
            )
        from neuroshard.store.tables import load_tables

        return _noted(*load_tables(source), quiet)
    lookups = _lookups(pooling_factors or {})
    usual = default_pooling_factor
    usual = None if usual is None else tables_source.lookups(usual, "default_pooling_factor")
    asked = tables_source.Asked(access, dtype, optimizer, dim, lookups, usual)
    found = _read(source, is_model, asked)
    with TemporaryDirectory() as recorded:
        paths += [] if counted is None else [fetch_trace_of(counted, Path(recorded))]
        imported = table_access.with_access(found.tables(), words, paths, batch_size, order, folder)
    if batches is not None:
        imported = _counted(source, found, imported, batches, order, folder)
    return _noted(imported.tables, imported.notes, quiet)


def _read(source: Any, is_model: bool, asked: Asked) -> Source:
    """The tables of a source of any kind. Raises UsageError, InvalidInput."""
    from neuroshard.files.importers import tables_source
    from neuroshard.files.importers.presets import PRESETS

    if is_model:
        return tables_source.from_torchrec(source, asked)
    if isinstance(source, str) and source in PRESETS:
        return tables_source.from_preset(source, asked)
    if isinstance(source, str | PathLike):
        return tables_source.from_file(Path(source), asked)
    if _is_a("pandas", "DataFrame", source):
        return tables_source.from_frame(source, asked)
    if isinstance(source, Iterable) and not isinstance(source, Mapping):
        return tables_source.from_list([*source], asked)
    raise UsageError(
        f"{shown(source)} holds no tables; give a preset, a file, a TorchRec model, a DataFrame or a list of tables"
        f"{take.called_instead(source)}"
    )


def _words(access: object) -> list[str]:
    """Access as the command line takes it: a word, or a word by name or pattern. Raises UsageError."""
    if not isinstance(access, Mapping):
        return [take.name("access", access, "text, as in 'zipf:1.05', or such a text by table")]
    return [
        f"{name}={take.name(f'access of {name!r}', word, 'text, as in zipf:1.05')}" for name, word in access.items()
    ]


def _counted(
    model: Any, found: Source, imported: Imported, batches: object, order: str, row_orders: Path | None
) -> Imported:
    """A model's tables with what batches count. Raises UsageError, InvalidInput."""
    from neuroshard.files.importers.table_access import check_order, with_batches
    from neuroshard.files.importers.torchrec_model import features_of, make_on_meta

    one = _is_a("torchrec.sparse.jagged_tensor", "KeyedJaggedTensor", batches) or _is_a(
        "tensordict", "TensorDict", batches
    )
    if one or not isinstance(batches, Iterable):
        raise UsageError(
            f"batches is a list of KeyedJaggedTensors, or what yields them, not {shown(type(batches).__name__)}"
        )
    of_model = features_of(make_on_meta(model) if isinstance(model, str) else model, found.where)
    features = {table.name: of_model[table.module, table.name_in_module] for table in imported.tables}
    tables, notes = with_batches(imported.tables, features, batches, check_order(order), row_orders)
    # batches have counted what the importer assumed
    kept = tuple(note for note in imported.notes if "no pooling factor" not in note)
    return replace(imported, tables=tables, notes=(*kept, *notes))


def _lookups(given: object) -> dict[str, float]:
    """Lookups a sample by name. Raises UsageError, InvalidInput."""
    from neuroshard.files.importers.tables_source import lookups

    if not isinstance(given, Mapping):
        raise UsageError(f"pooling_factors is lookups by name, as in {{'user_id': 3.0}}, not {shown(given)}")
    each = {name: value if isinstance(value, list | tuple) else [value] for name, value in given.items()}
    return {str(name): sum(lookups(one, f"pooling_factors: {name}") for one in many) for name, many in each.items()}


_place = partial(take.name, what="a model in a store, as in 's3://bucket/prefix/ads-ranker'")


def _noted(listed: tuple[Table, ...], notes: tuple[str, ...], quiet: bool) -> Tables:
    if not quiet:
        log(*(f"note: {note}" for note in notes))
    return Tables.of(listed, notes)


def _is_a(module: str, name: str, value: object) -> bool:
    """Whether a value is an instance of a package's class. A package that was never imported has no instances."""
    found = getattr(sys.modules.get(module), name, None)
    return isinstance(found, type) and isinstance(value, found)
