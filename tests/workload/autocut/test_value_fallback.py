"""Submodules that ask for values stay whole in an ordinary module; what it asks itself is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from skyctl.errors import WorkloadError
from skyctl.workload import real_runs
from skyctl.workload.costs import count_layer_costs
from skyctl.workload.workload import Workload

Make = Callable[..., Workload]
NET = """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.norm = nn.Linear(8, 2), nn.BatchNorm1d(8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    def forward(self, x):
        x = self.norm(x)
        which, out = self.gate(x).argmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out[which == number] = expert(x[which == number])
        return x + out

class Guard(nn.Module):
    def forward(self, x):
        assert not torch.isnan(x).any()
        x += 1
        return x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Sequential(Experts(), Guard(), nn.Linear(8, 8)) for _ in range(3))
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks: x = block(x)
        return self.head(x)
def model(): return Net()
"""


def test_the_cut_gives_what_the_module_gives(user: Make) -> None:
    workload = user(NET)
    assert workload.layers > 3
    assert all(cost.activation_bytes > 0 for cost in count_layer_costs(workload, 4))
    inputs, targets = next(workload.batches(0, 0, 8))
    layers = workload.build(0, workload.layers)
    loss = workload.loss(torch.nn.Sequential(*layers)(inputs), targets)
    loss.backward()

    assert workload.model.make is not None
    whole = workload.model.make()
    weights = {}
    for index, layer in enumerate(workload.build(0, workload.layers)):
        own = layer.state_dict()
        weights |= {name: own[mine] for mine, name in workload.weight_names(index).items()}
    whole.load_state_dict(weights)
    assert workload.loss(whole(inputs), targets).item() == loss.item()


def test_what_the_module_asks_itself_is_refused_with_the_way_out(user: Make) -> None:
    body = NET.replace("        return self.head(x)\n", "        return self.head(x[x[:, 0] > 0])\n")
    with pytest.raises(WorkloadError, match=r"how large a tensor is .*train\.py, line \d+") as caught:
        user(body)
    assert "into a submodule" in str(caught.value.hint)


def test_a_submodule_that_does_not_fit_is_refused_with_both_sizes(
    user: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_runs, "host_memory", lambda _limits: {"available_bytes": 512})
    with pytest.raises(WorkloadError, match=r"what blocks\.0\.0 does .* needs .* GiB; .* GiB free") as caught:
        user(NET)
    assert "torch.where" in str(caught.value.hint)
