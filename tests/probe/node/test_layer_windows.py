"""Layers are timed in the company they will have: which company, and who took what of the time."""

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.probe.node.coordinators import Alone
from torch import nn

from skyctl.probe.node.layer_bench import LayerBench
from skyctl.probe.node.layer_windows import (
    MOST_IN_FLIGHT,
    MOST_WINDOW_BYTES,
    LayerWindow,
    choose_windows,
    single_layer_windows,
)
from skyctl.probe.node.probe_requests import DistinctLayer
from skyctl.probe.node.repetitions import ChainRepetition
from skyctl.probe.node.window_bench import WindowBench
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import make_spec

KINDS = [0, *[1, 2] * 6, 3]
WANTED = [(0, 0), (1, 1), (2, 2), (3, 13)]
PLENTY = float("inf")


def test_every_kind_of_a_model_whose_blocks_repeat_is_in_one_window() -> None:
    assert choose_windows(KINDS, WANTED, [1.0] * 4, (), PLENTY) == [
        LayerWindow((0, 1, 2, 3, 4, 5, 6, 13), (0, 1, 2, 1, 2, 1, 2, 3), MOST_IN_FLIGHT)
    ]
    assert choose_windows(KINDS, WANTED, [1.0] * 4, (), 6.5) == [
        LayerWindow((0, 1, 2, 3, 4, 13), (0, 1, 2, 1, 2, 3), 1)
    ]


def test_a_layer_follows_only_what_it_follows_in_the_model() -> None:
    kinds = [0, 1, 2, 3, 0, 4, 2, 5]
    windows = choose_windows(kinds, [(0, 0), (4, 5), (5, 7)], [1.0] * 6, (), PLENTY)
    assert windows == [LayerWindow((0, 1, 2, 3, 4, 5, 6, 7), tuple(kinds), MOST_IN_FLIGHT)]
    assert choose_windows(kinds, [(0, 0), (4, 5), (5, 7)], [1.0] * 6, (), 6.5) == [
        LayerWindow((0, 5, 6, 7), (0, 4, 2, 5), 1)
    ]
    assert choose_windows(KINDS, [(3, 13)], [1.0] * 4, (), PLENTY) == [
        LayerWindow((6, 7, 8, 9, 10, 11, 12, 13), (2, 1, 2, 1, 2, 1, 2, 3), MOST_IN_FLIGHT)
    ]


def test_layers_that_fill_the_caches_or_the_memory_stand_alone() -> None:
    large = MOST_WINDOW_BYTES / 2
    windows = choose_windows(KINDS, WANTED, [large, large, large / 2, large], (), PLENTY)
    assert windows[0] == LayerWindow((0, 1), (0, 1), 2)
    tight = choose_windows(KINDS, WANTED, [10.0] * 4, (), 25.0)
    assert all(len(window.layers) == 2 and window.in_flight == 1 for window in tight)
    assert choose_windows(KINDS, [(1, 1)], [1.0] * 4, (2,), PLENTY) == [
        LayerWindow((0, 1), (0, 1), MOST_IN_FLIGHT)
    ]
    assert choose_windows(KINDS, [(2, 2)], [1.0] * 4, (2,), PLENTY) == [LayerWindow((2,), (2,), 1)]


def test_a_window_taken_apart_has_every_kind_once() -> None:
    assert single_layer_windows(LayerWindow((10, 11, 12, 13), (2, 1, 2, 3))) == [
        LayerWindow((10,), (2,)),
        LayerWindow((11,), (1,)),
        LayerWindow((13,), (3,)),
    ]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def gpt() -> Workload:
    return load_workload(
        make_spec("gpt:layers=3,hidden=16,heads=2,context=8", batch_size=4, random_inputs=True)
    )


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return gradient


class Sleeper(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Slow.apply(x)  # type: ignore[no-untyped-call]
        return out


@pytest.mark.parametrize("place", [0, 1, 3])
def test_marks_tell_which_layer_took_the_time(gpt: Workload, place: int) -> None:
    modules: list[nn.Module] = list(gpt.build(1, 5, "cpu"))
    modules[place] = Sleeper()
    steps = ChainRepetition(gpt, modules, range(1, 5), 2, "cpu", in_flight=2, clock=time.perf_counter)
    for _ in range(2):
        steps.prepare()
        steps.forward()
        steps.between()
        steps.backward()
    for shares in steps.shares[-1]:
        assert sum(shares) == pytest.approx(1.0)
        assert max(range(4), key=shares.__getitem__) == place


def test_nothing_is_kept_when_it_is_over(gpt: Workload) -> None:
    steps = ChainRepetition(gpt, gpt.build(1, 4, "cpu"), range(1, 4), 2, "cpu", in_flight=3)
    steps.prepare()
    output = weakref.ref(steps._outputs[0][0])
    gc.disable()
    try:
        del steps
        assert output() is None
    finally:
        gc.enable()


def test_no_memory_in_company_is_tried_alone(gpt: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyctl.probe.node.layer_bench.MIN_TOTAL_S", 0.0)
    build = gpt.build
    asked = []

    def small(start: int, stop: int, device: str) -> list[nn.Module]:
        asked.append(start)
        if len(asked) == 2:
            raise MemoryError("no room for that many")
        return build(start, stop, device)

    monkeypatch.setattr(gpt, "build", small)
    kinds = [0, *[1, 2] * 3, 3]
    tasks = [DistinctLayer(index, gpt.names[index], {2: str(index)}, {2: 1.0}) for index in (0, 1, 2, 7)]
    bench = LayerBench(WindowBench(gpt, "cpu", threads=1, slowdown=1.0, memory_bytes=None, quota=None))
    bench.measure(tasks, 0.1, 60.0, Alone(), {2: kinds})
    assert asked[:6] == [0, 1, 0, 1, 2, 7]
    rows = bench.timings(tasks)
    assert all(row["forward_s"] > 0 and row["backward_s"] > 0 for row in rows)


RAGGED = """
import torch
from torch import nn

class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)
    def forward(self, x): return self.linear(x)

def model(): return [Frozen(), nn.Identity(), nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 3)]

def data(batch_size, seed):
    while True:
        yield torch.randn(batch_size, 4), torch.zeros(batch_size, dtype=torch.int64)
"""


def test_layers_without_a_gradient_have_no_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyctl.probe.node.layer_bench.MIN_TOTAL_S", 0.0)
    (tmp_path / "train.py").write_text(RAGGED)
    workload = load_workload(make_spec(str(tmp_path / "train.py"), batch_size=4))
    steps = ChainRepetition(workload, workload.build(0, 5, "cpu"), range(5), 2, "cpu")
    steps.prepare()
    steps.forward()
    steps.between()
    steps.backward()
    _, backward = steps.shares[-1]
    assert backward[0] == pytest.approx(0.0)
    assert sum(backward) == pytest.approx(1.0)
