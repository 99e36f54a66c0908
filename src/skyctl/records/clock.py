"""Dates that records have, against this machine's clock of the day, which may be, or have been, wrong.

Durations are never measured by that clock, which may be set while they last.
"""

from __future__ import annotations

from datetime import UTC, datetime

CLOCK_STEP_S = 60.0
"""A clock that is set right may jump back by so much without a word."""


def age_s(date: str) -> float:
    """Seconds since that ISO date; negative: it is ahead of this machine's clock.

    Raises:
        ValueError: it is no date.
    """
    then = datetime.fromisoformat(date)
    return (datetime.now(UTC) - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds()


def is_ahead(date: str) -> bool:
    """Whether that ISO date is ahead of this machine's clock, which was or is wrong; False of no date."""
    try:
        return age_s(date) < -CLOCK_STEP_S
    except ValueError:
        return False
