"""Options of when what pipelines sum takes effect. Each of them changes training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.records.rhythm import Rhythm


MOST_DIGITS = 9


@dataclass(frozen=True, kw_only=True)
class RhythmOptions:
    """The rhythm asked for; None: what a problem or run says, else each sum before the next step."""

    sync_delay: Annotated[
        int | None,
        typer.Option(
            "--sync-delay",
            min=0,
            max=1,
            metavar="N",
            help="1: sum a step's gradients while the next one computes, and apply them after it (changes "
            "training).",
        ),
    ] = None
    undelayed_steps: Annotated[
        int | None,
        typer.Option(
            "--undelayed-steps",
            min=0,
            metavar="N",
            help="With --sync-delay 1: the first N steps are made without the delay.",
        ),
    ] = None

    staleness: Annotated[
        str | None,
        typer.Option(
            "--staleness",
            metavar="N|async",
            help="One device holds weights and optimizer and applies each device's gradients as they come; "
            "the others may be N steps ahead of the slowest, async: any number (changes training; "
            "--parallel data).",
        ),
    ] = None

    def make_rhythm(self) -> Rhythm | None:
        """The rhythm as typed; None where nothing was.

        Raises:
            InputError: options that contradict each other.
        """
        from skyctl.records.rhythm import Rhythm

        if self.undelayed_steps and not self.sync_delay:
            raise InputError("--undelayed-steps goes with --sync-delay 1")
        staleness = None if self.staleness is None else parse_staleness(self.staleness)
        if staleness not in (None, Rhythm()) and self.sync_delay:
            raise InputError(
                "--staleness and --sync-delay contradict each other: with staleness nothing is summed"
            )
        if self.sync_delay is None:
            return staleness
        return Rhythm(delay=self.sync_delay, undelayed_steps=self.undelayed_steps or 0)  # type: ignore[arg-type]


def parse_staleness(text: str) -> Rhythm:
    """The rhythm of ``--staleness N|async``; InputError for anything else."""
    from skyctl.records.rhythm import Rhythm

    if text == "async":
        return Rhythm(staleness=None)
    if not (text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS):
        raise InputError(
            f"--staleness {text!r} is neither a number of steps nor async",
            hint="--staleness 3: at most three steps ahead of the slowest",
        )
    return Rhythm(staleness=int(text))
