"""The options of `neuroshard report`, declared once. It imports nothing that takes time."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, TypedDict

from neuroshard.orders import values as take
from neuroshard.orders.options import Option
from neuroshard.orders.values import FilePath


class ReportOptions(TypedDict, total=False):
    """What is read beside a plan for its page, as keyword arguments."""

    model: Annotated[
        FilePath | None,
        "The plan's cost model, as for search.",
        Option(partial(take.name, what="the name of a cost model, as in 'analytic:h100'"), "MODEL"),
    ]
    live: Annotated[
        str | None,
        "The plan to compare with: a plan.json, or STORE#MODEL, which may have nothing live.",
        Option(partial(take.name, what="a plan.json, or STORE#MODEL"), "PLAN"),
    ]
    costs: Annotated[
        Sequence[FilePath],
        "Costs that the cost model learned from; may be repeated.",
        Option(lambda name, value: [*map(Path, take.several(name, value))], "FOLDER", (), kind=list[Path]),
    ]
    fleet: Annotated[FilePath | None, "What `neuroshard fleet --json` printed.", Option(Path, "FILE")]
    evaluation: Annotated[FilePath | None, "What `neuroshard evaluate -o` wrote of this plan.", Option(Path, "FILE")]
