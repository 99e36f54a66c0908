"""Layers are timed one by one on a real device; those that can't be say why."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.probe.node.coordinators import Alone
from torch import nn

from skyctl.probe.node.layer_bench import LayerBench
from skyctl.probe.node.layer_windows import LayerWindow
from skyctl.probe.node.probe_requests import DistinctLayer
from skyctl.probe.node.repetitions import ChainRepetition, SplitRepetition
from skyctl.probe.node.samples import ENOUGH_BLOCKS, LEAST_OWN_SHARE
from skyctl.probe.node.window_bench import LayerBudget, WindowBench
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import make_spec


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def gpt() -> Workload:
    return load_workload(
        make_spec("gpt:layers=2,hidden=16,heads=2,context=8", batch_size=4, random_inputs=True)
    )


def task(workload: Workload, index: int, *sizes: int, needs: float = 0.0) -> DistinctLayer:
    signatures = {size: f"{workload.names[index]}/{size}" for size in sizes}
    return DistinctLayer(index, workload.names[index], signatures, dict.fromkeys(sizes, needs))


def bench(workload: Workload, memory_bytes: float | None = None) -> LayerBench:
    return LayerBench(
        WindowBench(workload, "cpu", threads=1, slowdown=1.0, memory_bytes=memory_bytes, quota=None)
    )


def measure(layer_bench: LayerBench, tasks: list[DistinctLayer]) -> list[dict[str, Any]]:
    coordinator = Alone()
    layer_bench.measure(tasks, 0.1, 60.0, coordinator)
    assert coordinator.calls == ["passed", "measured"]
    return layer_bench.timings(tasks)


@pytest.mark.alone
def test_every_layer_and_size_gets_figures(gpt: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyctl.probe.node.layer_bench.MIN_TOTAL_S", 0.0)
    tasks = [task(gpt, index, 1, 2) for index in (0, 1, 2, gpt.layers - 1)]
    rows = measure(bench(gpt), tasks)
    assert [(row["signature"], row["microbatch_size"]) for row in rows] == [
        (each.signatures[size], size) for each in tasks for size in (1, 2)
    ]
    for row in rows:
        assert row["forward_s"] > 0
        assert row["backward_s"] > 0
        assert row["optimizer_s"] > 0
        assert 0 <= row["weight_s"] < row["backward_s"]
        assert (row["weight_s"] > 0) == ("embedding" not in row["signature"])
        assert row["repeats"] >= 3
        assert row["spread"] >= 0


def test_what_there_was_no_time_for_is_skipped_and_says_so(gpt: Workload) -> None:
    layer_bench = bench(gpt)
    layer_bench.measure([task(gpt, 1, 2)], 0.1, 0.0, Alone())
    assert [row["skipped"] for row in layer_bench.timings([task(gpt, 1, 2)])] == ["there was no time for it"]


def test_what_a_stage_takes_besides_is_no_layers(gpt: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in company share it; next to nothing is not less than a part of what was measured."""
    monkeypatch.setattr("skyctl.probe.node.layer_bench.MIN_TOTAL_S", 0.0)
    tasks = [task(gpt, index, 2) for index in (0, 1, 2, gpt.layers - 1)]
    layer_bench = bench(gpt)
    layer_bench.measure(tasks, 0.1, 60.0, Alone(), {2: [0, *[1, 2] * 2, 3]})
    whole, own, least = (layer_bench.timings(tasks, action_s) for action_s in (0.0, 1e-5, 1e9))
    by_cpu = (
        layer_bench.wall_cpu_ratio() is not None
    )  # a machine with other work on it may be timed by the wall
    for each, before, after, most in zip(tasks, whole, own, least, strict=True):
        ratio = layer_bench.bench.layer_samples.own_share((each.index, 2), 1e-5, by_cpu)
        layer_s = (before["forward_s"] + before["backward_s"]) / (layer_bench.wall_cpu_ratio() or 1.0)
        assert 1 - 1e-5 / layer_s < ratio < 1, "others were run with it"
        for part in ("forward_s", "backward_s", "split_s"):
            assert after[part] == pytest.approx(before[part] * ratio)
            assert most[part] == pytest.approx(before[part] * LEAST_OWN_SHARE)


class Late(Alone):
    """Others need ``rounds`` more of its passes before anything counts."""

    def __init__(self, layer_bench: LayerBench, rounds: int) -> None:
        super().__init__()
        self._layer_bench, self._rounds = layer_bench, rounds
        self.before: list[int] = []

    def progress(self, done: int, of: int, what: str) -> None:
        if self.calls == ["passed"]:
            self._rounds -= 1

    def count_s(self) -> float | None:
        if self._rounds > 0:
            return None
        self.before = self.before or [len(self._layer_bench.bench.layer_samples.samples_of((1, 2)))]
        return 0.0

    def stopped(self) -> bool:
        return self.calls != ["passed"]


def test_only_what_was_measured_with_all_others_counts(
    gpt: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyctl.probe.node.layer_bench.MIN_TOTAL_S", 0.0)
    monkeypatch.setattr("skyctl.probe.node.samples.BLOCK_S", 1e-9)
    layer_bench = bench(gpt)
    coordinator = Late(layer_bench, 3)
    layer_bench.measure([task(gpt, 1, 2)], 0.1, 60.0, coordinator)
    assert coordinator.calls == ["passed", "measured"]
    total = len(layer_bench.bench.layer_samples._all[1, 2].samples)
    (row,) = layer_bench.timings([task(gpt, 1, 2)])
    assert coordinator.before[0] >= 3
    assert ENOUGH_BLOCKS <= row["repeats"] <= total - coordinator.before[0]


def test_layers_stay_in_memory_from_pass_to_pass_as_they_are(
    gpt: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow device building them takes longer than running them. Optimizers leave their weights alone."""
    monkeypatch.setattr("skyctl.probe.node.layer_bench.MIN_TOTAL_S", 0.0)
    built: list[tuple[int, torch.nn.Module]] = []
    build = gpt.build

    def keep(start: int, stop: int, device: str) -> list[torch.nn.Module]:
        modules: list[torch.nn.Module] = build(start, stop, device)
        built.extend(enumerate(modules, start))
        return modules

    monkeypatch.setattr(gpt, "build", keep)
    layer_bench = bench(gpt)
    tasks = [task(gpt, index, 2) for index in (0, 1, 2, gpt.layers - 1)]
    kinds = {2: [0, *[1, 2] * ((gpt.layers - 2) // 2), 3]}
    layer_bench.measure(tasks, 0.1, 60.0, Late(layer_bench, 3), kinds, with_call_overhead=False)
    assert [index for index, _ in built] == [0, 1, 2, 3, 4, gpt.layers - 1]  # of its blocks two
    assert layer_bench.bench._built is None
    for index, module in built:
        for weight, fresh in zip(module.parameters(), build(index, index + 1)[0].parameters(), strict=True):
            # real steps move each by 1e-3; weight decay takes 1e-5 of it, so often as there is time
            assert torch.allclose(weight, fresh, rtol=1e-2, atol=1e-3)


def test_gradients_accumulate_as_in_a_step(gpt: Workload) -> None:
    module = gpt.build(1, 2, "cpu")[0]
    steps = ChainRepetition(gpt, [module], [1], 2, "cpu")
    grads = []
    for _ in range(2):
        steps.prepare()
        steps.forward()
        steps.between()
        steps.backward()
        grads.append(next(module.parameters()).grad.clone())
    torch.testing.assert_close(grads[1], 2 * grads[0])


def test_several_microbatches_are_in_flight_and_leave_oldest_first(gpt: Workload) -> None:
    module = gpt.build(1, 2, "cpu")[0]
    steps = ChainRepetition(gpt, [module], [1], 2, "cpu", in_flight=3)
    steps.prepare()
    assert len(steps._outputs) == 2
    oldest = steps._outputs[0]
    steps.forward()
    steps.between()
    steps.backward()
    assert len(steps._outputs) == 2
    assert all(left is not oldest for left in steps._outputs)
    assert next(module.parameters()).grad is not None


def test_a_layer_that_gives_a_list(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Both(nn.Linear):\n"
        "    def forward(self, x): return [super().forward(x), x]\n"
        "class Sum(nn.Linear):\n"
        "    def forward(self, x): return super().forward(x[0] + x[1])\n"
        "def model(): return [Both(6, 6), Sum(6, 4)]\n"
        "def data(batch_size, seed):\n"
        "    while True: yield torch.randn(batch_size, 6), torch.randint(0, 4, (batch_size,))\n"
    )
    workload = load_workload(make_spec(str(tmp_path / "train.py"), batch_size=4))
    module = workload.build(0, 1, "cpu")[0]
    steps = ChainRepetition(workload, [module], [0], 2, "cpu")
    steps.prepare()
    steps.forward()
    steps.between()
    steps.backward()
    assert next(module.parameters()).grad is not None


def test_a_backward_in_two_parts_gives_the_same_gradients(gpt: Workload) -> None:
    for index in (1, 2, gpt.layers - 1):
        module = gpt.build(index, index + 1, "cpu")[0]
        whole = ChainRepetition(gpt, [module], [index], 2, "cpu")
        torch.manual_seed(0)  # of the gradients that come back
        whole.prepare()
        whole.forward()
        whole.between()
        whole.backward()
        expected = [parameter.grad for parameter in module.parameters()]
        module.zero_grad()
        layer = ChainRepetition(gpt, [module], [index], 2, "cpu")
        layer._values = whole._values
        parts = SplitRepetition(layer, "cpu")
        torch.manual_seed(0)
        parts.prepare()
        parts.forward()
        assert any(parameter.grad is None for parameter in module.parameters())
        parts.backward()
        for parameter, gradient in zip(module.parameters(), expected, strict=True):
            assert gradient is not None
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradient)


def test_no_memory_for_the_parts_alone_leaves_the_rest(
    gpt: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("skyctl.probe.node.layer_bench.MIN_TOTAL_S", 0.0)
    monkeypatch.setattr(SplitRepetition, "forward", fails)
    (row,) = measure(bench(gpt), [task(gpt, 1, 2)])
    assert row["backward_s"] > 0
    assert row["weight_s"] is None


def test_a_layer_that_does_not_fit_is_skipped_and_says_so(
    gpt: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyctl.probe.node.layer_bench.MIN_TOTAL_S", 0.0)
    big, small = task(gpt, 1, 2, needs=5 * 2**30), task(gpt, 2, 2, needs=10.0)
    rows = measure(bench(gpt, memory_bytes=2.0**30), [big, small])
    assert "needs 5.00 GiB" in rows[0]["skipped"]
    assert "has 1.00 GiB" in rows[0]["skipped"]
    assert "forward_s" not in rows[0]
    assert rows[1]["forward_s"] > 0


def test_running_out_of_memory_skips_that_size_only(gpt: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyctl.probe.node.layer_bench.MIN_TOTAL_S", 0.0)
    build = gpt.build

    class Greedy(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > 1:
                raise RuntimeError(
                    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
                )
            out: torch.Tensor = self.inner(x)
            return out

    monkeypatch.setattr(gpt, "build", lambda start, stop, device: [Greedy(build(start, stop, device)[0])])
    rows = measure(bench(gpt), [task(gpt, 1, 1, 2)])
    assert rows[0]["forward_s"] > 0
    assert "out of memory at 2 samples" in rows[1]["skipped"]


def test_a_layer_may_change_its_input_in_place(gpt: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyctl.probe.node.layer_bench.MIN_TOTAL_S", 0.0)
    monkeypatch.setattr(gpt, "build", lambda start, stop, device: [nn.ReLU(inplace=True)])
    rows = measure(bench(gpt), [task(gpt, 1, 2)])
    assert rows[0]["forward_s"] > 0
    assert rows[0]["optimizer_s"] == 0.0


def test_other_errors_are_not_hidden(gpt: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr(gpt, "build", fails)
    with pytest.raises(RuntimeError, match="kernel is missing"):
        measure(bench(gpt), [task(gpt, 1, 1)])


USER = """
import torch
from torch import nn

class Pair(nn.Module):
    def forward(self, x):
        return x * 2, torch.ones(x.shape[0], dtype=torch.int64)

class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
    def forward(self, both):
        x, count = both
        return self.linear(x) * count[:, None]

def model():
    return [nn.Linear(4, 4), Pair(), Join()]

def data(batch_size, seed):
    while True:
        yield torch.randn(batch_size, 4), torch.zeros(batch_size, dtype=torch.int64)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


def test_tuples_and_layers_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyctl.probe.node.layer_bench.MIN_TOTAL_S", 0.0)
    file = tmp_path / "train.py"
    file.write_text(USER)
    workload = load_workload(make_spec(str(file), batch_size=4))
    rows = measure(bench(workload), [task(workload, index, 2) for index in range(3)])
    assert all(row["forward_s"] > 0 and row["backward_s"] > 0 for row in rows)
    assert rows[1]["optimizer_s"] == 0.0
    assert rows[2]["optimizer_s"] > 0


def test_a_layer_that_waits_is_timed_with_its_waiting(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "import time\n"
        "import torch\n"
        "from torch import nn\n"
        "class Nap(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        time.sleep(0.004)\n"
        "        return super().forward(x)\n"
        "def model():\n"
        "    return [nn.Linear(4, 4), Nap(4, 4)]\n"
        "def data(batch_size, seed):\n"
        "    while True:\n"
        "        yield torch.zeros(batch_size, 4), torch.zeros(batch_size, dtype=torch.long)\n"
    )
    workload = load_workload(make_spec(str(file), batch_size=2))
    layer_bench = bench(workload)
    quick, naps = measure(layer_bench, [task(workload, 0, 2), task(workload, 1, 2)])
    assert layer_bench.bench.timer.layers_wait
    assert quick["forward_s"] < naps["forward_s"]
    assert naps["forward_s"] >= 0.004


def test_microbatches_in_flight_are_forgotten_where_an_optimizer_changes_their_layers(gpt: Workload) -> None:
    tasks, window = [task(gpt, index, 2) for index in (1, 2)], LayerWindow((1, 2), (0, 1), 3)
    window_bench = WindowBench(gpt, "cpu", threads=1, slowdown=1.0, memory_bytes=None, quota=None)
    for _ in range(2):  # the second time the window is there already
        window_bench.measure(tasks, window, 2, [0, 1], LayerBudget(0.01, 0.01, 0.0), set())
        assert window_bench._built is not None
        assert not window_bench._built.chain._outputs
