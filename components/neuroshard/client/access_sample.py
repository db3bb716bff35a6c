"""A rank's batch -> a sample of the rows that it looks up, by table; and a sample of its lookups. Needs torch.

Rows are sampled by a hash of their number, so every rank samples the same rows in every step: they say how rows are read, but
not which are hot. Lookups are sampled by their place in the batch, each stride-th from another place every step: among them
are the hot rows. On a GPU a batch is hashed and selected there, and only the samples are copied to the host, in the
background: the host waits for nothing. The first step is the exception, where the numbers of lookups say how large the samples
are to be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from neuroshard.core.errors import InvalidInput
from neuroshard.core.table import Table
from neuroshard.core.text import first_few
from neuroshard.core.value import shown
from neuroshard.files.access import Ints
from neuroshard.files.count_access import BY_PRODUCT, GOLDEN, MIXING, sampled_places
from neuroshard.files.importers.table_access import as_keyed

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torchrec import KeyedJaggedTensor

SAMPLED_A_STEP = 512  # distinct rows of a table in a global step, about; docs/cache.md has the errors of that
LOOKUPS_A_STEP = 256  # of a table in a global step that are sampled, about; they cost half of what the rows do
_MOST_TIMES = 4  # as many where later batches have more lookups than the first
_FEWEST_SLOTS = 4096  # of a sample on a GPU; as it is too small it grows
_DENSE_ROWS = 2**16  # tables up to so many rows are counted in an array of all rows, which is faster than sorting


class Reading(NamedTuple):
    """A table of a model, at the path of its module, and the features that read it."""

    table: Table
    path: str
    features: tuple[str, ...]


class Sample(NamedTuple):
    """What a rank's batch looks up: `samples` of it; by table the lookups of each feature (F,), and of rows in the sample of
    share `shares[t]`, rising, how often each was looked up (N,), (N,); and the rows of a sample of the lookups (M,). `outside`
    lookups are of rows that their table lacks."""

    samples: int
    shares: tuple[float, ...]
    lookups: list[Ints]
    rows: list[Ints]
    counts: list[Ints]
    drawn: list[Ints]
    outside: int = 0


@dataclass
class _Drawn:
    """The lookups of one KeyedJaggedTensor: by key how many, those of sampled rows, and those sampled by their place in the turn
    `turn`. On a GPU until `packed` has arrived."""

    places: list[list[tuple[int, int]]]  # by key, the tables that read it, and which of their features it is
    lookups: Ints
    rows: list[Ints]
    drawn: list[Ints]
    turn: int
    packed: Tensor | None = None
    arrived: "torch.cuda.Event | None" = None

    def wait(self) -> int:
        """Unpack what has arrived. How many sampled lookups did not fit."""
        if self.packed is None:
            return 0
        if self.arrived is not None:
            self.arrived.synchronize()
        got, keys = self.packed.numpy(), len(self.places)
        self.packed = self.arrived = None
        total, self.lookups = int(got[0]), got[1 : keys + 1]
        rows, code = got[keys + 1 :].reshape(2, -1)
        kept = min(total, len(rows) - 1)
        rows, key, samples = rows[:kept], code[:kept] // 4, code[:kept] % 4
        self.rows, self.drawn = (
            np.split(rows[of], np.searchsorted(key[of], np.arange(1, keys)))
            for of in (samples & 1 > 0, samples & 2 > 0)
        )
        return total - kept


@dataclass
class Batch:
    """A batch of which the sample may still be on its way from the GPU."""

    samples: int
    shares: tuple[float, ...]
    drawn: list[_Drawn]
    sampler: "Sampler"

    def sample(self) -> Sample | None:
        """The sample, once it is here; None where it was larger than the room for it, which then grows."""
        cut_off = sum(one.wait() for one in self.drawn)
        if cut_off:
            self.sampler.slots += 2 * cut_off
            return None
        return self.sampler.by_table(self)


class Sampler:
    """Samples the batches of one rank of `ranks`. Raises InvalidInput for what is no batch of these tables."""

    def __init__(self, readings: Sequence[Reading], ranks: int) -> None:
        self.readings, self.ranks = readings, ranks
        self.shares: tuple[float, ...] = ()
        self.strides: tuple[int, ...] = ()  # powers of two
        self._turn = 0
        self.slots = _FEWEST_SLOTS
        self._places: dict[tuple[str | None, tuple[str, ...]], list[list[tuple[int, int]]]] = {}
        self._limits: dict[tuple[torch.device, tuple[float, ...], tuple[int, ...]], Tensor] = {}
        self._paths = {reading.path for reading in readings}

    def draw(
        self, features: "KeyedJaggedTensor | TensorDict | Sequence[KeyedJaggedTensor] | Mapping[str, KeyedJaggedTensor]"
    ) -> Batch:
        """Begin the sample of a batch: a KeyedJaggedTensor or a TensorDict, several, or by the path of their module."""
        given: Any = as_keyed(features)  # a TensorDict is a Mapping too
        if isinstance(given, Mapping):
            several = [(name if name in self._paths else None, one) for name, one in given.items()]
        else:
            several = [(None, one) for one in (given if isinstance(given, list | tuple) else [given])]
        several = [(path, as_keyed(one)) for path, one in several]
        for _, one in several:
            if not all(hasattr(one, name) for name in ("keys", "values", "offsets", "stride_per_key")):
                raise InvalidInput(
                    f"a batch is a KeyedJaggedTensor or TensorDict, or a list or dict of them, not {shown(type(one).__name__)}"
                )
        samples = {_samples(one) for _, one in several}
        if len(samples) != 1:
            of = f"of {first_few(sorted(map(str, samples)))} samples; they must have equally many"
            raise InvalidInput(
                f"a batch has KeyedJaggedTensors {of}" if samples else "a batch has no KeyedJaggedTensor"
            )
        places = [self._places_of(path, one) for path, one in several]
        found = [place for by_key in places for key in by_key for place in key]
        self._check_all_there(found)
        if not min(
            samples
        ):  # of a rank whose data has ended: the step is there, and says nothing about how much to sample
            return Batch(0, self.shares or (1.0,) * len(self.readings), [], self)
        if not self.shares:
            self.shares, self.strides = self._first_shares(several, places, min(samples))
        drawn = [self._draw(one, by_key) for (_, one), by_key in zip(several, places, strict=True)]
        return Batch(min(samples), self.shares, drawn, self)

    def halve(self, tables: Sequence[int]) -> None:
        """Sample half as many rows of these tables from the next batch on."""
        self.shares = tuple(share / 2 if table in tables else share for table, share in enumerate(self.shares))

    def by_table(self, batch: Batch) -> Sample:
        """The sample of a batch that has arrived."""
        rows: list[list[Ints]] = [[] for _ in self.readings]
        every_drawn: list[list[Ints]] = [[] for _ in self.readings]
        lookups = [np.zeros(len(reading.features), dtype=np.int64) for reading in self.readings]
        for drawn in batch.drawn:
            for by_key, count, some, read in zip(drawn.places, drawn.lookups, drawn.rows, drawn.drawn, strict=True):
                finest = min((self.strides[table] for table, _ in by_key), default=1)
                for table, feature in by_key:
                    lookups[table][feature] = count
                    share = batch.shares[table]
                    largest = max(batch.shares[other] for other, _ in by_key)
                    rows[table].append(some if share == largest else some[sampled_places(some, share)])
                    times = self.strides[table] // finest
                    every_drawn[table].append(read[(drawn.turn >> 16) % times :: times])
        found = [_distinct(some, reading.table.rows) for some, reading in zip(rows, self.readings, strict=True)]
        return Sample(
            batch.samples,
            batch.shares,
            lookups,
            [rows for rows, _, _ in found],
            [counts for _, counts, _ in found],
            [self._no_more(some, reading.table.rows) for some, reading in zip(every_drawn, self.readings, strict=True)],
            sum(outside for _, _, outside in found),
        )

    def _no_more(self, drawn: list[Ints], rows: int) -> Ints:
        """The sampled lookups of a table's rows, or evenly chosen ones where they are many more than wanted."""
        every = np.concatenate([*drawn, np.empty(0, dtype=np.int64)])
        most = _MOST_TIMES * -(-LOOKUPS_A_STEP // self.ranks)
        every = every[:: -(-len(every) // most) or 1]
        return every[(every >= 0) & (every < rows)]

    def _places_of(self, path: str | None, batch: "KeyedJaggedTensor") -> list[list[tuple[int, int]]]:
        keys = tuple(batch.keys())
        found = self._places.get((path, keys))
        if found is None:
            found = self._places[path, keys] = [
                [
                    (table, place)
                    for table, reading in enumerate(self.readings)
                    if path in (None, reading.path)
                    for place, feature in enumerate(reading.features)
                    if feature == key
                ]
                for key in keys
            ]
        return found

    def _check_all_there(self, found: list[tuple[int, int]]) -> None:
        wanted = sum(len(reading.features) for reading in self.readings)
        if len(found) == wanted == len(set(found)):
            return
        for table, reading in enumerate(self.readings):
            for place, feature in enumerate(reading.features):
                times = found.count((table, place))
                if times != 1:
                    where = f"feature {feature!r} of table {reading.table.name!r}"
                    there = (
                        "is not in the batch"
                        if not times
                        else f"is there {times} times: give a dict by the paths of modules"
                    )
                    raise InvalidInput(f"{where} {there}")

    def _first_shares(
        self,
        several: Sequence[tuple[str | None, "KeyedJaggedTensor"]],
        places: list[list[list[tuple[int, int]]]],
        samples: int,
    ) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Shares that sample about SAMPLED_A_STEP rows of a table, and strides that sample LOOKUPS_A_STEP of its lookups, by the
        distinct rows and the lookups of the first batch."""
        distinct, lookups = [0] * len(self.readings), [0] * len(self.readings)
        for (_, batch), by_key in zip(several, places, strict=True):
            values, ends = batch.values().detach(), batch.offset_per_key()
            for key, begin, end in zip(by_key, ends, ends[1:], strict=False):
                for table, _ in key:
                    distinct[table] += len(torch.unique(values[begin:end]))
                    lookups[table] += end - begin
        shares = []
        for reading, count in zip(self.readings, distinct, strict=True):
            # a first batch without lookups is followed by others
            of_all_ranks = min(reading.table.rows, self.ranks * (count or samples))
            shares.append(min(2.0 ** np.floor(np.log2(SAMPLED_A_STEP / of_all_ranks)), 1.0))
        of_step = (self.ranks * (count or samples) / LOOKUPS_A_STEP for count in lookups)
        strides = tuple(2 ** max(int(np.log2(times)), 0) for times in of_step)
        return tuple(float(share) for share in shares), strides

    def _draw(self, batch: "KeyedJaggedTensor", places: list[list[tuple[int, int]]]) -> _Drawn:
        largest = tuple(max((self.shares[table] for table, _ in key), default=0.0) for key in places)
        finest = tuple(min((self.strides[table] for table, _ in key), default=0) for key in places)
        values = batch.values().detach()
        self._turn = (self._turn + GOLDEN) % 2**30  # so every place of a sample has its turn, whatever the stride
        if values.device.type == "cpu":
            return _draw_on_cpu(values, batch.offset_per_key(), places, largest, finest, self._turn)
        limits = self._limits.get((values.device, largest, finest))
        if limits is None:
            limits = self._limits[values.device, largest, finest] = limits_of(largest, finest).to(values.device)
        with torch.cuda.device(values.device):
            packed = sample_on_device(values, ends_on_device(batch), limits, self._turn, self.slots)
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return _Drawn(places, np.empty(0, dtype=np.int64), [], [], self._turn, host, arrived)


def _samples(batch: "KeyedJaggedTensor") -> int:
    """Samples of a rank's batch, also where features have their own batch sizes: then equal samples are there once."""
    inverse = batch.inverse_indices_or_none() if batch.variable_stride_per_key() else None
    return int(batch.stride() if inverse is None else inverse[1].shape[-1])


def _draw_on_cpu(
    values: Tensor,
    ends: Sequence[int],
    places: list[list[tuple[int, int]]],
    shares: Sequence[float],
    strides: Sequence[int],
    turn: int,
) -> _Drawn:
    if values.is_floating_point():
        values = values.long()  # as TorchRec's operators do
    every, rows, drawn = values.numpy(), [], []
    for begin, end, share, stride in zip(ends, ends[1:], shares, strides, strict=False):
        some = every[begin : end if share else begin]
        rows.append(some[sampled_places(some, share)].astype(np.int64))
        drawn.append(some[-(begin + turn + 1) % max(stride, 1) :: max(stride, 1)].astype(np.int64))
    return _Drawn(places, np.diff(np.array(ends)), rows, drawn, turn)


def limits_of(shares: Sequence[float], strides: Sequence[int]) -> Tensor:
    """By key what the two hashes of a sampled row are below, and the bits that the place of a sampled lookup must not have
    (3, K + 1): 0, 0 and all bits for lookups of no key."""
    product = [int(max(share, BY_PRODUCT) * 2**62) if share else 0 for share in shares]
    mixed = [int(min(share / BY_PRODUCT, 1.0) * 2**62) for share in shares]
    bits = [stride - 1 for stride in strides]  # all where there is no table
    return torch.tensor([[*product, 0], [*mixed, 0], [*bits, -1]], dtype=torch.int64)


def ends_on_device(batch: "KeyedJaggedTensor") -> Tensor:
    """Where the lookups of each key end (K,), on the device of the batch, without waiting for it."""
    offsets: Tensor = batch.offsets()
    if not batch.variable_stride_per_key():
        return offsets[batch.stride() :: batch.stride()].contiguous()
    return torch.stack([offsets[int(end)] for end in np.cumsum(batch.stride_per_key())])


def sample_on_device(values: Tensor, ends: Tensor, limits: Tensor, turn: int, slots: int) -> Tensor:
    """On the device of `values` (N,), in one tensor of int64: how many lookups are in a sample, the lookups of each key (K,), the
    rows of those in one (slots + 1,), of which the last means nothing, and their codes (slots + 1,): 4 times the key, plus 1
    where the row is sampled, plus 2 where the lookup is. The host waits for nothing."""
    values = values.long()
    places = torch.arange(len(values), device=values.device)
    key = torch.searchsorted(ends, places.to(ends.dtype), right=True)
    of_product, of_mixed, bits = limits[:, key]
    of_row = (_shifted(values * _signed(GOLDEN), 2) < of_product) & (_shifted(_mixed(values), 2) < of_mixed)
    by_place = ((places + (turn + 1)) & bits) == 0  # never where all bits are asked for
    kept = of_row | by_place
    place = torch.cumsum(kept, 0)
    slot = torch.where(kept & (place <= slots), place - 1, slots)
    rows, keys = (torch.zeros(slots + 1, dtype=torch.int64, device=values.device) for _ in range(2))
    rows.scatter_(0, slot, values)
    keys.scatter_(0, slot, 4 * key + of_row + 2 * by_place)
    total = kept.sum().reshape(1)
    lookups = torch.diff(ends.long(), prepend=torch.zeros(1, dtype=torch.int64, device=values.device))
    return torch.cat([total, lookups, rows, keys])


def _mixed(rows: Tensor) -> Tensor:
    """The hash of files/count_access.py with torch, whose int64 wraps around and has no unsigned shift."""
    mixed = rows + _signed(GOLDEN)
    for shift, factor in MIXING:
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    hashed: Tensor = mixed ^ _shifted(mixed, 31)
    return hashed


def _shifted(values: Tensor, by: int) -> Tensor:
    shifted: Tensor = (values >> by) & (2 ** (64 - by) - 1)
    return shifted


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _distinct(rows: list[Ints], most: int) -> tuple[Ints, Ints, int]:
    """Distinct rows, rising, how often each is there, and how many lookups are of rows that the table lacks."""
    every = rows[0] if len(rows) == 1 else np.concatenate([*rows, np.empty(0, dtype=np.int64)])
    inside = every[(every >= 0) & (every < most)]
    if most <= _DENSE_ROWS:
        of_rows = np.bincount(inside, minlength=1)
        found = np.flatnonzero(of_rows)
        return found, of_rows[found], len(every) - len(inside)
    found, counts = np.unique(inside, return_counts=True)
    return found, counts, len(every) - len(inside)
