"""A sweep for people and as JSON: the table while it goes on, and at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from skyctl.compare.number_format import format_number, format_seconds
from skyctl.records.cluster import node_of
from skyctl.records.sweep import best_trial

if TYPE_CHECKING:
    from rich.table import Table

    from skyctl.cli.command_output import Output
    from skyctl.cli.progress_display import ProgressDisplay
    from skyctl.records.sweep import SweepRequest, TrialState
    from skyctl.sweep.sweep_folder import SweepFolder
    from skyctl.sweep.sweep_outcome import SweepCallbacks, SweepOutcome

SHOWN_ROWS = 20
"""Of the live table: trials that run first, then those that ended last."""
FEW_TRIALS = 3
"""So many must have failed on a node for the node itself to be suspect."""
_STYLES = {"running": "bold", "waiting": "dim", "failed": "red", "stopped": "yellow"}
_JSON_KEYS = {
    *("number", "parameters", "status", "device", "seconds", "returncode"),
    *("value", "step", "reports", "why"),
}


class SweepDisplay:
    """A terminal's display while trials run; where there is none, a line for each trial that has ended."""

    def __init__(self, out: Output, progress: ProgressDisplay, request: SweepRequest) -> None:
        self._out, self._progress, self._request = out, progress, request
        self._trials: Mapping[int, TrialState] = {}

    def callbacks(self) -> SweepCallbacks:
        """For the runner."""
        from skyctl.sweep.sweep_outcome import SweepCallbacks

        return SweepCallbacks(phase=self._progress, warn=self._out.warn, changed=self._changed)

    @contextmanager
    def over(self, trials: Mapping[int, TrialState]) -> Iterator[None]:
        """While it lasts, these trials are drawn above the live line."""
        self._trials = trials
        self._progress.above = self._table
        try:
            yield
        finally:
            self._progress.above = None

    def _changed(self, trial: TrialState) -> None:
        statuses = Counter(one.status for one in self._trials.values())
        over = statuses["done"] + statuses["failed"] + statuses["stopped"]
        if trial.ended is not None and not self._progress.drawn:
            self._out.note(f"trial {' · '.join(filter(None, trial_cells(trial, self._request)))}")
        self._progress(f"{statuses['running']} under way", over, self._request.trials)

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
        for heading in table_headings(self._request)[:-1]:
            table.add_column(heading, no_wrap=True, overflow="ellipsis")
        trials = list(self._trials.values())  # it may grow meanwhile, in another thread
        shown = sorted(
            trials,
            key=lambda trial: (trial.status == "running", trial.ended or "", -trial.number),
            reverse=True,
        )
        for trial in shown[:SHOWN_ROWS]:
            table.add_row(*map(Text, trial_cells(trial, self._request)[:-1]), style=_STYLES.get(trial.status))
        return table


def table_headings(request: SweepRequest) -> list[str]:
    """The columns of a sweep's table."""
    metric = [] if request.metric is None else [request.metric]
    return ["trial", "parameters", "state", "device", "took", *metric, "why"]


def trial_cells(trial: TrialState, request: SweepRequest) -> list[str]:
    """A trial's row under the headings; what is not known is empty."""
    parameters = " ".join(f"{name}={value}" for name, value in trial.parameters.items())
    took = "" if trial.seconds is None else format_seconds(trial.seconds)
    value = "" if trial.value is None else format_number(trial.value)
    metric = [] if request.metric is None else [value]
    return [str(trial.number), parameters, trial.status, trial.device or "", took, *metric, trial.why or ""]


def show_sweep(out: Output, folder: SweepFolder, request: SweepRequest, outcome: SweepOutcome) -> None:
    """How a sweep has ended: its table, the best trial, and where its files are."""
    rows = [trial_cells(trial, request) for trial in _ranked(outcome.trials, request)]
    out.table(table_headings(request), rows, optional=("device", "took"), shorten="why")
    counts = Counter(trial.status for trial in outcome.trials)
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    out.line(f"{len(outcome.trials)} trials in {format_seconds(outcome.seconds)}: {said}")
    best = outcome.best
    if best is not None:
        words = " ".join(f"{name}={value}" for name, value in best.parameters.items())
        out.line(f"best: trial {best.number}, {request.metric} {format_number(best.value)}, {words}")
        out.line(f"its files: {folder.best}")
    for node in suspect_nodes(outcome.trials):
        out.warn(f"every trial on node {node} failed, and others did not: skyctl check --limit {node}")
    out.note(f"sweep: {folder.folder}")
    if counts["failed"]:
        out.note(f"run the failed ones again: skyctl sweep --resume {folder.sweep_id}")
    out.json(_document(folder, request, outcome))


def suspect_nodes(trials: Sequence[TrialState]) -> list[str]:
    """The nodes on which all of several trials failed, if one is done on another node."""
    statuses: dict[str, list[str]] = {}
    for trial in trials:
        if trial.device is not None:
            statuses.setdefault(node_of(trial.device), []).append(trial.status)
    failed = [node for node, own in statuses.items() if set(own) == {"failed"} and len(own) >= FEW_TRIALS]
    return failed if any("done" in own for own in statuses.values()) else []


def _ranked(trials: Sequence[TrialState], request: SweepRequest) -> list[TrialState]:
    """Trials with a figure first, the best of them at the top; then the others by number."""
    left = list(trials)
    ranked: list[TrialState] = []
    while (best := best_trial(tuple(left), request.mode)) is not None:
        ranked.append(best)
        left.remove(best)
    return [*ranked, *left]


def _document(folder: SweepFolder, request: SweepRequest, outcome: SweepOutcome) -> dict[str, Any]:
    best = outcome.best
    return {
        "sweep_id": folder.sweep_id,
        "folder": str(folder.folder),
        "metric": request.metric,
        "mode": request.mode,
        "seconds": outcome.seconds,
        "trials": [trial.model_dump(mode="json", include=_JSON_KEYS) for trial in outcome.trials],
        "best": None if best is None else {"number": best.number, "folder": str(folder.best)},
        "lost": dict(outcome.lost),
    }
