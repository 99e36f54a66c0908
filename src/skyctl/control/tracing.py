"""From what the ranks recorded to the run's trace: one file for viewers, one picture."""

from __future__ import annotations

import json
from collections.abc import Mapping

from skyctl.compare import chrome, timeline
from skyctl.compare.gantt import plot_trace
from skyctl.errors import SkyctlError
from skyctl.files import write_atomic
from skyctl.launch.events import Watcher
from skyctl.launch.run import Run
from skyctl.launch.trace import gather_traces
from skyctl.remote.session import Session
from skyctl.schedule.playing import Play


def write_trace(run: Run, sessions: Mapping[str, Session], play: Play, watcher: Watcher) -> str | None:
    """Writes ``trace.json`` and, where matplotlib is installed, ``trace.png``; the first one's path.

    Training is done by then: what goes wrong here is a note, and no reason to lose it.
    """
    watcher.phase("gathering the trace")
    devices = [spec.device for spec in run.specs]
    try:
        measured = timeline.measured(gather_traces(run, sessions), devices)
        simulated = timeline.simulated(play, devices)
        made = chrome.document(measured, simulated, run_id=run.paths.run_id)
        write_atomic(run.paths.trace, json.dumps(made, separators=(",", ":"), ensure_ascii=False) + "\n")
    except SkyctlError as exc:
        watcher.note(f"no trace: {exc}")
        return None
    try:
        plot_trace(measured, simulated, run.paths.trace_picture)
    except SkyctlError as exc:
        watcher.note(f"no picture of the trace: {exc}")
    return str(run.paths.trace)
