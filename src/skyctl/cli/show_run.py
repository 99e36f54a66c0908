"""How a run has ended, for people and as JSON: its figures, its loss, what was not as predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from skyctl.compare.number_format import (
    UNKNOWN,
    format_estimate,
    format_prediction_error,
    format_seconds,
    format_seconds_range,
)

if TYPE_CHECKING:
    from skyctl.cli.command_output import Output
    from skyctl.files import RunPaths
    from skyctl.records.measurement import Measurement, OwnerMeasurement, ValidationMeasurement
    from skyctl.supervision.background_supervisor import RunEnd

AVERAGED_LOSSES = 10
"""A run of more steps says what the last of them had on average: one batch's loss may be far from that."""
SHORT_STEP_S = 0.1
"""Below it, the prediction knows only roughly what a step takes."""


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
    from skyctl.cli.shared_step import show_shared_step
    from skyctl.supervision.run_status import counted_unit

    show_measurement(out, measured, counted_unit(paths))
    show_shared_step(out, paths)
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
            format_metric(owner.loss),
            format_metric(owner.validation_loss),
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
        values = [(format_metric((point.metrics or {}).get(name)), point.step + 1) for point in ends]
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


def format_metric(value: float | None) -> str:
    """A loss or a metric of the user's in four digits; a dash where it is not known."""
    return UNKNOWN if value is None else f"{value:.4g}"
