"""What every data type shares: frozen, checked once, read from and written to JSON with errors of one line."""

import hashlib
import json
import operator
import re
from collections import Counter
from collections.abc import Collection
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, ClassVar, Self, SupportsIndex

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    Strict,
    ValidationError,
    model_serializer,
)

from neuroshard.core.errors import InvalidInput, NewerFormat, UsageError

MOST_DIGITS = 150  # of a whole number: fields have bounds of their own, which name them
_LONG = re.compile(rb"[0-9]{150}")


def _written_as(kind: str) -> BeforeValidator:
    """Refuses what pydantic would take for a number: true for 1, "8" for 8."""

    def refuse(value: Any) -> Any:
        if isinstance(value, bool | str):
            raise ValueError(f"must be a {kind}, not {str(value).lower() if isinstance(value, bool) else shown(value)}")
        return value

    return BeforeValidator(refuse)


# For files that people write. Files that only programs write are not checked so strictly, which would take time
Whole = Annotated[int, _written_as("whole number")]
Number = Annotated[float, _written_as("number")]
Switch = Annotated[bool, Strict()]  # pydantic would take "no" and 0 for false

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$"


def _of_the_calendar(time: str) -> str:
    try:
        datetime.fromisoformat(time)
    except ValueError as error:
        raise ValueError(f"is {time}, which is no moment: {error}") from None
    return time


Moment = Annotated[str, Field(pattern=TIME), AfterValidator(_of_the_calendar)]  # in UTC, ISO 8601


def whole_number(name: str, value: object) -> int:
    """An argument of a trainer that is a number of something; NumPy's are taken too. Raises UsageError."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        hint = "; what the environment says is text: give int(…) of it" if isinstance(value, str) else ""
        raise UsageError(f"{name} is {shown(value)}, which is no whole number{hint}")
    return operator.index(value)


def timestamp(now: datetime) -> str:
    """The moment as files have it."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Value(BaseModel):
    """A frozen pydantic model. Unknown keys are ignored, so that files may carry more than we read."""

    # built at its first use: a trainer that imports the client uses few of them, and pydantic looks for plugins in every package
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, defer_build=True)

    @classmethod
    def parse(cls, data: Any, where: str) -> Self:
        """`data` (decoded JSON) as a value. Raises InvalidInput in one line that starts with `where`."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InvalidInput(f"{where}: {explain(error)}") from None

    def canonical_json(self) -> bytes:
        """The same value always gives the same bytes: sorted keys, no spaces, UTF-8."""
        return canonical_json(self.model_dump(mode="json"))

    def digest(self) -> str:
        """sha256 of the canonical JSON, as 64 hex digits."""
        return sha256(self.canonical_json())


class SparseValue(Value):
    """A value whose fields in `UNSAID` are written only where they have another value than their default."""

    UNSAID: ClassVar[Collection[str]] = ()

    @model_serializer(mode="wrap")
    def _without_defaults(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = fields(self)
        for name, default in _defaults(type(self)).items():
            if getattr(self, name) == default:
                data.pop(name, None)
        return data


@cache
def _defaults(kind: type[SparseValue]) -> dict[str, Any]:
    return {name: kind.model_fields[name].get_default(call_default_factory=True) for name in kind.UNSAID}


def canonical_json(data: Any) -> bytes:
    """JSON with sorted keys and no spaces. NaN and infinities are refused (ValueError): they are not JSON."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def decode_json(data: bytes, where: str) -> Any:
    """Bytes of a JSON file as Python values. Raises InvalidInput that names `where` and the place of the fault."""
    try:
        # decoded here, since json.loads might take bytes for UTF-16
        parse_int = _whole if _LONG.search(data) else None
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_distinct, parse_int=parse_int)
        if b"\\" in data:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise InvalidInput(f"{where}: not usable JSON: half a surrogate pair (\\ud800 or the like)") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{where}: not UTF-8 text (byte {error.start}); if it is JSON, save it as UTF-8") from None
    except json.JSONDecodeError as error:
        end = _way_out(error)
        raise InvalidInput(f"{where}: not JSON: {error.msg} at line {error.lineno} column {error.colno}{end}") from None
    except RecursionError:
        raise InvalidInput(f"{where}: not usable JSON: nested too deep") from None
    except ValueError as error:  # a key twice, or a whole number that nothing is as large as
        raise InvalidInput(f"{where}: not usable JSON: {error}") from None


def _way_out(error: json.JSONDecodeError) -> str:
    """What is wrong with text that is not JSON, where that is plain; empty where it is not."""
    before, after = error.doc[: error.pos].rstrip(), error.doc[error.pos :].lstrip()
    if not error.doc.strip():
        return "; it is empty"
    if not after or error.msg.startswith("Unterminated string"):
        return "; the file is cut off"
    if after.startswith(("//", "/*", "#")):
        return "; JSON has no comments: take them out"
    if error.msg == "Extra data" and after[0] in "{[":
        return "; one value a line is not read: make it a list, [ … , … ]"
    return "; take out the comma after the last value" if before.endswith(",") and after[0] in "]}" else ""


def _whole(text: str) -> int:
    """A whole number of JSON. Raises ValueError where it has so many digits that no float may be as large as its products."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"{shown(text, 30)} is a whole number of {len(text)} digits; at most {MOST_DIGITS}")
    return int(text)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these keys. Raises ValueError where one occurs twice: Python would let the last win."""
    value = dict(pairs)
    if len(value) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        first, second = [one for key, one in pairs if key == twice][:2]
        raise ValueError(
            f"the key {shown(twice)} is there twice in one object, as {shown(first, 30)} and {shown(second, 30)}; leave one"
        )
    return value


def check_format(data: Any, newest: int, where: str) -> dict[str, Any]:
    """`data` as a JSON object whose `format_version` (1 if absent) we can read. Raises NewerFormat, InvalidInput."""
    if not isinstance(data, dict):
        raise InvalidInput(f"{where}: expected a JSON object, found {type(data).__name__}")
    version = data.get("format_version", 1)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidInput(f"{where}: format_version is {shown(version)}, not a positive whole number")
    if version > newest:
        raise NewerFormat(
            f"{where}: format_version {version} is from a newer neuroshard; this one reads up to {newest}: upgrade it"
        )
    return data


# pydantic's errors that speak of Python types, in words for people who write JSON
_PLAIN = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller whole number",
    "int_type": "must be a whole number",
    "model_type": "must be an object",
    "string_type": "must be text",
    "tuple_type": "must be a list",
}


def explain(error: ValidationError) -> str:
    """The first fault of a pydantic error as one line: `tables[3].dim: must be a multiple of 4, not 6`."""
    fault = error.errors(include_url=False)[0]
    place = ""
    for step in fault["loc"]:
        place += f"[{step}]" if isinstance(step, int) else f".{step}" if place else str(step)
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "missing":
        message = "is missing"
    elif fault["type"] == "too_short" and not fault["ctx"]["actual_length"]:
        message = "is empty"
    elif fault["type"] != "value_error":  # our own rules already carry the value
        message = _PLAIN.get(fault["type"], message.replace("Input should be", "must be"))
        message = f"{message[:1].lower()}{message[1:]}, not {shown(fault['input'])}"
    more = error.error_count() - 1
    suffix = f" (and {more} more)" if more else ""
    return f"{place}: {message}{suffix}" if place else f"{message}{suffix}"


def shown(value: Any, limit: int = 60) -> str:
    """repr of a value, cut to `limit` characters, without line breaks."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _one_line(text: str) -> str:
    if any(not char.isprintable() for char in text):
        raise ValueError(f"must be one line without control characters, not {shown(text)}")
    return text


Source = Annotated[str, Field(max_length=200), AfterValidator(_one_line)]  # what something was counted on
