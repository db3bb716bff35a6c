"""The tables of fields in docs/formats.md, from the types that check the files.

    python docs/fields.py      after a type has changed: names, what they hold and defaults are written anew

A table stands below a comment that names its type, as in `<!-- neuroshard.core.table.Table -->`. Its last column, what a field
means, is written by hand and kept; the bounds there are those that types check by code of their own.
"""

import importlib
import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from neuroshard.core.release import FINGERPRINT, MODEL_NAME
from neuroshard.core.value import TIME, Value
from neuroshard.files.disk import write_bytes

PAGE = Path(__file__).parent / "formats.md"
TABLE = re.compile(r"(?<=<!-- )(neuroshard[\w.]+)( -->\n\n)((?:\|.*\n)*)")
HEAD = "| field | holds | if absent | meaning |\n|---|---|---|---|\n"
PATTERNS = {r"^[0-9a-f]{64}$": "a sha256", FINGERPRINT: "16 hex digits", MODEL_NAME: "a model's name", TIME: "a moment"}
WORDS = {int: "integer", float: "number", str: "text", bool: "boolean", Any: "anything"}


def rendered(page: str) -> str:
    """The page with its tables as the types are."""
    return TABLE.sub(lambda found: found[1] + found[2] + table(of_name(found[1]), meanings(found[3])), page)


def of_name(path: str) -> type[Value]:
    module, _, name = path.rpartition(".")
    found: type[Value] = getattr(importlib.import_module(module), name)
    return found


def meanings(rows: str) -> dict[str, str]:
    """What the table now says of each field."""
    return dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", rows, re.M))


def table(of: type[Value], said: dict[str, str]) -> str:
    fields = [(name, field) for name, field in of.model_fields.items() if name != "format_version"]
    rows = [
        f"| `{name}` | {holds(field.annotation, field.metadata)} | {absent(field)} | {said.get(name, '')} |"
        for name, field in fields
    ]
    return HEAD + "\n".join(rows) + "\n"


def absent(field: FieldInfo) -> str:
    if field.is_required():
        return "refused"
    if field.default_factory is not None or field.default in (None, (), ""):
        return ""
    if isinstance(field.default, float):
        return f"`{field.default:g}`"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def holds(kind: Any, metadata: Iterable[Any] = ()) -> str:
    """A type and its bounds, in words."""
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        return holds(kind, [*metadata, *more])
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(holds(one, metadata) for one in get_args(kind) if one is not types.NoneType)
    if get_origin(kind) is Literal:
        return ", ".join(
            f"`{str(one).lower() if one is True else one}`" if one != "" else "empty" for one in get_args(kind)
        )
    bounds = _bounds(metadata)
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        if others != [...]:
            return f"[{', '.join(holds(one) for one in (first, *others))}]"
        size = _from_to(bounds, "min_length", "max_length")
        return f"list of {holds(first)}{f', {size}' * bool(size)}"
    if get_origin(kind) is dict:
        return f"object of {holds(get_args(kind)[1])}"
    if isinstance(kind, type) and issubclass(kind, Value):
        return kind.__name__
    if "pattern" in bounds:
        return PATTERNS[bounds["pattern"]]
    if kind is str:
        size = _from_to(bounds, "min_length", "max_length")
        return f"text{f', {size} characters' * bool(size)}"
    step = f", a multiple of {bounds['multiple_of']}" if "multiple_of" in bounds else ""
    if kind is int and "gt" in bounds:
        bounds["ge"] = bounds.pop("gt") + 1
    size = _from_to(bounds, "ge", "le")
    return WORDS[kind] + f", {size}" * bool(size) + step


def _bounds(metadata: Iterable[Any]) -> dict[str, Any]:
    """The bounds of a field by their names in pydantic, those of nested ones too."""
    found: dict[str, Any] = {}
    for one in metadata:
        nested = one.metadata if isinstance(one, FieldInfo) else [one]
        for bound in nested:
            found.update({name: value for name in _NAMES if (value := getattr(bound, name, None)) is not None})
    return found


_NAMES = ("ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern")


def _from_to(bounds: dict[str, Any], least: str, most: str) -> str:
    low = f"above {_number(bounds['gt'])}" if "gt" in bounds else ""
    high = f"below {_number(bounds['lt'])}" if "lt" in bounds else ""
    if least in bounds and most in bounds:
        return f"{_number(bounds[least])} to {_number(bounds[most])}"
    low = f"at least {_number(bounds[least])}" if least in bounds else low
    high = f"at most {_number(bounds[most])}" if most in bounds else high
    return " and ".join(filter(None, (low, high)))


def _number(value: float) -> str:
    if value > 2**16 and value == int(value):
        whole = int(value)
        if whole & (whole - 1) == 0:
            return f"2^{whole.bit_length() - 1}"
        if str(whole).rstrip("0") == "1":
            return f"10^{len(str(whole)) - 1}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


if __name__ == "__main__":
    write_bytes(PAGE, rendered(PAGE.read_text()).encode())
