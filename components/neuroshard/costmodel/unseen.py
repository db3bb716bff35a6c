"""How tables differ from all that a compute net was trained on, in words. Their predicted costs are extrapolated."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.part import Part
from neuroshard.costmodel.compute_net import FeatureScale
from neuroshard.costmodel.features import FEATURES, SHARE_COLUMNS, part_features

DOUBLINGS: Final = 1.0  # tolerated beyond the measured range of a size, where nets still extrapolate well
SHARE: Final = 0.1  # tolerated beyond the measured range of a share of the lookups


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# Features of sizes, and how to print them.
_SIZES: Final[dict[str, Callable[[float], str]]] = {
    "log2_rows": lambda log2: f"{_number(2**log2)} rows",
    "log2_pooling_factor": lambda log2: f"{_number(max(2**log2 - 1, 0.0))} lookups a sample",
}
# Features of kinds. A net that saw only one kind prices all others like it.
_KINDS: Final[dict[str, Callable[[float], str]]] = {
    "log2_element_bytes": lambda log2: "fp32 elements" if log2 > 1 else "fp16 elements",
    "mean_pooling": lambda mean: (
        "mean pooling" if mean > 0 else "no pooling (sequences)" if mean < 0 else "sum pooling"
    ),
    "shared": lambda shared: "several features that read them" if shared else "one feature that reads them",
    "weighted": lambda weighted: "weighted lookups" if weighted else "lookups without weights",
}


def unlike_trained(scale: FeatureScale, parts: Sequence[Part]) -> tuple[str, ...]:
    """A line for each way in which some parts are outside the range of `scale`, the net's training data. Ignores widths."""
    features = part_features(parts, 1)
    lines = [*_beyond(scale, features, _SIZES), *unlike_in_kind(scale, parts)]
    read = np.array([any(part.table.reuse_bins) for part in parts])
    shares, low_share, high_share = (array[..., SHARE_COLUMNS] for array in (features, scale.low, scale.high))
    otherwise = ((shares < low_share - SHARE) | (shares > high_share + SHARE)).any(axis=1) & read
    if otherwise.any():
        lines.append(f"{_of(otherwise)} rows that repeat more or less often than any that was measured")
    return tuple(f"{line}: their costs are extrapolated" for line in lines)


def unlike_in_kind(scale: FeatureScale, parts: Sequence[Part]) -> tuple[str, ...]:
    """As `unlike_trained`, in kind alone: element type, pooling, weights, and how many features read a table."""
    return _beyond(scale, part_features(parts, 1), _KINDS)


def _beyond(
    scale: FeatureScale, features: NDArray[np.float64], names: dict[str, Callable[[float], str]]
) -> tuple[str, ...]:
    """A line for each of the features `names` of which some values are outside the range of `scale`."""
    lines = []
    for name, said in names.items():
        place, margin = FEATURES.index(name), DOUBLINGS if name in _SIZES else 0.0
        values, there = features[:, place], place < len(scale.low)  # a feature that is newer than the net was 0 then
        low, high = (float(end[place]) if there else 0.0 for end in (scale.low, scale.high))
        for beyond in (values < low - margin, values > high + margin):
            if beyond.any():
                most = float(values[beyond].max() if values[beyond].max() > high else values[beyond].min())
                known = said(low) if low == high else f"{said(low).partition(' ')[0]} to {said(high)}"
                lines.append(f"{_of(beyond)} {said(most)}; what was measured has {known}")
    return tuple(lines)


def _of(some: NDArray[np.bool_]) -> str:
    """How many of the tables, and the verb."""
    return f"{int(some.sum()):,} of {len(some):,} tables {'has' if some.sum() == 1 else 'have'}"
