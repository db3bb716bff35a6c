"""How much work something is, counted and not timed: the same on every machine, however slow or busy."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def python_steps(do: Callable[[], Any]) -> int:
    """How many lines of Python `do` runs, a line that runs again counted again. What C code does is one step."""
    steps = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += event == "line"
        return count

    before = sys.gettrace()
    gc.disable()  # hypothesis has a callback of its collections
    sys.settrace(count)
    try:
        do()
    finally:
        sys.settrace(before)
        gc.enable()
    return steps
