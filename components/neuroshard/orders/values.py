"""Values of options, of any type, taken or refused in one line that names the option.

A notebook gives anything: a list where the command line takes text, a NumPy integer, a function in place of the model that it
makes. What can mean only one thing is taken. All else is a UsageError.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from os import PathLike, fspath
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from neuroshard.core.errors import UsageError
from neuroshard.core.units import parse_duration, parse_portion
from neuroshard.core.value import shown

T = TypeVar("T")

FilePath = str | PathLike[str]


def path(option: str, value: object) -> Path:
    """A path. Raises UsageError for anything else, an empty one included."""
    return Path(name(option, value, "a path"))


def plan_file(option: str, value: object) -> Path:
    """The path of a plan.json. Raises UsageError for anything else, which is no plan either."""
    if not isinstance(value, str | PathLike):
        raise UsageError(
            f"{option} is a plan that neuroshard.search returned, or the path of a plan.json, not {shown(value)}"
        )
    return path(option, value)


def name(option: str, value: object, what: str) -> str:
    """Text, as `what` it is. Raises UsageError for anything else, empty text included."""
    text = fspath(value) if isinstance(value, PathLike) else value
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise UsageError(f"{option} is {what}, not {shown(value)}{called_instead(value)}")
    return text


def one_of(option: str, value: object, names: Collection[str]) -> str:
    """One of these words. Raises UsageError."""
    if not isinstance(value, str) or value not in names:
        raise UsageError(f"{option} {shown(value)} is none of {', '.join(names)}")
    return value


def called_instead(value: object) -> str:
    """What to say of a function that is given where what it returns is wanted."""
    return f"; call it: {value.__name__}()" if isinstance(value, FunctionType) else ""


def amounts(option: str, value: object, example: str) -> str:
    """An amount as the command line takes it: text, a number, or several of them, which become text with commas."""
    parts = [*value] if isinstance(value, list | tuple) else [value]
    if not parts or not all(isinstance(part, str) or is_number(part) for part in parts):
        raise UsageError(f"{option} is an amount, as in {example}, not {shown(value)}")
    return ",".join(map(str, parts))


def number(option: str, value: object) -> float:
    """A number, of Python or NumPy. Raises UsageError."""
    if not is_number(value):
        raise UsageError(f"{option} is a number, not {shown(value)}")
    try:
        return float(value)  # type: ignore[arg-type]  # seen by _is_number
    except OverflowError:
        raise UsageError(f"{option} is a number, not {shown(value)}") from None


def duration(option: str, value: object) -> float:
    """Seconds: a number of them, or text with its unit such as "2m". Raises UsageError."""
    return parse_duration(f"{value}s" if is_number(value) else name(option, value, "a time, as in '30s'"), option)


def portion(option: str, value: object) -> float:
    """A share of 1: a number, or text such as "5%". Raises UsageError."""
    if not isinstance(value, str):
        return number(option, value)
    try:
        return parse_portion(value)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def is_number(value: object) -> bool:
    """A number of Python or NumPy, whose numbers are registered as such; no True or False."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole(option: str, value: object, least: float | None = None, most: float | None = None) -> int:
    """A whole number, of Python, NumPy or YAML (8.0), from `least` to `most`. Raises UsageError."""
    number = int(value) if is_number(value) and value == value // 1 else None  # type: ignore[operator]
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        bounds = "" if least is None else f" from {least}" if most is None else f" from {least} to {most}"
        raise UsageError(f"{option} is a whole number{bounds}, not {shown(value)}")
    return number


def switch(option: str, value: object) -> bool:
    """True or False. Raises UsageError, since "no" counts as true in Python."""
    if not isinstance(value, bool):
        raise UsageError(f"{option} is True or False, not {shown(value)}")
    return value


def several(option: str, values: object) -> list[str]:
    """A list of texts. Raises UsageError for a single text, whose letters would count as values."""
    if isinstance(values, str | PathLike):
        raise UsageError(f"{option} is a list, as in {option}=[{str(values)!r}], not {shown(values)}")
    if values is None or isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise UsageError(f"{option} is a list of texts, not {shown(values)}")
    listed = [fspath(value) if isinstance(value, PathLike) else value for value in values]
    if wrong := [one for one in listed if not isinstance(one, str)]:
        raise UsageError(f"{option} is a list of texts, and {shown(wrong[0])} in it is none")
    return listed


def refuse(rules: Mapping[str, object]) -> None:
    """Raise UsageError with the first of these lines for which it holds that options contradict each other."""
    if said := next((line for line, wrong in rules.items() if wrong), ""):
        raise UsageError(said)


def maybe(check: Callable[..., T], option: str, value: object, *more: Any) -> T | None:
    """What `check` makes of an argument; None where none is given."""
    return None if value is None else check(option, value, *more)
