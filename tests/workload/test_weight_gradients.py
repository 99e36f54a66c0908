"""Weight gradients put off are those that autograd gives, whatever the layers are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.rounding import rounding
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the field's name
from torch.utils.checkpoint import checkpoint

from skyctl.errors import WorkloadError
from skyctl.workload.builtin import Attention, Head, Mlp
from skyctl.workload.weight_gradients import DeferredWeightGradients

Tensor = torch.Tensor


class Addmm(nn.Module):
    """As the Conv1D of GPT-2 in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, 8), self.weight).view(x.shape)


class Twice(nn.Module):
    """One weight for two products; what the first gives is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu_(self.linear(x)), self.linear.weight)


class Tied(Twice):
    """And for an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.table.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table(torch.arange(x.shape[1]) % 8)


class Straight(nn.Module):
    """Products as written by hand, and one with a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.other = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 8) @ self.weight @ self.weight.t()
        return torch.addmm(rows, rows, self.other, alpha=2.0).view(x.shape)


class Complex(nn.Module):
    """Products of complex numbers, by hand; real numbers in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.other = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.real = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.complex(x, x.square()).reshape(-1, 8) @ self.weight @ self.other.t()
        return (rows.abs() @ self.real).view(x.shape)


class Sideways(nn.Module):
    """Weights that do not lie in memory in the order of their dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4).t())
        self.other = nn.Parameter(torch.randn(4, 8).t())

    def forward(self, x: Tensor) -> Tensor:
        return ((x.reshape(-1, 8) @ self.weight.t()) @ self.other.t()).view(x.shape)


class Computed(nn.Module):
    """Weights and biases that are computed, parts of a parameter, or frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.only_bias = nn.Linear(8, 8)
        self.only_bias.weight.requires_grad_(False)
        self.no_bias = nn.Linear(8, 8, bias=False)
        self.shift = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.no_bias(self.only_bias(self.frozen(self.normed(x))))
        return F.linear(x, self.no_bias.weight, self.shift[:8] * 2).transpose(0, 1).transpose(0, 1)


class Penalty(nn.Module):
    """Differentiates inside, with a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inside = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(inside).tanh().sum(), inside, create_graph=True)
        return self.linear(x) + slope


class ByHand(torch.autograd.Function):
    """Keeps the graph of its forward and differentiates it in its backward, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.inner = x.detach().requires_grad_(), weight, bias
            ctx.out = F.linear(*ctx.inner).sin()
        return ctx.out.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.autograd.grad(ctx.out, ctx.inner, gradient)


class Hand(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = ByHand.apply(x, self.weight, self.bias)
        return out


class Again(nn.Module):
    """Uses checkpoints inside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x * 1.0, use_reentrant=self.reentrant)
        return out


class Mapped(nn.Linear):
    """torch.func inside."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.func.vmap(lambda row: F.linear(row, self.weight, self.bias))(x)
        return out


class Fold(nn.Module):
    """[n, 6, 8] as pictures of 2 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, stride=(2, 1))
        self.second = nn.Conv2d(4, 4, 3, padding="same", bias=False)
        self.third = nn.Conv1d(4, 8, 2, groups=2, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x.view(-1, 2, 3, 8))).flatten(2)
        return self.third(x)[:, :6, :8].contiguous()


class Biases(nn.Module):
    """Convolutions' biases: of two, of something else too, computed, frozen; and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth, self.fifth = (
            nn.Conv1d(6, 6, 3, padding=1) for _ in range(5)
        )
        self.back = nn.ConvTranspose1d(6, 6, 3, padding=1, groups=2)
        self.second.bias = self.first.bias
        self.fourth.weight.requires_grad_(False)
        assert self.fifth.bias is not None
        self.fifth.bias.requires_grad_(False)
        self.shared, self.computed = nn.Conv1d(6, 6, 1), nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.back(self.fifth(self.fourth(self.third(self.second(self.first(x))))))
        x = F.conv1d(x, self.shared.weight, self.computed[:6] * 2)
        assert self.third.bias is not None
        return self.shared(x) + self.third.bias[:, None]


LAYERS: dict[str, tuple[Callable[[], nn.Module], int | None]] = {
    # what to make, and how many products are put off (None: it depends on torch)
    "linear": (lambda: nn.Linear(8, 8), 1),
    "mlp": (lambda: Mlp(8), 2),
    "attention": (lambda: Attention(8, 2, True), 2),
    "head": (lambda: Head(8, 8, False), 1),
    "addmm": (Addmm, 1),
    "twice": (Twice, 2),
    "tied": (Tied, 0),
    "straight": (Straight, None),
    "complex": (Complex, None),
    "sideways": (Sideways, None),
    "computed": (Computed, 2),
    "convolutions": (Fold, 3),
    "convolutions' biases": (Biases, 6),
    "penalty": (Penalty, 3),
    "by hand": (lambda: Hand(8, 8), 0),
    "checkpoint": (lambda: Again(False), 0),
    "reentrant checkpoint": (lambda: Again(True), 0),
    "vmap": (lambda: Mapped(8, 8), None),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), None),
    "lstm": (lambda: Second(nn.LSTM(8, 8, batch_first=True)), None),
    "no weights": (nn.GELU, 0),
}


WITHOUT_INPUT = {"convolutions": 2, "convolutions' biases": 4}
"""The same where the first input needs no gradient: a convolution that only has its own is not put off."""


class Second(nn.Module):
    """An LSTM's outputs without its state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


def run(layer: nn.Module, x: Tensor, gradient: Tensor, *, put_off: bool) -> tuple[Tensor | None, int]:
    """One microbatch → (the input's gradient, how many products were put off)."""
    later = DeferredWeightGradients()
    if put_off:
        out = layer(x)
        later.backward([out], [gradient])
    else:
        out = layer(x)
        torch.autograd.backward([out], [gradient])
    number = len(list(later.held)) // 2
    later.add()
    assert not list(later.held)
    return x.grad, number


CLOSE = rounding(3 * 12 * 16)
"""A gradient is a sum over three batches of twelve rows, of what are sums of up to 16."""


def gradients(layer: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in layer.parameters()]


@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_autograds(name: str, needs_input: bool) -> None:
    make, expected = LAYERS[name]
    expected = expected if needs_input else WITHOUT_INPUT.get(name, expected)
    torch.manual_seed(0)
    plain = make()
    other = copy.deepcopy(plain)
    if name in ("no weights", "reentrant checkpoint") and not needs_input:
        return  # there is nothing to differentiate
    for _ in range(3):
        x, gradient = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
        a, b = x.clone().requires_grad_(needs_input), x.clone().requires_grad_(needs_input)
        of_a, _ = run(plain, a, gradient, put_off=False)
        of_b, number = run(other, b, gradient, put_off=True)
        assert expected in (number, None)
        assert (of_a is None) == (of_b is None) == (not needs_input)
        if of_a is not None and of_b is not None:
            torch.testing.assert_close(of_b, of_a, rtol=CLOSE, atol=CLOSE)
    for wanted, late in zip(gradients(plain), gradients(other), strict=True):
        assert (wanted is None) == (late is None)
        if wanted is not None and late is not None:
            assert late.stride() == wanted.stride()
            torch.testing.assert_close(late, wanted, rtol=CLOSE, atol=CLOSE)
            if name in ("linear", "mlp", "attention", "head", "addmm"):
                assert torch.equal(wanted, late)


def test_several_microbatches_between_backward_and_add() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Mlp(8), Attention(8, 2, True))
    other = copy.deepcopy(plain)
    waiting = []
    for _ in range(3):
        x, gradient = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
        plain(x).backward(gradient)
        later = DeferredWeightGradients()
        out = other(x)
        later.backward([out], [gradient])
        waiting.append(later)
    assert other[0].up.weight.grad is None
    for later in waiting:
        later.add()
    for wanted, late in zip(gradients(plain), gradients(other), strict=True):
        assert wanted is not None
        assert late is not None
        assert torch.equal(wanted, late)


def test_hooks_of_parameters_see_what_they_always_saw() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    seen = []
    layer[0].weight.register_hook(lambda g: seen.append("before") or g * 2)
    layer[1].bias.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    other = copy.deepcopy(layer[0].weight.detach())
    x = torch.randn(3, 4)
    _, number = run(layer, x, torch.ones(3, 4), put_off=True)
    assert number == 2
    assert seen == ["after", "before"]
    assert layer[0].weight.grad is not None
    gradient = layer[0].weight.grad.clone()
    plain = copy.deepcopy(layer)
    plain.zero_grad()
    plain[0].weight = nn.Parameter(other)
    plain(x).backward(torch.ones(3, 4))
    assert plain[0].weight.grad is not None
    torch.testing.assert_close(gradient, 2 * plain[0].weight.grad)


@pytest.mark.parametrize("make", [lambda: Mlp(8), Fold, Addmm])
def test_autocast(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = make()
    other = copy.deepcopy(plain)
    x, gradient = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    for layer, put_off in ((plain, False), (other, True)):
        later = DeferredWeightGradients()
        for _ in range(2):
            own = x.clone().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = layer(own)
            (later.backward if put_off else torch.autograd.backward)([out], [gradient.to(out.dtype)])
            assert put_off == bool(list(later.held))
            later.add()
    for wanted, late in zip(gradients(plain), gradients(other), strict=True):
        assert wanted is not None
        assert late is not None
        assert wanted.dtype == late.dtype == torch.float32
        torch.testing.assert_close(late, wanted, rtol=2e-2, atol=2e-2)


def test_what_is_changed_too_early_is_an_error() -> None:
    layer = nn.Linear(4, 4)
    later = DeferredWeightGradients()
    gradient = torch.ones(3, 4)
    out = layer(torch.randn(3, 4))
    later.backward([out], [gradient])
    gradient.mul_(2)
    with pytest.raises(WorkloadError, match=r"weight of \[4, 4\].* changed in place"):
        later.add()

    later = DeferredWeightGradients()
    x = torch.randn(3, 4)
    out = layer(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.backward([out], [torch.ones(3, 4)])


def test_what_is_held_has_no_history() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    later = DeferredWeightGradients()
    out = layer(torch.randn(3, 4, requires_grad=True))
    later.backward([out], [torch.ones(3, 4)])
    assert [tensor.grad_fn for tensor in later.held] == [None] * 4


class Shifted(nn.Module):
    """A part that adds itself to all samples: of a single one its gradient is that of the sum, as it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.randn(1, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        shift = self.shift.expand(x.shape[0], -1, -1)
        out: Tensor = self.last(self.first(x) + shift)
        return out


def test_a_gradient_that_a_parameter_has_taken_over_is_copied() -> None:
    torch.manual_seed(0)
    plain = Shifted()
    other = copy.deepcopy(plain)
    waiting = []
    for _ in range(3):
        x, gradient = torch.randn(1, 6, 8), torch.randn(1, 6, 8)
        plain(x).backward(gradient)
        later = DeferredWeightGradients()
        later.backward([other(x)], [gradient])
        waiting.append(later)
    for later in waiting:
        later.add()
    for wanted, late in zip(gradients(plain), gradients(other), strict=True):
        assert wanted is not None
        assert late is not None
        torch.testing.assert_close(late, wanted)
