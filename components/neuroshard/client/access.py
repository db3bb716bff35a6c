"""Counters in the trainer: how each table is read, in the store, from where the nightly run takes it.

    from neuroshard.client.access import AccessCounts

    counts = AccessCounts(model, "s3://bucket/prefix", "ads-ranker")  # on every rank, before DistributedModelParallel
    for batch in loader:
        counts.add(batch.sparse_features)  # once a step on every rank
        ...
    counts.write(wait_seconds=60)  # at the end, and now and then, after the same steps on every rank

It counts a sample of the rows, and in a sample of the lookups which rows are hottest, in the background, in constant memory.
Whatever fails ends the counting, or one write, with one AccessWarning; training goes on. Needs torch and torchrec.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from neuroshard.client.access_merge import PATIENCE_SECONDS, Background, Step, Write
from neuroshard.client.access_sample import Reading, Sampler
from neuroshard.client.ranks import Channel, parts_of, prefix_of
from neuroshard.client.torchrec_module import collections_of
from neuroshard.core.clean import log
from neuroshard.core.counted import CountedAccess
from neuroshard.core.errors import InvalidInput, NeuroshardError, UsageError
from neuroshard.core.store_url import StoreUrl
from neuroshard.core.text import one_line
from neuroshard.core.value import shown
from neuroshard.files.importers.torchrec_tables import configs_of, tables_of
from neuroshard.store.counted import put_counted
from neuroshard.store.deadline import within
from neuroshard.store.open import open_store
from neuroshard.store.releases import check_model

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch.distributed import ProcessGroup
    from torchrec import KeyedJaggedTensor

WRITE_SECONDS = 120.0  # of a store: as long as a request to S3 may take


class AccessWarning(UserWarning):
    """How tables are read is not counted any more, or was not written; training is as it was."""


class AccessCounts:
    """Counts how the tables of `module` are read, over all ranks, for the model `model` of the store at `store_url`.

    `module` is the model as it is before DistributedModelParallel, on the meta device too. Every rank of `group` (by default of
    the world) must make one; where torch.distributed is not initialised, this process trains alone. Ranks other than 0 need no
    access to the store; rank 0 needs to write there. `single_writer` is for an S3 store that ignores conditional writes.

    Raises UsageError for what is no module and for an invalid name, URL or patience, and InvalidInput for a module without
    tables that plans cover. After that nothing raises: a fault ends the counting with an AccessWarning, on rank 0 or on the rank
    that has it.
    """

    def __init__(
        self,
        module: nn.Module,
        store_url: StoreUrl,
        model: str,
        *,
        group: "ProcessGroup | None" = None,
        single_writer: bool = False,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        import torch.distributed as dist

        if not _is_time(patience_seconds) or not patience_seconds:
            raise UsageError(f"patience_seconds is how long to wait for another rank, not {shown(patience_seconds)}")
        store = open_store(store_url, single_writer=single_writer)
        readings, rank, ranks, channel = _readings(module), 0, 1, None
        if dist.is_available() and dist.is_initialized():
            chosen, key_value, rank, ranks = parts_of(group, "AccessCounts")
            channel = Channel(key_value, prefix_of(chosen, f"{check_model(model)}/access"), rank)
        self._sampler = Sampler(readings, ranks)
        self._said: set[str] = set()
        self._step = self._writes = 0
        self._stopped = False

        def store_it(counted: CountedAccess, lists: Sequence[bytes]) -> str:
            return within(
                WRITE_SECONDS, store.url, lambda: put_counted(store, counted, lists), place=f"{store.identity} counts"
            )

        self._background = Background(
            self._sampler,
            channel if ranks > 1 else None,
            rank,
            ranks,
            check_model(model),
            store_it,
            patience_seconds,
        )

    def add(
        self, features: "KeyedJaggedTensor | TensorDict | Sequence[KeyedJaggedTensor] | Mapping[str, KeyedJaggedTensor]"
    ) -> None:
        """Count this rank's batch of a step: a KeyedJaggedTensor or a TensorDict with the features of all tables, several, or a
        dict of them by the paths of their modules, which is needed where two modules have features of one name.

        The values are row numbers. Call it once a step on every rank, with what the collections are given.
        """
        if self._is_over():
            return
        try:
            self._background.put(Step(self._step, self._sampler.draw(features)))
            self._step += 1
        except Exception as error:
            said = str(error) if isinstance(error, NeuroshardError) else f"{type(error).__name__}: {one_line(error)}"
            self._background.stop(f"step {self._step}: {said}")
            self._stopped = True
            self._report(f"tables are no longer counted: step {self._step}: {said}")

    def write(self, *, wait_seconds: float = 0.0) -> None:
        """Let rank 0 write what was counted so far to the store, in the background; at the end of training, wait so long for it.

        Every rank must call it after the same steps.
        """
        if self._is_over():
            return
        if not _is_time(wait_seconds):
            self._report(
                f"wait_seconds of a write is a number of seconds, not {shown(wait_seconds)}; it waits for none"
            )
            wait_seconds = 0.0
        self._writes += 1
        self._background.put(Write(self._writes, self._step, wait_seconds))
        if wait_seconds > 0:
            self._background.wait(self._writes, wait_seconds)
        self._is_over()

    def _is_over(self) -> bool:
        """Whether counting has ended. Reports the reason once."""
        if self._stopped:
            return True
        over = self._background.ended.is_set()
        if over and self._background.fault:
            self._report(f"tables are no longer counted: {self._background.fault}")
        for number in [*self._background.written]:
            outcome = self._background.written.pop(number)
            if outcome:
                self._report(f"what was counted of the tables is not in the store: {outcome}")
        return over

    def _report(self, what: str) -> None:
        if what in self._said:
            return
        self._said.add(what)
        try:
            warnings.warn(f"{what}; training goes on", AccessWarning, stacklevel=3)
        except AccessWarning as warning:  # where warnings are errors
            log(f"warning: {warning}")


def _is_time(seconds: object) -> bool:
    return isinstance(seconds, int | float) and 0 <= seconds <= threading.TIMEOUT_MAX


def _readings(module: nn.Module) -> list[Reading]:
    """The tables of a model, named as `neuroshard tables --from-torchrec` names them. Raises InvalidInput."""
    collections = collections_of(module)
    found = [
        (path, table.model_copy(update={"module": path}), tuple(config.feature_names) or (config.name,))
        for path, collection in collections.items()
        for table, config in zip(tables_of(collection), configs_of(collection), strict=True)
        if table.id_map is None  # what it looks up are ids, and no rows
    ]
    if not found:
        raise InvalidInput(
            "all tables of the model give rows to ids as they train, so their lookups say nothing of rows"
        )
    times = Counter(table.name for _, table, _ in found)
    return [
        Reading(
            table.model_copy(update={"name": f"{path}.{table.name}"}) if times[table.name] > 1 and path else table,
            path,
            features,
        )
        for path, table, features in found
    ]
