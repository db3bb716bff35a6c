"""What a refusal must say, whatever its sentence: the kind of error, and its subject and values, in one line."""

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
    for fact in map(str, facts):
        end = r"(?!\w|\.\d)" if fact[-1:].isdigit() else r"(?!\w)"
        assert re.search(rf"(?<![\w.]){re.escape(fact)}{end}", message), f"{fact!r} is not named in: {message}"
