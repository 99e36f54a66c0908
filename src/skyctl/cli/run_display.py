"""A run on the terminal: phases, steps, what ranks print, the question at Ctrl-C, and how it ended."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, get_args

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import ask, is_interactive
from skyctl.cli.progress_display import ProgressDisplay
from skyctl.compare.number_format import (
    UNKNOWN,
    format_estimate,
    format_prediction_error,
    format_seconds,
    format_seconds_range,
)

if TYPE_CHECKING:
    from skyctl.cli.command_output import Output
    from skyctl.compare.outcome import StrategyOutcome
    from skyctl.files import RunPaths
    from skyctl.jobs.node_sessions import NodeSessions
    from skyctl.jobs.training_request import TrainingRequest
    from skyctl.records.cluster import Cluster
    from skyctl.records.measurement import Measurement, OwnerMeasurement, ValidationMeasurement
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


AVERAGED_LOSSES = 10
"""A run of more steps says what the last of them had on average: one batch's loss may be far from that."""
SHORT_STEP_S = 0.1
"""Below it, the prediction knows only roughly what a step takes."""


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
    metrics = [
        f" · {name} {_format_metric(value)}" for name, value in (done.validation.metrics or {}).items()
    ]
    return f" · validation {done.validation.loss:.4f}" + "".join(metrics)


def _format_metric(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}"


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


def show_outcome(out: Output, run_id: str, outcome: RunEnd | None) -> None:
    """How a run ended, or that it goes on in the background (``outcome`` None)."""
    if isinstance(outcome, tuple):
        show_run(out, *outcome)
        return
    if outcome is not None:
        show_script(out, outcome.to_json())
        return
    out.line(f"run {run_id} goes on in the background")
    out.note(f"see it again: skyctl attach {run_id}\nend it: skyctl stop {run_id}")
    out.json({"run_id": run_id, "detached": True})


def show_script(out: Output, outcome: Mapping[str, Any]) -> None:
    """How a script's run has ended well; ``outcome``: as ``outcome.json`` has it."""
    from skyctl.files import RunPaths

    again = f", {outcome['restarts']} restarts" if outcome["restarts"] else ""
    out.note(f"all {len(outcome['ranks'])} ranks have ended well{again}")
    if outcome["output"] is not None:
        files = outcome["output_files"]
        out.note(f"{files} output file{'' if files == 1 else 's'}: {outcome['output']}")
    out.note(f"run: {RunPaths(outcome['run_id']).folder}")
    out.json(outcome)


def show_run(out: Output, measured: Measurement, paths: RunPaths) -> None:
    """The measurement of a run that ended well, and where its files are."""
    from skyctl.supervision.run_status import counted_unit

    show_measurement(out, measured, counted_unit(paths))
    show_deviation(out, measured)
    if measured.trace is not None:
        out.line(f"trace: {measured.trace}")
    if measured.attempts > 1:
        out.line(f"attempts: {measured.attempts}; why each was begun: {paths.state}")
    out.note(f"run: {paths.folder}")
    out.json(measured)


def show_measurement(out: Output, measured: Measurement, unit: str = "step") -> None:
    """Seconds of a step per device, predicted and measured; then the whole step, and the loss.

    Args:
        unit: what people call a step of the run (``Rhythm.unit``).
    """
    rows = [
        (
            rank,
            r.device,
            f"{r.predicted.compute_s:.3f}",
            f"{r.compute_s:.3f}",
            f"{r.transfer_s:.3f}",
            f"{r.idle_s:.3f}",
            "" if r.peak_memory_bytes is None else f"{r.peak_memory_bytes / 2**30:.2f}",
        )
        for rank, r in enumerate(measured.replicas)
    ]
    out.table(
        ("rank", "device", "predicted busy s", "busy s", "transfer s", "idle s", "peak GiB"),
        rows,
    )
    step = measured.iteration_s
    took_s = step.median if measured.mean_iteration_s is None else measured.mean_iteration_s
    error = measured.predicted_iteration_s / took_s - 1 if took_s else 0.0
    interval, where = measured.predicted_interval, ""
    if interval is not None:
        where = f", {'within' if interval.holds(step.median) else 'outside'} the interval"
    took = f"{format_seconds(step.median)} (p10–p90 {format_seconds_range(step.p10, step.p90)})"
    if measured.mean_iteration_s is not None:
        took = f"{format_seconds(took_s)} on average, median {took}"
    out.line(
        f"{unit}: {took}; predicted {format_estimate(measured.predicted_iteration_s, interval)}, "
        f"{format_prediction_error(error)}{where}"
    )
    if interval is None and step.median < SHORT_STEP_S and abs(error) > 0.25:
        out.line(
            f"note: a {unit} under {SHORT_STEP_S * 1000:.0f} ms is mostly overhead of messages and layers, "
            "which the prediction knows only roughly"
        )
    if measured.backend is not None and len(measured.replicas) > 1:
        out.line(f"tensors went over {measured.backend}")
    out.line(_loss_text(measured, unit))
    show_validation(out, measured.validation, unit)
    if measured.owners:
        _show_owners(out, measured.owners)
    if measured.weights is not None:
        out.line(f"weights: {measured.weights}")


def _show_owners(out: Output, owners: Sequence[OwnerMeasurement]) -> None:
    """A row for each owner of data."""
    rows = [
        (
            owner.owner,
            owner.rounds,
            f"{owner.local_steps:g}",
            owner.samples,
            _format_metric(owner.loss),
            _format_metric(owner.validation_loss),
        )
        for owner in owners
    ]
    out.table(("owner", "rounds", "local steps", "samples", "last loss", "last validation loss"), rows)


def _loss_text(measured: Measurement, unit: str) -> str:
    """``loss: 2.35 → 0.21 in 500 steps (mean of the last 10: 0.22)``: a step's loss is one batch's."""
    losses = [step.loss for step in measured.steps]
    text = f"loss: {losses[0]:.4f} → {measured.final_loss:.4f} in {len(losses)} {unit}s"
    if len(losses) > AVERAGED_LOSSES:
        text += f" (mean of the last {AVERAGED_LOSSES}: {fmean(losses[-AVERAGED_LOSSES:]):.4f})"
    return text


def show_validation(out: Output, validation: Sequence[ValidationMeasurement], unit: str = "step") -> None:
    """The first and the last validation: a line for the loss, and one for each of the user's metrics."""
    if not validation:
        return
    ends = [validation[0], validation[-1]] if len(validation) > 1 else [validation[0]]
    figures = [("loss", [f"{point.loss:.4f} after {unit} {point.step + 1}" for point in ends])]
    for name in ends[-1].metrics or {}:
        values = [(_format_metric((point.metrics or {}).get(name)), point.step + 1) for point in ends]
        figures.append((name, [f"{value} after {unit} {step}" for value, step in values]))
    for name, shown in figures:
        out.line(f"validation {name}: {' → '.join(shown)}")


def show_deviation(out: Output, done: Measurement) -> None:
    """A table (measured, and how many times the predicted) and sentences, where there is something to say."""
    from skyctl.compare.deviation import DEVIATION_COLUMNS, describe_deviation, deviation_rows

    sentences = describe_deviation(done)
    if not sentences:
        return
    out.table(
        DEVIATION_COLUMNS,
        deviation_rows(done),
        title="measured, and how many times the predicted",
        optional=("optimizer", "waits", "rank"),
        shorten="device",
    )
    for sentence in sentences:
        out.line(sentence, wrap=True)
