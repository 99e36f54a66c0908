"""Layers may change what they receive in place, wherever the model is cut."""

from collections.abc import Callable

import torch

from skyctl.workload.costs import count_layer_costs
from skyctl.workload.received_values import attach_inputs, received_value
from skyctl.workload.workload import Workload

IN_PLACE = """
class AddBias(nn.Module):
    def __init__(self): super().__init__(); self.bias = nn.Parameter(torch.zeros(16))
    def forward(self, x): x += self.bias; return x

def model():
    first, last = nn.Linear(6, 16), nn.Linear(16, 4)
    return [first, AddBias(), nn.ReLU(inplace=True), nn.Dropout(0.0, inplace=True), last]
"""


def test_layers_that_begin_in_place_are_counted(user: Callable[..., Workload]) -> None:
    workload = user(IN_PLACE)
    costs = count_layer_costs(workload, 2)
    assert [tensor.requires_grad for i in range(1, 5) for tensor in workload.boundary(i, 2)] == [True] * 4
    assert costs[4].flops == 3 * 2 * (2 * 16 * 4)
    assert costs[1].state_bytes == 16 * 16


def test_the_chain_of_stages_gives_the_gradients_of_one_process(user: Callable[..., Workload]) -> None:
    workload = user(IN_PLACE)
    inputs, targets = next(workload.batches(0, 0, 8))
    assert isinstance(inputs, torch.Tensor)
    whole = torch.nn.Sequential(*workload.build(0, workload.layers))
    workload.loss(whole(inputs), targets).backward()

    layers = workload.build(0, workload.layers)
    given, captures = [layers[0](inputs)], []
    for layer in layers[1:]:
        (entered,), capture = attach_inputs([given[-1].detach().clone()], [True])
        captures.append(capture)
        given.append(layer(entered))
    gradient = None
    given[-1] = workload.loss(given[-1], targets)
    for out, capture in zip(reversed(given), [*reversed(captures), None], strict=True):
        out.backward(gradient)
        gradient = None if capture is None else capture.gradients()[0]
    for layer, other in zip(whole, layers, strict=True):
        for mine, theirs in zip(layer.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_values_keep_their_structure_and_whole_numbers_stay_as_they_are() -> None:
    weight = torch.ones(2, requires_grad=True)
    value = {"x": (weight * 2, None), "ids": torch.arange(3)}
    received = received_value(value)
    assert isinstance(received, dict)
    x, ids = received["x"][0], received["ids"]
    assert (x.requires_grad, x.is_leaf, ids.requires_grad) == (True, False, False)
    x += 1
    assert x.tolist() == [3.0, 3.0]
