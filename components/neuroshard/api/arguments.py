"""What makes a function one of the Python API: messages in Python's words, and the options of a search as its arguments."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Set
from functools import wraps
from typing import ParamSpec, TypeVar

from neuroshard.core.clean import in_words
from neuroshard.core.errors import NeuroshardError
from neuroshard.orders.options import OPTIONS, Option, declared, with_options

P = ParamSpec("P")
R = TypeVar("R")

# Flags of the command line, with an amount if one follows, outside of the commands that a message quotes.
_FLAG_OR_COMMAND = re.compile(r"`neuroshard [^`]*`|(?<![\w-])--([a-z]+(?:-[a-z]+)*)(?: ([0-9][\w.%/@]*))?")
_RENAMED = {option.flag.removeprefix("--"): name for name, option in OPTIONS.items() if option.flag}


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
    name = f"{name}s" if f"{name}s" in parameters else name  # `size` takes a list of what --model names
    if name not in parameters:
        return found[0]
    if found[2]:
        return f"{name}={found[2] if found[2].isdecimal() else repr(found[2])}"
    return f"{name}=True" if name in switches else name


def takes(kind: type, without: Set[str] = frozenset()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The verb, whose `**options` are those that a class declares but `without` these: its signature has each, and its docstring
    says what each does in place of the line OPTIONS."""
    options = [option for name, option in declared(kind).items() if name not in without]

    def described(line: re.Match[str]) -> str:
        return textwrap.indent("\n".join(map(_description, options)), line[1])

    def decorated(verb: Callable[P, R]) -> Callable[P, R]:
        verb.__doc__ = re.sub(r"^( +)OPTIONS$", described, verb.__doc__ or "", flags=re.M)
        vars(verb)["__signature__"] = with_options(inspect.signature(verb), options, lambda option: option.python)
        return verb

    return decorated


def _description(option: Option) -> str:
    """A line of help, with flags as arguments, wrapped."""
    text = _FLAG_OR_COMMAND.sub(lambda found: _argument(found, OPTIONS.keys(), set()), option.help)
    word = "True or False" if option.kind is bool else option.word
    usual = "" if option.default in (None, (), False) else f" [default: {option.default}]"
    return textwrap.fill(
        f"- `{option.name}` ({word}): {text}{usual}", width=115, subsequent_indent="  ", break_on_hyphens=False
    )
