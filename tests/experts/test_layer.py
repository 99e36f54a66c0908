"""The layer against a loop over tokens and experts; its mask, its figures, what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import skyctl
from skyctl.errors import WorkloadError

WIDTH = 6


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH))


def layer(experts: int = 8, top_k: int = 3, **options: Any) -> skyctl.Experts:
    torch.manual_seed(0)
    return skyctl.Experts(make, experts, top_k, features=WIDTH, **options).double()


def slow(module: skyctl.Experts, tokens: Tensor, alive: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """(the output, the balance loss), token by token and expert by expert."""
    count, outputs = len(module.experts), []
    share, mean = [0.0] * count, [torch.zeros((), dtype=tokens.dtype)] * count
    for token in tokens:
        scores = [(module.gate.weight[number] * token).sum() for number in range(count)]
        total = sum(score.exp() for score in scores)
        mean = [m + score.exp() / total / len(tokens) for m, score in zip(mean, scores, strict=True)]
        ranked = sorted(range(count), key=lambda number: -float(scores[number].detach()))
        living = [number for number in ranked if alive[number]][: module.top_k]
        for number in living:
            share[number] += 1 / module.top_k / len(tokens)
        output = torch.zeros_like(token)
        for number in living:
            weight = scores[number].exp() / sum(scores[other].exp() for other in living)
            output = output + weight * module.experts[number](token)
        outputs.append(output)
    return torch.stack(outputs), count * sum(f * p for f, p in zip(share, mean, strict=True))


def gradients(module: skyctl.Experts, inputs: Tensor, output: Tensor, balance: Tensor) -> dict[str, Any]:
    module.zero_grad()
    inputs.grad = None
    (output.sin().sum() + 0.1 * balance).backward()
    return {"inputs": inputs.grad} | {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("mask", [[1] * 8, [1, 0, 1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1, 0, 1]])
def test_equals_a_loop_over_tokens_and_experts(mask: list[int]) -> None:
    module, alive = layer(), [bool(value) for value in mask]
    tokens = torch.randn(20, WIDTH, dtype=torch.float64, requires_grad=True)
    module.alive = alive
    output, balance = module(tokens), module.balance_loss
    wanted, wanted_balance = slow(module, tokens, alive)
    assert torch.allclose(output, wanted, rtol=0, atol=1e-6)
    assert torch.allclose(balance, wanted_balance, rtol=0, atol=1e-6)
    ours = gradients(module, tokens, output, balance)
    theirs = gradients(module, tokens, wanted, wanted_balance)
    for name, gradient in theirs.items():
        assert (ours[name] is None) == (gradient is None), name
        assert gradient is None or torch.allclose(ours[name], gradient, rtol=0, atol=1e-6), name
    assert all(
        (p.grad is not None) == bool(module.counts[number])
        for number, expert in enumerate(module.experts)
        for p in expert.parameters()
    )


def test_the_dead_are_not_chosen() -> None:
    module = layer(experts=4, top_k=1)
    tokens = torch.randn(5, 8, WIDTH, dtype=torch.float64)
    module(tokens)
    whole = module.counts
    assert (sum(whole), module.dropped) == (40, 0)
    module.alive = (True, False, True, True)
    module(tokens)
    assert (sum(module.counts), module.counts[1], module.dropped) == (40, 0, 0)
    module.alive = [True] * 4
    assert module.alive == (True,) * 4
    module(tokens)
    assert module.counts == whole


class Silent:
    """Experts elsewhere, some of which do not answer."""

    def __init__(self, module: skyctl.Experts, answering: Sequence[bool]) -> None:
        self.module, self.answering = module, answering

    def __call__(self, tokens: Tensor, counts: Sequence[int]) -> tuple[Tensor, Sequence[bool]]:
        parts = [
            self.module.experts[number](part) if answers else torch.zeros_like(part)
            for number, (part, answers) in enumerate(
                zip(tokens.split(list(counts)), self.answering, strict=True)
            )
        ]
        return torch.cat(parts), self.answering


def test_the_softmax_goes_over_those_that_answer_and_a_token_that_nobody_answers_is_dropped() -> None:
    module = layer(experts=4, top_k=2)
    tokens = torch.randn(40, WIDTH, dtype=torch.float64)
    answering = (True, False, False, True)
    module.dispatch = Silent(module, answering)
    output = module(tokens)
    wanted = torch.zeros_like(tokens)
    for row, token in enumerate(tokens):
        scores = module.gate(token)
        chosen = [number for number in scores.topk(2).indices.tolist() if answering[number]]
        for number, weight in zip(chosen, scores[chosen].softmax(-1), strict=True):
            wanted[row] += weight * module.experts[number](token)
    assert torch.allclose(output, wanted, rtol=0, atol=1e-9)
    assert module.dropped == int((wanted == 0).all(-1).sum()) > 0
    assert sum(module.counts) == 80


def test_without_tokens() -> None:
    module = layer()
    assert module(torch.zeros(0, WIDTH, dtype=torch.float64)).shape == (0, WIDTH)
    assert (sum(module.counts), float(module.balance_loss.detach())) == (0, 0.0)


def test_its_weights_are_plain_and_it_can_be_copied() -> None:
    module = layer(experts=2, top_k=1)
    plain = nn.ModuleDict(
        {"gate": nn.Linear(WIDTH, 2, bias=False), "experts": nn.ModuleList(make() for _ in range(2))}
    )
    module.alive = [True, False]
    assert plain.load_state_dict(module.state_dict())
    tokens = torch.randn(3, WIDTH, dtype=torch.float64)
    output = module(tokens)
    copied = copy.deepcopy(module)
    assert copied.alive == (True, False)
    assert torch.equal(copied(tokens), output)


def test_make_is_given_the_number_if_it_wants_one() -> None:
    given = []

    def numbered(number: int) -> nn.Module:
        given.append(number)
        return nn.Identity()

    skyctl.Experts(numbered, 3, 1, features=2)
    assert given == [0, 1, 2]


def test_jitter_is_for_training_only() -> None:
    module, still = layer(jitter=0.5), layer()
    tokens = torch.randn(30, WIDTH, dtype=torch.float64)
    assert not torch.equal(module(tokens), still(tokens))
    assert torch.equal(module.eval()(tokens), still(tokens))


def test_an_even_load_has_the_balance_loss_of_one() -> None:
    module = skyctl.Experts(nn.Identity, 2, 1, features=2)
    module.gate.weight.data = 4 * torch.eye(2)
    module(torch.eye(2))
    assert float(module.balance_loss.detach()) == pytest.approx(1.0)
    module(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert float(module.balance_loss.detach()) > 1.9


class Wrong(nn.Module):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, tokens: Tensor) -> Any:
        return self.answer(tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 0}, "at least one expert, it is given experts=0"),
        ({"experts": 3, "top_k": 4}, "top_k=4 of 3 experts"),
        ({"experts": 3, "top_k": 0}, "top_k=0 of 3 experts"),
        ({"features": 0}, "features=0"),
        ({"jitter": 1.0}, "from 0 to below 1, it is 1.0"),
        ({"make": lambda: len}, "make gives builtin_function_or_method for expert 0"),
    ],
)
def test_numbers_that_go_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        skyctl.Experts(**{"make": nn.Identity, "experts": 4, "top_k": 2, "features": WIDTH, **options})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: x[:, :5], r"expert 1 \(Wrong\) gives float32\[4, 5\] for float32\[4, 6\]"),
        (lambda x: x.double(), r"expert 1 \(Wrong\) gives float64\[4, 6\] for float32\[4, 6\]"),
        (lambda x: (x,), r"expert 1 \(Wrong\) gives tuple"),
    ],
)
def test_an_expert_that_gives_something_else_is_named(answer: Any, message: str) -> None:
    module = skyctl.Experts(lambda number: Wrong(answer) if number else nn.Identity(), 2, 2, features=WIDTH)
    with pytest.raises(WorkloadError, match=message):
        module(torch.zeros(4, WIDTH))


def test_masks_inputs_and_questions_that_are_refused() -> None:
    module = layer()
    with pytest.raises(WorkloadError, match="none of the 8 experts lives"):
        module.alive = [False] * 8
    with pytest.raises(WorkloadError, match="names 7 experts, the layer has 8"):
        module.alive = [True] * 7
    with pytest.raises(WorkloadError, match=r"takes \[\.\.\., 6\], it is given \[3, 5\]"):
        module(torch.zeros(3, 5))
    with pytest.raises(WorkloadError, match="before its first forward"):
        _ = module.balance_loss
