"""What a proof method says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Proof:
    """``holds`` True: no plan is below the limit; False: one is; None: this method can't tell."""

    holds: bool | None
    detail: str
