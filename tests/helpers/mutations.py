"""Damaged files: what a bad disk, a bad network, a careless hand or an attacker makes of good ones."""

import json
import random
from typing import Any

TOKENS = (
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"null", b"true", b"NaN", b"Infinity", b"-1", b"1e999", b"1e-999", b"0.5",
    b"99999999999999999999", b"-0", b"\x00", b"\xff", b"\xed\xa0\x80", b'"\\ud800"', b"[" * 2000, b'{"a":' * 2000, b"9" * 5000,
    b"\xef\xbb\xbf", b"  ", b"\n", b"../", b'"a"' * 50,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 3, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, 1e308, -1e308, 1e-320, "", "a", "\x00", "\n", "\ud800",
    "../..", "a" * 10_000, [], {}, [None], [[]], {"": None}, [0] * 5000,
)  # fmt: skip


NOTHING = object()


def mutated(data: bytes, rng: random.Random, value: Any = NOTHING) -> bytes:
    """`data` with one to four faults: of bits, bytes, tokens, or of values in its JSON; `value`, if given, is one of them.

    `rng` may be one of Hypothesis's, which then chooses and shrinks the faults.
    """
    if value is not NOTHING:
        data = _value(data, rng, (value,))
    for _ in range(rng.randint(1 if value is NOTHING else 0, 4)):
        data = rng.choice((_flip, _cut, _insert, _copy, _truncate, _value, _value, _value))(data, rng)
    return data


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return data
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    first = rng.randrange(len(data) + 1)
    return first, min(len(data), first + rng.choice((1, 2, 8, 64)))


def _cut(data: bytes, rng: random.Random) -> bytes:
    first, end = _span(data, rng)
    return data[:first] + data[end:]


def _insert(data: bytes, rng: random.Random) -> bytes:
    first, end = _span(data, rng)
    return data[:first] + rng.choice(TOKENS) + data[rng.choice((first, end)) :]


def _copy(data: bytes, rng: random.Random) -> bytes:
    first, end = _span(data, rng)
    place = rng.randrange(len(data) + 1)
    return data[:place] + data[first:end] + data[place:]


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _value(data: bytes, rng: random.Random, values: tuple[Any, ...] = VALUES) -> bytes:
    """Another value somewhere in the JSON, a key more, or one less."""
    try:
        root = json.loads(data)
    except (ValueError, RecursionError):
        return data
    holder, key = _place(root, rng)
    if holder is None:
        return json.dumps(rng.choice(values)).encode()
    action = rng.randrange(4) if values is VALUES else 3
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, list):
        holder.insert(key, holder[rng.randrange(len(holder))])
    elif action == 2 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] += rng.choice((-4, -1, 1, 4, 1000))
    else:
        holder[key] = rng.choice(values)
    return json.dumps(root).encode()


def _place(node: Any, rng: random.Random) -> tuple[Any, Any]:
    """Some container in the tree, and one of its keys; (None, None) where the root is none."""
    found: tuple[Any, Any] = (None, None)
    while isinstance(node, dict | list) and node:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        found = (node, key)
        node = node[key]
        if rng.random() < 0.3:
            break
    return found
