"""The names of the formats in which gradients are summed: a number format, or PowerSGD with its rank."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

PLAIN_FORMATS = ("float32", "bfloat16", "fixed32", "int8")
ROUNDED_FORMATS = ("bfloat16", "int8")
"""Those in which each hop of a sum rounds, and so changes what is trained."""
WEIGHT_FORMATS = ("float32", *ROUNDED_FORMATS)
"""Those in which weights are averaged at a round's end."""
MOST_RANK = 256
_POWERSGD = re.compile(r"powersgd:([1-9][0-9]{0,3})")


def powersgd_rank(name: str) -> int | None:
    """The rank R of ``powersgd:R``; None: another format."""
    match = _POWERSGD.fullmatch(name)
    return int(match[1]) if match is not None else None


def check_sync_format(name: str) -> str:
    """The name itself. ValueError: there is no format of that name."""
    rank = powersgd_rank(name)
    if name not in PLAIN_FORMATS and (rank is None or rank > MOST_RANK):
        formats = ", ".join(PLAIN_FORMATS)
        raise ValueError(f"there is {formats} and powersgd:R with a rank R from 1 to {MOST_RANK}")
    return name


SyncFormat = Annotated[str, AfterValidator(check_sync_format)]
