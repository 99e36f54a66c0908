"""One stage: forwards, backwards and their gradients, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from skyctl.worker.batches.sample_batches import split_inputs
from skyctl.worker.pipeline.stage import PipelineStage
from skyctl.workload.shape_inference import TensorSpec

CPU = torch.device("cpu")
X = TensorSpec((2, 3), "float32", True)
IDS = TensorSpec((2,), "int64", False)


def _stage(
    layers: list[nn.Module], inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...] | None
) -> PipelineStage:
    return PipelineStage(
        layers,
        input_specs=lambda _: inputs,
        input_structure={"tuple": [None] * len(inputs)} if len(inputs) > 1 else None,
        output_specs=None if outputs is None else lambda _: outputs,
        loss_fn=None if outputs is not None else lambda outputs, targets: (outputs - targets).square().mean(),
    )


def test_a_stage_may_change_its_input_in_place() -> None:
    weights = torch.randn(3, 3)
    x = torch.randn(2, 3)
    stage = _stage([nn.ReLU(inplace=True), nn.Linear(3, 3, bias=False)], (X,), (X,))
    stage.parameters[0].data.copy_(weights)
    (out,) = stage.forward(0, (x.clone(),))
    assert stage.in_flight == 1
    gradient = torch.ones(2, 3)
    (back,) = stage.backward(0, [gradient])
    assert stage.in_flight == 0
    leaf = x.clone().requires_grad_()
    expected = nn.functional.linear(leaf.relu(), weights)
    expected.backward(gradient)
    assert torch.equal(out, expected)
    assert torch.equal(back, leaf.grad if leaf.grad is not None else torch.empty(0))


@pytest.mark.parametrize("recompute", [True, False])
def test_a_list_is_given_on_as_a_tuple_also_within_a_stage(recompute: bool) -> None:
    class Both(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return [super().forward(x), x]

    class Sum(nn.Module):
        def forward(self, given: Any) -> torch.Tensor:
            assert isinstance(given, tuple)
            out: torch.Tensor = given[0] + given[1]
            return out

    stage = PipelineStage(
        [Both(3, 3), Sum()],
        input_specs=lambda _: (X,),
        output_specs=lambda _: (X,),
        loss_fn=None,
        recompute=recompute,
    )
    assert stage.forward(0, (torch.ones(2, 3),))[0].shape == (2, 3)
    assert stage.backward(0, [torch.ones(2, 3)])[0].shape == (2, 3)


def test_unused_and_integer_inputs() -> None:
    class Pick(nn.Module):
        def forward(self, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return given[0] * given[1].unsqueeze(-1)

    stage = _stage([Pick()], (X, IDS, X), (X,))
    stage.forward(0, (torch.ones(2, 3), torch.tensor([2, 3]), torch.ones(2, 3)))
    used, unused = stage.backward(0, [torch.ones(2, 3)])
    assert used.tolist() == [[2.0] * 3, [3.0] * 3]
    assert not unused.any()


def test_a_first_layer_may_change_the_batch_in_place() -> None:
    given = TensorSpec((2, 3), "float32", False)
    layer = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
    stage = _stage([layer], (given,), (X,))
    for microbatch, part in enumerate(split_inputs(torch.randn(4, 3), [2, 2], CPU)):
        stage.forward(microbatch, part)
    for microbatch in range(2):
        stage.backward(microbatch, [torch.ones(2, 3)])
    assert layer[1].weight.grad is not None


def test_a_gradient_to_be_sent_is_not_added_to() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.linear = nn.Parameter(torch.randn(1, 2, 3)), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shift = self.shift.expand(x.shape[0], -1, -1)
            out: torch.Tensor = self.linear(x.view(-1, 2, 3) + shift)
            return out

    spec = TensorSpec((1, 2, 3), "float32", True)  # of one sample, so both have the same gradient
    stage = _stage([Shift()], (spec,), (spec,))
    sent = []
    for microbatch in range(2):
        stage.forward(microbatch, (torch.randn(1, 2, 3),))
        (back,) = stage.backward(microbatch, [torch.randn(1, 2, 3)])
        sent.append((back, back.clone()))
    for back, was in sent:
        assert torch.equal(back, was)


def test_last_stage_weighs_its_loss_and_frozen_layers_pass_gradients() -> None:
    frozen = nn.Linear(3, 3)
    frozen.requires_grad_(False)
    stage = _stage([frozen], (X,), None)
    loss = stage.forward_loss(0, (torch.ones(2, 3),), torch.zeros(2, 3), 0.25)
    full = frozen(torch.ones(2, 3)).square().mean()
    assert loss.item() == pytest.approx(0.25 * full.item())
    (back,) = stage.backward(0, None)
    assert back.shape == (2, 3)
    assert frozen.weight.grad is None
    shared = _stage([nn.Linear(3, 3), frozen, frozen], (X,), None)
    assert len(shared.parameters) == 4


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("defer", [False, True])
def test_a_reentrant_checkpoint_in_a_layer_gives_the_gradients_of_one_process(
    recompute: bool, defer: bool
) -> None:
    class Again(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(super().forward, x, use_reentrant=True)
            return out

    layers = [Again(3, 3), nn.Linear(3, 3), nn.Tanh()]
    stage = PipelineStage(
        layers,
        input_specs=lambda _: (X,),
        output_specs=lambda _: (X,),
        loss_fn=None,
        recompute=recompute,
        defer_weights=defer,
    )
    x, gradient = torch.randn(2, 3), torch.ones(2, 3)
    stage.forward(0, (x.clone(),))
    if defer:
        (back,) = stage.backward_inputs(0, [gradient])
        stage.backward_weights(0)
    else:
        (back,) = stage.backward(0, [gradient])
    gradients = [p.grad.clone() for p in stage.parameters if p.grad is not None]
    for parameter in stage.parameters:
        parameter.grad = None
    leaf = x.clone().requires_grad_()
    nn.Sequential(*layers)(leaf).backward(gradient)
    torch.testing.assert_close(back, leaf.grad)
    torch.testing.assert_close(gradients, [p.grad for p in stage.parameters])
