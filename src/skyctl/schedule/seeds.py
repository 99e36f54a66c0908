"""Seeds derived from whole numbers, the same on every machine."""

from __future__ import annotations

_MASK_64 = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def splitmix64(*values: int) -> int:
    """32 bits hashed from whole numbers by splitmix64 (Steele et al. 2014); torch on CPUs uses no more."""
    state = 0
    for value in values:
        state = (state + value) * _GOLDEN_GAMMA & _MASK_64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK_64
    return state >> 32
