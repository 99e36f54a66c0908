"""How a run ended, as a person reads it: its figures next to the predicted ones, or that it was detached."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyctl.cli.command_output import Output
    from skyctl.files import RunPaths
    from skyctl.records.measurement import Measurement

SHORT_STEP_S = 0.1
"""Below it, the prediction knows only roughly what a step takes."""


def show_outcome(out: Output, run_id: str, outcome: tuple[Measurement, RunPaths] | None) -> None:
    """How a run ended, or that it goes on in the background (``outcome`` None)."""
    if outcome is not None:
        show_run(out, *outcome)
        return
    out.line(f"run {run_id} goes on in the background")
    out.note(f"see it again: skyctl attach {run_id}\nend it: skyctl stop {run_id}")
    out.json({"run_id": run_id, "detached": True})


def show_run(out: Output, measured: Measurement, paths: RunPaths) -> None:
    """The measurement of a run that ended well, and where its files are."""
    show_measurement(out, measured)
    show_deviation(out, measured)
    if measured.trace is not None:
        out.line(f"trace: {measured.trace}")
    if measured.attempts > 1:
        out.line(f"attempts: {measured.attempts}; why each was begun: {paths.state}")
    out.note(f"run: {paths.folder}")
    out.json(measured)


def show_measurement(out: Output, measured: Measurement) -> None:
    """Seconds of a step per device, predicted and measured; then the whole step, and the loss."""
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
    error = measured.predicted_iteration_s / step.median - 1 if step.median else 0.0
    out.line(
        f"step: {step.median:.4f} s (p10 {step.p10:.4f}, p90 {step.p90:.4f}); "
        f"predicted {measured.predicted_iteration_s:.4f} s, off by {error:+.1%}"
    )
    if step.median < SHORT_STEP_S and abs(error) > 0.25:
        out.line(
            f"note: a step under {SHORT_STEP_S * 1000:.0f} ms is mostly overhead of messages and layers, "
            "which the prediction knows only roughly"
        )
    out.line(f"loss: {measured.steps[0].loss:.4f} → {measured.final_loss:.4f} in {len(measured.steps)} steps")
    if measured.validation:
        first, last = measured.validation[0], measured.validation[-1]
        before = f"{first.loss:.4f} after step {first.step + 1} → " if len(measured.validation) > 1 else ""
        out.line(f"validation loss: {before}{last.loss:.4f} after step {last.step + 1}")
    if measured.weights is not None:
        out.line(f"weights: {measured.weights}")


def show_deviation(out: Output, done: Measurement) -> None:
    """A table (measured, and how many times the predicted) and sentences, where there is something to say."""
    from skyctl.compare.deviation import DEVIATION_COLUMNS, describe_deviation, deviation_rows

    said = describe_deviation(done)
    if not said:
        return
    out.table(
        DEVIATION_COLUMNS,
        deviation_rows(done),
        title="measured, and how many times the predicted",
        optional=("optimizer", "waits", "rank"),
        shorten="device",
    )
    for sentence in said:
        out.line(sentence, wrap=True)
