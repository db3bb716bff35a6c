"""How far a cost model can be trusted: its errors on held-out cases, and the noise of the labels, which no model can beat."""

from textwrap import wrap
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from neuroshard.core.case import Split
from neuroshard.core.text import counted
from neuroshard.core.tiers import TIERS, BeyondHbmTier
from neuroshard.core.value import SparseValue, Value

# Tables in a set, from and to: few, some, many, and beyond what the paper measured.
SET_SIZES: Final[tuple[tuple[int, int | None], ...]] = ((1, 3), (4, 8), (9, 15), (16, None))

STAND_IN_ERROR: Final = 0.3  # relative error of the analytic model, for parts that were not learned
FAR_OFF: Final = 0.5  # mean error on unseen tables above which a plan carries a note


class Errors(Value):
    """Errors of predicted against measured milliseconds. A statistic that needs more values is None, never NaN."""

    values: int  # sets of tables, or devices of all-to-alls
    mse: float  # ms²
    mape: float  # mean |predicted / measured - 1|
    r2: float | None
    kendall_tau: float | None  # tau-b: agreement of the two rankings


class Noise(Value):
    """Cases measured again later, against their labels. No model can do much better."""

    values: int
    mape: float


class SizeError(Value):
    """Error on unseen sets and unseen tables together, for sets of `fewest` to `most` tables (None: no limit)."""

    fewest: int
    most: int | None
    values: int
    mape: float

    @property
    def name(self) -> str:
        return f"{self.fewest} or more tables" if self.most is None else f"{self.fewest}-{self.most} tables"


class Coverage(SparseValue):
    """How often the measured value was within one predicted deviation, which should hold 68 %, and within `two`, 95 %.

    Each case is tested with deviations scaled on cases that have none of its tables. Older versions did not predict `two`, and
    scaled one on cases of other splits.
    """

    UNSAID: ClassVar = ("two_share", "two_spread")

    values: int
    share: float
    spread: float  # the median of what was predicted, as a share of the cost
    two_share: float | None = None
    two_spread: float | None = None


class Deviations(Value):
    """What the nets' own deviations of compute lack: `least_ms`, which matters where a set takes little time, and how many
    deviations hold 95 % of the errors (`two`)."""

    least_ms: Annotated[float, Field(ge=0)]
    two: Annotated[float, Field(ge=1)]


class Fit(Value):
    """The course of a training. Epochs count from 1; the weights are those of `best_epoch`, the best on the `valid_cases`.

    `train_errors` and `valid_errors` have one value an epoch, mean |log(predicted / measured)|: of single members during the
    epoch, and of their mean after it.
    """

    train_cases: int
    valid_cases: int
    epochs: int
    best_epoch: int
    train_errors: tuple[float, ...] = ()
    valid_errors: tuple[float, ...] = ()


class NetReport(Value):
    """One net: how it was trained, and its errors a split. `devices` is None for the compute net."""

    kind: Literal["compute", "forward all-to-all", "backward all-to-all"]
    devices: int | None = None
    fit: Fit
    splits: dict[Split, Errors | None]
    by_size: tuple[SizeError, ...] = ()
    coverage: dict[Split, Coverage] = Field(default_factory=dict)
    label_noise: Noise | None = None  # None where no case was measured twice

    @property
    def name(self) -> str:
        return self.kind if self.devices is None else f"{self.kind}, {self.devices} devices"


class TierErrors(Value):
    """Tables in a tier beyond HBM: how many cases the constants were fitted to, and how far they are off on `values` others.

    `mape` is the mean |predicted / measured - 1| of forward and backward, `datasheet_mape` that of the datasheet that the
    constants replace; None without such cases, or where the datasheet states no bus.
    """

    train_cases: int
    values: int
    mape: float | None
    datasheet_mape: float | None = None


class ModelReport(SparseValue):
    """Reports of all nets, the number of rows `left_out` of training (an error, or 0 ms), and the `gaps`: what is missing.

    `stand_ins` has a sentence for each part of which too little was measured; the fitted analytic model answers for it.
    `compute_stands_in` is true if table sets are such a part. `datasheet_better` has one for each part that it answers for since
    it predicts cases held back better than the net. `tiers` are empty where nothing beyond HBM was learned.
    `deviations` is None of a model by an older version, whose own were scaled without tables that training never saw.
    """

    UNSAID: ClassVar = ("datasheet_better", "tiers", "deviations")

    nets: tuple[NetReport, ...]
    left_out: int = 0
    gaps: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()
    compute_stands_in: bool = False
    datasheet_better: tuple[str, ...] = ()
    tiers: dict[BeyondHbmTier, TierErrors] = Field(default_factory=dict)
    deviations: Deviations | None = None

    @property
    def unseen_tables_error(self) -> float | None:
        """MAPE of compute on tables that were not in training; None if none was measured. At least STAND_IN_ERROR if the analytic
        model stands in for compute."""
        errors = [net.splits.get("test_tables") for net in self.nets if net.kind == "compute"]
        found = errors[0].mape if errors and errors[0] else None
        return max(found or 0.0, STAND_IN_ERROR) if self.compute_stands_in else found

    @property
    def uncertainty(self) -> float | None:
        """The possible error of a plan's cost, as a share: `unseen_tables_error`, at least STAND_IN_ERROR with a stand-in."""
        error = self.unseen_tables_error
        return max(error or 0.0, STAND_IN_ERROR) if self.stand_ins else error

    @property
    def doubts(self) -> tuple[str, ...]:
        """Notes for a plan: where a datasheet answers; the cost model was not tested on unseen tables, or is far off there."""
        notes = list(self.datasheet_better)
        for net in (net for net in self.nets if net.kind == "compute"):
            errors, learned = net.splits.get("test_tables"), counted(net.fit.train_cases, "set")
            if errors is None:
                notes.append(
                    f"the cost model was not tested on tables that it never saw; it learned from {learned} of tables"
                )
            elif errors.mape > FAR_OFF:
                notes.append(
                    f"the cost model's error on tables that it never saw is {errors.mape:,.0%}; measure more cases"
                )
        return tuple(notes)

    def text(self) -> str:
        """The report in lines of at most 80 columns."""
        lines = ["error on cases held back       values     MAPE       R2      tau        MSE/ms2"]
        for net in self.nets:
            lines += _net_lines(net)
        if self.tiers:
            lines += [
                "beyond HBM, measured beside the same tables in HBM",
                *map(_tier_line, sorted(self.tiers.items())),
            ]
        notes = [f"stand-in: {part}; measure more cases to learn it" for part in self.stand_ins]
        notes += [f"note: {line}" for line in (*self.datasheet_better, *self.gaps)]
        if self.left_out:
            notes.append(
                f"note: {self.left_out:,} measured rows were left out: their case failed (out of memory, say) or took 0 ms"
            )
        return "\n".join([*lines, *(part for note in notes for part in wrap(note, 80, subsequent_indent="  "))])

    def metrics(self) -> dict[str, float]:
        """The figures for a run's overview: MAPE, coverage and label noise of each net and split."""
        found: dict[str, float] = {}
        for net in self.nets:
            name = net.name.replace(", ", " ").replace(" ", "_").replace("-", "_")
            found |= {f"{name}_mape_{split}": errors.mape for split, errors in net.splits.items() if errors}
            found |= {f"{name}_covered_{split}": covered.share for split, covered in net.coverage.items()}
            if net.label_noise is not None:
                found[f"{name}_label_noise"] = net.label_noise.mape
        found |= {f"beyond_hbm_{tier}_mape": one.mape for tier, one in self.tiers.items() if one.mape is not None}
        return found


_SPLITS: dict[Split, str] = {"test_sets": "unseen sets", "test_tables": "unseen tables"}


def _net_lines(net: NetReport) -> list[str]:
    lines = [f"{net.name} ({net.fit.train_cases:,} training cases, epoch {net.fit.best_epoch} of {net.fit.epochs})"]
    for split, label in _SPLITS.items():
        if split not in net.splits:
            continue
        errors = net.splits[split]
        lines.append(f"  {label:<28}{_figures(errors) if errors else 'no case of this split was measured'}")
    for split, covered in net.coverage.items():
        both = [(covered.spread, covered.share)]
        if covered.two_spread is not None and covered.two_share is not None:
            both.append((covered.two_spread, covered.two_share))
        for spread, share in both:
            interval = f"+-{spread:.1%} holds {share:.0%} of"
            lines.append(f"    {interval:<26}{covered.values:>7,}  {_SPLITS.get(split, split)}")
    for size in net.by_size:
        lines.append(f"    {size.name:<26}{size.values:>7,}  {size.mape:>7.1%}")
    if net.label_noise is None:
        lines.append("  label noise                 unknown: no case was measured twice")
    else:
        lines.append(f"  {'measuring again (noise)':<28}{net.label_noise.values:>7,}  {net.label_noise.mape:>7.1%}")
    return lines


def _tier_line(of_tier: tuple[BeyondHbmTier, TierErrors]) -> str:
    tier, errors = of_tier
    name = f"  {TIERS[tier].words} ({counted(errors.train_cases, 'case')})"
    if errors.mape is None:
        return f"{name:<30}no case was held out"
    sheet = "" if errors.datasheet_mape is None else f"  by the datasheet {errors.datasheet_mape:.1%}"
    return f"{name:<30}{errors.values:>7,}  {errors.mape:>7.1%}{sheet}"


def _figures(errors: Errors) -> str:
    r2, tau = ("-" if value is None else f"{value:.3f}" for value in (errors.r2, errors.kendall_tau))
    return f"{errors.values:>7,}  {errors.mape:>7.1%}  {r2:>7}  {tau:>7}  {errors.mse:>13.5g}"
