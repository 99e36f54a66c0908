"""The exponents of ``fixed32``: one for each parameter, the same on every rank, found a step ahead.

A microbatch's gradient is rounded to integers of 2^exponent each, no larger than 2^bits, so that the sum over
a step's M microbatches stays below 2^31 in whatever order it is made. All ranks agree in every step on how
large each parameter's gradient was in any microbatch, as codes of a byte whose maximum is taken. All that
is decided here follows from these alone, so all ranks decide alike:

* A step overflows where a gradient does not fit its exponent, and the first one, which has none yet. It is
  made again with what was just found.
* An exponent leaves ``HEADROOM_BITS`` above the largest gradient of the last ``REMEMBERED`` steps with one
  other than zero, so it widens at once and narrows later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from skyctl.errors import RunError

NONE, ZERO, NOT_FINITE = 0, 1, 255
"""Codes: no microbatch has a gradient; zeros; a NaN, or something infinite. Between them: 2^(code - 126)."""
HEADROOM_BITS = 3
REMEMBERED = 16
LEAST_EXPONENT = -126
"""Of which float32 has the power and its inverse as normal numbers."""
_BIAS = 126
_LEAST_MAGNITUDE, _LARGEST_MAGNITUDE = -124, 128


def magnitude_code(magnitude: float) -> int:
    """The code of a gradient's largest magnitude: of the least power of two above it."""
    if magnitude == 0.0:
        return ZERO
    if not math.isfinite(magnitude):
        return NOT_FINITE
    exponent = math.frexp(magnitude)[1]
    return NOT_FINITE if exponent > _LARGEST_MAGNITUDE else max(exponent, _LEAST_MAGNITUDE) + _BIAS


class SharedExponents:
    """The exponents of a group's parameters.

    Attributes:
        bits: integers of one microbatch are at most 2^bits.
        exponents: by parameter; None before the first step's gradients are known.

    Args:
        count: parameters.
        microbatches: of a step, over all ranks.
    """

    def __init__(self, count: int, microbatches: int) -> None:
        self.bits = ((2**31 - 1) // microbatches).bit_length() - 1
        self.exponents: list[int] | None = None
        self._seen: list[deque[int]] = [deque(maxlen=REMEMBERED) for _ in range(count)]

    def overflows(self, codes: Sequence[int]) -> bool:
        """Whether gradients of these codes do not fit; always before the first are known."""
        if self.exponents is None:
            return True
        pairs = zip(codes, self.exponents, strict=True)
        return any(_is_number(code) and code - _BIAS > exponent + self.bits for code, exponent in pairs)

    def widen(self, codes: Sequence[int]) -> None:
        """So that these codes fit: the step that had them is made again.

        If one rank has found no number, whatever others have fits.

        Raises:
            RunError: they fitted already, so no honest rank has asked for that.
        """
        exponents = [LEAST_EXPONENT] * len(self._seen) if self.exponents is None else self.exponents
        wider = [max(e, self._fitting(code)) for e, code in zip(exponents, codes, strict=True)]
        if wider == self.exponents:
            raise RunError("a rank wants a step to be made again whose gradients all fit their exponents")
        self.exponents = wider

    def follow(self, codes: Sequence[int]) -> None:
        """Sets the exponents of the next step, after one that had these codes and is kept."""
        for seen, code in zip(self._seen, codes, strict=True):
            if _is_number(code):
                seen.append(code)
        self.exponents = [self._fitting(max(seen, default=ZERO)) for seen in self._seen]

    def state(self, exponents: Sequence[int] | None) -> dict[str, Any]:
        """The state that a rank that joins needs to have the same exponents from now on, as JSON values.

        Args:
            exponents: with which the step under way began.
        """
        kept = None if exponents is None else list(exponents)
        return {"exponents": kept, "seen": [list(seen) for seen in self._seen]}

    def take(self, state: Any) -> None:
        """Takes over another rank's ``state``. Raises ValueError where it is none."""
        try:
            exponents, seen = state["exponents"], [list(codes) for codes in state["seen"]]
        except (TypeError, KeyError) as exc:
            raise ValueError(f"it lacks {exc}") from exc
        count = len(self._seen)
        codes_fit = all(type(code) is int and _is_number(code) for codes in seen for code in codes)
        if len(seen) != count or not codes_fit:
            raise ValueError(f"its codes are not of {count} parameters")
        if exponents is not None and (
            not isinstance(exponents, list)
            or len(exponents) != count
            or any(type(e) is not int or not LEAST_EXPONENT <= e <= _LARGEST_MAGNITUDE for e in exponents)
        ):
            raise ValueError(f"its exponents are not of {count} parameters")
        self.exponents = exponents
        self._seen = [deque(codes, maxlen=REMEMBERED) for codes in seen]

    def _fitting(self, code: int) -> int:
        if code <= ZERO:
            return LEAST_EXPONENT
        code = min(code, NOT_FINITE - 1)
        return max(LEAST_EXPONENT, code - _BIAS + HEADROOM_BITS - self.bits)


def _is_number(code: int) -> bool:
    return ZERO < code < NOT_FINITE
