"""A run that another process supervises, shown as if it ran here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from skyctl.cli.common import Output, Terminated, interactive
from skyctl.cli.output import Ticker

if TYPE_CHECKING:
    from skyctl.launch.events import Watcher
    from skyctl.supervise.custody.runs import Seen

POLL_S = 0.25
ALONE_EVERY_S = 2.0
LAST_LINES = 5
"""Of each log, what was printed before."""

Outcome = Literal["ended", "alone", "detached", "stopped"]


class View:
    """From the run's files to a watcher."""

    def __init__(self, out: Output, run: Seen, *, yes: bool) -> None:
        from skyctl.supervise.custody.following import Figures, Logs, Tail

        self._out, self._run, self._yes = out, run, yes
        self._logs = Logs(run.paths, run.state, last=LAST_LINES)
        self._figures = Figures(run.paths)
        self._said = Tail(run.paths.supervisor_log, 3)
        self._stopping = False
        self._state = run.state

    def watch(self) -> Outcome:
        """Until the run has ended, has no supervisor any more (``alone``), or Ctrl-C was answered.

        Raises:
            Terminated: a signal came; the run goes on.
        """
        from skyctl.cli.watching import asked, watcher

        with self._out.progress("attach") as progress:
            watch = watcher(self._out, progress, yes=self._yes)
            self._begin(progress)
            while True:
                try:
                    outcome = self._until_over(watch)
                except Terminated:
                    raise
                except KeyboardInterrupt:
                    if self._stopping:
                        self._ask_to_stop(watch, checkpoint=False)
                        continue
                    ask = interactive() and not self._yes
                    answer = asked(self._out, leaving=True) if ask else "stop"
                    if answer == "detach":
                        return "detached"
                    if answer == "stop":
                        self._ask_to_stop(watch, checkpoint=True)
                    continue
                return "stopped" if self._stopping and outcome == "ended" else outcome

    def _begin(self, progress: Ticker) -> None:
        """Where it stands, before anything is new."""
        for line in self._figures.lines()[-1:]:
            progress(
                f"step {line['step'] + 1} of {self._state.steps} · loss {line['loss']:.4f} "
                f"· {line['iteration_s']:.3f} s"
            )

    def _until_over(self, watch: Watcher) -> Outcome:
        from skyctl.supervise.custody.following import state_of
        from skyctl.supervise.custody.runs import of

        looked_at = time.monotonic()
        while True:
            self._state = state_of(self._run.paths)
            self._show(watch)
            if time.monotonic() - looked_at >= ALONE_EVERY_S:
                looked_at = time.monotonic()
                now = of(self._run.paths.run_id)
                if now.standing == "gone":
                    self._show(watch)
                    return "ended" if now.ended else "alone"
            time.sleep(POLL_S)

    def _show(self, watch: Watcher) -> None:
        from skyctl.launch.events import Progress
        from skyctl.supervise.custody.following import left_s
        from skyctl.supervise.custody.saying import parse

        self._logs.update(self._state)
        for said in map(parse, self._said.lines()):
            told = {"phase": watch.phase, "warning": watch.warn, "error": watch.warn}.get(
                said.kind, watch.note
            )
            told(said.text)
        for line in self._logs.lines():
            who = line.who if line.rank is None else str(line.rank)
            self._out.note(f"[{who} {line.node}] {line.text}")
        for line_ in self._figures.lines():
            watch.step(
                Progress(
                    step=int(line_["step"]),
                    steps=self._state.steps,
                    loss=float(line_["loss"]),
                    iteration_s=float(line_["iteration_s"]),
                    samples_per_s=float(line_["samples_per_s"]),
                    left_s=left_s(line_, self._state),
                    learning_rate=line_.get("learning_rate"),
                    grad_norm=line_.get("grad_norm"),
                    validation_loss=line_.get("validation_loss"),
                )
            )

    def _ask_to_stop(self, watch: Watcher, *, checkpoint: bool) -> None:
        from skyctl.supervise.attempts.requests import ask

        self._stopping = True
        watch.phase("asking its supervisor to end it" + ("" if checkpoint else " at once"))
        ask(self._run.paths, {"op": "stop", "checkpoint": checkpoint})
