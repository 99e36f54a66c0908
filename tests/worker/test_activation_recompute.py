"""The tensors that a stage keeps between forward and backward, and that keeping less changes nothing."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skyctl.errors import RunError
from skyctl.worker.pipeline.activation_recompute import RecomputedLayer
from skyctl.worker.pipeline.stage import PipelineStage
from skyctl.workload.builtin import Attention, Embedding, Head, Mlp
from skyctl.workload.costs import count_layer_costs
from skyctl.workload.shape_inference import TensorSpec
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import make_spec

Tensor = torch.Tensor
X = TensorSpec((4, 8), "float32", True)


class Scaled(nn.Module):
    """Overwrites its input; twice would not be the same as once."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(3.0)


class Pair(nn.Module):
    """[n, 8] → itself twice, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x), torch.arange(x.shape[0]), x


class Join(nn.Module):
    """Overwrites its integers, and passes nothing on of them."""

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        x, ids, y = given
        return x * ids.add_(1).unsqueeze(-1) + y


class Drawn(nn.Module):
    """Its output depends on a buffer that each call changes, and replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("fixed", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x.tanh() * self.weight * float(self.calls) + self.mean * self.fixed


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(8, 8),
    Scaled,
    nn.GELU,
    lambda: nn.Dropout(0.5),
    Pair,
    Join,
    lambda: nn.BatchNorm1d(8),
    Drawn,
    lambda: nn.ReLU(inplace=True),
    lambda: nn.Linear(8, 8),
]


def stage(layers: list[nn.Module], *, last: bool, **options: Any) -> PipelineStage:
    return PipelineStage(
        layers,
        input_specs=lambda _: (X,),
        output_specs=None if last else lambda _: (X,),
        loss_fn=(lambda outputs, targets: (outputs - targets).square().mean()) if last else None,
        **options,
    )


def step(stage: PipelineStage, *, last: bool, in_flight: int) -> tuple[list[Tensor], list[Tensor]]:
    """Three microbatches, that many in flight → what went out, and the gradients that went back."""
    torch.manual_seed(1)
    given = [torch.randn(4, 8) for _ in range(3)]
    out: list[Tensor] = []
    back: list[Tensor] = []

    def backward(m: int) -> None:
        gradients = None if last else [torch.full((4, 8), 1.0 + m)]
        if stage.defers_weights:
            back.extend(stage.backward_inputs(m, gradients))
            if m:
                stage.backward_weights(m - 1)
            if m == 2:
                stage.backward_weights(m)
        else:
            back.extend(stage.backward(m, gradients))

    for m in range(3 + in_flight - 1):
        if m < 3:
            torch.manual_seed(100 + m)  # what is drawn in a forward depends on its microbatch only
            x = given[m].clone()
            if last:
                out.append(stage.forward_loss(m, (x,), torch.ones(4, 8), 0.5))
            else:
                out.extend(t.clone() for t in stage.forward(m, (x,)))
        if m - in_flight + 1 >= 0:
            backward(m - in_flight + 1)
    return out, back


@pytest.mark.parametrize("mode", ["recompute", "defer_weights"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_everything_is_equal(mode: str, last: bool, in_flight: int) -> None:
    torch.manual_seed(0)
    layers = [make() for make in LAYERS]
    other = copy.deepcopy(layers)
    for number in (1, 2):
        plain, less = stage(layers, last=last), stage(other, last=last, **{mode: True})
        expected = step(plain, last=last, in_flight=in_flight)
        results = step(less, last=last, in_flight=in_flight)
        for ours, theirs in zip(results, expected, strict=True):
            assert len(ours) == len(theirs) == 3
            for a, b in zip(ours, theirs, strict=True):
                assert torch.equal(a, b), number
        assert less.in_flight == 0
        for a, b in zip(less.parameters, plain.parameters, strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(a.grad, b.grad)
        for other_layer, layer in zip(other, layers, strict=True):
            for name, buffer in layer.named_buffers():
                assert torch.equal(other_layer.get_buffer(name), buffer), name


def test_a_frozen_stage_with_integers_only_recomputes_nothing() -> None:
    layer = nn.Embedding(5, 8)
    stage = PipelineStage(
        [layer, nn.Linear(8, 8)],
        input_specs=lambda _: (TensorSpec((4,), "int64", False),),
        output_specs=lambda _: (X,),
        loss_fn=None,
        recompute=True,
    )
    stage.forward(0, (torch.arange(4),))
    assert stage.backward(0, [torch.ones(4, 8)]) == ()
    assert layer.weight.grad is not None
    with torch.no_grad():
        assert RecomputedLayer(layer)(torch.arange(4)).grad_fn is None


def test_a_layer_that_overwrites_its_input_now_and_then_is_an_error() -> None:
    class Moody(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.mul_(2.0) if self.calls > 1 else x * 2.0

    layer = RecomputedLayer(Moody())
    layer(torch.ones(2, requires_grad=True) * 1)
    with pytest.raises(RunError, match="layer Moody has changed its input in place"):
        layer(torch.ones(2, requires_grad=True) * 1)


class Restless(nn.Module):
    """Changes a buffer when it is due, and puts an equal one in the place of another each time."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.due = in_place, False
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("cache", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.ones(8)
        if self.due:
            self.scale = self.scale.add_(1.0) if self.in_place else self.scale + 1.0
        return x.tanh() * self.scale.clone() * self.cache


def test_a_buffer_that_a_later_call_changes_is_put_back_or_an_error() -> None:
    plain, other = Restless(in_place=False), Restless(in_place=False)
    layer = RecomputedLayer(other)
    for due in (False, True, True, False):
        plain.due = other.due = due
        x = torch.randn(2, 8)
        plain_input, less_input = x.clone().requires_grad_(), x.clone().requires_grad_()
        plain(plain_input * 1.0).sum().backward()
        layer(less_input * 1.0).sum().backward()
        assert plain_input.grad is not None
        assert less_input.grad is not None
        torch.testing.assert_close(less_input.grad, plain_input.grad)
        assert torch.equal(other.scale, plain.scale)

    other = Restless(in_place=True)
    layer = RecomputedLayer(other)
    layer(torch.ones(2, 8, requires_grad=True) * 1)
    other.due = True
    with pytest.raises(RunError, match="layer Restless has changed a buffer in place"):
        layer(torch.ones(2, 8, requires_grad=True) * 1)


class Alive(TorchDispatchMode):
    """Bytes of the storages made inside that are still there."""

    def __init__(self, held: Iterator[Tensor]) -> None:
        super().__init__()
        self._held = {tensor.untyped_storage()._cdata for tensor in held}
        self._there: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._held:
                    self._there[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return out

    @property
    def nbytes(self) -> int:
        return sum(nbytes for there, nbytes in self._there.values() if there() is not None)


def built(source: str) -> tuple[Workload, list[nn.Module]]:
    workload = load_workload(make_spec(source, batch_size=4, random_inputs=True))
    return workload, workload.build(0, workload.layers)


def kept_after(workload: Workload, layers: list[nn.Module], start: int, stop: int, **options: Any) -> Any:
    """A generator: what a stage keeps after a forward; after its backward; after its weight gradients."""
    last = stop == workload.layers
    stage = PipelineStage(
        layers[start:stop],
        input_specs=lambda _: tuple(workload.boundary(start, 4)),
        input_structure=workload.structure(start),
        output_structure=workload.structure(stop),
        output_specs=None if last else lambda _: tuple(workload.boundary(stop, 4)),
        loss_fn=workload.loss if last else None,
        **options,
    )
    for parameter in stage.parameters:
        parameter.grad = torch.zeros_like(parameter)
    given, targets = next(workload.batches())
    if start:
        given = torch.randn(workload.boundary(start, 4)[0].shape)
    counted = [*stage.parameters, *[p.grad for p in stage.parameters if p.grad is not None], targets]
    gc.disable()  # what is freed must be freed at once
    try:
        with Alive(iter(counted)) as alive:
            inputs = (given.clone(),)
            del given
            if last:
                stage.forward_loss(0, inputs, targets, 1.0)
            else:
                stage.forward(0, inputs)
            del inputs
            yield alive.nbytes
            gradients = None if last else [torch.ones(workload.boundary(stop, 4)[0].shape)]
            if stage.defers_weights:
                stage.backward_inputs(0, gradients)
                del gradients
                yield alive.nbytes
                stage.backward_weights(0)
            else:
                stage.backward(0, gradients)
                del gradients
            yield alive.nbytes
    finally:
        gc.enable()


SOURCES = ["gpt:layers=2,hidden=64,heads=4,context=32", "bert:layers=2,hidden=64,heads=4,context=32"]
STAGES = [(0, 3), (1, 5), (3, 6), (0, 6)]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("start", "stop"), STAGES)
def test_what_is_kept_is_what_is_told(source: str, start: int, stop: int) -> None:
    """Against real storages: a plain stage, one that recomputes, and one that puts weight gradients off."""
    workload, layers = built(source)
    costs = count_layer_costs(workload, 4)
    counted = sum(cost.activation_bytes for cost in costs[start:stop])
    forward, end = kept_after(workload, layers, start, stop)
    assert 0.93 * counted <= forward <= 1.001 * counted
    assert end == 0

    counted = sum(
        min(cost.activation_bytes, costs[i - 1].output_bytes) if i else cost.activation_bytes
        for i, cost in enumerate(costs[start:stop], start)
    )
    first = 0 if start else costs[0].activation_bytes - workload.boundary(0, 4)[0].nbytes
    forward, end = kept_after(workload, layers, start, stop, recompute=True)
    assert counted - first <= forward <= 1.001 * counted
    assert end == 0

    counted = sum(cost.deferred_bytes for cost in costs[start:stop])
    _, backward, end = kept_after(workload, layers, start, stop, defer_weights=True)
    assert 0.93 * counted <= backward <= 1.001 * counted
    assert end == 0


def test_each_kind_of_layer_of_the_built_in_models_is_there() -> None:
    _, layers = built(SOURCES[0])
    assert {type(layer) for layer in layers} == {Embedding, Attention, Mlp, Head}
