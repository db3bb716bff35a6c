"""How far access has drifted from the row orders of the live plan, and how many hot rows two plans share."""

from typing import TYPE_CHECKING

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NotFound
from neuroshard.core.plan import Plan

if TYPE_CHECKING:
    from neuroshard.files.row_orders import ReadIds


def with_drift(live: Plan | None, plan: Plan, read: "ReadIds") -> tuple[Plan | None, tuple[str, ...]]:
    """The live plan with what the hottest rows of its row orders have of the lookups now, by the newer orders of a plan; and
    lines on those that access has drifted from. A note says where that is not known."""
    if live is None or not live.held.orders:
        return live, ()
    from neuroshard.files.row_orders import as_now  # NumPy, which other plans do not need

    try:
        task, found = as_now(live.held, plan.held, read)
    except (NotFound, InvalidInput) as error:
        log(f"note: whether access has drifted from the live plan's row orders is not known: {error}")
        return live, ()
    lines = tuple(f"the live plan's {drift.text}" for drift in found if drift.is_large)
    return live.named.model_copy(update={"task": task}), lines
