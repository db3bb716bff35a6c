"""A trainer's own lookups, as a traces file in the store, from which the nightly run counts how tables are read.

    from neuroshard.client.access import AccessTrace

    trace = AccessTrace(model, "s3://bucket/prefix", "ads-ranker")  # on every rank, before DistributedModelParallel
    for batch in loader:
        trace.add(batch.sparse_features)  # once a step
        ...
    trace.write(wait_seconds=60)  # at the end, and now and then

Rank 0 records the first samples of some of its batches, spread evenly over the steps since it began; other ranks do nothing. It
asks nothing of other ranks. Whatever fails ends the recording, or one write, with an AccessWarning; training goes on. Needs torch
and torchrec.
"""

import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from neuroshard.client.model.tables import collections_of
from neuroshard.client.model.warn import warn_and_go_on
from neuroshard.core.errors import InvalidInput, NeuroshardError, UsageError
from neuroshard.core.store_url import StoreUrl
from neuroshard.core.table import Table
from neuroshard.core.text import one_line
from neuroshard.core.value import shown, timestamp
from neuroshard.files.access import Ints
from neuroshard.files.importers.imported import with_modules_in_repeated_names
from neuroshard.files.importers.table_access import keyed_in
from neuroshard.files.importers.torchrec_tables import configs_of, tables_of
from neuroshard.files.traces import Lookups, Recorded, Traces, bytes_of_traces
from neuroshard.store.deadline import within
from neuroshard.store.open import open_store
from neuroshard.store.releases import check_model
from neuroshard.store.traces import put_trace

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torchrec import KeyedJaggedTensor

MOST_BATCHES = 256  # of a trace; every second leaves where there are as many, and half as many are recorded then
FEWEST_BATCHES = 64  # after which a write begins a new trace
MOST_BYTES = 64 * 2**20  # of a trace; a write needs three times as much host memory for a moment
WRITE_SECONDS = 300.0  # of a store, for all requests


class AccessWarning(UserWarning):
    """Lookups are not recorded any more, or were not written; training is as it was."""


_report = partial(warn_and_go_on, AccessWarning)


class _Reading(NamedTuple):
    """A table of a model, at the path of its module, and the features that read it."""

    table: Table
    path: str
    features: tuple[str, ...]


class AccessTrace:
    """Records how the tables of `module` are read, on rank 0, for the model `model` of the store at `store_url`.

    `module` is the model as it is before DistributedModelParallel, on the meta device too. Only rank 0 needs to write to the
    store. `single_writer` is for an S3 store that ignores conditional writes. `most_bytes` are those of the trace: as many
    samples of a batch are recorded as fit 256 times into it.

    Raises UsageError for what is no module and for an invalid name, URL or size, and InvalidInput for a module without tables
    that plans cover. After that nothing raises: a fault ends the recording with an AccessWarning.
    """

    def __init__(
        self,
        module: nn.Module,
        store_url: StoreUrl,
        model: str,
        *,
        single_writer: bool = False,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        import torch.distributed as dist

        if isinstance(most_bytes, bool) or not isinstance(most_bytes, int) or not 2**16 <= most_bytes <= MOST_BYTES:
            raise UsageError(f"most_bytes is a size of {2**16:,} to {MOST_BYTES:,} bytes, not {shown(most_bytes)}")
        self._store, self._model = open_store(store_url, single_writer=single_writer), check_model(model)
        self._readings, self._most_bytes = _readings(module), most_bytes
        self._is_over = dist.is_available() and dist.is_initialized() and dist.get_rank() != 0
        self._samples = 0  # of a batch that are recorded
        self._outside = self._smaller = 0
        self._writing: threading.Thread | None = None
        self._failed: list[str] = []  # of writes
        self._begin()

    def _begin(self) -> None:
        self._step, self._every = 0, 1
        self._batches: list[dict[str, Lookups]] = []

    def add(
        self, features: "KeyedJaggedTensor | TensorDict | Sequence[KeyedJaggedTensor] | Mapping[str, KeyedJaggedTensor]"
    ) -> None:
        """Record the first samples of this rank's batch, or of some batches. A batch is a KeyedJaggedTensor or a TensorDict with
        the features of all tables, several, or a dict of them by the paths of their modules, which is needed where two modules
        have features of one name.

        The values are row numbers. Call it once a step, with what the collections are given.
        """
        if self._is_over:
            return
        self._report_failures()
        self._step += 1
        if (self._step - 1) % self._every:
            return
        try:
            batch = self._cut(features)
        except Exception as error:
            said = str(error) if isinstance(error, NeuroshardError) else f"{type(error).__name__}: {one_line(error)}"
            self._is_over = True
            _report(f"lookups are no longer recorded: step {self._step - 1}: {said}")
            return
        if batch is None:
            self._smaller += 1
            return
        self._batches.append(batch)
        most = self._most_bytes
        while len(self._batches) > 1 and (len(self._batches) > MOST_BATCHES or sum(map(_bytes, self._batches)) > most):
            self._batches, self._every = self._batches[::2], 2 * self._every

    def write(self, *, wait_seconds: float = 0.0) -> None:
        """Write the trace to the store, in the background; at the end of training, wait so long for it. After 64 recorded batches
        a new trace begins.

        The store keeps a longer trace of the last day where this one has fewer batches than that.
        """
        if self._is_over:
            return
        if not isinstance(wait_seconds, int | float) or not 0 <= wait_seconds <= threading.TIMEOUT_MAX:
            _report(f"wait_seconds of a write is a number of seconds, not {shown(wait_seconds)}; it waits for none")
            wait_seconds = 0.0
        if self._writing is not None and self._writing.is_alive():
            self._failed.append("the write before it is not done")
        elif not self._batches:
            smaller = f"; {self._smaller:,} had fewer than {self._samples:,} samples" if self._smaller else ""
            self._failed.append(f"no batch was recorded{smaller}")
        else:
            batches, steps = self._batches, self._step
            self._writing = threading.Thread(target=self._put, args=(batches, steps), daemon=True)
            self._writing.start()
            if len(batches) >= FEWEST_BATCHES:
                self._begin()
        if self._writing is not None and wait_seconds:
            self._writing.join(wait_seconds)
            if self._writing.is_alive():
                self._failed.append(f"not within {wait_seconds:g} s")
        self._report_failures()

    def _report_failures(self) -> None:
        while self._failed:
            _report(f"the recorded lookups are not in the store: {self._failed.pop(0)}")

    def _put(self, batches: list[dict[str, Lookups]], steps: int) -> None:
        """Write a trace, in a thread of its own."""
        try:
            tables = {
                name: Lookups(*(np.concatenate([one[name][place] for one in batches]) for place in (0, 1)))
                for name in batches[0]
            }
            rows = {reading.table.name: reading.table.rows for reading in self._readings}
            recorded = Recorded(
                batch_size=self._samples,
                rows=rows,
                batches=len(batches),
                steps=steps,
                time=timestamp(datetime.now(UTC)),
            )
            data = bytes_of_traces(Traces(tables), recorded)
            store, model = self._store, self._model
            few = len(batches) < FEWEST_BATCHES
            why = within(WRITE_SECONDS, store.url, lambda: put_trace(store, model, data, recorded, keep_longer=few))
            self._failed += [why] if why else []
        except Exception as error:
            self._failed.append(str(error) if isinstance(error, NeuroshardError) else one_line(error))

    def _cut(self, features: Any) -> dict[str, Lookups] | None:
        """The first samples of a batch, by table; None where it has fewer. Raises InvalidInput for what is no batch of these
        tables."""
        paths = {reading.path for reading in self._readings}
        several = [(name if name in paths else None, one) for name, one in keyed_in(features, "a batch")]
        samples = several[0][1].stride()
        if not self._samples and samples:
            lookups = sum(len(one.values()) for _, one in several) / samples + len(self._readings)
            self._samples = min(max(int(self._most_bytes / MOST_BATCHES / 8 / lookups), 1), samples)
        if samples < max(self._samples, 1):
            return None
        first = [(path, _first(one, self._samples)) for path, one in several]
        found = {}
        for reading in self._readings:
            each = []
            for feature in reading.features:
                there = [of[feature] for path, of in first if path in (None, reading.path) and feature in of]
                if len(there) != 1:
                    where = f"feature {feature!r} of table {reading.table.name!r}"
                    many = f"is there {len(there)} times: give a dict by the paths of modules"
                    raise InvalidInput(f"{where} {many if there else 'is not in the batch'}")
                each += there
            rows, owner = (np.concatenate(parts) for parts in zip(*each, strict=True))
            inside = (rows >= 0) & (rows < reading.table.rows)
            if not inside.all() and not self._outside:
                _report(
                    f"table {reading.table.name!r} is asked for row {int(rows[~inside][0]):,}, which it lacks: such lookups are "
                    "left out of the trace"
                )
            self._outside += len(rows) - int(inside.sum())
            rows, owner = rows[inside], owner[inside]
            by_sample = np.argsort(owner, kind="stable")
            found[reading.table.name] = Lookups(rows[by_sample], np.bincount(owner, minlength=self._samples))
        return found


def _first(batch: Any, samples: int) -> dict[str, tuple[Ints, Ints]]:
    """What each feature looks up in the first samples of a KeyedJaggedTensor: rows (N,), and the sample of each (N,). From a GPU
    two copies, which wait for the batch."""
    offsets, stride, every = batch.offsets().cpu().numpy().astype(np.int64), batch.stride(), batch.values().detach()
    ends = [offsets[place * stride : place * stride + samples + 1] for place in range(len(batch.keys()))]
    some = torch.cat([every[int(one[0]) : int(one[-1])] for one in ends])
    if some.is_floating_point() and not some.isfinite().all():
        raise InvalidInput("a batch looks up a row that is no number (nan or inf)")
    rows = some.to(device="cpu", dtype=torch.int64).numpy()  # as TorchRec's operators do
    lengths = [np.diff(one) for one in ends]
    each = np.split(rows, np.cumsum([int(one.sum()) for one in lengths])[:-1])
    return {
        key: (of, np.repeat(np.arange(samples), one)) for key, of, one in zip(batch.keys(), each, lengths, strict=True)
    }


def _bytes(batch: Mapping[str, Lookups]) -> int:
    return sum(array.nbytes for lookups in batch.values() for array in lookups)


def _readings(module: nn.Module) -> list[_Reading]:
    """The tables of a model, named as `neuroshard tables --from-torchrec` names them. Raises InvalidInput."""
    found = [
        _Reading(table.model_copy(update={"module": path}), path, tuple(config.feature_names) or (config.name,))
        for path, collection in collections_of(module).items()
        for table, config in zip(tables_of(collection), configs_of(collection), strict=True)
        if table.id_map is None  # what it looks up are ids, and no rows
    ]
    if not found:
        raise InvalidInput(
            "all tables of the model give rows to ids as they train, so their lookups say nothing of rows"
        )
    tables, _ = with_modules_in_repeated_names([reading.table for reading in found])
    return [reading._replace(table=table) for table, reading in zip(tables, found, strict=True)]
