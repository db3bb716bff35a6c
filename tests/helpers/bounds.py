"""Every number of a format, by its type: where it is, and values to put there that no format expects, or only just takes."""

import copy
import math
from collections.abc import Iterator
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

ANY = "*"  # in a place: the first key of an object, the first entry of a list
Place = tuple[str, ...]

# Text, true and null too: what is no number at all. 2^40 and 65,536 are bounds that rules of tables have
HOSTILE: tuple[Any, ...] = (
    *(-1, 0, 1, 2**31, 2**40, 2**40 + 1, 2**53 + 1, 2**62, 2**63, 10**25, 10**149, 10**400),
    *(65_536, 65_540, 0.5, -1e308, 1e308, 1e-320, math.nan, math.inf, True, "12", None),
)


def numbers_of(kind: Any, place: Place = (), metadata: tuple[Any, ...] = ()) -> Iterator[tuple[Place, tuple[Any, ...]]]:
    """The places of all numbers that a value of this type may hold, each with the limits of its type.

    Numbers inside a dict of anything (`dict[str, Any]`) are not found, nor those of a type that contains itself.
    """
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield from numbers_of(field.annotation, (*place, name), tuple(field.metadata))
    elif kind in (int, float):
        yield place, metadata
    elif get_origin(kind) is Annotated:
        inner, *more = get_args(kind)
        flat = [limit for one in more for limit in (one.metadata if isinstance(one, FieldInfo) else (one,))]
        yield from numbers_of(inner, place, (*metadata, *flat))
    elif get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from numbers_of(one, place, metadata)
    elif get_origin(kind) is tuple or get_origin(kind) is list:
        yield from numbers_of(get_args(kind)[0], (*place, ANY))
    elif get_origin(kind) is dict:
        yield from numbers_of(get_args(kind)[1], (*place, ANY))


def at_its_limits(metadata: tuple[Any, ...]) -> Iterator[float]:
    """The limits of a number, and the next numbers on both sides."""
    for limit in metadata:
        for kind, name in ((Ge, "ge"), (Gt, "gt"), (Le, "le"), (Lt, "lt")):
            if isinstance(limit, kind):
                bound = getattr(limit, name)
                yield from (bound, bound - 1, bound + 1)
                if isinstance(bound, float):
                    yield from (math.nextafter(bound, -math.inf), math.nextafter(bound, math.inf))


def with_number(data: Any, place: Place, value: Any) -> Any:
    """The data with that value at a place; all numbers of a list at once, so that its other rules hold.

    Raises LookupError where the data have nothing that holds such a number: then the test needs richer data.
    """
    copied = inner = copy.deepcopy(data)
    for key, below in pairwise(place):
        inner = inner[_first_with(inner, below) if key == ANY else key]
    for key in _keys(inner) if place[-1] == ANY else (place[-1],):
        inner[key] = value
    return copied


def _first_with(inner: Any, below: str) -> Any:
    """The key of the first of several objects that has something `below`, or of the first."""
    keys = _keys(inner)
    return next((key for key in keys if isinstance(inner[key], dict) and below in inner[key]), keys[0])


def _keys(inner: Any) -> tuple[Any, ...]:
    """The keys of an object, or the places of a list; at least one."""
    keys = tuple(inner if isinstance(inner, dict) else range(len(inner)))
    if not keys:
        raise LookupError(f"nothing is in {inner}")
    return keys


def drawn(kind: Any, data: Any) -> Iterator[tuple[str, Any]]:
    """`data` of a type with each of its numbers replaced by each hostile value; what was replaced, in words, comes with it."""
    for place, metadata in numbers_of(kind):
        for value in (*HOSTILE, *at_its_limits(metadata)):
            shown = str(value) if len(str(value)) < 30 else f"{str(value)[:8]}… of {len(str(value))}"
            yield f"{'.'.join(place)} = {shown}", with_number(data, place, value)


def values_in(kind: Any) -> Iterator[type[BaseModel]]:
    """The types with fields that a value of this type holds, itself among them."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
        for field in kind.model_fields.values():
            yield from values_in(field.annotation)
    else:
        for one in get_args(kind):
            yield from values_in(one)
