from itertools import product

import pytest

from skyctl.run.scripts.share_trials import MAX_TRIALS, ShareTrials, middle_mean


def played(total: int, time_of) -> ShareTrials:
    """Trials until no more are to be made, from equal shares; ``time_of(rank, samples)`` in seconds."""
    ranks = 3
    trials, shares = ShareTrials(), (total // ranks,) * ranks
    while shares is not None:
        trials.add(shares, [time_of(rank, n) for rank, n in enumerate(shares)])
        shares = trials.next_shares()
    return trials


def least_s(total: int, time_of) -> float:
    """The least time of the slowest of three ranks, by trying all shares."""
    shares = product(range(1, total), repeat=2)
    return min(
        max(time_of(0, a), time_of(1, b), time_of(2, total - a - b)) for a, b in shares if a + b < total
    )


def test_times_in_proportion_take_two_trials():
    def time_of(rank, n):
        return (0.01, 0.03, 0.03)[rank] * n

    trials = played(15, time_of)
    assert trials.best.shares == (9, 3, 3)
    assert [trial.shares for trial in trials._trials] == [(5, 5, 5), (9, 3, 3)]
    assert trials.best.slowest_s == least_s(15, time_of)


def test_a_rank_s_fixed_part_is_found_by_the_second_trial():
    def time_of(rank, n):
        return (0.0, 0.1, 0.3)[rank] + (0.01, 0.01, 0.02)[rank] * n

    trials = played(60, time_of)
    assert trials.best.slowest_s == pytest.approx(least_s(60, time_of), rel=0.04)


def test_a_quota_that_a_short_step_does_not_reach():
    """80, 40 and 20% of a core in periods of 100 ms; a step begins with all that a period gives."""

    def time_of(rank, n):
        quota, left_s = (0.08, 0.04, 0.02)[rank], 0.005 * n
        whole, rest = divmod(left_s - 1e-9, quota)
        return whole * 0.1 + rest

    trials = played(63, time_of)
    assert trials.first.slowest_s > 1.5 * trials.best.slowest_s
    assert trials.best.slowest_s <= 1.1 * least_s(63, time_of)


def test_no_other_shares_are_tried_for_little_or_for_ever():
    trials = ShareTrials()
    assert (trials.next_shares(), trials.best, trials.first) == (None, None, None)
    trials.add((10, 10), (1.0, 1.02))
    assert trials.next_shares() is None
    erratic = ShareTrials()
    for _ in range(MAX_TRIALS):
        erratic.add(erratic.next_shares() or (10, 10), (1.0, 9.0 - len(erratic._trials)))
    assert erratic.next_shares() is None


def test_the_middle_half_of_times():
    assert middle_mean([5.0]) == 5.0
    assert middle_mean([1.0, 2.0, 3.0, 4.0, 100.0]) == 3.0
    assert middle_mean([1.0, 1.0, 2.0, 2.0]) == 1.5
