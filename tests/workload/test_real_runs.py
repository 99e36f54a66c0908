"""Layers whose work depends on values: run on real tensors, at few samples, where they fit this machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from skyctl.errors import WorkloadError
from skyctl.workload import real_runs
from skyctl.workload.costs import count_layer_costs
from skyctl.workload.workload import Workload

Make = Callable[..., Workload]
EXPERTS = """
class Experts(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
    def forward(self, x):
        which, out = self.gate(x).argmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out[which == number] = expert(x[which == number])
        return x + out
"""
GUARD = """
class Guard(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
    def forward(self, x):
        x = self.linear(x)
        assert not torch.isnan(x).any()
        return x / max(1.0, x.detach().abs().max().item())
"""
LISTS = {
    "experts": EXPERTS + "def model(): return [nn.Linear(6, 8), Experts(8), Experts(8), nn.Linear(8, 4)]\n",
    "guard": GUARD + "def model(): return [nn.Linear(6, 8), Guard(8), Guard(8), nn.Linear(8, 4)]\n",
}


@pytest.mark.parametrize("name", LISTS)
def test_layers_of_a_list_are_counted_as_if_they_had_no_masks(user: Make, name: str) -> None:
    workload = user(LISTS[name], batch_size=64)
    assert [str(workload.boundary(i, 64)[0]) for i in (1, 2, 3)] == ["float32[64, 8]"] * 3
    assert all(workload.boundary(i, 64)[0].requires_grad for i in (1, 2, 3))
    costs = count_layer_costs(workload, 16)
    assert costs[1].signature == costs[2].signature != costs[3].signature
    rows = 16 * (8 * 8 + (8 * 2 if name == "experts" else 0))
    assert costs[1].flops == pytest.approx(3 * 2 * rows, rel=0.5)  # argmax needs no gradient
    assert costs[1].activation_bytes >= 16 * 8 * 4
    assert costs[1].workspace_bytes > 0


def test_signatures_are_the_same_each_time_and_others_for_other_numbers(user: Make) -> None:
    def signature(model: str, seed: int = 0) -> str:
        text = f"{GUARD}def model(): return [nn.Linear(6, 8), {model}, nn.Linear(8, 4)]\n"
        return count_layer_costs(user(text, seed=seed), 4)[1].signature

    assert signature("Guard(8)") == signature("Guard(8)", seed=3)
    dropped = "nn.Sequential(Guard(8), nn.AvgPool1d({}, 1, {}, count_include_pad={}))"
    assert signature(dropped.format(1, 0, True)) != signature(dropped.format(1, 0, False))


def test_a_loss_may_pick_by_a_mask(user: Make) -> None:
    body = (
        "def model(): return [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)]\n"
        "def loss(outputs, targets):\n"
        "    there = targets > 0\n"
        "    return nn.functional.cross_entropy(outputs[there], targets[there])\n"
    )
    workload = user(body, batch_size=64)
    costs = count_layer_costs(workload, 16)
    assert costs[2].flops > 0
    assert not workload.shapes.needs_values(0)
    assert workload.shapes.needs_values(2)


def test_a_backward_may_depend_on_values(user: Make) -> None:
    body = (
        "class Clip(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x): return x.clone()\n"
        "    @staticmethod\n"
        "    def backward(ctx, g): return g * 0.5 if g.norm() > 1 else g\n"
        "class Layer(nn.Linear):\n"
        "    def forward(self, x): return Clip.apply(super().forward(x))\n"
        "def model(): return [nn.Linear(6, 8), Layer(8, 8), nn.Linear(8, 4)]\n"
    )
    workload = user(body)
    assert count_layer_costs(workload, 4)[1].flops == 3 * 2 * (4 * 8 * 8)
    assert [workload.shapes.needs_values(i) for i in range(3)] == [False, True, False]


def test_what_passes_on_as_many_samples_as_values_say_is_refused(user: Make) -> None:
    body = (
        "class Positive(nn.Module):\n    def forward(self, x): return x[x[:, 0] > 0]\n"
        "def model(): return [nn.Linear(6, 8), Positive(), nn.Linear(8, 4)]\n"
    )
    with pytest.raises(WorkloadError, match=r"layer 1 \(Positive\) gives|outputs"):
        user(body, batch_size=64).spec  # noqa: B018


def test_a_mistake_in_such_a_layer_is_told_as_it_is(user: Make) -> None:
    body = GUARD + "def model(): return [nn.Linear(6, 8), Guard(8), Guard(7), nn.Linear(7, 4)]\n"
    with pytest.raises(WorkloadError, match=r"layer 2 \(Guard\) does not take .*float32\[") as caught:
        user(body)
    assert "FakeTensor" not in str(caught.value)


def test_a_layer_that_does_not_fit_is_refused_with_both_sizes(
    user: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_runs, "host_memory", lambda _limits: {"available_bytes": 1 << 20})
    body = GUARD + "def model(): return [nn.Linear(6, 8), Guard(8), nn.Linear(8, 512), Guard(512)]\n"
    with pytest.raises(
        WorkloadError, match=r"layer 3 \(Guard\).* needs 0\.00\d+ GiB; .* 0\.000977 GiB free"
    ) as caught:
        user(body + "def loss(outputs, targets): return outputs.mean()\n")
    assert "torch.where" in str(caught.value.hint)


def test_runs_leave_random_numbers_as_they_were(user: Make) -> None:
    torch.manual_seed(7)
    before = torch.default_generator.get_state()
    count_layer_costs(user(LISTS["experts"]), 4)
    assert torch.equal(torch.default_generator.get_state(), before)
