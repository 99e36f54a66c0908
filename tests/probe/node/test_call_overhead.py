"""The time that a stage takes whatever its layers: more for each layer that is run by itself."""

import itertools
import time
from collections.abc import Callable, Iterator

import pytest

from skyctl.probe.node.call_overhead import CHEAP_S, CallOverhead, choose_window
from skyctl.probe.node.layer_windows import LayerWindow
from skyctl.probe.node.repetition_timer import RepetitionTimer

pytestmark = pytest.mark.alone
"""Each has so many seconds to measure in; on a busy machine nothing settles by then."""

ENTERING_S, LAYER_S = 0.001, {0: 0.002, 1: 0.004}
FOUR = LayerWindow((3, 4, 5, 6), (0, 1, 0, 1), in_flight=2)


class Busy:
    """Takes so much of the CPU, and as much again."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def prepare(self) -> None:
        pass

    between = prepare

    def forward(self) -> None:
        end = time.thread_time() + self.seconds / 2
        while time.thread_time() < end:
            pass

    backward = forward


class Changing(Busy):
    """Half of the time half as fast again; now and then much slower."""

    def __init__(self, seconds: float, calls: Iterator[int]) -> None:
        super().__init__(seconds)
        self._usual_s, self._calls = seconds, calls

    def prepare(self) -> None:
        number = next(self._calls)
        self.seconds = self._usual_s * (1.5 if number // 40 % 2 else 1.0) + 0.01 * (number % 47 == 0)


def stage(entering_s: float) -> Callable[[int, int], Busy]:
    return lambda a, b: Busy(entering_s + sum(LAYER_S[kind] for kind in FOUR.kinds[a:b]))


def test_it_is_what_layers_take_more_one_at_a_time_than_together() -> None:
    overhead = CallOverhead(FOUR, 2)
    assert overhead.seconds(by_cpu=True) == 0.0
    assert not overhead.known(by_cpu=True)
    overhead.measure(RepetitionTimer("cpu"), stage(ENTERING_S), 1.2)
    assert overhead.seconds(by_cpu=True) == pytest.approx(ENTERING_S, rel=0.25)
    assert overhead.known(by_cpu=True)


def test_it_leaves_layers_a_part_of_their_time() -> None:
    overhead = CallOverhead(FOUR, 2)
    overhead.measure(RepetitionTimer("cpu"), lambda a, b: Busy(0.004 if b - a == 1 else 0.005), 0.4)
    assert overhead.seconds(by_cpu=True) == pytest.approx(0.75 * 0.005, rel=0.1)


def test_where_wall_time_counts_it_is_wall_time() -> None:
    """As with several threads and no quota: twice as slow is twice as much."""
    overhead = CallOverhead(FOUR, 2)
    overhead.measure(RepetitionTimer("cpu", 2.0), stage(ENTERING_S), 1.2)
    assert overhead.seconds(by_cpu=False) == pytest.approx(2 * overhead.seconds(by_cpu=True), rel=0.4)


def test_a_spike_and_a_change_of_speed_do_not_change_it() -> None:
    """As where the kernel takes the processor for a while, or another guest of the host comes and goes."""
    calls = itertools.count()

    def steps(a: int, b: int) -> Busy:
        return Changing(stage(ENTERING_S)(a, b).seconds, calls)

    overhead = CallOverhead(FOUR, 2)
    overhead.measure(RepetitionTimer("cpu"), steps, 2.0)
    assert overhead.seconds(by_cpu=True) == pytest.approx(1.25 * ENTERING_S, rel=0.25)


def test_where_there_is_nothing_hardly_anything_is_found() -> None:
    overhead = CallOverhead(FOUR, 2)
    overhead.measure(RepetitionTimer("cpu"), stage(0.0), 0.4)
    assert overhead.seconds(by_cpu=True) < ENTERING_S / 4


def test_the_longest_cheap_window_at_the_smallest_size_is_taken() -> None:
    seconds = {
        (2, FOUR): 4 * CHEAP_S,
        (2, LayerWindow((0, 1, 2, 3), (2, 0, 1, 0), 2)): 3 * CHEAP_S,
        (2, LayerWindow((7, 8), (1, 3), 2)): CHEAP_S,
        (4, LayerWindow((1, 2, 3, 4), (0, 1, 0, 1), 2)): CHEAP_S,
    }

    def seconds_of(size: int, window: LayerWindow) -> float:
        return seconds[size, window]

    best = choose_window(list(seconds), seconds_of)
    assert best is not None
    assert (best.window.layers[0], best.size) == (0, 2)
    assert choose_window([(2, FOUR)], lambda *_: 5 * CHEAP_S) is None
    assert choose_window([(2, LayerWindow((0,), (0,), 2))], lambda *_: 0.0) is None
    assert choose_window([(2, LayerWindow(FOUR.layers, FOUR.kinds, in_flight=1))], lambda *_: 0.0) is None
    assert choose_window([], seconds_of) is None
