"""The runs of a comparison on the terminal: a table that is drawn again as they go, plain lines elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyctl.cli.output import Output, Ticker
from skyctl.cli.watching import watcher

if TYPE_CHECKING:
    from skyctl.compare.rows import Outcome
    from skyctl.control.comparing import Comparing
    from skyctl.control.connect import Connected
    from skyctl.launch.events import Progress, Watcher


def run_all(
    out: Output, progress: Ticker, job: Comparing, outcomes: Sequence[Outcome], links: Connected, *, yes: bool
) -> list[Outcome]:
    """Runs every plan while the table shows how far each is. The same outcomes, with what was measured."""
    from skyctl.compare.board import Board

    board = Board(outcomes, job.run.steps)
    progress.above = board.table

    def watcher_for(name: str) -> Watcher:
        base = watcher(out, progress, title=name, show_logs=False, yes=yes)

        def phase(text: str) -> None:
            board.doing(name, text)
            base.phase(text)

        def step(done: Progress) -> None:
            board.step(name, done.loss, done.iteration_s)
            base.step(done)

        return dataclasses.replace(base, phase=phase, step=step)

    def ended(outcome: Outcome) -> None:
        board.ended(outcome)
        if not progress.drawn:
            out.note(board.said(outcome.strategy))

    try:
        return job.measured(list(outcomes), links, watcher_for, ended)
    finally:
        progress.above = None
