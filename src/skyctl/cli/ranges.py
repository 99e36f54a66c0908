"""Lists and ranges of numbers as they are typed: ``8``, ``4,8,16,32``, ``2..6``, ``2..N``."""

from __future__ import annotations

from collections.abc import Callable

from skyctl.errors import InputError

MOST = 256
"""So many points one sweep may have."""


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """``4,8,16`` → (4, 8, 16), each once, in their order.

    Raises:
        InputError: something else, or a number below 1.
    """
    found = [_number(flag, part, text) for part in text.split(",")]
    return tuple(dict.fromkeys(found))


def counts(flag: str, text: str) -> Callable[[int], tuple[int, ...]]:
    """``2..N`` or ``1,2,4`` → what gives the numbers once N is known, in rising order.

    Raises:
        InputError: something else, a range that falls, or too many numbers.
    """
    parts = [part.strip() for part in text.split(",")]
    ends: list[tuple[int | None, int | None]] = []
    for part in parts:
        low, dots, high = part.partition("..")
        first = _end(flag, low, text)
        last = _end(flag, high, text) if dots else first
        if first is not None and last is not None and last < first:
            raise InputError(
                f"{flag} {text}: {part} falls", hint=f"write the smaller one first: {last}..{first}"
            )
        ends.append((first, last))

    def of(all_: int) -> tuple[int, ...]:
        found: set[int] = set()
        for first, last in ends:
            low, high = all_ if first is None else first, all_ if last is None else last
            if high < low:
                raise InputError(f"{flag} {text}: there {'is' if all_ == 1 else 'are'} {all_} only")
            found |= set(range(low, min(high, low + MOST) + 1))
        if len(found) > MOST:
            raise InputError(f"{flag} {text}: at most {MOST} numbers")
        return tuple(sorted(found))

    return of


def _end(flag: str, text: str, whole: str) -> int | None:
    return None if text.strip().lower() == "n" else _number(flag, text, whole)


def _number(flag: str, part: str, whole: str) -> int:
    try:
        value = int(part.strip())
    except ValueError:
        value = 0
    if not 1 <= value <= 1_000_000_000:
        raise InputError(
            f"{flag} {whole!r}: {part.strip()!r} is no number from 1 up",
            hint=f"one number, or several with commas: {flag} 4,8,16"
            + ("; or a range: 2..N" if flag == "--nodes" else ""),
        )
    return value
