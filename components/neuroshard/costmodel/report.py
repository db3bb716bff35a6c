"""How far a cost model can be trusted: its errors on cases it never saw, beside the noise of the labels themselves."""

from textwrap import wrap
from typing import Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from neuroshard.core.case import Split
from neuroshard.core.text import counted
from neuroshard.core.value import Value

# Tables in a set, from and to: few, some, many, and beyond what the paper measured.
SET_SIZES: Final[tuple[tuple[int, int | None], ...]] = ((1, 3), (4, 8), (9, 15), (16, None))

STAND_IN_ERROR: Final = 0.3  # of a part that was not learned: the analytic model's own spread
FAR_OFF: Final = 0.5  # mean error on unseen tables, beyond which a plan says so


class Errors(Value):
    """Predicted against measured milliseconds. What cannot be told from so few values is None, never NaN."""

    values: int  # sets of tables, or devices of all-to-alls
    mse: float  # ms²
    mape: float  # mean |predicted / measured - 1|
    r2: float | None
    kendall_tau: float | None  # tau-b: how alike predicted and measured rank


class Noise(Value):
    """Cases measured again later, against their labels: no model can be far below."""

    values: int
    mape: float


class SizeError(Value):
    """Error on unseen sets and unseen tables together, of those with `fewest` to `most` tables, or more."""

    fewest: int
    most: int | None
    values: int
    mape: float

    @property
    def name(self) -> str:
        return f"{self.fewest} or more tables" if self.most is None else f"{self.fewest}-{self.most} tables"


class Coverage(Value):
    """How often the measured value lay within one predicted standard deviation.

    It is fitted to hold 68 % of the errors of the least sure of five kinds of cases, since the devices of a plan are alike; of
    all kinds together it holds more, 70 to 80 %. It was fitted to `test_sets` among others, so the share of `test_tables` is
    the test.
    """

    values: int
    share: float
    spread: float  # the median of what was predicted, as a share of the cost


class Fit(Value):
    """How a training went. Epochs count from 1; the net is that of the best, by the error on the `valid_cases`.

    `train_errors` and `valid_errors` have a value an epoch: mean |log(predicted / measured)|, of the nets one by one while they
    learned, and of their mean after the epoch. Cost models of before there were any have none.
    """

    train_cases: int
    valid_cases: int
    epochs: int
    best_epoch: int
    train_errors: tuple[float, ...] = ()
    valid_errors: tuple[float, ...] = ()

    @model_serializer(mode="wrap")
    def _say_no_more_than_needed(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        told: dict[str, Any] = fields(self)
        return {name: value for name, value in told.items() if value or not name.endswith("_errors")}


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


class Report(Value):
    """All nets of a cost model, how many rows were left out (their case met an error, or took no time), and what is missing.

    `stand_ins` has a sentence for each part of which too little was measured: its costs are the analytic model's, scaled.
    `compute_stands_in` says whether table sets are such a part.
    """

    nets: tuple[NetReport, ...]
    left_out: int = 0
    gaps: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()
    compute_stands_in: bool = False

    @property
    def unseen_tables_error(self) -> float | None:
        """MAPE of compute on sets of tables that it never saw; None where none was measured. Of costs that stand in at least
        STAND_IN_ERROR."""
        errors = [net.splits.get("test_tables") for net in self.nets if net.kind == "compute"]
        found = errors[0].mape if errors and errors[0] else None
        return max(found or 0.0, STAND_IN_ERROR) if self.compute_stands_in else found

    @property
    def uncertainty(self) -> float | None:
        """How far off a plan's cost may be, as a share: at least STAND_IN_ERROR where a part stands in."""
        error = self.unseen_tables_error
        return max(error or 0.0, STAND_IN_ERROR) if self.stand_ins else error

    @property
    def doubts(self) -> tuple[str, ...]:
        """What a plan should say of its cost model: that it was not tested on unseen tables, or is far off there."""
        told = []
        for net in (net for net in self.nets if net.kind == "compute"):
            errors, learned = net.splits.get("test_tables"), counted(net.fit.train_cases, "set")
            if errors is None:
                told.append(
                    f"the cost model was tested on no table that is new to it; it learned from {learned} of tables"
                )
            elif errors.mape > FAR_OFF:
                told.append(
                    f"the cost model is {errors.mape:,.0%} off for tables that are new to it; measure more cases"
                )
        return tuple(told)

    def text(self) -> str:
        """The report in lines of at most 80 columns. Errors are of predicted against measured ms, on cases held back."""
        lines = ["error on cases held back       values     MAPE       R2      tau        MSE/ms2"]
        for net in self.nets:
            lines += _net_lines(net)
        notes = [f"stand-in: {part}; measure more cases to learn it" for part in self.stand_ins]
        notes += [f"note: {gap}" for gap in self.gaps]
        if self.left_out:
            notes.append(
                f"note: {self.left_out:,} measured rows were left out: their case met an error, as out of memory, or took 0 ms"
            )
        return "\n".join([*lines, *(part for note in notes for part in wrap(note, 80, subsequent_indent="  "))])

    def metrics(self) -> dict[str, float]:
        """The figures worth a line in a run's overview: MAPE a net and split, and of the labels themselves."""
        found: dict[str, float] = {}
        for net in self.nets:
            name = net.name.replace(", ", " ").replace(" ", "_").replace("-", "_")
            found |= {f"{name}_mape_{split}": errors.mape for split, errors in net.splits.items() if errors}
            found |= {f"{name}_covered_{split}": covered.share for split, covered in net.coverage.items()}
            if net.label_noise is not None:
                found[f"{name}_label_noise"] = net.label_noise.mape
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
        told = f"+-{covered.spread:.1%} holds {covered.share:.0%} of"
        lines.append(f"    {told:<26}{covered.values:>7,}  {_SPLITS.get(split, split)}")
    for size in net.by_size:
        lines.append(f"    {size.name:<26}{size.values:>7,}  {size.mape:>7.1%}")
    if net.label_noise is None:
        lines.append("  label noise                 unknown: no case was measured twice")
    else:
        lines.append(f"  {'measuring again (noise)':<28}{net.label_noise.values:>7,}  {net.label_noise.mape:>7.1%}")
    return lines


def _figures(errors: Errors) -> str:
    r2, tau = ("-" if value is None else f"{value:.3f}" for value in (errors.r2, errors.kendall_tau))
    return f"{errors.values:>7,}  {errors.mape:>7.1%}  {r2:>7}  {tau:>7}  {errors.mse:>13.5g}"
