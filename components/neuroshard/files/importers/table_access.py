"""How the rows of tables are read: tables -> the same with access curves, stated in words, or counted on traces or batches.

Traces are those of a stream, or what a trainer recorded (client/access.py), which says so in its file."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

import numpy as np

from neuroshard.core.access import STEADY, access_law
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.table import Table
from neuroshard.core.text import agreeing, counted, first_few
from neuroshard.core.value import shown, timestamp
from neuroshard.files.access import Ints
from neuroshard.files.count_access import TRACKED_ROWS, AccessCounter, Order, counted_table
from neuroshard.files.hot_rows import COUNTERS, FEWEST_COUNTERS, HotRows
from neuroshard.files.importers.imported import Imported
from neuroshard.files.row_orders import write_ids
from neuroshard.files.traces import Recorded, recorded_in, trace_batches, trace_tables
from neuroshard.progress import progress


def check_order(order: str) -> Order:
    """The order of batches. Raises UsageError."""
    if not isinstance(order, str) or order not in get_args(Order):
        raise UsageError(f"order is time (as they are trained) or shuffled, not {shown(order)}")
    return order  # type: ignore[return-value]


def access_options(given: Sequence[str]) -> tuple[str, dict[str, str]]:
    """`["zipf:1.05", "user_*=zipf:1.2"]` as the access of tables that say none, and that of tables by pattern. Raises
    UsageError."""
    defaults = [one for one in given if "=" not in one]
    if len(defaults) > 1:
        raise UsageError(
            f"--access is given as {defaults[0]!r} and {defaults[1]!r}; name tables, as in 'user_*={defaults[1]}'"
        )
    named = dict(one.split("=", 1) for one in given if "=" in one)
    for access in (*defaults, *named.values()):
        access_law(access)
    return (defaults or ["uniform"])[0], named


def with_access(
    imported: Imported,
    access: Sequence[str],
    traces: Sequence[Path] = (),
    batch_size: int | None = None,
    order: str = "time",
    row_orders: Path | None = None,
) -> Imported:
    """Imported tables with the access that options give them: words first, then traces. With `row_orders`, the folder
    of the lists of hot rows, sequences also with orders of their rows. Raises UsageError, InvalidInput."""
    default, named = access_options(access)
    tables, notes = with_words(imported.tables, named), imported.notes
    if default != "uniform" and not any(table.access and table.access.source == default for table in tables):
        notes += (
            f"--access {default} changes nothing: every table says how its rows are read; '*={default}' replaces it",
        )
    if traces:
        tables, more = with_traces(tables, traces, batch_size, check_order(order), row_orders=row_orders)
        notes += more
    return replace(imported, tables=tables, notes=notes)


def with_words(tables: Sequence[Table], named: Mapping[str, str]) -> tuple[Table, ...]:
    """The tables, those whose names match a pattern with that access, whatever they said before; the last pattern wins.

    Raises UsageError for a pattern that matches no table."""
    found = list(tables)
    for pattern, access in named.items():
        places = [place for place, table in enumerate(found) if fnmatchcase(table.name, pattern)]
        if not places:
            raise UsageError(
                f"--access {pattern}={access}: no table has such a name; there are {first_few([t.name for t in tables])}"
            )
        for place in places:
            said = found[place].model_dump()
            del said["reuse_bins"]
            found[place] = Table.parse({**said, "access": access}, f"table {found[place].name!r}")
    return tuple(found)


def with_traces(
    tables: Sequence[Table],
    paths: Sequence[Path],
    batch_size: int | None = None,
    order: Order = "time",
    tracked_rows: int = TRACKED_ROWS,
    row_orders: Path | None = None,
) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """The tables with what their traces count (files one after the other in time), and notes.

    A batch is `batch_size` samples; what a trainer recorded says how many, and its curves know no order in time. Pooling factor,
    reuse bins and access curve are the traces', and so is the row order of a sequence with `row_orders`, the folder of the lists
    of hot rows; tables without a trace stay as they are, as do those of which a trainer has other rows. Memory is that of a batch
    and of one table's counted rows. Raises UsageError, InvalidInput.
    """
    if others := _without_maps(tables):
        return _beside(tables, *with_traces(others, paths, batch_size, order, tracked_rows, row_orders))
    recorded = _recorded(paths, batch_size)
    batch_size = recorded[0].batch_size if recorded else batch_size
    if batch_size is None or batch_size < 1:
        raise UsageError("counting traces needs --batch-size, the samples of a global batch")
    there = {name for path in paths for name in trace_tables(path)}
    missing = [table.name for table in tables if table.name not in there]
    resized = {table.name for table in tables for one in recorded if one.rows.get(table.name, table.rows) != table.rows}
    counting = {table.name for table in tables} - {*missing, *resized}
    if not counting:
        rows = f", or with other rows than {first_few(sorted(resized))}" if resized else ""
        raise InvalidInput(f"{paths[0]}: has lookups of none of the tables{rows}; it has {first_few(sorted(there))}")
    found = []
    with progress("count access", total=len(tables), unit="tables") as bar:
        for table in tables:
            if table.name in counting:
                counter = _counter(table, row_orders, COUNTERS, tracked_rows)
                for path in paths:
                    for batch in trace_batches(path, table.name, batch_size):
                        counter.add(batch, batch_size)
                if not counter.batches:
                    raise InvalidInput(
                        f"{paths[0]}: table {table.name!r} has fewer than {batch_size:,} samples; give a smaller --batch-size"
                    )
                source = recorded[-1].said if recorded else counter.said
                one = counted_table(table, counter, "sampled" if recorded else order, source=source)
                found.append(_with_row_order(one, counter, row_orders, source))
            else:
                found.append(table)
            bar.advance()
    notes = [f"how {agreeing(len(counting), 'table', 'is', 'are')} read: {one.said}" for one in recorded]
    notes += [f"{counted(len(missing), 'table')} without a trace: {first_few(missing)}"] if missing else []
    if resized:
        notes.append(
            f"{agreeing(len(resized), 'table', 'is', 'are')} as before, since the trainer has other rows: "
            f"{first_few(sorted(resized))}"
        )
    if row_orders is not None:
        notes += _notes_on_row_orders([table for table in found if table.name in counting])
    return tuple(found), (*notes, *_notes_on(found, sampled=bool(recorded)))


def _recorded(paths: Sequence[Path], batch_size: int | None) -> list[Recorded]:
    """How trainers recorded these files; none where they are of a stream. Raises UsageError for files that do not go together."""
    of_files = [recorded_in(path) for path in paths]
    found = [one for one in of_files if one is not None]
    sizes = {None if one is None else one.batch_size for one in of_files}
    if found and len(sizes) > 1:
        raise UsageError(
            f"{first_few([str(path) for path in paths])}: recorded by a trainer with another number of samples of a batch, or "
            "not at all; count one of them"
        )
    if found and batch_size not in (None, found[0].batch_size):
        raise UsageError(
            f"{paths[0]}: its trainer recorded batches of {found[0].batch_size:,} samples; leave out --batch-size {batch_size}"
        )
    return found


def _without_maps(tables: Sequence[Table]) -> tuple[Table, ...]:
    """Those of the tables that give no rows to ids as they train, where some do; else none. Raises InvalidInput where all do."""
    others = tuple(table for table in tables if table.id_map is None)
    if not others:
        raise InvalidInput(
            f"table {tables[0].name!r} gives rows to ids as it trains, as all tables do: lookups of ids say nothing of its rows; "
            "give --pooling-factor"
        )
    return others if len(others) < len(tables) else ()


def _beside(
    tables: Sequence[Table], found: Sequence[Table], notes: Sequence[str]
) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """All tables, of which these were found, in order; with a note on the others."""
    known = {table.name: table for table in found}
    left = [table.name for table in tables if table.name not in known]
    note = (
        f"{counted(len(left), 'table')} that give rows to ids as they train stay as they were ({first_few(left)}): lookups of "
        "ids say nothing of their rows; give --pooling-factor"
    )
    return tuple(known.get(table.name, table) for table in tables), (*notes, note)


def _counter(table: Table, row_orders: Path | None, counters: int, tracked_rows: int = TRACKED_ROWS) -> AccessCounter:
    hot_rows = None if row_orders is None else HotRows(table.rows, counters if table.pooling == "none" else 0)
    return AccessCounter(table.rows, tracked_rows, f"table {table.name!r}", hot_rows)


def _with_row_order(table: Table, counter: AccessCounter, folder: Path | None, source: str = "") -> Table:
    """The table with the order of its hot rows, if any are, whose list is written into the folder, and its lookups by id."""
    if counter.hot_rows is None or folder is None:
        return table
    found = counter.hot_rows.order(source or counter.said, timestamp(datetime.now(UTC)))
    if found is not None and found.file:
        write_ids(folder, [found.file])
    order = None if found is None else found.order
    return table.model_copy(update={"row_order": order, "lookups_by_id": counter.hot_rows.lookups_by_id})


def _notes_on_row_orders(tables: Sequence[Table]) -> list[str]:
    """What was found of the hot rows of these tables; sequences alone have orders."""
    sequences = [table for table in tables if table.pooling == "none"]
    orders = [(table.name, table.row_order) for table in sequences if table.row_order is not None]
    listed = [f"{name} ({order.hot_rows:,} rows, {order.lookup_share:.1%} of the lookups)" for name, order in orders]
    alike = [table.name for table in sequences if table.row_order is None]
    pooled = len(tables) - len(sequences)
    why = "as rows are read alike or too few batches were counted"
    notes = [
        (listed, f"hot rows of {counted(len(listed), 'table')}: {first_few(listed)}"),
        (alike, f"{counted(len(alike), 'table')} without a row order, {why}: {first_few(alike)}"),
        (pooled, f"{counted(pooled, 'pooled table')} without a row order: plans hold sequences alone by one"),
    ]
    return [note for there, note in notes if there]


def with_batches(
    tables: Sequence[Table],
    features: Mapping[str, Sequence[str]],
    batches: Iterable[object],
    order: Order = "time",
    row_orders: Path | None = None,
) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """The tables with what batches count, and notes.

    `features` are the names of the features that read each table. A batch is a TorchRec KeyedJaggedTensor, or several of them
    as a list or dict, each feature in one. Any number of batches may come, in the order in which they are trained; only one is
    held at a time. With `row_orders`, the folder of the lists of hot rows, sequences also have orders of their rows. Raises
    InvalidInput for a batch that lacks a feature, and for a row that a table lacks.
    """
    if others := _without_maps(tables):
        return _beside(tables, *with_batches(others, features, batches, order, row_orders))
    of_each = max(COUNTERS // max(sum(table.pooling == "none" for table in tables), 1), FEWEST_COUNTERS)
    counters = {table.name: _counter(table, row_orders, of_each) for table in tables}
    lookups = {table.name: np.zeros(len(features[table.name])) for table in tables}
    samples = smaller = 0
    for number, batch in enumerate(batches):
        ids, samples_here = _features(batch, f"batch {number}")
        if samples_here < samples:
            smaller += 1  # the last batch of an epoch
            continue
        samples = samples_here
        for table in tables:
            absent = [name for name in features[table.name] if name not in ids]
            if absent:
                raise InvalidInput(
                    f"batch {number} has no feature {absent[0]!r} of table {table.name!r}; it has {first_few(sorted(ids))}"
                )
            read = [ids[name] for name in features[table.name]]
            lookups[table.name] += [len(one) for one in read]
            counters[table.name].add(np.concatenate(read), samples)
    found = [
        counted_table(table, counters[table.name], order, features[table.name], lookups[table.name]) for table in tables
    ]
    found = [_with_row_order(table, counters[table.name], row_orders) for table in found]
    left_out = [f"{smaller:,} of the batches left out, of fewer than {samples:,} samples"] if smaller else []
    orders = _notes_on_row_orders(found) if row_orders is not None else ()
    return tuple(found), (*left_out, *orders, *_notes_on(found))


def _notes_on(tables: Sequence[Table], *, sampled: bool = False) -> tuple[str, ...]:
    """What the user should know of what was counted; of a trainer's `sampled` batches nobody expects an order in time."""
    streams = [table.access.stream for table in tables if table.access is not None and table.access.stream is not None]
    of_some_rows = [stream for stream in streams if stream.sampled < 1]
    varying = [stream for stream in streams if stream.varies > STEADY]
    notes = []
    if not sampled and any(table.access is not None and table.access.stream is None for table in tables):
        notes.append(
            "fewer than 4 batches say nothing of locality in time: misses assume that rows are read independently"
        )
    if of_some_rows:
        notes.append(
            f"{counted(len(of_some_rows), 'table')} counted on a sample of the rows: misses may be off by "
            f"{max(stream.error for stream in of_some_rows):.1%} of the distinct rows (standard error)"
        )
    if varying:
        notes.append(
            f"the misses of {counted(len(varying), 'table')} vary by up to {max(stream.varies for stream in varying):.1%} of the "
            "distinct rows between parts of the stream (standard deviation); so may later ones"
        )
    return tuple(notes)


def as_keyed(batch: object) -> object:
    """A TensorDict of jagged features as the KeyedJaggedTensor that TorchRec makes of it; anything else as it is. Raises
    InvalidInput for a TensorDict that TorchRec cannot read."""
    tensordict = sys.modules.get("tensordict")
    if tensordict is None or not isinstance(batch, tensordict.TensorDict):
        return batch
    from torchrec.sparse.tensor_dict import maybe_td_to_kjt

    samples: dict[str, int] = {}
    for name in batch.keys():  # noqa: SIM118
        one: Any = batch[name]  # items() gives what holds a JaggedTensor
        if not hasattr(one, "_offsets"):
            raise InvalidInput(
                f"feature {name!r} of a TensorDict is {shown(type(one).__name__)}, without lengths; TorchRec reads nested "
                "tensors (layout torch.jagged) and JaggedTensors"
            )
        samples[name] = len(one._offsets) - 1 if one._lengths is None else len(one._lengths)
    if len({*samples.values()}) > 1:
        (first, some), (other, more) = sorted(samples.items(), key=lambda item: item[1])[:: len(samples) - 1]
        raise InvalidInput(
            f"a TensorDict has {some:,} samples of feature {first!r} and {more:,} of {other!r}, where TorchRec takes all to have "
            "equally many"
        )
    return maybe_td_to_kjt(batch, None)


def keyed_in(batch: object, where: str) -> list[tuple[str | None, Any]]:
    """The KeyedJaggedTensors of a batch: one, several, or a dict of them, with their names there. Raises InvalidInput."""
    batch = as_keyed(batch)
    some = batch if isinstance(batch, list | tuple) else [batch]
    named = batch.items() if isinstance(batch, Mapping) else ((None, one) for one in some)
    several: list[tuple[str | None, Any]] = [(name, as_keyed(one)) for name, one in named]
    for _, one in several:
        if not all(hasattr(one, name) for name in ("keys", "values", "offsets", "offset_per_key", "stride_per_key")):
            raise InvalidInput(
                f"{where} is {shown(type(one).__name__)}, not a KeyedJaggedTensor or TensorDict, or a list or dict of them"
            )
        if one.variable_stride_per_key():
            raise InvalidInput(
                f"{where} has a batch size for each feature, which is not supported; give batches before that"
            )
    sizes = [f"{size:,}" for size in dict.fromkeys(one.stride() for _, one in several)]
    if len(sizes) != 1:
        of = f"KeyedJaggedTensors of {' and '.join(sizes)}" if sizes else "no KeyedJaggedTensor, so no"
        raise InvalidInput(f"{where} has {of} samples")
    return several


def _features(batch: object, where: str) -> tuple[dict[str, Ints], int]:
    """Row numbers by feature, and the samples of a batch. Raises InvalidInput."""
    ids, samples = dict[str, Ints](), 0
    for _, kjt in keyed_in(batch, where):
        samples = kjt.stride()
        values, ends = kjt.values().detach(), kjt.offset_per_key()
        if values.is_meta:
            raise InvalidInput(
                f"{where} is on the meta device, which holds no row numbers; give batches of your data loader"
            )
        if values.is_floating_point():
            if not values.isfinite().all():
                raise InvalidInput(f"{where} looks up a row that is no number (nan or inf)")
            values = values.long()  # as TorchRec's operators do
        every = values.cpu().numpy()
        for name, begin, end in zip(kjt.keys(), ends, ends[1:], strict=False):
            some = every[begin:end].astype(np.int64, copy=False)
            if not np.array_equal(ids.setdefault(name, some), some):
                raise InvalidInput(f"{where} has feature {name!r} twice, with other lookups; give each feature in one")
    if not samples:
        raise InvalidInput(f"{where} has no samples")
    return ids, samples
