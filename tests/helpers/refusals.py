"""What a refusal or a warning must say, whatever its sentence: its kind, its subject and values, in one line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pydantic import ValidationError


@contextmanager
def refused(kind: type[Exception], *facts: object) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """The block raises `kind`, and its message names each fact (a field, a name, a number, an option) as a word of its own.

    The message of an error that users see is one line; pydantic's are lines until they are made one.
    """
    with pytest.raises(kind) as raised:
        yield raised
    message = str(raised.value)
    assert "\n" not in message or issubclass(kind, ValidationError | ValueError), message
    for fact in facts:
        assert names(message, fact), f"{fact!r} is not named in: {message}"


@contextmanager
def warned(kind: type[Warning], *facts: object) -> Iterator[None]:
    """The block warns of `kind`, and one of these warnings names each fact as a word of its own."""
    with pytest.warns(kind) as seen:
        yield
    messages = [str(warning.message) for warning in seen if issubclass(warning.category, kind)]
    assert any(all(names(message, fact) for fact in facts) for message in messages), f"{facts} are not in: {messages}"


def names(message: str, fact: object) -> bool:
    """Whether a message has the fact as a word of its own."""
    word = str(fact)
    end = r"(?!\w|\.\d)" if word[-1:].isdigit() else r"(?!\w)"
    return re.search(rf"(?<![\w.]){re.escape(word)}{end}", message) is not None
