"""A run on the terminal: phases, steps, what ranks print, the question at Ctrl-C; a comparison's table."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, get_args

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import ask, is_interactive
from skyctl.cli.progress_display import ProgressDisplay

if TYPE_CHECKING:
    from skyctl.compare.outcome import StrategyOutcome
    from skyctl.control.comparison_job import ComparisonJob
    from skyctl.control.node_sessions import NodeSessions
    from skyctl.records.measurement import Measurement
    from skyctl.records.plan import Plan
    from skyctl.run.callbacks import RunCallbacks, StepProgress
    from skyctl.run.rank_spec import RankSpec
    from skyctl.run.run_context import RunOptions
    from skyctl.supervision.run_logs import RankLogLine

InterruptAnswer = Literal["stop", "detach", "go on"]
INTERRUPT_ANSWERS: tuple[InterruptAnswer, ...] = get_args(InterruptAnswer)


def make_terminal_callbacks(
    out: Output,
    progress: ProgressDisplay,
    *,
    title: str = "",
    show_logs: bool = True,
    yes: bool = False,
    can_detach: bool = False,
) -> RunCallbacks:
    """Shows what a run reports.

    Args:
        title: goes before every line (the strategy, in a comparison).
        yes: Ctrl-C stops it without a question.
        can_detach: whether the run can go on without this process.
    """
    from skyctl.run.callbacks import RunCallbacks

    prefix = f"{title}: " if title else ""

    def step(done: StepProgress) -> None:
        left = "" if done.left_s is None else f" · {_format_duration(done.left_s)} left"
        progress(
            f"{prefix}step {done.step + 1} · loss {done.loss:.4f}{_format_validation(done)} "
            f"· {done.iteration_s:.3f} s · {done.samples_per_s:.1f} samples/s{left}",
            done.step + 1,
            done.steps,
        )

    def log(rank: RankSpec, text: str) -> None:
        if show_logs:
            out.note(f"[{rank.rank} {rank.node}] {text}")

    def interrupted() -> str:
        return "stop" if yes or not is_interactive() else ask_on_interrupt(out, can_detach=can_detach)

    return RunCallbacks(
        phase=lambda text: progress(f"{prefix}{text}"),
        step=step,
        log=log,
        note=lambda text: out.note(f"{prefix}{text}"),
        warn=lambda text: out.warn(f"{prefix}{text}"),
        interrupted=interrupted,
    )


def ask_on_interrupt(out: Output, *, can_detach: bool) -> InterruptAnswer:
    """Asks what is to become of the run. A second Ctrl-C stops it."""
    choices = INTERRUPT_ANSWERS if can_detach else ("stop", "go on")
    detach = ", (d)etach and let it go on," if can_detach else ","
    while True:
        try:
            question = f"interrupted: (s)top the run{detach} or (g)o on? [s]"
            answer = ask(out, question, "s", yes=False).lower()
        except KeyboardInterrupt:
            return "stop"
        for choice in choices:
            if answer and choice.startswith(answer):
                return choice


@contextmanager
def detachable_callbacks(
    out: Output,
    progress: ProgressDisplay,
    signals: Sequence[signal.Signals],
    *,
    yes: bool,
    detach: bool = False,
) -> Iterator[RunCallbacks]:
    """As ``make_terminal_callbacks``, for a run that a process in the background can take over.

    Args:
        signals: those that detach, while the context lasts.
        detach: as soon as the run trains.
    """
    from skyctl.supervision.background_supervisor import DetachRequest

    request = DetachRequest(wanted=detach)
    with request.on(signals):
        yield request.beside(make_terminal_callbacks(out, progress, yes=yes, can_detach=True))


def format_log_line(line: RankLogLine) -> str:
    """A line of a log with its rank (or what else printed it) and node before it."""
    who = line.who if line.rank is None else str(line.rank)
    return f"[{who} {line.node}] {line.text}"


def _format_validation(done: StepProgress) -> str:
    return "" if done.validation_loss is None else f" · validation {done.validation_loss:.4f}"


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def measure_with_progress(
    out: Output,
    progress: ProgressDisplay,
    job: ComparisonJob,
    outcomes: Sequence[StrategyOutcome],
    sessions: NodeSessions,
    options: RunOptions,
    *,
    yes: bool,
) -> list[StrategyOutcome]:
    """Runs every plan while a table shows how far each is (plain lines where there is no terminal).

    Returns:
        The same outcomes, with what was measured.
    """
    from skyctl.compare.comparison_table import ProgressTable
    from skyctl.control.comparison_job import measure_strategies
    from skyctl.run.plan_runner import run_plan

    table = ProgressTable(outcomes, options.steps)
    progress.above = table.table

    def callbacks_for(name: str) -> RunCallbacks:
        base = make_terminal_callbacks(out, progress, title=name, show_logs=False, yes=yes)

        def phase(text: str) -> None:
            table.show_phase(name, text)
            base.phase(text)

        def step(done: StepProgress) -> None:
            table.add_step(name, done.loss, done.iteration_s)
            base.step(done)

        return dataclasses.replace(base, phase=phase, step=step)

    def run(strategy: str, plan: Plan) -> Measurement:
        callbacks = callbacks_for(strategy)
        return run_plan(plan, job.cluster, job.request, sessions.sessions, options, callbacks)[0]

    def ended(outcome: StrategyOutcome) -> None:
        table.end_run(outcome)
        if not progress.drawn:
            out.note(table.ended_line(outcome.strategy))

    try:
        return measure_strategies(outcomes, run, ended)
    finally:
        progress.above = None
