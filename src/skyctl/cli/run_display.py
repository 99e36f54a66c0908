"""A run on the terminal while it goes on: phases, steps, what ranks print, the question at Ctrl-C."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal, get_args

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import ask, is_interactive
from skyctl.cli.progress_display import ProgressDisplay
from skyctl.cli.show_run import format_metric, show_outcome

if TYPE_CHECKING:
    from skyctl.cli.command_output import Output
    from skyctl.compare.outcome import StrategyOutcome
    from skyctl.files import RunPaths
    from skyctl.jobs.node_sessions import NodeSessions
    from skyctl.jobs.training_request import TrainingRequest
    from skyctl.records.cluster import Cluster
    from skyctl.records.measurement import Measurement
    from skyctl.records.plan import Plan
    from skyctl.run.callbacks import RankOfNode, RunCallbacks, StepProgress
    from skyctl.run.live_run import LiveRun
    from skyctl.run.run_lock import RunLock
    from skyctl.run.run_options import RunOptions
    from skyctl.supervision.background_supervisor import RunEnd
    from skyctl.supervision.opened_runs import OnDetach
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
    prints_results: bool = False,
) -> RunCallbacks:
    """Shows what a run reports.

    Args:
        title: goes before every line (the strategy, in a comparison).
        yes: Ctrl-C stops it without a question.
        can_detach: whether the run can go on without this process.
        prints_results: what ranks print is the command's result, not something by the way.
    """
    from skyctl.run.callbacks import RunCallbacks

    prefix = f"{title}: " if title else ""

    def step(done: StepProgress) -> None:
        left = "" if done.left_s is None else f" · {_format_duration(done.left_s)} left"
        progress(
            f"{prefix}{done.unit} {done.step + 1} · loss {done.loss:.4f}{_format_validation(done)} "
            f"· {done.iteration_s:.3f} s · {done.samples_per_s:.1f} samples/s{left}",
            done.step + 1,
            done.steps,
        )

    def log(rank: RankOfNode, text: str) -> None:
        if prints_results:
            out.line(f"[{rank.rank} {rank.node}] {text}")
        elif show_logs:
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
    prints_results: bool = False,
) -> Iterator[RunCallbacks]:
    """As ``make_terminal_callbacks``, for a run that a process in the background can take over.

    Args:
        signals: those that detach, while the context lasts.
        detach: as soon as the run trains.
    """
    from skyctl.supervision.background_supervisor import DetachRequest

    request = DetachRequest(wanted=detach)
    with request.on(signals):
        shown = make_terminal_callbacks(
            out, progress, yes=yes, can_detach=True, prints_results=prints_results
        )
        yield request.beside(shown)


def format_log_line(line: RankLogLine) -> str:
    """A line of a log with its rank (or what else printed it) and node before it."""
    who = line.who if line.rank is None else str(line.rank)
    return f"[{who} {line.node}] {line.text}"


def _format_validation(done: StepProgress) -> str:
    if done.validation is None:
        return ""
    metrics = [f" · {name} {format_metric(value)}" for name, value in (done.validation.metrics or {}).items()]
    return f" · validation {done.validation.loss:.4f}" + "".join(metrics)


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def measure_with_progress(
    out: Output,
    progress: ProgressDisplay,
    cluster: Cluster,
    request: TrainingRequest,
    outcomes: Sequence[StrategyOutcome],
    sessions: NodeSessions,
    options: RunOptions,
    *,
    yes: bool,
    earlier: Sequence[StrategyOutcome] = (),
) -> list[StrategyOutcome]:
    """Runs every plan while a table shows how far each is (plain lines where there is no terminal).

    Args:
        earlier: what was measured already; none of its plans is run again.

    Returns:
        The same outcomes, with what was measured.
    """
    from skyctl.compare.comparison import ProgressTable
    from skyctl.jobs.comparison_job import measure_strategies
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
        return run_plan(plan, cluster, request, sessions.sessions, options, callbacks)[0]

    def ended(outcome: StrategyOutcome) -> None:
        table.end_run(outcome)
        if not progress.drawn:
            out.note(table.ended_line(outcome.strategy))

    try:
        return measure_strategies(outcomes, run, ended, earlier)
    finally:
        progress.above = None


def supervise_on_terminal(
    out: Output,
    progress: ProgressDisplay,
    run: LiveRun,
    make_plan: Callable[[], Plan],
    *,
    yes: bool,
    detach: bool,
) -> tuple[Measurement, RunPaths] | None:
    """Supervises a run here, watched from the terminal; None where it was detached from.

    Args:
        make_plan: called once, with Ctrl-C taken care of.
        yes: Ctrl-C stops it without a question.
        detach: leave it to the background once it trains.

    A process that is this one command starts anew meanwhile, where that saves memory (``fresh_start``).
    """
    from skyctl.supervision.background_supervisor import hand_over, start_background
    from skyctl.supervision.fresh_start import FreshStart, LeftRun, repeatable_command
    from skyctl.supervision.plan_supervision import supervise_run

    with ExitStack() as stack:
        callbacks = stack.enter_context(
            detachable_callbacks(out, progress, (signal.SIGHUP,), yes=yes, detach=detach)
        )
        command = repeatable_command()
        if command is None or detach:
            return supervise_run(run, make_plan(), callbacks, lambda left: hand_over(left, callbacks.phase))
        told = LeftRun(run.run_id, yes, as_json=out.as_json, quiet=out.quiet, verbose=out.verbose)
        anew = stack.enter_context(FreshStart(run, command, told))

        def leave(left: LiveRun) -> int:
            if not anew.begun:
                return hand_over(left, callbacks.phase)
            anew.execute(progress.stop)
            return start_background(left.journal.paths)

        return supervise_run(run, make_plan(), anew.beside(callbacks), leave)


def take_over_on_terminal(
    out: Output,
    lock: RunLock,
    title: str,
    signals: Sequence[signal.Signals],
    take_over: Callable[[RunLock, RunCallbacks, OnDetach], RunEnd | None],
    *,
    yes: bool,
) -> None:
    """Takes a run over and supervises it here, until it ends or is detached from.

    Args:
        signals: those that detach.
        take_over: ``take_over_any``, or one of those that it calls.
    """
    from skyctl.supervision.background_supervisor import hand_over
    from skyctl.supervision.run_logs import read_state

    is_script = read_state(lock.paths).is_script
    with (
        lock,
        out.progress(title) as progress,
        detachable_callbacks(out, progress, signals, yes=yes, prints_results=is_script) as callbacks,
    ):
        outcome = take_over(lock, callbacks, lambda run: hand_over(run, callbacks.phase))
    show_outcome(out, lock.paths.run_id, outcome)
