"""Shows a run's records: how many, how much of them is learnt, and one sample with that marked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyctl.cli.command_output import Output
    from skyctl.workload.datasets.survey import Survey
    from skyctl.workload.workload import Workload


def show_records(
    out: Output, workload: Workload, on_progress: Callable[[str], None] = lambda _text: None
) -> Survey | None:
    """Looks through the records of ``--data``, and tells what was found on notes; of a text nothing.

    Args:
        on_progress: told how far it is.

    Returns:
        The survey of the records; None of a text.

    Raises:
        WorkloadError: a record can't be used, and is not to be left out; names file and line.
    """
    if workload.spec.records is None or workload.spec.random_inputs:
        return None
    from skyctl.workload.datasets.survey import survey_records

    survey = survey_records(workload.record_reader(), on_progress)
    for line in survey.lines():
        out.note(line, wrap="\n" not in line)
    return survey
