"""The compute net in NumPy: the sum of a device's table vectors -> forward + backward milliseconds of the device.

Each of MEMBERS independently trained nets (an ensemble) has two parts. A table part turns the F features of a table into a
vector of 16 numbers, none negative. A head turns the sum of a device's vectors into a time. So adding a table to a device is
one vector addition (NeuroShard, MLSys 2023, section 3.2).

The head is a hidden layer of ReLUs plus a linear skip: with s the vector sum,

    time = out @ relu(head @ s + bias) + skip @ s + constant

Weights of the head may have any sign. The skip is at least what the hidden layer may take away (`least_skip`), so a time never
falls when a table is added (monotone). It is piecewise linear: beyond the measured range it goes on in proportion, and
evaluating it needs no exponential, which matters to a search that asks millions of times.

With its share of the skip, a hidden neuron of weights w, bias b and output weight c is

    c max(w+ x + b, w- x)      where c > 0: the larger of two increasing sums, which is convex
    |c| min(w+ x, w- x - b)    where c < 0: the smaller of two, which is concave

where w+ and w- are the positive parts of w and -w. Fused kernels behave in both ways: of two resources the busier one decides
(a maximum), and what an extra pass or a full cache costs grows until it applies to all lookups (a minimum). A concave neuron is
called a dip. On any range a chord lies below it, from which the bounds of a search are made (`convex_below`).

On top of the head there may be rates: extra time per vector component that sets in once the rows of all tables of a device
exceed a threshold (kernels sort row numbers, and more digits take more passes), or once the bytes of all distinct rows of a
batch do (caches hold only so much). Vectors then have three more columns: `BYTES` and `ROWS`, which are summed and compared with
the thresholds, and `OWN`, the extra time that each table would have by its own rows and bytes alone. No table has more of either
than its device, so the sum of `OWN` is a linear underestimate of the extra time.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from neuroshard.costmodel.features import BY_WIDTH, ROW_COLUMN, SHARE_COLUMNS, TOUCHED_COLUMN, SplitFeatures
from neuroshard.costmodel.protocol import Dips, Floats, Ints

MEMBERS: Final = 4  # nets of the ensemble; together they take as long as one net of twice their widths
TABLE_WIDTHS: Final = (64, 16)  # of a member's table layers; the second is the vector that is summed
HEAD_WIDTH: Final = 32
# Thresholds at which the extra cost of a rate saturates: rows of a device; bytes of the distinct rows of a batch; and rows just
# beyond a power of two, whose numbers need one more binary digit
BY_ROWS: Final[Floats] = np.exp2(np.arange(8, 33))
BY_BYTES: Final[Floats] = np.exp2(np.arange(14, 37, 2))
BY_DIGITS: Final[Floats] = BY_ROWS * (1 + 1 / 64)
THRESHOLDS: Final[Floats] = np.concatenate([BY_ROWS, BY_BYTES, BY_DIGITS])
_KINDS: Final = [len(BY_ROWS), len(BY_BYTES), len(BY_DIGITS)]
# Share of each threshold at which its rate starts to rise.
SETS_IN: Final[Floats] = np.repeat([0.75, 0.25, 64 / 65], _KINDS)
BYTES, OWN, ROWS = -3, -2, -1  # the last columns of a vector, where the net has rates
_STEEPNESS: Final[Floats] = 1 / (1 - SETS_IN) / THRESHOLDS
_SHIFT: Final[Floats] = SETS_IN / (1 - SETS_IN)
COUNTED_IN: Final = np.repeat([ROWS, BYTES, ROWS], _KINDS)
IN_CACHE: Final = 2**17  # numbers of an array of which two copies fit a cache
AT_ONCE: Final = 200  # shards whose vectors are computed at a time
FEW: Final = 40  # up to this many devices, one layer for all members is faster than a layer for each
MANY: Final = 2048  # devices at a time: larger arrays fit no cache and take twice as long


@dataclass(frozen=True)
class FeatureScale:
    """Mean, deviation and range of each feature over the tables that the net was trained on, each of shape (F,).

    Shares of lookups are clipped to the measured range: a reuse bin that was nearly empty in all training tables has a tiny
    deviation, and a table that fills it would otherwise be a thousand deviations off. Sizes are not clipped.
    """

    mean: Floats
    deviation: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(cls, features: Floats) -> "FeatureScale":
        """The statistics of (N, F) features. A feature that never varies gets the deviation 0 and is ignored."""
        low, high = features.min(axis=0), features.max(axis=0)
        deviation = np.where(high - low > 1e-9 * np.abs(high), features.std(axis=0), 0.0)
        return cls(features.mean(axis=0), deviation, low, high)

    def apply(self, features: Floats) -> Floats:
        """Standardized features, (feature - mean) / deviation: (…, F) -> (…, F). Without features added since the training."""
        clipped = features[..., : len(self.mean)].copy()
        clipped[..., SHARE_COLUMNS] = np.clip(
            features[..., SHARE_COLUMNS], self.low[SHARE_COLUMNS], self.high[SHARE_COLUMNS]
        )
        return (clipped - self.mean) * self.per_deviation

    @cached_property
    def per_deviation(self) -> Floats:
        """1 / deviation, and 0 for features that are ignored: (F,)."""
        inverse: Floats = np.divide(1.0, self.deviation, where=self.deviation > 0, out=np.zeros_like(self.mean))
        return inverse


@dataclass(frozen=True)
class Layer:
    """A linear layer of every member: `weight` is (members, in, out), `bias` (members, 1, out)."""

    weight: Floats
    bias: Floats

    def __call__(self, x: Floats) -> Floats:
        """(members, N, in), or (N, in) where all members get the same -> (members, N, out)."""
        product: Floats = np.matmul(x, self.weight)
        product += self.bias
        return product


def least_skip(head: Floats, out: Floats) -> Floats:
    """The smallest skip with which no vector component lowers a cost: (members, K, H), (members, H, 1) -> (members, K, 1)."""
    falls: Floats = np.matmul(np.maximum(-head, 0.0), np.maximum(out, 0.0))
    falls += np.matmul(np.maximum(head, 0.0), np.maximum(-out, 0.0))
    return falls


def steps(vector_sums: Floats, used: Ints) -> Floats:
    """The share of each rate in `used` that applies at these sums, from 0 to 1: (…, width) -> (…, T)."""
    share = np.take(vector_sums, COUNTED_IN[used], axis=-1)
    share *= _STEEPNESS[used]
    share -= _SHIFT[used]
    np.minimum(np.maximum(share, 0.0, out=share), 1.0, out=share)
    return share


@lru_cache(maxsize=2)
def _zeros(shape: tuple[int, ...], dtype: "np.dtype[np.floating]") -> Floats:
    """Zeros of a shape, kept: NumPy's maximum with an array takes half as long as with a scalar."""
    return np.zeros(shape, dtype)


@dataclass(frozen=True)
class ComputeNet:
    """The ensemble. It predicts the mean of its members, in units of `unit_ms`, and at least `floor` units.

    In shapes, K is the length of a member's vector, H of its hidden layer, T the number of THRESHOLDS. `table` are the two layers
    of the table part, `head` is K -> H, `out` is H -> 1, `skip` is (members, K, 1), and `rates`, if any, is (members, K, T): what
    each vector component adds beyond each threshold. Rates BY_ROWS and BY_DIGITS exclude each other.

    A vector holds the vectors of all members; then, if the net `waits`, ms that are added as they are; and with rates BYTES, OWN
    and ROWS: `width` numbers in all.
    """

    scale: FeatureScale
    table: tuple[Layer, Layer]
    head: Layer
    out: Layer
    skip: Floats
    unit_ms: float
    floor: float
    disagreement: float  # predicted deviation of log(time), as a multiple of the members' deviation from one another
    least_spread: float  # predicted deviation of log(time) where all members agree
    rates: Floats | None = None
    waits: bool = False

    @property
    def width(self) -> int:
        """Length of a vector."""
        return len(self.mean.skip)

    @property
    def counts(self) -> int:
        """How many of them are BYTES, OWN and ROWS."""
        return 0 if self.rates is None else 3

    @property
    def waiting(self) -> int:
        """The place of the ms that are added, from the end of a vector."""
        return -1 - self.counts

    @property
    def monotone(self) -> bool:
        """True if a prediction decreases in no vector component, by the signs of the weights."""
        grows = self.rates is None or (self.rates >= 0).all()
        return bool(grows and (self.skip >= least_skip(self.head.weight, self.out.weight)).all())

    @property
    def convex(self) -> bool:
        """True if a monotone net is convex as well: it has neither rates nor dips."""
        return not len(self.mean.used) and not len(self.dips.bias)

    @cached_property
    def dips(self) -> Dips:
        """The dips of all members."""
        down = self.mean.out < 0
        return Dips(self.mean.weight[:, down], self.mean.bias[down])

    def convex_below(self, low: Floats, high: Floats) -> "ComputeNet":
        """A convex and monotone net that underestimates this one wherever dip j is between low[j] and high[j]: (J,) each.

        A dip's value is `vector_sums @ weight + bias`. Each dip is replaced by its chord over that range, and the rates by the
        sum of what each table would add by its own rows and bytes (OWN).
        """
        low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
        slope = np.zeros(self.mean.out.shape)
        slope[self.mean.out < 0] = high / np.maximum(high - low, np.finfo(np.float64).tiny)
        reach = np.zeros(self.mean.out.shape)
        reach[self.mean.out < 0] = low
        by_member = self.out.weight.shape
        falling = np.minimum(self.out.weight, 0.0) * slope.reshape(by_member)
        before = self.head.bias.swapaxes(1, 2) - reach.reshape(by_member)
        whole = (
            self if self.rates is None else _ByOwnRows(**{one.name: getattr(self, one.name) for one in fields(self)})
        )
        return replace(
            whole,
            out=Layer(np.maximum(self.out.weight, 0.0), self.out.bias + (falling * before).sum(axis=1, keepdims=True)),
            skip=self.skip + np.matmul(self.head.weight, falling),
        )

    def beyond_own_ms(self, vectors: Floats, holds: Floats) -> Floats:
        """As in protocol.Bending: (…, width) and (…, width) or (width,) -> (…)."""
        if self.rates is None:
            return np.zeros(vectors.shape[:-1])
        added: Floats = (steps(holds, self.mean.used) * (vectors @ self.mean.rates)).sum(axis=-1)
        return np.maximum(added - vectors[..., OWN], 0.0)

    def vectors(self, features: Floats) -> Floats:
        """The vectors of tables with these features: (…, F) -> (…, width). None is negative."""
        flat = self.scale.apply(features).reshape(-1, len(self.scale.mean))
        before = self.table[0](flat)
        np.maximum(before, 0.0, out=before)
        by_member = self.table[1](before)
        np.maximum(by_member, 0.0, out=by_member)
        vectors = np.empty((len(flat), self.width))
        known = len(by_member) * by_member.shape[2]
        vectors[:, :known] = by_member.swapaxes(0, 1).reshape(len(flat), known)
        rows, touched = (features[..., column].ravel() for column in (ROW_COLUMN, TOUCHED_COLUMN))
        return self._with_counts(vectors, rows, touched).reshape(*features.shape[:-1], self.width)

    def split_vectors(self, features: SplitFeatures) -> Floats:
        """The same for N shards of few distinct tables -> (N, width): most is computed once a table."""
        hidden, scale = self.table[0], self.scale
        fixed = scale.apply(features.fixed)
        fixed[:, BY_WIDTH] = 0.0
        by_width = (features.by_width - scale.mean[BY_WIDTH]) * scale.per_deviation[BY_WIDTH]
        of_table, (weight, bias) = hidden(fixed), (self.table[1].weight, self.table[1].bias)
        vectors = np.empty((len(by_width), self.width))
        by_member = vectors[:, : len(weight) * weight.shape[2]].reshape(len(by_width), len(weight), -1)
        # buffers for all shards at once would not fit the caches, and the first touch of each page of memory takes some 4 us
        buffers = np.empty((2, min(AT_ONCE, len(by_width)), weight.shape[1]))
        for begin in range(0, len(by_width), AT_ONCE):
            some = slice(begin, begin + AT_ONCE)
            before, of_tables = buffers[:, : len(by_width[some])]
            for member in range(len(weight)):
                np.matmul(by_width[some], self._by_width[member], out=before)
                np.take(of_table[member], features.index[some], axis=0, out=of_tables, mode="clip")
                before += of_tables
                np.maximum(before, 0.0, out=before)
                after = before @ weight[member]
                after += bias[member]
                np.maximum(after, 0.0, out=by_member[some, member])
        rows, touched = features.fixed[features.index, ROW_COLUMN], features.by_width[:, BY_WIDTH.index(TOUCHED_COLUMN)]
        return self._with_counts(vectors, rows, touched)

    def _with_counts(self, vectors: Floats, log2_rows: Floats, touched_gib: Floats) -> Floats:
        """The vectors (N, width), with nothing to wait for, and BYTES, OWN and ROWS filled in where there are rates."""
        if self.waits:
            vectors[:, self.waiting] = 0.0
        if self.rates is None:
            return vectors
        vectors[:, BYTES] = touched_gib * 2**30
        vectors[:, ROWS] = np.rint(np.exp2(log2_rows))  # whole, so that sums of them are exact
        vectors[:, OWN] = 0.0
        vectors[:, OWN] = self.mean.beyond(vectors)
        return vectors

    @cached_property
    def _by_width(self) -> Floats:
        """The first layer's weights of the features that depend on the width, contiguous: the product is ten times as fast."""
        return np.ascontiguousarray(self.table[0].weight[:, BY_WIDTH])

    @cached_property
    def mean(self) -> "MeanHead":
        """The members' heads as one function, which `ms` evaluates."""
        return MeanHead.of(self)

    def ms(self, vector_sums: Floats) -> Floats:
        """Forward + backward ms: (…, width) -> (…)."""
        mean, flat = self.mean, vector_sums.reshape(-1, vector_sums.shape[-1])
        if len(flat) > MANY:
            some = [self.ms(flat[begin : begin + MANY]) for begin in range(0, len(flat), MANY)]
            return np.concatenate(some).reshape(vector_sums.shape[:-1])
        if len(flat) > FEW:
            hidden = self.head(self._by_member(flat))
            np.maximum(hidden, 0.0, out=hidden)
            of_member = np.matmul(hidden, mean.out.reshape(len(hidden), -1, 1))
            ms: Floats = of_member.sum(axis=0)[:, 0]
        else:
            ms = mean.hidden(flat) @ mean.out
        mean.finish(flat, ms)
        np.maximum(ms, 0.0, out=ms)
        ms += mean.floor_ms
        return ms.reshape(vector_sums.shape[:-1])

    def slope(self, vector_sums: Floats) -> Floats:
        """The gradient of `ms`; at a kink, that of one side: (…, width) -> (…, width), in ms a unit."""
        mean, flat = self.mean, vector_sums.reshape(-1, vector_sums.shape[-1])
        hidden = mean.hidden(flat)
        slope: Floats = ((hidden > 0) * mean.out) @ mean.weight.T
        slope += mean.skip
        ms = hidden @ mean.out
        mean.finish(flat, ms, slope)
        slope[ms <= 0] = 0.0
        return slope.reshape(vector_sums.shape)

    def spread_ms(self, vector_sums: Floats) -> Floats:
        """One standard deviation of the error of `ms`: (…, width) -> (…)."""
        spread = np.hypot(self.disagreement * self.disagreements(vector_sums), self.least_spread)
        return self.ms(vector_sums) * spread

    def disagreements(self, vector_sums: Floats) -> Floats:
        """Standard deviation of log(time) over the members: (…, width) -> (…)."""
        members = np.maximum(self._members(vector_sums), self.floor)
        found: Floats = np.log(members).std(axis=0)
        return found

    def _members(self, vector_sums: Floats) -> Floats:
        """What each member predicts, in units: (…, width) -> (members, …)."""
        sums = self._by_member(vector_sums)
        hidden = self.head(sums)
        np.maximum(hidden, 0.0, out=hidden)
        predicted = self.out(hidden) + np.matmul(sums, self.skip)
        if self.rates is not None:
            used = np.arange(len(THRESHOLDS))
            shares = steps(vector_sums, used).reshape(-1, len(used))
            predicted[..., 0] += np.einsum("mnt,nt->mn", np.matmul(sums, self.rates), shares)
        answers: Floats = predicted.reshape(len(sums), *vector_sums.shape[:-1])
        return answers

    def _by_member(self, vector_sums: Floats) -> Floats:
        """(…, width) -> (members, N, K), without a copy."""
        members, into, _ = self.skip.shape
        flat = vector_sums.reshape(-1, vector_sums.shape[-1])
        return flat[:, : members * into].reshape(-1, members, into).swapaxes(0, 1)


class _ByOwnRows(ComputeNet):
    """An underestimate of a net with rates: each table adds only what its own rows and bytes ask for (the column OWN)."""

    @cached_property
    def mean(self) -> "MeanHead":
        mean = MeanHead.of(self)
        skip = mean.skip.copy()
        skip[OWN] = 1.0
        return replace(mean, skip=skip, rates=np.zeros((len(skip), 0)), used=mean.used[:0])


@dataclass(frozen=True)
class MeanHead:
    """The mean of all members' heads as one head over the vectors of all members, in ms.

    A search asks about few devices at a time. Then a call of NumPy costs more than its arithmetic, so fewer calls are faster.
    """

    weight: Floats  # (width, hidden of all members): block diagonal, a block a member
    bias: Floats  # (hidden of all members,)
    out: Floats  # (hidden of all members,)
    skip: Floats  # (width,)
    rates: Floats  # (width, T): the rates that are not zero everywhere
    used: Ints  # (T,): their places among the THRESHOLDS
    counts: int  # how many of the last columns of a vector are BYTES, OWN and ROWS
    above_ms: float  # the constant, less `floor_ms`
    floor_ms: float

    @classmethod
    def of(cls, net: ComputeNet) -> "MeanHead":
        """The mean of the net's heads."""
        (members, into, hidden), share = net.head.weight.shape, net.unit_ms / len(net.head.weight)
        # the head does not read what comes after
        known, width = members * into, members * into + net.waits + net.counts
        weight, skip = np.zeros((width, members * hidden)), np.zeros(width)
        for member, one in enumerate(net.head.weight):
            weight[member * into : (member + 1) * into, member * hidden : (member + 1) * hidden] = one
        skip[:known] = net.skip.ravel() * share
        skip[known : known + net.waits] = 1.0
        every = np.zeros((known, 0)) if net.rates is None else net.rates.reshape(known, -1) * share
        used = np.flatnonzero(every.any(axis=0))
        rates = np.zeros((width, len(used)))
        rates[:known] = every[:, used]
        return cls(
            weight=weight,
            bias=net.head.bias.ravel(),
            out=net.out.weight.ravel() * share,
            skip=skip,
            rates=rates,
            used=used,
            counts=net.counts,
            above_ms=float(net.out.bias.sum()) * share - net.floor * net.unit_ms,
            floor_ms=net.floor * net.unit_ms,
        )

    def lifted(self, vectors: Floats) -> Floats:
        """Vectors after all linear steps of the head: (…, width) -> (…, hidden of all members + 2 T + 1).

        The columns are the hidden layer before its ReLU, the progress towards each threshold, the rates, and the skip. Nothing
        constant is added, so lifted vectors can be summed instead of vectors, and the largest matrix product is done once a
        shard, not once a sum.
        """
        hidden, rates = len(self.bias), len(self.used)
        lifted = np.empty((*vectors.shape[:-1], hidden + 2 * rates + 1), self.out.dtype)
        np.matmul(vectors, self.weight, out=lifted[..., :hidden])
        np.matmul(vectors, self.skip, out=lifted[..., -1])
        if rates:
            towards = lifted[..., hidden : hidden + rates]
            np.multiply(vectors[..., COUNTED_IN[self.used]], _STEEPNESS[self.used], out=towards)
            np.matmul(vectors, self.rates, out=lifted[..., hidden + rates : -1])
        return lifted

    @cached_property
    def ground(self) -> Floats:
        """What the sum of lifted vectors starts from, on an empty device: all constants of the head, (lifted width,)."""
        above = np.array([self.above_ms + self.floor_ms])
        return np.concatenate([self.bias, -_SHIFT[self.used], np.zeros(len(self.used)), above])

    def ms(self, lifted_sums: Floats) -> Floats:
        """What `ComputeNet.ms` returns, computed from `ground` plus the sum of lifted vectors: (…, lifted width) -> (…)."""
        hidden, counted = len(self.bias), len(self._counted)
        few = lifted_sums.size <= IN_CACHE
        terms = np.maximum(lifted_sums, _zeros(lifted_sums.shape, lifted_sums.dtype) if few else 0.0)
        if counted > hidden:
            shares = terms[..., hidden:counted]
            np.minimum(shares, 1.0, out=shares)
            shares *= lifted_sums[..., counted:-1]
        ms: Floats = terms[..., :counted] @ self._counted
        ms += lifted_sums[..., -1]
        return np.maximum(ms, self.floor_ms, out=ms)

    @cached_property
    def _counted(self) -> Floats:
        """Output weights of the hidden neurons, and 1 for each rate."""
        return np.concatenate([self.out, np.ones(len(self.used), self.out.dtype)])

    def hidden(self, vector_sums: Floats) -> Floats:
        """(N, width) -> (N, hidden of all members)."""
        hidden: Floats = vector_sums @ self.weight
        hidden += self.bias
        np.maximum(hidden, 0.0, out=hidden)
        return hidden

    def finish(self, vector_sums: Floats, ms: Floats, slope: Floats | None = None) -> None:
        """Add skip, rates and constant to `ms` (N,), in place; and the gradient of the rates to `slope` (N, width), if given.

        The result is in ms above the floor, negative below it.
        """
        ms += vector_sums @ self.skip
        if len(self.used):
            ms += self.beyond(vector_sums, slope)
        ms += self.above_ms

    def beyond(self, vector_sums: Floats, slope: Floats | None = None) -> Floats:
        """Milliseconds that the rates add: (N, width) -> (N,). Their gradient is added to `slope`, if given, in place."""
        shares, rates = steps(vector_sums, self.used), vector_sums @ self.rates
        if slope is not None:
            slope += shares @ self.rates.T
            slope += (((shares > 0) & (shares < 1)) * rates) @ self._steepness
        shares *= rates
        added: Floats = shares.sum(axis=1)
        return added

    @cached_property
    def _steepness(self) -> Floats:
        """How much of each rate sets in with a unit of each vector component, between start and threshold: (T, width)."""
        steepness = np.zeros(self.rates.shape[::-1])
        steepness[np.arange(len(self.used)), COUNTED_IN[self.used]] = _STEEPNESS[self.used]
        return steepness
