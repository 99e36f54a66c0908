"""bfloat16 layers over float32 masters: what is lowered, what is added up where, what it costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.helpers.rounding import rounding
from torch import nn

from skyctl.errors import WorkloadError
from skyctl.workload.costs import count_layer_costs
from skyctl.workload.mixed_precision import (
    accumulate_into_master,
    copy_masters_after_step,
    master_of,
    to_low_precision,
)
from skyctl.workload.weight_gradients import DeferredWeightGradients
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import make_spec

Make = Callable[..., Workload]
SMALL = "gpt:layers=1,hidden=32,heads=2,context=16"
LOW = torch.bfloat16


def test_layers_are_the_float32_models_rounded() -> None:
    plain, mixed = (
        load_workload(make_spec(SMALL, batch_size=4, dtype=dtype)) for dtype in ("float32", "bfloat16")
    )
    assert plain.digest != mixed.digest
    for a, b in zip(plain.build(0, plain.layers), mixed.build(0, mixed.layers), strict=True):
        for wide, low in zip(a.parameters(), b.parameters(), strict=True):
            assert low.dtype == LOW
            assert torch.equal(low, wide.to(LOW))
            assert torch.equal(master_of(low), wide)
            assert master_of(wide) is wide


def test_what_passes_between_layers_is_bfloat16_and_the_loss_float32() -> None:
    workload = load_workload(make_spec(SMALL, batch_size=4, dtype="bfloat16"))
    assert [t.dtype for t in workload.boundary(0, 2)] == ["int64"]
    assert {t.dtype for i in range(1, 5) for t in workload.boundary(i, 2)} == {"bfloat16"}
    value, targets = next(workload.batches())
    for layer in workload.build(0, workload.layers):
        value = layer(value)
    assert value.dtype == LOW
    assert workload.loss(value, targets).dtype == torch.float32


def test_half_the_bytes_between_layers_and_eighteen_for_a_parameter() -> None:
    plain, mixed = (
        count_layer_costs(load_workload(make_spec(SMALL, dtype=d, batch_size=4)), 4)
        for d in ("float32", "bfloat16")
    )
    for wide, low in zip(plain, mixed, strict=True):
        assert low.output_bytes == wide.output_bytes / 2
        assert low.gradient_bytes == wide.gradient_bytes
        assert low.state_bytes == wide.state_bytes / 16 * (2 + 4 + 4 + 8)
        assert low.signature != wide.signature
        assert low.flops == wide.flops
    assert sum(c.activation_bytes for c in mixed) < 0.7 * sum(c.activation_bytes for c in plain)


def test_gradients_are_added_in_float32_and_the_optimizer_moves_the_masters(user: Make) -> None:
    body = (
        "def model(): return [nn.Linear(6, 4, bias=False)]\n"
        "def optimizer(parameters):\n"
        "    assert all(p.dtype == torch.float32 for p in parameters)\n"
        "    return torch.optim.SGD(parameters, lr=1e-6)\n"
    )
    workload = user(body, dtype="bfloat16")
    weight = workload.build(0, 1)[0].weight
    master = master_of(weight)
    optimizer = workload.optimizer([weight])
    start = master.detach().clone()
    total = torch.zeros(4, 6)
    for _ in range(300):  # in bfloat16 the sum would stop growing at 256 times one part
        part = torch.ones(4, 6, dtype=LOW)
        (weight * part).sum().backward()
        total += part.float()
        assert weight.grad is None
    assert torch.equal(master.grad, total)
    for _ in range(40):
        optimizer.step()
    assert torch.allclose(master, start - 40 * 300e-6, atol=rounding(40))
    assert torch.equal(weight, master.to(LOW))
    optimizer.zero_grad(set_to_none=True)
    assert master.grad is None


def test_a_gradient_written_by_hand_is_collected_and_a_sparse_one_too(user: Make) -> None:
    workload = user(
        "def model(): return [nn.Linear(6, 5), nn.Flatten(0)]\ndef loss(o, t): return o.sum()\n",
        dtype="bfloat16",
    )
    weight = workload.build(0, 1)[0].weight
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        accumulate_into_master(weight)
    assert torch.equal(master_of(weight).grad, torch.full((5, 6), 2.0))
    accumulate_into_master(nn.Parameter(torch.zeros(2)))


def test_what_stays_in_float32(user: Make) -> None:
    body = (
        "class Keep(nn.Module):\n"
        "    keep_float32 = True\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.register_buffer('frequencies', torch.arange(4.0))\n"
        "    def forward(self, x): return x * self.frequencies.to(x.dtype)\n"
        "class Table(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.register_buffer('table', torch.ones(4))\n"
        "        self.register_buffer('index', torch.arange(4))\n"
        "    def forward(self, x): return x * self.table[self.index]\n"
        "def model(): return [nn.Linear(6, 4).requires_grad_(False), nn.BatchNorm1d(4), Keep(), Table(), "
        "nn.Linear(4, 4)]\n"
    )
    workload = user(body, dtype="bfloat16")
    frozen, norm, keep, table, last = workload.build(0, 5)
    assert {p.dtype for p in frozen.parameters()} == {LOW}
    assert all(master_of(p) is p for p in frozen.parameters())
    assert {t.dtype for t in norm.state_dict().values()} == {torch.float32, torch.int64}
    assert keep.frequencies.dtype == torch.float32
    assert (table.table.dtype, table.index.dtype) == (LOW, torch.int64)
    costs = count_layer_costs(workload, 4)
    assert costs[0].state_bytes == 2 * 28
    assert costs[1].state_bytes == 8 * 16 + 8 * 4 + 8
    assert costs[4].state_bytes == 18 * 20
    inputs, targets = next(workload.batches())
    value = inputs
    assert inputs.dtype == LOW
    for layer in (frozen, norm, keep, table, last):
        value = layer(value)
    workload.loss(value, targets).backward()
    assert norm.weight.grad.dtype == torch.float32
    assert master_of(last.weight).grad.dtype == torch.float32


def test_a_layer_that_insists_on_float32_is_told_what_to_do(user: Make) -> None:
    body = (
        "class Mask(nn.Module):\n"
        "    def forward(self, x): return x * torch.ones(6)\n"
        "def model(): return [Mask(), nn.Linear(6, 4)]\n"
    )
    user(body)
    with pytest.raises(WorkloadError, match=r"layer 1 \(Linear\) does not take") as caught:
        user(body, dtype="bfloat16")
    assert "dtype=x.dtype" in str(caught.value.hint)


def test_weight_gradients_put_off_reach_the_masters() -> None:
    workload = load_workload(make_spec(SMALL, batch_size=4, dtype="bfloat16"))
    gradients = []
    for put_off in (False, True):
        layer = workload.build(1, 2)[0]
        nn.init.ones_(layer.out.weight)
        x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0)).to(LOW).requires_grad_()
        later = DeferredWeightGradients()
        out = layer(x).float().square().sum()
        if put_off:
            later.backward([out], [None])
            assert list(later.held)
            assert master_of(layer.qkv.weight).grad is None
            later.add()
        else:
            out.backward()
        assert layer.qkv.weight.grad is None
        gradients.append([master_of(p).grad for p in layer.parameters()])
    for whole, late in zip(*gradients, strict=True):
        assert whole.dtype == torch.float32
        assert torch.equal(whole, late)


def test_an_optimizer_may_give_weights_other_memory() -> None:
    """As ``p.data = …`` does, in place of a change in place."""

    class Assigning(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.data = parameter.data - parameter.grad

    old = nn.Parameter(torch.ones(3))
    low = to_low_precision(old, torch.ones(3), torch.bfloat16)
    assert isinstance(low, nn.Parameter)
    optimizer = Assigning([master_of(low)], lr=1.0)
    copy_masters_after_step(optimizer, [low])
    for expected in (0.5, 0.0):
        master_of(low).grad = torch.full((3,), 0.5)
        optimizer.step()
        assert low.tolist() == [expected] * 3
