"""Costs on fake tensors, against the real thing run on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from skyctl.workload.costs import count_layer_costs
from skyctl.workload.received_values import received_value
from skyctl.workload.structures import value_tensors
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import make_spec

Make = Callable[..., Workload]
SMALL = "gpt:layers=3,hidden=64,heads=4,context=32"


def kept_bytes(workload: Workload, start: int, stop: int, samples: int) -> int:
    """The bytes that one microbatch of a real stage keeps: everything saved, and its input."""
    x, targets = next(workload.batches(0, 0, samples))
    for layer in workload.build(0, start):
        x = layer(x)
    x = received_value(x)
    layers = workload.build(start, stop)
    state = {t.untyped_storage()._cdata for m in layers for t in (*m.parameters(), *m.buffers())}
    storages: dict[int, Any] = {t.untyped_storage()._cdata: t.untyped_storage() for t in value_tensors(x)}

    def keep(t: torch.Tensor) -> torch.Tensor:
        storages[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = x
        for layer in layers:
            out = layer(out)
        if stop == workload.layers:
            out = workload.loss(out, targets)
    return sum(s.nbytes() for key, s in storages.items() if key not in state)


@pytest.mark.parametrize("source", [SMALL, "bert:layers=2,hidden=64,heads=4,context=32"])
def test_activation_against_the_real_thing(source: str) -> None:
    workload = load_workload(make_spec(source, batch_size=4))
    costs = count_layer_costs(workload, 4)
    for start, stop in [(0, 3), (1, 2), (1, 5), (2, workload.layers), (0, workload.layers)]:
        counted = sum(c.activation_bytes for c in costs[start:stop])
        assert kept_bytes(workload, start, stop, 4) <= counted * 1.001
        assert kept_bytes(workload, start, stop, 4) >= counted * 0.93


def test_what_is_passed_on_is_counted_once(user: Make) -> None:
    body = (
        "class Start(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.linear = nn.Linear(6, 64)\n"
        "    def forward(self, x): y = self.linear(x); return y.tanh(), y.exp()\n"
        "class Body(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.linear = nn.Linear(64, 64)\n"
        "    def forward(self, given): x, shortcut = given; return self.linear(x).tanh(), shortcut\n"
        "class Join(Body):\n"
        "    def forward(self, given): x, shortcut = given; return self.linear(x).tanh() * shortcut\n"
        "def model(): return [Start(), Body(), Body(), Body(), Join(), nn.Linear(64, 4)]\n"
    )
    workload = user(body)
    costs = count_layer_costs(workload, 8)
    for start, stop in [(1, 5), (2, 6), (3, 5), (1, 6)]:
        counted = sum(c.activation_bytes for c in costs[start:stop])
        assert kept_bytes(workload, start, stop, 8) == counted


def test_flops_against_the_counter() -> None:
    workload = load_workload(make_spec(SMALL, batch_size=4))
    costs = count_layer_costs(workload, 2)
    x, targets = next(workload.batches(0, 0, 2))
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    ):  # fmt: skip
        for layer in workload.build(0, workload.layers):
            x = layer(x)
        workload.loss(x, targets).backward()
    # torch's formula for fused attention counts recomputing the scores in backward, a fifth product
    fused = 3 * 2 * (2 * 64 * 32 * 32)
    assert sum(c.flops for c in costs) == counter.get_total_flops() + fused


def test_state_and_signatures() -> None:
    workload = load_workload(make_spec(SMALL, batch_size=4))
    costs = count_layer_costs(workload, 2)
    for cost, layer in zip(costs, workload.build(0, workload.layers), strict=True):
        assert cost.state_bytes == 16 * sum(p.numel() for p in layer.parameters())
        assert cost.gradient_bytes == cost.state_bytes / 4
    by_kind = {}
    for cost in costs:
        by_kind.setdefault(cost.name.rpartition(".")[2], set()).add(cost.signature)
    assert {k: len(v) for k, v in by_kind.items()} == {"embedding": 1, "attention": 1, "mlp": 1, "head": 1}
    assert len({c.signature for c in costs}) == 4
    assert costs[0].output_bytes == 2 * 32 * 64 * 4
    assert [c.name for c in costs] == workload.names


def test_optimizer_state(user: Make) -> None:
    def state(optimizer: str) -> float:
        body = "def model(): return [nn.Linear(6, 4)]\n"
        return (
            count_layer_costs(user(body + f"def optimizer(parameters): return {optimizer}\n"), 2)[
                0
            ].state_bytes
            / 28
        )

    assert state("torch.optim.SGD(parameters, lr=0.1)") == 8
    assert state("torch.optim.SGD(parameters, lr=0.1, momentum=0.9)") == 12
    assert state("torch.optim.Adam(parameters)") == 16
    assert state("torch.optim.Adam(parameters, amsgrad=True)") == 20


def test_frozen_and_buffers(user: Make) -> None:
    workload = user(
        "def model(): return [nn.Linear(6, 4).requires_grad_(False), nn.BatchNorm1d(4), nn.Linear(4, 4), "
        "nn.Dropout(0.1), nn.Dropout(0.2)]\n"
    )
    costs = count_layer_costs(workload, 4)
    assert costs[0].state_bytes == 28 * 4
    assert costs[1].state_bytes == 8 * 16 + 8 * 4 + 8
    assert [cost.gradient_bytes for cost in costs] == [0, 8 * 4, 20 * 4, 0, 0]
    assert not workload.boundary(1, 4)[0].requires_grad
    assert costs[3].signature != costs[4].signature
    assert all(p.grad is None for p in workload.shapes.fake_layers[2].parameters())


def test_workspace(user: Make) -> None:
    """A layer that makes ten times its input for a moment, and keeps none of it."""
    body = (
        "class Wide(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.w = nn.Parameter(torch.zeros(6))\n"
        "    def forward(self, x):\n"
        "        with torch.no_grad(): big = x.repeat(1, 1000).sum()\n"
        "        return x * self.w + big\n"
        "def model(): return [Wide(), nn.Linear(6, 4)]\n"
    )
    cost = count_layer_costs(user(body), 8)[0]
    assert cost.activation_bytes == 8 * 6 * 4
    assert 8 * 6000 * 4 <= cost.workspace_bytes <= 8 * 6000 * 4 * 1.1


def test_own_function_shows_in_the_signature(user: Make) -> None:
    body = (
        "class A(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x): return x * 2\n"
        "    @staticmethod\n"
        "    def backward(ctx, g): return g * 2\n"
        "class B(A):\n"
        "    @staticmethod\n"
        "    def backward(ctx, g): return (g @ g.T) @ g\n"
        "class L(nn.Module):\n"
        "    def __init__(self, f):\n"
        "        super().__init__(); self.f = f\n"
        "    def forward(self, x): return self.f.apply(x)\n"
        "def model(): return [nn.Linear(6, 6), L(A), L(B), L(A), nn.Linear(6, 4)]\n"
    )
    costs = count_layer_costs(user(body), 4)
    assert costs[1].signature == costs[3].signature != costs[2].signature
    assert costs[2].flops > costs[1].flops


def test_real_layers_run_as_told() -> None:
    workload = load_workload(make_spec(SMALL, batch_size=4))
    x, _ = next(workload.batches())
    for index, layer in enumerate(workload.build(0, workload.layers)):
        x = layer(x)
        assert tuple(x.shape) == workload.boundary(index + 1, 4)[0].shape
    assert isinstance(layer, nn.Module)


def test_sparse_gradients_are_no_obstacle(user: Make) -> None:
    body = (
        "class Look(nn.Module):\n"
        "    def __init__(self, sparse):\n"
        "        super().__init__()\n"
        "        self.table = nn.Embedding(50, 4, sparse=sparse)\n"
        "    def forward(self, x):\n"
        "        return self.table(x.long().clamp(0, 49)).mean(1)\n"
        "def model():\n"
        "    return [Look(SPARSE)]\n"
        "def optimizer(parameters):\n"
        "    return torch.optim.SGD(parameters, lr=0.1)\n"
    )
    dense, sparse = (
        count_layer_costs(user(body.replace("SPARSE", flag)), 8)[0] for flag in ("False", "True")
    )
    assert (sparse.flops, sparse.activation_bytes) == (dense.flops, dense.activation_bytes)
