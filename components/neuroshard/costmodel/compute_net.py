"""The compute net as NumPy sees it: a few matrix products over any number of leading dimensions.

It ends in a hidden layer of ReLU and a skip beside it, both of any sign, but the skip is never less than what the hidden layer
may take away. So a prediction is piecewise linear in what comes in, grows with it, and beyond the measured range grows in
proportion. There is no exponential in it: a search asks millions of times.

With its share of the skip, a hidden neuron of weights w and bias b that counts for c is c max(w+ x + b, w- x) where c > 0, the
larger of two sums without a negative weight, and |c| min(w+ x, w- x - b) where c < 0, the smaller. Fused kernels have both:
what takes longer hides the other, and what a further pass or a full cache costs grows with the lookups, up to all of them. The
first is convex. Below the second, which is called a dip, lies a chord on any range, and bounds are drawn from that.

Beside the head there may be rates: what lookups take longer once the rows of all tables together are more than so many, since
kernels sort row numbers by as many digits as these have; and once the bytes of all rows that a batch touches are, since caches
hold only so many. A sum of vectors then has columns more: `OWN`, what the parts would ask for by their own rows and bytes alone,
`ROWS`, and where there are rates by bytes, `BYTES`. As no part has more of either than its device, `OWN` is below the rates, and
linear.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from neuroshard.costmodel.features import BY_WIDTH, ROW_COLUMN, SHARE_COLUMNS, TOUCHED_COLUMN, SplitFeatures
from neuroshard.costmodel.protocol import Dips, Floats, Ints

MEMBERS: Final = 4  # nets of the compute ensemble: together they cost what one of twice their widths would
TABLE_WIDTHS: Final = (64, 16)  # of a member's layers after the features; the last is the vector that is summed
HEAD_WIDTH: Final = 32
# Up to so many rows of a device, and bytes of all different rows that a batch touches, the rates of each have set in; and rows
# beyond 2^k, which it takes a binary digit more to number
BY_ROWS: Final[Floats] = np.exp2(np.arange(8, 33))
BY_BYTES: Final[Floats] = np.exp2(np.arange(14, 37, 2))
BY_DIGITS: Final[Floats] = BY_ROWS * (1 + 1 / 64)
THRESHOLDS: Final[Floats] = np.concatenate([BY_ROWS, BY_BYTES, BY_DIGITS])
_KINDS: Final = [len(BY_ROWS), len(BY_BYTES), len(BY_DIGITS)]
RATES: Final = np.cumsum(_KINDS).tolist()  # so many of them a net may have rates for
SETS_IN: Final[Floats] = np.repeat([0.75, 0.25, 64 / 65], _KINDS)  # of each: rates rise from nothing there
BYTES, OWN, ROWS = -3, -2, -1  # columns of a sum of vectors, where there are rates
_STEEPNESS: Final[Floats] = 1 / (1 - SETS_IN) / THRESHOLDS
_SHIFT: Final[Floats] = SETS_IN / (1 - SETS_IN)
COUNTED_IN: Final = np.repeat([ROWS, BYTES, ROWS], _KINDS)
IN_CACHE: Final = 2**17  # numbers that may well lie in a cache twice
AT_ONCE: Final = 200  # shards whose vectors are made at a time
FEW: Final = 40  # devices asked about at once, up to which one layer of all members is faster than a layer each
MANY: Final = 2048  # above which arrays fit no cache: so many at a time are asked in half the time


@dataclass(frozen=True)
class FeatureScale:
    """Mean, deviation and range of each feature over the tables that the net was trained on, each of shape (F,).

    Shares are kept to the range that was measured: a reuse bin that was always nearly empty has a tiny deviation, and a
    table that fills it would otherwise stand a thousand deviations off. Sizes go on beyond their range.
    """

    mean: Floats
    deviation: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(cls, features: Floats) -> "FeatureScale":
        """The statistics of (N, F) features. One that never varies is ignored: its deviation counts as infinite (0 here)."""
        low, high = features.min(axis=0), features.max(axis=0)
        deviation = np.where(high - low > 1e-9 * np.abs(high), features.std(axis=0), 0.0)
        return cls(features.mean(axis=0), deviation, low, high)

    def apply(self, features: Floats) -> Floats:
        """Features in deviations from the mean: (…, F) -> (…, F)."""
        clipped = features.copy()
        clipped[..., SHARE_COLUMNS] = np.clip(
            features[..., SHARE_COLUMNS], self.low[SHARE_COLUMNS], self.high[SHARE_COLUMNS]
        )
        return (clipped - self.mean) * self.per_deviation

    @cached_property
    def per_deviation(self) -> Floats:
        """What a feature is multiplied by."""
        inverse: Floats = np.divide(1.0, self.deviation, where=self.deviation > 0, out=np.zeros_like(self.mean))
        return inverse


@dataclass(frozen=True)
class Layer:
    """A layer of every member: weight of shape (members, in, out), bias of shape (members, 1, out)."""

    weight: Floats
    bias: Floats

    def __call__(self, x: Floats) -> Floats:
        """(members, N, in), or (N, in) for all alike -> (members, N, out)."""
        product: Floats = np.matmul(x, self.weight)
        product += self.bias
        return product


def least_skip(head: Floats, out: Floats) -> Floats:
    """What a skip must be at least that no vector lowers a cost: (members, K, H) and (members, H, 1) -> (members, K, 1)."""
    falls: Floats = np.matmul(np.maximum(-head, 0.0), np.maximum(out, 0.0))
    falls += np.matmul(np.maximum(head, 0.0), np.maximum(-out, 0.0))
    return falls


def steps(vector_sums: Floats, used: Ints) -> Floats:
    """How much of the rates of each of the thresholds `used` counts, by the last columns of sums: (…, width) -> (…, T)."""
    share = np.take(vector_sums, COUNTED_IN[used], axis=-1)
    share *= _STEEPNESS[used]
    share -= _SHIFT[used]
    np.minimum(np.maximum(share, 0.0, out=share), 1.0, out=share)
    return share


@lru_cache(maxsize=2)
def _zeros(shape: tuple[int, ...], dtype: "np.dtype[np.floating]") -> Floats:
    """For what is asked many times of as many numbers: beside these NumPy compares in half the time that one zero takes."""
    return np.zeros(shape, dtype)


@dataclass(frozen=True)
class ComputeNet:
    """An ensemble: of each member a vector a table, summed over the tables of a device, then a head.

    A head is a hidden layer, and a `skip` of shape (members, K, 1) beside it; and `rates` (members, K, T), if any, of what
    lookups take more beyond each of the first T of the THRESHOLDS, T one of RATES; none of those BY_ROWS beside those BY_DIGITS.
    What is predicted is the mean of the members, in units of `unit_ms`, and at least `floor`. How far it may be off: see
    `spread_ms`.

    A sum of vectors has the components of all members, and with rates BYTES (if there are rates by these), OWN and ROWS after
    these: `width` in all.
    """

    scale: FeatureScale
    table: tuple[Layer, Layer]
    head: Layer
    out: Layer
    skip: Floats
    unit_ms: float
    floor: float
    disagreement: float  # how many standard deviations of the logarithm it is worth when the members differ by one
    least_spread: float  # the standard deviation of the logarithm where they all agree
    rates: Floats | None = None

    @property
    def width(self) -> int:
        """Components of a vector."""
        return len(self.mean.skip)

    @property
    def counts(self) -> int:
        """Components of a vector beside those of the members."""
        if self.rates is None:
            return 0
        return 3 if self.rates.shape[2] > len(BY_ROWS) else 2

    @property
    def monotone(self) -> bool:
        """Growing with each of the vector sums, by its weights."""
        grows = self.rates is None or (self.rates >= 0).all()
        return bool(grows and (self.skip >= least_skip(self.head.weight, self.out.weight)).all())

    @property
    def convex(self) -> bool:
        """Where it is monotone, convex as well."""
        return not len(self.mean.used) and not len(self.dips.bias)

    @cached_property
    def dips(self) -> Dips:
        """Of all members."""
        down = self.mean.out < 0
        return Dips(self.mean.weight[:, down], self.mean.bias[down])

    def convex_below(self, low: Floats, high: Floats) -> "ComputeNet":
        """A convex net that grows with each of the vector sums, and is not above this one wherever each dip's weight times them,
        plus its bias, is `low` to `high` (J,): there each has its chord instead. Of the rates it has what parts ask for by
        themselves."""
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

    def vectors(self, features: Floats) -> Floats:
        """(…, F) -> (…, width). Never negative, so that a sum only grows."""
        flat = self.scale.apply(features).reshape(-1, features.shape[-1])
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
        """The same of N shards of few tables -> (N, width); the layer on a table's own features is asked once."""
        hidden, scale = self.table[0], self.scale
        fixed = scale.apply(features.fixed)
        fixed[:, BY_WIDTH] = 0.0
        by_width = (features.by_width - scale.mean[BY_WIDTH]) * scale.per_deviation[BY_WIDTH]
        of_table, (weight, bias) = hidden(fixed), (self.table[1].weight, self.table[1].bias)
        vectors = np.empty((len(by_width), self.width))
        by_member = vectors[:, : len(weight) * weight.shape[2]].reshape(len(by_width), len(weight), -1)
        # what all members need of all shards would not fit the caches, and in a new process each page of it costs some 4 us
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
        """The vectors (N, width), with BYTES, OWN and ROWS filled in where there are rates."""
        if self.rates is None:
            return vectors
        if self.counts > 2:
            vectors[:, BYTES] = touched_gib * 2**30
        vectors[:, ROWS] = np.rint(np.exp2(log2_rows))  # whole, so that sums of them are exact
        vectors[:, OWN] = 0.0
        vectors[:, OWN] = self.mean.beyond(vectors)
        return vectors

    @cached_property
    def _by_width(self) -> Floats:
        """The first layer's weights on what follows the width, in one piece: otherwise their product takes ten times as long."""
        return np.ascontiguousarray(self.table[0].weight[:, BY_WIDTH])

    @cached_property
    def mean(self) -> "MeanHead":
        """What `ms` is told by."""
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
        """The gradient of `ms`, at a kink that of one side: (…, width) -> (…, width)."""
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
        """Standard deviation of the logarithm over the members: (…, width) -> (…)."""
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
            used = np.arange(self.rates.shape[2])
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
    """A net below one with rates: of those it has what the parts of a device ask for by themselves."""

    @cached_property
    def mean(self) -> "MeanHead":
        mean = MeanHead.of(self)
        skip = mean.skip.copy()
        skip[OWN] = 1.0
        return replace(mean, skip=skip, rates=np.zeros((len(skip), 0)), used=mean.used[:0])


@dataclass(frozen=True)
class MeanHead:
    """The mean of all members' heads as one head over all their vectors, in ms.

    A search asks about few devices at a time, and then each array operation costs more than the numbers in it.
    """

    weight: Floats  # (width, hidden of all members), zero between a member's vectors and another's layer
    bias: Floats  # (hidden of all members,)
    out: Floats  # (hidden of all members,)
    skip: Floats  # (width,)
    rates: Floats  # (width, T), of those that are not all zero, and
    used: Ints  # (T,), the places of their thresholds
    counts: int  # of the last columns of vectors that only rates know
    above_ms: float  # what is added, less `floor_ms`
    floor_ms: float

    @classmethod
    def of(cls, net: ComputeNet) -> "MeanHead":
        (members, into, hidden), share = net.head.weight.shape, net.unit_ms / len(net.head.weight)
        known, width = members * into, members * into + net.counts  # the head knows nothing of what is counted
        weight, skip = np.zeros((width, members * hidden)), np.zeros(width)
        for member, one in enumerate(net.head.weight):
            weight[member * into : (member + 1) * into, member * hidden : (member + 1) * hidden] = one
        skip[:known] = net.skip.ravel() * share
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
        """What the hidden layer makes of vectors, and how far they lead towards each threshold of the rates, if any; what the
        rates make of them, and the skip: (…, width) -> (…, hidden of all members + 2 T + 1).

        No constant is in it, so it can be summed in their place, and the head's largest product need not be made of every sum.
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
        """What a device is lifted to before there is anything on it, all constants: (width of what is lifted,)."""
        above = np.array([self.above_ms + self.floor_ms])
        return np.concatenate([self.bias, -_SHIFT[self.used], np.zeros(len(self.used)), above])

    def ms(self, lifted_sums: Floats) -> Floats:
        """What `ComputeNet.ms` tells of sums of vectors, from the sums of what they are `lifted` to, and of the `ground`."""
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
        """What hidden neurons count for, and rates as they are."""
        return np.concatenate([self.out, np.ones(len(self.used), self.out.dtype)])

    def hidden(self, vector_sums: Floats) -> Floats:
        """(N, width) -> (N, hidden of all members)."""
        hidden: Floats = vector_sums @ self.weight
        hidden += self.bias
        np.maximum(hidden, 0.0, out=hidden)
        return hidden

    def finish(self, vector_sums: Floats, ms: Floats, slope: Floats | None = None) -> None:
        """Make of what the hidden layer says of (N, width) ms above the floor, or below it, in place: (N,). To the `slope` there,
        if any, (N, width), that of the rates is added."""
        ms += vector_sums @ self.skip
        if len(self.used):
            ms += self.beyond(vector_sums, slope)
        ms += self.above_ms

    def beyond(self, vector_sums: Floats, slope: Floats | None = None) -> Floats:
        """What rates add: (N, width) -> (N,) ms, and to the `slope` there, if any, in place."""
        shares, rates = steps(vector_sums, self.used), vector_sums @ self.rates
        if slope is not None:
            slope += shares @ self.rates.T
            slope += (((shares > 0) & (shares < 1)) * rates) @ self._steepness
        shares *= rates
        added: Floats = shares.sum(axis=1)
        return added

    @cached_property
    def _steepness(self) -> Floats:
        """How much of each rate a unit of each component adds where it sets in: (T, width)."""
        steepness = np.zeros(self.rates.shape[::-1])
        steepness[np.arange(len(self.used)), COUNTED_IN[self.used]] = _STEEPNESS[self.used]
        return steepness
