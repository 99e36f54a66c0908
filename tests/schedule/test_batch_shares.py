import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyctl.schedule.batch_shares import best_shares, level_in_parts_s, proportional_shares


def every_share(total, count, least=1):
    """All tuples of ``count`` integers, ``least`` or more each, that add up to ``total``."""
    if count == 1:
        return [(total,)] if total >= least else []
    return [
        (first, *rest)
        for first in range(least, total - least * (count - 1) + 1)
        for rest in every_share(total - first, count - 1, least)
    ]


def step_s(shares, fixed_s, per_unit_s):
    return max(f + n * t for n, f, t in zip(shares, fixed_s, per_unit_s, strict=True))


def test_no_other_shares_finish_sooner_than_the_best():
    draw = random.Random(5)
    for _ in range(300):
        count = draw.randint(1, 4)
        total = draw.randint(count, 11)
        least = draw.randint(0, 1)
        fixed_s = [draw.choice([0.0, draw.random() * 3]) for _ in range(count)]
        per_unit_s = [draw.choice([0.0, draw.random(), draw.random() * 9]) for _ in range(count)]
        shares = best_shares(total, fixed_s, per_unit_s, least)
        assert sum(shares) == total
        assert min(shares) >= least
        fastest_s = min(step_s(other, fixed_s, per_unit_s) for other in every_share(total, count, least))
        assert step_s(shares, fixed_s, per_unit_s) == fastest_s
        assert level_in_parts_s(total, fixed_s, per_unit_s, least) <= fastest_s + 1e-12


def test_water_filling_equals_one_unit_after_the_other():
    for t, e, count in (
        ([1.0, 2.5, 0.3], [0.0, 4.0, 2.0], 40),
        ([1.0, 0.0], [0.0, 3.0], 7),
        ([2.0], [1.0], 3),
    ):
        one_by_one = [1] * len(t)
        for _ in range(count - len(t)):
            i = min(range(len(t)), key=lambda i: e[i] + (one_by_one[i] + 1) * t[i])
            one_by_one[i] += 1
        assert step_s(best_shares(count, e, t), e, t) == step_s(one_by_one, e, t)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(0, 25))
def test_proportional_shares_are_the_nearest_to_the_proportion(speeds, more):
    """Of all shares of at least 1 each, none lies nearer to the quotas (in the sum of squares)."""
    total = len(speeds) + more
    shares = proportional_shares(total, speeds)
    assert sum(shares) == total
    assert min(shares) >= 1
    quota = [Fraction(speed * total, sum(speeds)) for speed in speeds]
    if min(quota) >= 1:

        def distance(shares):
            return sum((n - q) ** 2 for n, q in zip(shares, quota, strict=True))

        ways = every_share(total, len(speeds)) if math.comb(total - 1, len(speeds) - 1) < 3000 else [shares]
        assert distance(shares) == min(distance(other) for other in ways)
        assert all(abs(n - q) < 1 for n, q in zip(shares, quota, strict=True))
    for (n, a), (m, b) in itertools.combinations(zip(shares, speeds, strict=True), 2):
        assert n == m or (n > m) == (a > b) or a == b


def test_shares_of_the_issue():
    assert proportional_shares(64, [80, 40, 20, 20]) == (32, 16, 8, 8)
    assert proportional_shares(64, [1.0, 1.0, 1.0]) == (22, 21, 21)  # ties: the lowest rank
    assert proportional_shares(3, [1000, 1, 1]) == (1, 1, 1)
    assert proportional_shares(10, [1000, 1, 1]) == (8, 1, 1)


def test_fewer_units_than_ranks_are_refused():
    with pytest.raises(ValueError, match="2 can't be shared by 3 with at least 1 each"):
        proportional_shares(2, [1, 1, 1])
    with pytest.raises(ValueError, match="1 can't be shared by 2 with at least 1 each"):
        best_shares(1, [0.0, 0.0], [1.0, 1.0])
    for speeds in ([0.0, 1.0], [-1.0, 1.0], [math.inf, 1.0], [math.nan, 1.0]):
        with pytest.raises(ValueError, match="positive and finite"):
            proportional_shares(8, speeds)
    with pytest.raises(ValueError, match="can't be shared by 0"):
        proportional_shares(8, [])
