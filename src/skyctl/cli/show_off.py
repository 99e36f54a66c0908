"""Where a run was not as predicted, stage by stage, and which of it explains the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyctl.cli.output import Output

if TYPE_CHECKING:
    from skyctl.records.measurement import Measurement


def show_off(out: Output, done: Measurement) -> None:
    """A table (measured, and how many times the predicted) and sentences, where there is something to say."""
    from skyctl.compare.off import COLUMNS, rows, sentences

    said = sentences(done)
    if not said:
        return
    out.table(
        COLUMNS,
        rows(done),
        title="measured, and how many times the predicted",
        spare=("optimizer", "waits", "rank"),
        shorten="device",
    )
    for sentence in said:
        out.line(sentence, wrap=True)
