"""``skyctl attach``: watch a run again, and supervise it where nobody does."""

from __future__ import annotations

import json
import signal
import time
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import Terminated, command, is_interactive
from skyctl.cli.options import RunArgument, YesOption
from skyctl.cli.progress_display import ProgressDisplay
from skyctl.errors import SkyctlError

if TYPE_CHECKING:
    from skyctl.run.callbacks import RunCallbacks
    from skyctl.supervision.run_status import InspectedRun

POLL_S = 0.25
SUPERVISOR_CHECK_INTERVAL_S = 2.0
EARLIER_LINES = 5
"""Of each log, the lines that are shown of what was printed before."""

ViewOutcome = Literal["ended", "alone", "detached", "stopped"]


@command
def attach(out: Output, run: RunArgument = None, yes: YesOption = False) -> int:
    """Show a run as `launch` does, until it ends.

    A run whose supervisor is gone gets this process as its supervisor: ranks that still train are taken over
    without a gap; where none is left, the run resumes from its last checkpoint.
    Ctrl-C asks whether to stop the run, to detach from it or to go on; without a terminal and with -y it
    stops it. SIGTERM and a closed terminal detach.
    """
    from skyctl.cli.run_display import take_over_on_terminal
    from skyctl.run.run_lock import acquire_run_lock
    from skyctl.supervision.background_supervisor import take_over_any
    from skyctl.supervision.run_status import inspect_run, refuse_other_machine, resolve_run

    observed = resolve_run(run)
    refuse_other_machine(observed)
    name = observed.paths.run_id
    if run is None:
        out.note(f"run {name}")
    while not observed.ended:
        if observed.supervisor_state == "alive":
            if (code := _watch(out, observed, yes=yes)) is not None:
                return code
        else:
            try:
                lock = acquire_run_lock(observed.paths, attached=True)
            except SkyctlError:
                if inspect_run(name).supervisor_state != "alive":
                    raise
                # Another process was quicker; that one can be watched.
            else:
                if not lock.run_ended:
                    detaching = (signal.SIGHUP, signal.SIGTERM)
                    take_over_on_terminal(out, lock, "attach", detaching, take_over_any, yes=yes)
                    return 0
                lock.release()
        observed = inspect_run(name)
    return show_ended(out, observed)


def _watch(out: Output, run: InspectedRun, *, yes: bool) -> int | None:
    """Shows a run that another process supervises.

    Returns:
        An exit code; None where the run has ended, or lost its supervisor, and is to be observed again.
    """
    from skyctl.cli.show_run import show_outcome
    from skyctl.supervision.run_status import inspect_run

    name = run.paths.run_id
    outcome = RunView(out, run, yes=yes).watch()
    if outcome == "detached":
        show_outcome(out, name, None)
        return 0
    if outcome == "stopped":
        status = inspect_run(name).state.status
        out.note(f"run {name} is {status}")
        out.json({"run_id": name, "status": status})
        return 130
    if outcome == "alone":
        out.warn("its supervisor is gone; this process takes its place")
    return None


def show_ended(out: Output, run: InspectedRun) -> int:
    """Shows how a run has ended, and returns the exit code. Raises RunError where it failed."""
    from skyctl.cli.show_run import show_run, show_script
    from skyctl.files import read_record, read_text
    from skyctl.records.measurement import Measurement
    from skyctl.supervision.run_status import counted_unit, refuse_failed

    name, state = run.paths.run_id, run.state
    refuse_failed(run)
    if state.is_script and run.paths.outcome.is_file():
        show_script(out, json.loads(read_text(run.paths.outcome)))
        return 0
    if state.is_script:
        out.line(f"run {name} of {state.workload} was {state.status}")
        out.json({"run_id": name, "status": state.status})
        return 0 if state.status == "done" else 1
    if state.status == "stopped" or not run.paths.measurement.is_file():
        unit = counted_unit(run.paths)
        out.line(f"run {name} was {state.status} after {state.step} of {state.steps} {unit}s")
        out.json({"run_id": name, "status": state.status})
        return 0 if state.status == "done" else 1
    show_run(out, read_record(Measurement, run.paths.measurement), run.paths)
    return 0


class RunView:
    """A run that another process supervises, shown from its files as if it ran here."""

    def __init__(self, out: Output, run: InspectedRun, *, yes: bool) -> None:
        from skyctl.supervision.run_logs import FileTail, LogFollower, MetricsFollower

        self._out, self._run, self._yes = out, run, yes
        self._logs = LogFollower(run.paths, run.state, last=EARLIER_LINES)
        self._metrics = MetricsFollower(run.paths)
        self._supervisor_log = FileTail(run.paths.supervisor_log, 3)
        self._stopping = False
        self._state = run.state

    @cached_property
    def _unit(self) -> str:
        """The unit that the run counts in; asked for once it has counted any."""
        from skyctl.supervision.run_status import counted_unit

        return counted_unit(self._run.paths)

    def watch(self) -> ViewOutcome:
        """Shows the run until it ends, has no supervisor any more (``alone``), or Ctrl-C is answered.

        Raises:
            Terminated: a signal came; the run is left as it is.
        """
        from skyctl.cli.run_display import ask_on_interrupt, make_terminal_callbacks

        with self._out.progress("attach") as progress:
            callbacks = make_terminal_callbacks(self._out, progress, yes=self._yes)
            self._show_newest_step(progress)
            while True:
                try:
                    outcome = self.follow(callbacks)
                except Terminated:
                    raise
                except KeyboardInterrupt:
                    if self._stopping:
                        self._ask_to_stop(callbacks, checkpoint=False)
                        continue
                    ask = is_interactive() and not self._yes
                    answer = ask_on_interrupt(self._out, can_detach=True) if ask else "stop"
                    if answer == "detach":
                        return "detached"
                    if answer == "stop":
                        self._ask_to_stop(callbacks, checkpoint=True)
                    continue
                return "stopped" if self._stopping and outcome == "ended" else outcome

    def _show_newest_step(self, progress: ProgressDisplay) -> None:
        """Shows the newest step, before anything new happens."""
        for line in self._metrics.lines()[-1:]:
            progress(
                f"{self._unit} {line['step'] + 1} of {self._state.steps} · loss {line['loss']:.4f} "
                f"· {line['iteration_s']:.3f} s"
            )

    def follow(self, callbacks: RunCallbacks) -> Literal["ended", "alone"]:
        """Shows what is new until the run ends or has no supervisor any more (``alone``)."""
        from skyctl.supervision.run_logs import read_state
        from skyctl.supervision.run_status import inspect_run

        looked_at = time.monotonic()
        while True:
            self._state = read_state(self._run.paths)
            self.show_new(callbacks)
            if time.monotonic() - looked_at >= SUPERVISOR_CHECK_INTERVAL_S:
                looked_at = time.monotonic()
                now = inspect_run(self._run.paths.run_id)
                if now.supervisor_state == "gone":
                    self.show_new(callbacks)
                    return "ended" if now.ended else "alone"
            time.sleep(POLL_S)

    def show_new(self, callbacks: RunCallbacks) -> None:
        """Shows what was appended to the run's logs and metrics since the last call."""
        from skyctl.cli.run_display import format_log_line
        from skyctl.supervision.run_logs import parse_supervisor_line, read_step

        self._logs.update(self._state)
        show = {"phase": callbacks.phase, "warning": callbacks.warn, "error": callbacks.warn}
        for message in map(parse_supervisor_line, self._supervisor_log.lines()):
            show.get(message.kind, callbacks.note)(message.text)
        for line in self._logs.lines():
            show_line = self._out.line if self._state.is_script else self._out.note
            show_line(format_log_line(line))
        for metrics in self._metrics.lines():
            callbacks.step(read_step(metrics, self._state, self._unit))

    def _ask_to_stop(self, callbacks: RunCallbacks, *, checkpoint: bool) -> None:
        """Leaves a request to stop for the run's supervisor."""
        from skyctl.run.operator_requests import StopRunRequest, leave_request

        self._stopping = True
        callbacks.phase("asking its supervisor to end it" + ("" if checkpoint else " at once"))
        leave_request(self._run.paths, StopRunRequest(checkpoint))
