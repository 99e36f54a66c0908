"""The formulas of the paper's experiment, against random devices and against each other."""

from __future__ import annotations

import math
import random

import pytest

from skyctl.paper.paper_result import (
    SlowdownFactors,
    max_balanced_chain_saving,
    max_pipeline_saving,
    spread_needed,
)


def test_means_and_ends() -> None:
    two = SlowdownFactors.of([2.0, 6.0])
    assert (two.arithmetic, two.harmonic, two.least, two.most, two.spread) == (4.0, 3.0, 2.0, 6.0, 3.0)
    assert (two.balanced_chain, two.fastest_chain, two.pipeline) == (0.25, 0.5, 0.5)
    equal = SlowdownFactors.of([5.0] * 4)
    assert (equal.balanced_chain, equal.fastest_chain, equal.pipeline) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_no_devices_beat_the_bounds(seed: int) -> None:
    r = random.Random(seed)
    devices = SlowdownFactors.of([r.uniform(1, r.choice((1.5, 3.5, 9))) for _ in range(r.randint(2, 40))])
    assert 0 <= devices.balanced_chain <= max_balanced_chain_saving(devices.spread) + 1e-12
    assert devices.balanced_chain <= devices.fastest_chain <= max_pipeline_saving(devices.spread) + 1e-12
    assert devices.balanced_chain <= devices.pipeline <= max_pipeline_saving(devices.spread) + 1e-12


def test_half_fast_and_half_slow_reach_the_bound_of_a_chain() -> None:
    devices = SlowdownFactors.of([2.0] * 10 + [7.0] * 10)
    assert devices.balanced_chain == pytest.approx(max_balanced_chain_saving(3.5))


def test_one_slow_among_many_comes_near_the_bound_of_a_pipeline() -> None:
    assert SlowdownFactors.of([1.0] * 100_000 + [3.5]).pipeline == pytest.approx(
        max_pipeline_saving(3.5), abs=1e-4
    )


def test_many_uniform_devices_are_as_their_formula() -> None:
    many = SlowdownFactors.of([1 + 2.5 * (i + 0.5) / 100_000 for i in range(100_000)])
    formula = SlowdownFactors.uniform(3.5)
    assert many.arithmetic == pytest.approx(formula.arithmetic)
    assert many.harmonic == pytest.approx(formula.harmonic, rel=1e-6)
    assert SlowdownFactors.uniform(1.0).harmonic == 1.0


@pytest.mark.parametrize("layers", [7, 60, 483])
def test_no_split_beats_the_formulas(layers: int) -> None:
    r = random.Random(layers)
    factors = [r.uniform(1, 3.5) for _ in range(6)]
    devices = SlowdownFactors.of(factors)
    for _ in range(200):
        cuts = sorted(r.randint(0, layers) for _ in range(5))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
        stages = [f * n for f, n in zip(factors, counts, strict=True)]
        assert math.fsum(stages) >= layers * devices.least - 1e-9
        assert max(stages) >= layers / 6 * devices.harmonic - 1e-9


def test_the_spread_that_a_reduction_needs() -> None:
    assert spread_needed(lambda devices: max_balanced_chain_saving(devices.spread), 0.55) == pytest.approx(
        6.74, abs=0.01
    )
    assert spread_needed(lambda devices: max_pipeline_saving(devices.spread), 0.55) == pytest.approx(1 / 0.45)
    needed = spread_needed(lambda devices: devices.pipeline, 0.55)
    assert SlowdownFactors.uniform(needed).pipeline == pytest.approx(0.55)
