"""``--trace`` where nothing runs, and what was off as it is printed."""

from __future__ import annotations

import io

import pytest
from tests.helpers.bare_records import OF_MEASUREMENT, OF_REPLICA

from skyctl.cli.app import main
from skyctl.cli.command_output import Output
from skyctl.cli.progress_display import ProgressDisplay
from skyctl.cli.run_display import make_terminal_callbacks
from skyctl.cli.show_run import show_deviation, show_measurement, show_validation
from skyctl.records.interval import Interval
from skyctl.records.measurement import (
    Difference,
    Measurement,
    Quantiles,
    ReplicaMeasurement,
    ReplicaPredicted,
    StepMeasurement,
    ValidationMeasurement,
)
from skyctl.run.callbacks import StepProgress


def test_only_real_runs_can_be_traced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["skyctl", "compare", "gpt:layers=1", "--trace"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "--trace records real runs: it needs --measure" in capsys.readouterr().err


def run(*differences: Difference) -> Measurement:
    planned = ReplicaPredicted(
        compute_s=1.0,
        idle_s=0.0,
        memory_bytes=0.0,
        forward_s=0.4,
        backward_s=0.5,
        optimizer_s=0.1,
        input_message_s=None,
        gradient_message_s=None,
    )
    replica = ReplicaMeasurement(
        device="n1/cpu:0",
        compute_s=1.6,
        transfer_s=0.0,
        idle_s=0.0,
        peak_memory_bytes=None,
        predicted=planned,
        forward_s=0.6,
        backward_s=0.75,
        optimizer_s=0.15,
        input_message_s=None,
        gradient_message_s=None,
        **OF_REPLICA,
    )
    return Measurement(
        run_id="r",
        strategy="even",
        steps=(StepMeasurement(step=0, loss=1.0, iteration_s=1.6),),
        iteration_s=Quantiles(median=1.6, p10=1.6, p90=1.6),
        predicted_iteration_s=1.0,
        replicas=(replica,),
        final_loss=1.0,
        attempts=1,
        weights=None,
        differences=differences,
        **OF_MEASUREMENT,
    )


def test_what_was_off(capsys: pytest.CaptureFixture[str]) -> None:
    show_deviation(
        Output(),
        run(
            Difference(cause="compute", device="n1/cpu:0", predicted_s=1.0, measured_s=1.5, step_s=1.5),
            Difference(cause="all", predicted_s=1.0, measured_s=1.6, step_s=1.6),
        ),
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "measured, and how many times the predicted"
    assert "600 ms 1.50×" in lines[2]
    assert lines[3].startswith("n1/cpu:0 computes 1.50× as long as predicted (forward 1.50×, backward 1.50×")
    assert lines[4] == "with all parts as measured a step takes 1.60 s, and 1.60 s was measured"


def test_where_nothing_was_off_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    show_deviation(Output(), run())
    assert capsys.readouterr().out == ""


def test_the_end_of_a_run_says_whether_its_interval_held(capsys: pytest.CaptureFixture[str]) -> None:
    done = run()
    for interval, words in (
        (None, "step: 1.60 s (p10–p90 1.60–1.60); predicted 1.00 s, 37.5% too short\n"),
        (
            Interval(low_s=0.9, high_s=1.7),
            "predicted 1.00 s (0.90–1.70), 37.5% too short, within the interval\n",
        ),
        (
            Interval(low_s=0.9, high_s=1.2),
            "predicted 1.00 s (0.90–1.20), 37.5% too short, outside the interval\n",
        ),
    ):
        show_measurement(Output(), done.model_copy(update={"predicted_interval": interval}))
        assert words in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "text"), [(10, "in 10 steps\n"), (12, "(mean of the last 10: 4.5000)\n")])
def test_the_last_losses_mean_is_beside_one_batchs(
    capsys: pytest.CaptureFixture[str], steps: int, text: str
) -> None:
    losses = tuple(StepMeasurement(step=i, loss=float(steps - 1 - i), iteration_s=1.6) for i in range(steps))
    show_measurement(Output(), run().model_copy(update={"steps": losses, "final_loss": 0.0}))
    printed = capsys.readouterr().out
    assert f"loss: {steps - 1}.0000 → 0.0000 in {steps} steps" in printed
    assert text in printed


def test_a_validations_metrics_each_have_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    validation = [
        ValidationMeasurement(step=1, loss=2.0, metrics={"accuracy": 0.123456, "loss": None}),
        ValidationMeasurement(step=3, loss=1.5, metrics={"accuracy": 0.5, "loss": 2e-7}),
    ]
    show_validation(Output(), validation)
    assert capsys.readouterr().out.splitlines() == [
        "validation loss: 2.0000 after step 2 → 1.5000 after step 4",
        "validation accuracy: 0.1235 after step 2 → 0.5 after step 4",
        "validation loss: – after step 2 → 2e-07 after step 4",
    ]
    show_validation(Output(), [ValidationMeasurement(step=0, loss=2.0, metrics=None)])
    assert capsys.readouterr().out == "validation loss: 2.0000 after step 1\n"


def test_a_round_is_called_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    done = run().model_copy(
        update={
            "iteration_s": Quantiles(median=0.05, p10=0.05, p90=0.05),
            "validation": (ValidationMeasurement(step=0, loss=2.0, metrics={"accuracy": 0.5}),),
        }
    )
    show_measurement(Output(), done, "round")
    printed = capsys.readouterr().out
    assert "round: 50.0 ms (p10" in printed
    assert "note: a round under 100 ms" in printed
    assert "in 1 rounds" in printed
    assert "validation loss: 2.0000 after round 1" in printed
    assert "validation accuracy: 0.5 after round 1" in printed
    assert "step" not in printed
    shown = io.StringIO()
    callbacks = make_terminal_callbacks(Output(), ProgressDisplay("launch", show=True, stream=shown))
    figures = {"loss": 1.5, "iteration_s": 0.25, "samples_per_s": 8.0, "left_s": None}
    callbacks.step(StepProgress(step=2, steps=3, **figures, unit="round"))
    assert shown.getvalue() == "launch: round 3 · loss 1.5000 · 0.250 s · 8.0 samples/s (3/3)\n"
