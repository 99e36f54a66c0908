"""Estimates from made-up repetitions: what a quota does to the wall clock must not reach the layers."""

import random
import time
from statistics import fmean, stdev

import pytest

from skyctl.device import device_timer
from skyctl.probe.node import repetition_timer, wall_cpu_ratio
from skyctl.probe.node.repetition_timer import RepetitionTimer, collect_samples
from skyctl.probe.node.samples import (
    ENOUGH_BLOCKS,
    LayerSamples,
    TimingSample,
    block_sizes,
    converged,
    estimate,
    trimmed_error,
    trimmed_mean,
)


def throttled(cpu_s: float, count: int, quota: float = 0.2, period_s: float = 0.1) -> list[TimingSample]:
    """One thread under a quota: it runs for ``quota`` of each period, then stands still to its end."""
    samples = []
    used_s = 0.0
    for _ in range(count):
        parts = []
        for part_s in (cpu_s / 3, cpu_s * 2 / 3):
            stalls = int((used_s + part_s) / (quota * period_s)) - int(used_s / (quota * period_s))
            used_s += part_s
            parts += [part_s + stalls * (1 - quota) * period_s, part_s]
        samples.append(TimingSample(*parts))
    return samples


def metered(
    samples: list[TimingSample], threads: int = 1, quota_cpus: float | None = None
) -> RepetitionTimer:
    """A timer that has taken them, with nothing between."""
    timer = RepetitionTimer("cpu", single_thread=threads == 1, quota_cpus=quota_cpus)
    timer.wall_s, timer.cpu_s = sum(s.wall_s for s in samples), sum(s.cpu_s for s in samples)
    return timer


def test_a_quota_stretches_all_layers_alike() -> None:
    short, long = throttled(0.001, 1000), throttled(0.025, 40)
    wall_cpu_ratio = metered([*short, *long]).wall_cpu_ratio()
    assert wall_cpu_ratio == pytest.approx(5.0, rel=0.02)
    for samples, cpu_s in ((short, 0.001), (long, 0.025)):
        estimated = estimate(samples, wall_cpu_ratio)
        assert estimated.forward_s + estimated.backward_s == pytest.approx(5 * cpu_s, rel=0.02)
        assert estimated.forward_s == pytest.approx(estimated.backward_s / 2, rel=0.02)
        assert estimated.spread == pytest.approx(0.0, abs=1e-9)
        assert estimated.repeats == len(samples)


def test_wall_time_is_used_where_threads_differ() -> None:
    samples = [TimingSample(0.01, 0.015, 0.02, 0.04)] * 5
    assert metered(samples, 2).wall_cpu_ratio() is None
    assert metered(samples, 2, 1.9).wall_cpu_ratio() == pytest.approx(0.03 / 0.055)
    assert metered(samples, 4, 4.0).wall_cpu_ratio() is None, "this quota does not bite"
    estimated = estimate(samples, None)
    assert (estimated.forward_s, estimated.backward_s) == (pytest.approx(0.01), pytest.approx(0.02))


def test_an_accelerator_has_no_cpu_clock() -> None:
    assert metered([TimingSample(0.01, 0.0, 0.02, 0.0)] * 3).wall_cpu_ratio() is None


def test_one_hiccup_of_many_does_not_move_the_median() -> None:
    samples = [TimingSample(0.01, 0.01, 0.02, 0.02)] * 20 + [TimingSample(0.05, 0.05, 0.1, 0.1)]
    assert estimate(samples, 1.0).forward_s + estimate(samples, 1.0).backward_s == pytest.approx(0.03)


def test_steady_needs_repeats_and_agreement() -> None:
    even = [TimingSample(0.01, 0.01, 0.02, 0.02)] * 3
    assert converged(even, cpu=True)
    assert not converged(even[:2], cpu=True)
    assert not converged([*even, TimingSample(0.02, 0.02, 0.04, 0.04)], cpu=True)


def whole(count: int, seconds: float = 0.03) -> list[TimingSample]:
    return [TimingSample(seconds / 3, seconds / 3, seconds * 2 / 3, seconds * 2 / 3)] * count


def test_a_layer_of_a_window_is_judged_in_the_windows_blocks() -> None:
    window = whole(6)
    assert block_sizes(window, cpu=True) == [1] * 6
    small = [sample.with_shares(0.01, 0.01) for sample in window]
    assert len(block_sizes(small, cpu=True)) == 1, "alone it would take hundreds of repetitions"
    layer_samples = LayerSamples()
    layer_samples.add((0, 4), small, block_sizes(window, cpu=True))
    assert layer_samples.interval((0, 4), by_cpu=True) == pytest.approx(0.0, abs=1e-9)
    assert estimate(small, None, [1] * 6).interval == pytest.approx(0.0, abs=1e-9)
    assert estimate(small, None).interval is None


def test_little_that_is_not_known_of_a_layer_of_next_to_nothing_is_enough() -> None:
    layer_samples = LayerSamples()
    wild = [*whole(3, 0.0002), *whole(3, 0.0006)]
    layer_samples.add((0, 4), wild, [1] * 6)
    layer_samples.add((1, 4), whole(6), [1] * 6)
    assert layer_samples.interval((0, 4), by_cpu=True) > 0.3
    assert layer_samples.unconverged([(0, 4), (1, 4)], by_cpu=True) == set()
    assert layer_samples.unconverged([(0, 4)], by_cpu=True) == {(0, 4)}, (
        "where there is nothing else it counts"
    )
    layer_samples.add((2, 4), whole(2), [1] * 2)
    assert layer_samples.unconverged([(1, 4), (2, 4)], by_cpu=True) == {(2, 4)}, "too few to tell"


class Counting:
    """Steps that take no time and say how often they ran."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def prepare(self) -> None:
        self.calls.append("p")

    def forward(self) -> None:
        self.calls.append("f")

    def between(self) -> None:
        pass

    def backward(self) -> None:
        self.calls.append("b")


def test_collect_warms_up_and_repeats() -> None:
    steps = Counting()
    samples = collect_samples(RepetitionTimer("cpu"), steps, slice_s=0.0, warm_up_repeats=2)
    assert len(samples) == repetition_timer.MIN_REPEATS
    assert "".join(steps.calls) == "pfb" * (2 + repetition_timer.MIN_REPEATS)


@pytest.mark.parametrize(("naps", "waits"), [(1, False), (3, True)])
def test_a_wait_in_the_warm_up_alone_is_not_the_layers(naps: int, waits: bool) -> None:
    """The first repetition may wait for its code to come from a disk."""

    class Napping(Counting):
        def forward(self) -> None:
            super().forward()
            if self.calls.count("f") <= naps:
                time.sleep(0.05)
            sum(range(50_000))

    timer = RepetitionTimer("cpu")
    collect_samples(timer, Napping(), slice_s=0.0, least=2)
    assert timer.layers_wait == waits


def test_collect_is_short_where_there_is_no_more_time() -> None:
    steps = Counting()
    assert (
        len(collect_samples(RepetitionTimer("cpu"), steps, slice_s=1.0, warm_up_s=1.0, over=lambda: True))
        == 1
    )
    assert "".join(steps.calls) == "pfb" * 2


def test_what_lies_between_repetitions_counts_for_the_stretch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"wall": 0.0, "cpu": 0.0}

    def work(wall_s: float, cpu_s: float) -> None:
        now["wall"] += wall_s
        now["cpu"] += cpu_s

    class Steps:
        def prepare(self) -> None:
            work(0.3, 0.1)

        def forward(self) -> None:
            work(0.1, 0.1)

        def between(self) -> None:
            work(0.1, 0.1)

        def backward(self) -> None:
            work(0.1, 0.1)

    monkeypatch.setattr(device_timer.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(device_timer.time, "thread_time", lambda: now["cpu"])
    monkeypatch.setattr(wall_cpu_ratio, "thread_schedstat", lambda: None)
    timer = RepetitionTimer("cpu")
    first = timer.sample(Steps())
    work(0.6, 0.2)
    timer.sample(Steps())
    assert first.wall_s == pytest.approx(0.2)
    assert timer.wall_cpu_ratio() == pytest.approx((1.2 + 0.6) / (0.8 + 0.2))
    slowed = RepetitionTimer("cpu", slowdown=1.5)
    monkeypatch.setattr(device_timer.time, "sleep", lambda seconds: work(seconds, 0.0))
    slowed.sample(Steps())
    assert slowed.wall_cpu_ratio() == pytest.approx(1.5)


def test_what_other_threads_take_of_a_quota_is_not_taken_for_a_smaller_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = {"wall": 0.0, "thread": 0.0, "process": 0.0}

    class Steps:
        def prepare(self) -> None:
            """Nothing."""

        def forward(self) -> None:
            now["wall"] += 1.0
            now["thread"] += 0.09
            now["process"] += 0.1

        between = prepare
        backward = forward

    monkeypatch.setattr(device_timer.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(device_timer.time, "thread_time", lambda: now["thread"])
    monkeypatch.setattr(device_timer.time, "process_time", lambda: now["process"])
    monkeypatch.setattr(wall_cpu_ratio, "thread_schedstat", lambda: None)
    timer = RepetitionTimer("cpu", quota_cpus=0.1, period_s=0.01)
    timer.sample(Steps())
    assert timer.wall_cpu_ratio() == pytest.approx(10.0)
    free = RepetitionTimer("cpu")
    free.sample(Steps())
    assert free.wall_cpu_ratio() == pytest.approx(1 / 0.09)


def test_slowdown_holds_whatever_the_sleeps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"wall": 0.0, "cpu": 0.0}
    overshoot = iter([0.05, *[0.0] * 100])

    def work() -> None:
        now["wall"] += 0.001
        now["cpu"] += 0.001

    def sleep(seconds: float) -> None:
        assert seconds > 0
        now["wall"] += seconds + next(overshoot)

    monkeypatch.setattr(device_timer.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(device_timer.time, "thread_time", lambda: now["cpu"])
    monkeypatch.setattr(device_timer.time, "sleep", sleep)
    timer = RepetitionTimer("cpu", slowdown=4.0)
    runs = [timer.run(work) for _ in range(100)]
    assert sum(wall for wall, _ in runs) == pytest.approx(4 * sum(cpu for _, cpu in runs))
    assert now["wall"] == pytest.approx(sum(wall for wall, _ in runs))


def test_a_processor_with_two_speeds_is_not_taken_for_one_of_them() -> None:
    assert trimmed_mean([1.0] * 11 + [2.0] * 9) == pytest.approx(1.4375)
    assert trimmed_mean([1.0, 2.0, 30.0]) == 11.0  # too few to leave any out
    assert trimmed_mean([0.1, *[1.0] * 3, 30.0]) == 1.0


def test_repetitions_since_all_were_at_it_count_by_themselves_where_there_are_enough() -> None:
    layer_samples = LayerSamples()
    layer_samples.add((0, 4), whole(3), [1] * 3)
    layer_samples.start_counting()
    layer_samples.add((0, 4), whole(ENOUGH_BLOCKS - 1), [1] * (ENOUGH_BLOCKS - 1))
    assert len(layer_samples.samples_of((0, 4))) == 3 + ENOUGH_BLOCKS - 1
    layer_samples.add((0, 4), whole(1), [1])
    assert len(layer_samples.samples_of((0, 4))) == len(layer_samples.blocks_of((0, 4))) == ENOUGH_BLOCKS
    layer_samples.drop((0, 4))
    assert not layer_samples.known
    assert layer_samples.samples_of((0, 4)) == []


def test_the_error_of_a_trimmed_mean_is_how_far_such_means_are_apart() -> None:
    """This holds if some values are far off, too, which leave a plain mean no better for their number."""
    drawn = random.Random(1)

    def values() -> list[float]:
        return sorted(drawn.gauss(1.0, 0.1) + 3.0 * (drawn.random() < 0.03) for _ in range(40))

    means, errors = zip(
        *((trimmed_mean(v), trimmed_error(v)) for v in (values() for _ in range(400))), strict=True
    )
    assert fmean(errors) == pytest.approx(stdev(means), rel=0.15)
    assert stdev(means) < 0.5 * stdev(fmean(values()) for _ in range(400))
    assert trimmed_error([1.0, 2.0]) == pytest.approx(0.5)
