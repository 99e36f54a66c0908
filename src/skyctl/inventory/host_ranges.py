"""Several hosts in one word, as Ansible (``web[01:20]``) and Slurm (``gpu[1-3,7],cpu01``) write them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

MAX_HOSTS = 10_000
"""The most hosts that one word or one inventory may make: a typing mistake must not fill the memory."""

_ANSIBLE = r"\[(\d*|[A-Za-z]):(\d+|[A-Za-z])(?::(\d+))?\]"
_SLURM = r"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]"
_RANGE = re.compile(f"{_ANSIBLE}|{_SLURM}", re.ASCII)
_SLURM_RANGE = re.compile(_SLURM, re.ASCII)
_OUTER_COMMA = re.compile(r",(?![^\[\]]*\])")


def split_hosts(text: str) -> list[str]:
    """``gpu[1-3,7],cpu01`` → ``gpu[1-3,7]``, ``cpu01``: at the commas outside of ranges."""
    return [part for part in _OUTER_COMMA.split(text) if part]


def expand_hosts(word: str) -> list[str]:
    """``db[1:3]`` → db1, db2, db3; ``n[08:12:2]`` keeps the leading zero; ``x[a:c]``; ``gpu[1-3,7],cpu01``.

    A name may hold several ranges; a word without any is the one host itself.

    Raises:
        ValueError: a range is empty, or there are more than ``MAX_HOSTS``.
    """
    hosts: list[str] = []
    for pattern in split_hosts(word) or [word]:
        names = list(itertools.islice(_expand(pattern), MAX_HOSTS + 1))
        if not names:
            raise ValueError(f"the range in {pattern!r} is empty")
        hosts += names
        if len(hosts) > MAX_HOSTS:
            raise ValueError(f"{word!r} makes more than {MAX_HOSTS:,} hosts")
    return hosts


def without_slurm_ranges(word: str) -> list[str]:
    """The hosts of a Slurm list with one number for each of their ranges, to see what kind of word it is."""
    return [_SLURM_RANGE.sub("0", pattern) for pattern in split_hosts(word)]


def _expand(pattern: str) -> Iterator[str]:
    match = _RANGE.search(pattern)
    if match is None:
        yield pattern
        return
    for middle in _slurm_numbers(match[4]) if match[4] else _ansible_middles(match[1], match[2], match[3]):
        for rest in _expand(pattern[match.end() :]):
            yield f"{pattern[: match.start()]}{middle}{rest}"


def _slurm_numbers(listed: str) -> Iterator[str]:
    """``1,08-10`` → 1, 08, 09, 10."""
    for part in listed.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


def _ansible_middles(first: str, last: str, step: str | None) -> Iterator[str]:
    by = max(1, int(step or 1))
    first = first or "0"
    if first.isdigit() and last.isdigit():
        width = len(first) if first.startswith("0") and len(first) > 1 else 0
        for number in range(int(first), int(last) + 1, by):
            yield str(number).zfill(width)
    elif not first.isdigit() and not last.isdigit():
        for code in range(ord(first), ord(last) + 1, by):
            yield chr(code)
