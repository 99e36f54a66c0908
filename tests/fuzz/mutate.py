"""Mutations of files: of what they say, and of their bytes. The same seed gives the same file."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from typing import Any

WORDS = [
    "",
    " ",
    "a",
    "nodes",
    "cpu",
    "cuda:0",
    "é\u202e\U0001f600",
    "\ud800",
    "\0",
    "x" * 5000,
    "-oProxyCommand=x",
    "../..",
    "1e5",
    "null",
]
NUMBERS: list[Any] = [
    0,
    -1,
    1,
    2,
    3,
    10**18,
    10**400,
    -(10**30),
    0.5,
    -0.0,
    1e-320,
    5e-324,
    1e308,
    1e18,
    2**63,
    1.7976931348623157e308,
]
ODD = [float("nan"), float("inf"), float("-inf")]


def odd_value(rng: random.Random) -> Any:
    """Anything."""
    kind = rng.randrange(9)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind == 3:
        return rng.choice(ODD)
    if kind == 4:
        return rng.choice(WORDS)
    if kind == 5:
        return rng.choice([None, True, False])
    if kind == 6:
        return rng.choice([[], {}, [[]], [None], {"": None}, [1, "a"], {"kind": "skyctl/plan"}])
    if kind == 7:
        deep: Any = rng.choice([1, "x", None])
        for _ in range(rng.choice([3, 50, 400])):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        return deep
    return [rng.choice(NUMBERS)] * rng.choice([2, 7, 60])


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Every key and item of a document."""
    found = [path]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        found += places(item, (*path, key))
    return found


def at(document: Any, path: tuple) -> Any:
    for part in path:
        document = document[part]
    return document


def _near(value: Any, rng: random.Random) -> Any:
    """A value of the same kind: what passes the types and goes deeper."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([0, 1, value + 1, max(0, value - 1), value * 3, -value, 10**6, 10**12])
    if isinstance(value, float):
        factor = rng.choice([0.0, 1e-12, 1e-3, 0.5, 2.0, 1e3, 1e12, -1.0, 1e200, 1e-300])
        return value * factor
    if isinstance(value, str):
        return rng.choice([value + "x", value[:-1], value.upper(), value * 2, "", rng.choice(WORDS)])
    return odd_value(rng)


def structural(document: Any, rng: random.Random, times: int) -> Any:
    """Some keys and items dropped, doubled, renamed, swapped, or given another value."""
    document = copy.deepcopy(document)
    for _ in range(times):
        paths = [path for path in places(document) if path]
        if not paths:
            return odd_value(rng)
        path = rng.choice(paths)
        parent, key = at(document, path[:-1]), path[-1]
        action = rng.randrange(8)
        if action == 0:
            del parent[key]
        elif action == 1 and isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
        elif action == 2 and isinstance(parent, dict):
            parent[rng.choice([f"{key}s", key[:-1], key.upper(), *WORDS])] = parent.pop(key)
        elif action == 3:
            other = rng.choice(paths)
            with contextlib.suppress(RecursionError):  # an odd value may be as deep as that
                parent[key] = copy.deepcopy(at(document, other))
        elif action == 4:
            parent[key] = odd_value(rng)
        elif action == 5 and isinstance(parent, list):
            rng.shuffle(parent)
        else:
            parent[key] = _near(parent[key], rng)
        if len(json.dumps(document, default=str)) > 200_000:
            break
    return document


def bytewise(data: bytes, rng: random.Random, times: int) -> bytes:
    """Some bytes cut off, flipped, put in, taken out, or doubled."""
    raw = bytearray(data)
    for _ in range(times):
        if not raw:
            return bytes(rng.randrange(256) for _ in range(rng.randrange(20)))
        at_byte = rng.randrange(len(raw))
        action = rng.randrange(6)
        if action == 0:
            del raw[at_byte:]
        elif action == 1:
            raw[at_byte] ^= 1 << rng.randrange(8)
        elif action == 2:
            raw[at_byte:at_byte] = bytes(rng.randrange(256) for _ in range(rng.choice([1, 2, 8])))
        elif action == 3:
            del raw[at_byte : at_byte + rng.choice([1, 2, 40])]
        elif action == 4:
            raw[at_byte:at_byte] = raw[at_byte : at_byte + rng.choice([1, 10, 100])]
        else:
            raw[at_byte] = rng.choice(b"{}[]\":,-+.0123456789eE \t\n\\\0&*!|>'%@`#")
    return bytes(raw)


def text_of(document: Any) -> bytes:
    """As JSON; lone surrogates and all."""
    return json.dumps(document, ensure_ascii=True).encode()
