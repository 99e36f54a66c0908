"""Which cause explains a step that was not as predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.helpers.bare_records import OF_MEASUREMENT, OF_REPLICA

from skyctl.compare.deviation import DEVIATION_COLUMNS, describe_deviation, deviation_rows, find_differences
from skyctl.errors import RecordError
from skyctl.records.base import parse
from skyctl.records.measurement import (
    Measurement,
    ReplicaMeasurement,
    ReplicaPredicted,
    StepMeasurement,
    quantiles,
)
from skyctl.run.step_metrics import predicted_time_parts
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes

HOP = MessageTimes(link_s=0.04, latency_s=0.01)
PLAY = SimulationInput(
    "1f1b", 4, (3, 2, 1), (0, 0, 0), (StageTimes(0.1, 0.2, 0.05),) * 3, (BoundaryTimes(HOP, HOP),) * 2
)
DEVICES = ("n1/cpu:0", "n2/cpu:0", "n3/cpu:0")


def run(
    real: SimulationInput,
    step_s: float | None = None,
    overhead_s: Sequence[float] = (0.0, 0.0, 0.0),
    planned_as: SimulationInput = PLAY,
) -> Measurement:
    """A run of ``planned_as`` whose parts were as in ``real``; its step is what those give, or ``step_s``."""
    done = real.simulate()
    took_s = done.iteration_s if step_s is None else step_s
    planned = planned_as.simulate()
    replicas = []
    for stage, device in enumerate(DEVICES):
        parts = predicted_time_parts(real, stage)
        layers_s = sum(parts[name] or 0.0 for name in ("forward_s", "backward_s", "optimizer_s"))
        replicas.append(
            ReplicaMeasurement(
                device=device,
                compute_s=layers_s + overhead_s[stage],
                transfer_s=0.0,
                idle_s=max(0.0, took_s - layers_s),
                peak_memory_bytes=None,
                predicted=ReplicaPredicted(
                    compute_s=planned.compute_s[stage],
                    idle_s=planned.idle_s[stage],
                    memory_bytes=0.0,
                    **predicted_time_parts(planned_as, stage),
                ),
                **parts,
                **OF_REPLICA,
            )
        )
    measured = Measurement(
        run_id="r",
        strategy="optimal",
        steps=tuple(StepMeasurement(step=i, loss=1.0, iteration_s=took_s) for i in range(3)),
        iteration_s=quantiles([took_s]),
        predicted_iteration_s=planned.iteration_s,
        replicas=tuple(replicas),
        final_loss=1.0,
        attempts=1,
        weights=None,
        **OF_MEASUREMENT,
    )
    return measured.model_copy(update={"differences": find_differences(planned_as, measured)})


def slowed(stage: int, factor: float) -> SimulationInput:
    times = PLAY.stages[stage]
    real = StageTimes(times.forward_s * factor, times.backward_s * factor, times.optimizer_s)
    stages = tuple(real if s == stage else times for s in range(3))
    return replace(PLAY, stages=stages)


def test_as_predicted_there_is_nothing_to_say() -> None:
    done = run(PLAY)
    assert done.differences == ()
    assert describe_deviation(done) == []
    assert parse(Measurement, done.to_json(), "m") == done


def test_a_slow_device_explains_the_step() -> None:
    real = slowed(2, 1.5)
    done = run(real)
    cause, together = done.differences
    assert (cause.cause, cause.device) == ("compute", "n3/cpu:0")
    assert cause.step_s == pytest.approx(real.simulate().iteration_s)
    assert together.cause == "all"
    assert together.predicted_s == pytest.approx(PLAY.simulate().iteration_s)
    assert together.step_s == pytest.approx(together.measured_s)
    first, whole = describe_deviation(done)
    assert first.startswith(
        "n3/cpu:0 computes 1.48× as long as predicted (forward 1.50×, backward 1.50×, opt"
    )
    assert whole == "with all parts as measured a step takes 2.65 s, and 2.65 s was measured"
    assert parse(Measurement, done.to_json(), "m") == done


@pytest.mark.parametrize("ahead", [True, False])
def test_a_slow_link_explains_the_step(ahead: bool) -> None:
    slow = replace(HOP, link_s=0.4)
    boundary = BoundaryTimes(slow, HOP) if ahead else BoundaryTimes(HOP, slow)
    real = replace(PLAY, boundaries=(PLAY.boundaries[0], boundary))
    done = run(real)
    cause = done.differences[0]
    ends = ("n2/cpu:0", "n3/cpu:0") if ahead else ("n3/cpu:0", "n2/cpu:0")
    assert (cause.cause, cause.device, cause.target) == ("message", *ends)
    assert (cause.predicted_s, cause.measured_s) == pytest.approx((0.05, 0.41))
    # The measured way is split as the planned one is: four fifths link, one fifth latency.
    assert cause.step_s > PLAY.simulate().iteration_s * 1.1
    assert describe_deviation(done)[0].startswith(
        f"a message {ends[0]} → {ends[1]} takes 410 ms, predicted 50.0 ms: with that alone"
    )


def test_overhead_and_what_remains() -> None:
    done = run(PLAY, step_s=3.0, overhead_s=(0.0, 0.4, 0.0))
    cause, together = done.differences
    assert (cause.cause, cause.device, cause.measured_s) == ("overhead", "n2/cpu:0", pytest.approx(0.4))
    assert PLAY.simulate().iteration_s < cause.step_s < 3.0
    first, whole = describe_deviation(done)
    assert first.startswith("n2/cpu:0 has 400 ms of overhead a step: with that alone a step takes ")
    assert whole.startswith("with all parts as measured a step takes ")
    assert "; 3.00 s was measured, " in whole
    assert whole.endswith("more than the parts explain")
    assert together.step_s == cause.step_s


def handled(each_s: float) -> SimulationInput:
    """``PLAY`` with so much overhead in each forward and backward."""
    stages = tuple(
        replace(x, forward_s=x.forward_s + each_s, backward_s=x.backward_s + each_s) for x in PLAY.stages
    )
    return replace(PLAY, stages=stages, overhead_s=(each_s,) * 3)


def test_overhead_that_was_predicted_is_no_difference() -> None:
    planned = handled(0.05)
    done = run(planned, overhead_s=(0.4,) * 3, planned_as=planned)  # 4 microbatches, there and back
    assert done.differences == ()
    assert [r.predicted.forward_s for r in done.replicas] == pytest.approx([0.4] * 3)
    row = dict(zip(DEVIATION_COLUMNS, deviation_rows(done)[0], strict=True))
    assert (row["forward"], row["overhead"]) == ("400 ms 1.00×", "400 ms 1.00×")


def test_more_overhead_than_predicted_counts_once() -> None:
    planned = handled(0.05)
    done = run(planned, overhead_s=(0.4, 0.8, 0.4), planned_as=planned)
    cause, together = done.differences
    assert (cause.cause, cause.device) == ("overhead", "n2/cpu:0")
    assert (cause.predicted_s, cause.measured_s) == pytest.approx((0.4, 0.8))
    slower = replace(planned.stages[1], forward_s=0.2, backward_s=0.3)
    real = replace(planned, stages=(planned.stages[0], slower, planned.stages[2]))
    assert cause.step_s == pytest.approx(real.simulate().iteration_s)
    assert together.step_s == cause.step_s
    assert describe_deviation(done)[0].startswith(
        "n2/cpu:0 has 800 ms of overhead a step, predicted 400 ms: "
    )


def test_causes_come_by_what_they_do_to_the_step() -> None:
    real = replace(
        slowed(1, 1.6), boundaries=(BoundaryTimes(replace(HOP, link_s=0.06), HOP), PLAY.boundaries[1])
    )
    *causes, together = run(real).differences
    effects = [abs(cause.step_s - together.predicted_s) for cause in causes]
    assert effects == sorted(effects, reverse=True)
    assert [cause.cause for cause in causes] == ["compute", "message"]


def test_the_table_says_how_many_times_the_predicted() -> None:
    row = dict(
        zip(
            DEVIATION_COLUMNS,
            deviation_rows(run(slowed(2, 1.5), overhead_s=(0.0, 0.0, 0.012)))[2],
            strict=True,
        )
    )
    assert row["forward"] == "600 ms 1.50×"
    assert row["backward"] == "1.20 s 1.50×"
    assert row["overhead"] == "12.0 ms"
    assert row["message in"] == "50.0 ms 1.00×"
    assert row["message back"] == "–"


def test_what_shares_a_line_is_not_played_as_if_it_were_alone() -> None:
    """Its time has the others' in it: with it the line would be counted twice."""
    slow = replace(HOP, link_s=0.4)
    real = replace(PLAY, boundaries=(replace(PLAY.boundaries[0], forward=slow), *PLAY.boundaries[1:]))
    line = replace(HOP, shared=(("n2 in", HOP.link_s),))
    planned = replace(PLAY, boundaries=(replace(PLAY.boundaries[0], forward=line), *PLAY.boundaries[1:]))
    assert any(difference.cause == "message" for difference in run(real).differences)
    done = run(real, planned_as=planned)
    assert all(difference.cause != "message" for difference in done.differences)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("replicas", [], "'n3/cpu:0'"),
        ("differences", [{"cause": "compute", "device": "n9/cpu:0"}], "'n9/cpu:0'"),
        ("differences", [{"cause": "compute"}], "None"),
        ("differences", [{"cause": "overhead", "device": "n3/cpu:0"}], "last"),
    ],
)
def test_a_file_whose_differences_nobody_measured_is_refused(
    key: str, value: list[Any], message: str
) -> None:
    """It comes from a run's folder, which another version, a full disk or a hand may have changed."""
    document = json.loads(run(slowed(2, 1.5)).to_json())
    document[key] = [{**entry, "predicted_s": 1.0, "measured_s": 2.0, "step_s": 2.0} for entry in value]
    with pytest.raises(RecordError, match=message):
        parse(Measurement, json.dumps(document), "measurement.json")
