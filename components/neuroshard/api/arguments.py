"""Arguments of the Python API, checked as they come in, and messages in Python's words.

The rooms take checked values; a notebook gives anything: a list where the command line takes text, a NumPy integer, a function in
place of the model that it makes. What can mean only one thing is taken. All else is a UsageError that names the argument.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Set
from functools import wraps
from numbers import Real
from os import PathLike, fspath
from pathlib import Path
from types import FunctionType
from typing import ParamSpec, TypeVar

from neuroshard.core.clean import in_words
from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.core.units import parse_portion
from neuroshard.core.value import shown

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

FilePath = str | PathLike[str]

# Flags of the command line, outside of the commands that a message quotes.
_FLAG_OR_COMMAND = re.compile(r"`neuroshard [^`]*`|(?<![\w-])--([a-z]+(?:-[a-z]+)*)")
_RENAMED = {"from": "previous"}


def public(verb: Callable[P, R]) -> Callable[P, R]:
    """The verb, whose errors and notes name its arguments (`move_budget`) where the rooms name flags (`--move-budget`).

    The command line, which calls verbs inside `in_words(str)`, keeps the flags."""
    parameters = inspect.signature(verb).parameters
    switches = {name for name, parameter in parameters.items() if parameter.default is False}

    def words(text: str) -> str:
        return _FLAG_OR_COMMAND.sub(lambda found: _argument(found, parameters.keys(), switches), text)

    @wraps(verb)
    def called(*arguments: P.args, **options: P.kwargs) -> R:
        with in_words(words) as said:
            try:
                return verb(*arguments, **options)
            except NeuroshardError as error:
                error.args = tuple(said(one) if isinstance(one, str) else one for one in error.args)
                raise

    return called


def _argument(found: re.Match[str], parameters: Set[str], switches: Set[str]) -> str:
    """A flag as the argument that it is in Python; other commands and their flags as they are."""
    name = (found[1] or "").replace("-", "_")
    name = _RENAMED.get(name, name)
    if name not in parameters:
        return found[0]
    return f"{name}=True" if name in switches else name


def path(option: str, value: object) -> Path:
    """A path. Raises UsageError for anything else, an empty one included."""
    return Path(name(option, value, "a path"))


def name(option: str, value: object, what: str) -> str:
    """Text, as `what` it is. Raises UsageError for anything else, empty text included."""
    text = fspath(value) if isinstance(value, PathLike) else value
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise UsageError(f"{option} is {what}, not {shown(value)}{called_instead(value)}")
    return text


def called_instead(value: object) -> str:
    """What to say of a function that is given where what it returns is wanted."""
    return f"; call it: {value.__name__}()" if isinstance(value, FunctionType) else ""


def amounts(option: str, value: object, example: str) -> str:
    """An amount as the command line takes it: text, a number, or several of them, which become text with commas."""
    parts = [*value] if isinstance(value, list | tuple) else [value]
    if not parts or not all(isinstance(part, str) or _is_number(part) for part in parts):
        raise UsageError(f"{option} is an amount, as in {example}, not {shown(value)}")
    return ",".join(map(str, parts))


def number(option: str, value: object) -> float:
    """A number, of Python or NumPy. Raises UsageError."""
    if not _is_number(value):
        raise UsageError(f"{option} is a number, not {shown(value)}")
    try:
        return float(value)  # type: ignore[arg-type]  # seen by _is_number
    except OverflowError:
        raise UsageError(f"{option} is a number, not {shown(value)}") from None


def portion(option: str, value: object) -> float:
    """A share of 1: a number, or text such as "5%". Raises UsageError."""
    if not isinstance(value, str):
        return number(option, value)
    try:
        return parse_portion(value)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)  # NumPy's numbers are registered as such


def whole(option: str, value: object) -> int:
    """A whole number, of Python or NumPy. Raises UsageError."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]  # raises TypeError for what has no __index__
    except TypeError:
        raise UsageError(f"{option} is a whole number, not {shown(value)}") from None


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


def seed(value: object) -> int:
    """A seed that NumPy takes. Raises UsageError."""
    number = whole("seed", value)
    if not 0 <= number < 2**31:
        raise UsageError(f"seed is a whole number from 0 to {2**31 - 1}, not {shown(value)}")
    return number


def maybe(check: Callable[..., T], option: str, value: object, *more: str) -> T | None:
    """What `check` makes of an argument; None where none is given."""
    return None if value is None else check(option, value, *more)
