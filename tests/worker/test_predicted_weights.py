"""Weights moved once more by the last update, and put back to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from skyctl.worker.updates.predicted_weights import PredictedWeights, has_momentum
from skyctl.workload.mixed_precision import master_of, to_low_precision

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "nadam": torch.optim.NAdam,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "rmsprop": torch.optim.RMSprop,
    "rmsprop with momentum": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
    **{
        f"{kind.__name__} without beta1": partial(kind, betas=(0.0, 0.99))
        for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax)
    },
}
PLAIN = {name for name in OPTIMIZERS if name in ("sgd", "rmsprop") or "without" in name}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_weights_are_predicted_where_an_optimizer_has_momentum(name: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 3), nn.Linear(3, 2).requires_grad_(False), nn.Linear(4, 2)]
    for parameter_name, parameter in list(layers[2].named_parameters()):
        lowered = to_low_precision(parameter, parameter.detach().clone(), torch.bfloat16)
        layers[2]._parameters[parameter_name] = lowered
    trained = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    masters = [master_of(p) for p in trained]
    optimizer = OPTIMIZERS[name](masters)
    predicted = PredictedWeights(layers, optimizer)
    seen: list[list[torch.Tensor]] = []
    for _ in range(4):
        now = [master.detach().clone() for master in masters]
        predicted.enter()
        expected = now
        if seen and name not in PLAIN:
            expected = [2 * w - v for w, v in zip(now, seen[-1], strict=True)]
            assert not any(torch.equal(w, e) for w, e in zip(now, expected, strict=True))
        for parameter, master, value in zip(trained, masters, expected, strict=True):
            torch.testing.assert_close(master.detach(), value)
            if master is not parameter:
                assert torch.equal(parameter.detach(), master.detach().to(parameter.dtype))
        predicted.leave()
        assert all(torch.equal(a, b) for a, b in zip(masters, now, strict=True)), "to the last bit"
        predicted.keep()
        for master in masters:
            master.grad = torch.randn_like(master)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(trained, masters, strict=True):
                parameter.copy_(master)
        seen.append(now)
    assert has_momentum(optimizer) == (name not in PLAIN)
    now = [master.detach().clone() for master in masters]
    predicted.discard()
    predicted.enter()
    assert all(torch.equal(a, b) for a, b in zip(masters, now, strict=True)), "of no update anything is known"
    predicted.leave()


def test_a_stage_in_which_nothing_is_trained_has_nothing_to_predict() -> None:
    layer = nn.Linear(2, 2).requires_grad_(False)
    predicted = PredictedWeights([layer], torch.optim.AdamW(layer.parameters()))
    before = layer.weight.clone()
    for _ in range(3):
        predicted.enter()
        predicted.leave()
        predicted.keep()
    predicted.discard()
    assert torch.equal(layer.weight, before)


class Own(torch.optim.Optimizer):
    """An optimizer of the user's, whose groups say nothing of momentum."""

    def __init__(self, parameters: Iterable[nn.Parameter], **defaults: Any) -> None:
        super().__init__(parameters, defaults)


def test_an_optimizer_of_the_users_may_keep_anything_in_its_state() -> None:
    layer = nn.Linear(2, 2)
    optimizer = Own(layer.parameters())
    optimizer.state["steps"] = 3
    optimizer.state[layer.bias] = [torch.zeros(2)]
    assert not has_momentum(optimizer)
    optimizer.state[layer.weight] = {"momentum_buffer": torch.zeros(2, 2)}
    assert has_momentum(optimizer)


def test_a_running_mean_that_keeps_nothing_is_no_momentum() -> None:
    """Which of the groups has what is told apart; a coefficient may be a tensor, and be changed."""
    layer = nn.Linear(2, 2)
    groups: Any = [{"params": [layer.weight], "momentum": 0.0}, {"params": [layer.bias], "momentum": 0.9}]
    optimizer = Own(groups)
    optimizer.state[layer.weight] = {"momentum_buffer": torch.zeros(2, 2)}
    assert not has_momentum(optimizer), "the group with momentum has no mean yet"
    optimizer.state[layer.bias] = {"momentum_buffer": torch.zeros(2)}
    assert has_momentum(optimizer)
    optimizer.param_groups[1]["momentum"] = 0.0
    assert not has_momentum(optimizer)
    adam = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    (weight,) = adam.param_groups[0]["params"]
    adam.state[weight] = {"exp_avg": torch.zeros(1)}
    for betas, expected in (
        ((torch.tensor(0.0), 0.9), False),
        ([torch.tensor(0.9), 0.9], True),
        (None, True),
    ):
        adam.param_groups[0]["betas"] = betas
        assert has_momentum(adam) == expected


def test_weights_that_an_optimizer_gives_other_memory_are_predicted() -> None:
    """As ``p.data = …`` does; and so may a forward, between ``enter`` and ``leave``."""
    layer = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[layer.weight] = {"momentum_buffer": torch.zeros(2, 2)}
    predicted = PredictedWeights([layer], optimizer)
    predicted.keep()
    before = layer.weight.detach().clone()
    layer.weight.data = before + 1.0
    predicted.enter()
    torch.testing.assert_close(layer.weight.detach(), before + 2.0)
    layer.weight.data = layer.weight.detach().clone()
    predicted.leave()
    assert torch.equal(layer.weight, before + 1.0)
