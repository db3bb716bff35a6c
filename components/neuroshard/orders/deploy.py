"""The options of `neuroshard deploy`, declared once."""

from functools import partial
from typing import Annotated, TypedDict

from neuroshard.orders import values as take
from neuroshard.orders.options import Option
from neuroshard.orders.values import FilePath

_share = partial(Option, take.portion, "SHARE")


class DeployOptions(TypedDict, total=False):
    """What the gate is given beside a plan, as keyword arguments."""

    model: Annotated[
        FilePath | None,
        "The plan's cost model, as for search, to price the live plan on the plan's own tables.",
        Option(partial(take.name, what="the name of a cost model, as in 'analytic:h100'"), "MODEL", field="cost_model"),
    ]
    memory_margin: Annotated[str | float, "Share of a device's memory to leave free.", _share(0.0)]
    max_error: Annotated[str | float | None, "Largest error of its cost model on unseen tables: 0.1 is 10 %.", _share()]
    min_gain: Annotated[
        str | float | None,
        "Share by which it must be better than the live plan [default: its cost model's error, at least 30 % for a datasheet or "
        "a fallback].",
        _share(),
    ]
    force: Annotated[
        bool,
        "Go live whatever the gate finds; the release says so.",
        Option(bool, default=False, flag="--force/--no-force"),
    ]
    single_writer: Annotated[
        bool,
        "Nobody else deploys: accept a store that ignores conditional writes.",
        Option(bool, default=False, flag="--single-writer/--no-single-writer"),
    ]
