"""How far two orders of the same computation may lie apart: from the dtype and the length of the sum."""

from __future__ import annotations

import math

import torch

FACTOR = 10.0
"""Processors split a sum and fuse differently, within that; what a fault is off by is far more."""


def rounding(length: int, dtype: torch.dtype = torch.float32) -> float:
    """The error that a sum of that many products may have, as a part of its norm: ten times what is expected.

    Each addition rounds by half an epsilon at most. These errors are as likely up as down, so that of
    ``length`` additions grows with its root. Two computations are compared, each with errors of its own:
    two halves are one epsilon. Another processor adds in another order (wider vectors, other blocks, fused
    products), so an error that one of them happens to make says little about the next one's.

    Args:
        length: of the longest sum on the way to one number. Sums one after another, as in training, count
            as one of all their lengths together.
    """
    return FACTOR * torch.finfo(dtype).eps * math.sqrt(length)
