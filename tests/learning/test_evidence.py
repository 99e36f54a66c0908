"""One disturbed run moves no plan, what is slow for good is soon known, and what was seen is weighed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from skyctl.learning.evidence import BELIEVED_RUNS, BELIEVED_S, LearnedEstimate, Scale, weigh, weighted_median
from skyctl.records.profile import Observation, Remeasurement

START = datetime(2026, 1, 1, tzinfo=UTC)
SCALE = Scale(lambda observation: observation.seen_s / observation.probed_s, uncertainty=0.03)


def saw(factor: float, hour: float, **more: object) -> Observation:
    defaults: dict[str, object] = {"run_id": f"r{hour:g}", "steps": 11, "spread": 1.05, "device": "a/cpu:0"}
    figures: dict[str, object] = {"digest": "w", "microbatch_size": 2, "probed_s": 1.0, "seen_s": factor}
    return Observation(seen=at(hour), **{**defaults, **figures, **more})  # type: ignore[arg-type]


def look(factor: float, hour: float) -> Remeasurement:
    return Remeasurement(seen=at(hour), device="a/cpu:0", factor=factor)


def at(hour: float) -> str:
    return (START + timedelta(hours=hour)).isoformat()


def believed(*evidence: Observation | Remeasurement) -> LearnedEstimate:
    return weigh(evidence, SCALE)


def test_a_run_close_to_the_probe_counts_at_once_and_several_by_their_middle() -> None:
    assert believed(saw(1.2, 1)).factor == 1.2
    assert believed(saw(0.9, 1), saw(1.2, 2), saw(1.1, 3)).factor == 1.1


def test_one_run_that_was_much_slower_counts_for_nothing_and_is_named() -> None:
    estimate = believed(saw(3.0, 1))
    assert estimate.factor == 1.0
    assert [observation.run_id for observation in estimate.contradictions] == ["r1"]
    estimate = believed(saw(1.1, 1), saw(3.0, 2))
    assert estimate.factor == 1.1
    assert [observation.run_id for observation in estimate.contradictions] == ["r2"]


def test_a_later_run_that_is_as_believed_settles_it() -> None:
    estimate = believed(saw(1.1, 1), saw(3.0, 2), saw(1.0, 3), saw(1.1, 4))
    assert estimate.factor == 1.1
    assert estimate.contradictions == ()
    assert [(gone.observation.run_id, gone.by) for gone in estimate.dismissals] == [("r2", saw(1.0, 3))]


@pytest.mark.parametrize(
    ("seen", "again", "factor", "confirmed"),
    [(3.0, 2.8, 3.0, True), (3.0, 1.1, 1.0, False), (3.0, 1.7, 1.7, None), (1.4, 1.2, 1.4, True),
     (1.4, 1.1, 1.0, False)],
)  # fmt: skip
def test_a_measurement_settles_it(seen: float, again: float, factor: float, confirmed: bool | None) -> None:
    estimate = believed(saw(seen, 1), look(again, 2))
    assert estimate.factor == factor
    assert estimate.contradictions == ()
    assert bool(estimate.sources) == (confirmed is True)
    assert bool(estimate.dismissals) == (confirmed is not True)
    if confirmed is not False:
        assert estimate.remeasured == look(again, 2)


def test_what_was_measured_is_what_later_runs_are_held_against() -> None:
    slow = saw(3.0, 1), look(3.1, 2)
    assert believed(*slow, saw(2.9, 3), saw(2.8, 4)).factor == 2.9
    assert believed(*slow, saw(1.0, 3)).factor == 1.0
    assert believed(*slow, saw(1.0, 3), saw(3.0, 4)).factor == 1.0


def test_faster_is_believed_at_once_since_nothing_makes_a_device_faster_than_it_is() -> None:
    estimate = believed(saw(0.5, 1))
    assert estimate.factor == 0.5
    estimate = believed(saw(0.5, 1), saw(1.0, 2))
    assert estimate.factor == 0.5
    assert [observation.run_id for observation in estimate.contradictions] == ["r2"]


def test_runs_that_agree_with_each_other_are_believed_even_against_a_measurement() -> None:
    slow = [saw(3.0 + hour / 100, hour) for hour in range(BELIEVED_RUNS)]
    assert believed(*slow[:-1]).factor == 1.0
    assert believed(*slow).factor == slow[1].seen_s
    looked = [piece for run in slow for piece in (run, look(1.0, float(run.run_id[1:]) + 0.5))]
    assert believed(*looked[:-2]).factor == 1.0
    assert believed(*looked[:-1]).factor == slow[1].seen_s
    between = [*looked[:-2], saw(1.0, 1.7)]
    assert believed(*between, slow[-1]).factor == 1.0
    unlike = saw(2.0, 1), saw(3.0, 2), saw(6.0, 3)
    assert believed(*unlike).factor == 1.0


def test_a_long_run_is_believed_alone() -> None:
    steps = int(BELIEVED_S / 3.0) + 1
    assert believed(saw(3.0, 1, steps=steps)).factor == 3.0
    assert believed(saw(3.0, 1, steps=steps, target="b/cpu:0")).factor == 1.0


def test_a_run_that_was_uneven_tells_only_that_something_is_slow() -> None:
    uneven = {"layers_spread": 1.8}
    assert believed(saw(1.2, 1, **uneven)) == believed(saw(0.5, 1, **uneven)) == LearnedEstimate()
    assert len(believed(saw(3.0, 1, **uneven)).contradictions) == 1
    assert believed(saw(3.0, 1, **uneven), look(2.8, 2)).factor == 3.0
    assert believed(saw(3.0, 1, steps=1000, **uneven)).factor == 1.0
    assert believed(saw(3.0, 1), saw(1.0, 2, **uneven)).contradictions == (saw(3.0, 1),)


def test_how_much_is_a_contradiction_follows_from_how_well_both_are_known() -> None:
    assert believed(saw(1.3, 1)).factor == 1.0
    unsure = Scale(SCALE.factor_of, uncertainty=0.2)
    assert weigh([saw(1.3, 1)], unsure).factor == 1.3
    assert believed(saw(1.3, 1, steps=3, layers_spread=1.5)).factor == 1.3


def test_long_steady_and_recent_runs_count_more() -> None:
    rough = {"steps": 3, "layers_spread": 1.5}
    assert believed(saw(1.2, 1, **rough), saw(1.2, 2, **rough), saw(1.0, 3), saw(1.01, 4)).factor == 1.01
    assert believed(saw(1.0, 1), saw(1.01, 2), saw(1.2, 24 * 21)).factor == 1.2


def test_the_weighted_median_is_the_least_value_with_half_of_the_weight() -> None:
    assert weighted_median([3.0, 1.0, 2.0], [1.0, 1.0, 1.0]) == 2.0
    assert weighted_median([3.0, 1.0, 2.0], [5.0, 1.0, 1.0]) == 3.0
    assert weighted_median([2.0, 1.0], [1.0, 1.0]) == 1.0
