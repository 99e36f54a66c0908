"""Static orders are the contract's."""

import pytest

from skyctl.schedule.actions import SCHEDULES, Action, actions, check_in_flight, least_in_flight


def text(order):
    return " ".join(f"{kind}{m}" for kind, m in order)


def test_sequential_finishes_a_microbatch_before_the_next():
    assert text(actions("sequential", 3, 1)) == "F0 B0 F1 B1 F2 B2"


def test_gpipe_does_all_forwards_first():
    assert text(actions("gpipe", 3, 3)) == "F0 F1 F2 B0 B1 B2"


def test_1f1b_warms_up_then_alternates():
    assert text(actions("1f1b", 4, 3)) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert text(actions("1f1b", 4, 1)) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_zero_bubble_is_1f1b_with_weight_gradients_behind():
    assert text(actions("zero-bubble", 3, 2)) == "F0 F1 B0 W0 F2 B1 W1 B2 W2"
    assert text(actions("zero-bubble", 3, 2, 1)) == "F0 F1 B0 F2 B1 W0 B2 W1 W2"
    assert text(actions("zero-bubble", 3, 1, 2)) == "F0 B0 F1 B1 F2 B2 W0 W1 W2"
    for deferred in range(5):
        order = actions("zero-bubble", 5, 3, deferred)
        assert [a for a in order if a.kind != "W"] == actions("eager-1f1b", 5, 3)
        assert [a.microbatch for a in order if a.kind == "W"] == list(range(5))
        pending = most = 0
        for kind, _ in order:
            pending += {"F": 0, "B": 1, "W": -1}[kind]
            most = max(most, pending)
        assert most == deferred + 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_never_more_than_in_flight_and_each_once(schedule, microbatches):
    for stages in (1, 3, 6):
        for stage in range(stages):
            number = least_in_flight(schedule, stage, stages, microbatches)
            order = actions(schedule, microbatches, number)
            kinds = "FBW" if schedule == "zero-bubble" else "FB"
            assert sorted(order) == sorted(Action(k, m) for k in kinds for m in range(microbatches))
            held = most = 0
            for kind, _ in order:
                held += {"F": 1, "B": -1, "W": 0}[kind]
                most = max(most, held)
            assert most == number


def test_in_flight_numbers():
    assert [least_in_flight("1f1b", s, 4, 8) for s in range(4)] == [4, 3, 2, 1]
    assert [least_in_flight("1f1b", s, 4, 2) for s in range(4)] == [2, 2, 2, 1]
    assert [least_in_flight("gpipe", s, 2, 8) for s in range(2)] == [8, 8]
    assert [least_in_flight("sequential", s, 2, 8) for s in range(2)] == [1, 1]


@pytest.mark.parametrize(
    ("schedule", "numbers", "fine"),
    [
        ("1f1b", [3, 2, 1], True),
        ("1f1b", [3, 3, 1], False),
        ("eager-1f1b", [5, 3, 1], True),
        ("eager-1f1b", [3, 4, 1], False),
        ("eager-1f1b", [2, 2, 1], False),
        ("eager-1f1b", [9, 2, 1], False),
        ("zero-bubble", [5, 3, 1], True),
        ("zero-bubble", [2, 2, 1], False),
        ("gpipe", [8, 8], True),
        ("sequential", [1, 2], False),
    ],
)
def test_check_in_flight(schedule, numbers, fine):
    assert (check_in_flight(schedule, numbers, 8) is None) == fine


def test_check_deferred_weights():
    assert check_in_flight("zero-bubble", [2, 1], 8, [7, 0]) is None
    assert "0 to 7" in check_in_flight("zero-bubble", [2, 1], 8, [8, 0])
    assert "allows none" in check_in_flight("1f1b", [2, 1], 8, [0, 1])
    assert check_in_flight("1f1b", [2, 1], 8, [0, 0]) is None


def test_wrong_arguments():
    with pytest.raises(ValueError, match="unknown schedule"):
        least_in_flight("zigzag", 0, 1, 1)
    with pytest.raises(ValueError, match="unknown schedule"):
        actions("zigzag", 1, 1)
    with pytest.raises(ValueError, match="not one of"):
        least_in_flight("1f1b", 2, 2, 1)
    with pytest.raises(ValueError, match="in_flight"):
        actions("1f1b", 2, 3)
    with pytest.raises(ValueError, match="deferred_weights must be 0 to 1"):
        actions("zero-bubble", 2, 2, 2)
    with pytest.raises(ValueError, match="1f1b has no deferred_weights"):
        actions("1f1b", 2, 2, 1)
