"""Mixtures of experts of the ``transformers`` library whose experts may be on other machines.

A block's own ``forward`` stays as it is, with shared experts and jitter. Only what it asks of its experts is
sent elsewhere. So the gate must be one that can be followed when experts are dead. No family is known here:
each block is asked what it does.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.workload.deferred_init import deferred_initialization
from skyctl.workload.hf.fused_experts import FusedExperts, fuse
from skyctl.workload.user_code import describe_exception

_WEIGHTS = {"gate_up_proj", "down_proj"}
_TOKENS = 64


def fuse_experts(model: Any) -> str | None:
    """Makes the experts of all the model's mixtures ``FusedExperts``, if it can.

    Returns:
        Why it can't, and has left them as they are; None: they are, or the model has none.
    """
    blocks = [block for block in model.modules() if isinstance(getattr(block, "experts", None), nn.Module)]
    found = []
    for block in blocks:
        normalises = None
        try:
            why = _against_parts(block) or _against_inputs(block)
            normalises = None if why else _normalises(block)
        except Exception as exc:  # noqa: BLE001 - the library's own code, as it is in another version
            why = describe_exception(exc)
        if why is None and normalises is None:
            why = "its gate is no softmax over all experts, of which the best are taken"
        if why is not None:
            return f"{type(block).__name__}: {why}"
        found.append((block, bool(normalises)))
    for block, normalises in found:
        features = int(block.gate.weight.shape[1])
        fuse(block.experts, block.gate, features=features, top_k=block.gate.top_k, normalises=normalises)
    return None


def _against_parts(block: Any) -> str | None:
    experts, gate = block.experts, getattr(block, "gate", None)
    if not isinstance(gate, nn.Module) or [*gate.state_dict()] != ["weight"]:
        return "its gate has more than one weight"
    if {*experts.state_dict()} != _WEIGHTS or [*experts.buffers()]:
        return f"its experts are not held as {' and '.join(sorted(_WEIGHTS))}"
    sizes = {int(weight.shape[0]) for weight in (block.gate.weight, *experts.parameters())}
    return None if sizes == {experts.num_experts} else "its experts are not the rows of their weights"


class _Seen(Exception):  # noqa: N818 - no error
    """The experts are asked; what came before is noted."""


def _against_inputs(block: Any) -> str | None:
    """Looks without values whether a block asks its experts with what it has asked its gate with."""
    seen: list[Any] = []
    gate, features = block.gate, int(block.gate.weight.shape[1])

    class Gate(nn.Module):
        def forward(self, *args: Any, **named: Any) -> Any:
            seen.append((args, named))
            seen.append(gate(*args, **named))
            return seen[-1]

    class Asked(nn.Module):
        def forward(self, *args: Any, **named: Any) -> Any:
            seen.append((args, named))
            raise _Seen

    looked_at = copy.copy(block)
    looked_at._modules = {**block._modules, "gate": Gate(), "experts": Asked()}
    try:
        with torch.no_grad(), deferred_initialization(0):
            looked_at(torch.zeros(2, 2, features))
    except _Seen:
        (given, named), (_, weights, chosen), (asked, more) = seen
        wanted = (*given, chosen, weights)
        if not named and not more and [*map(id, asked)] == [*map(id, wanted)] and asked[0].dim() == 2:
            return None
    return "its experts are not asked with what its gate gives"


def _normalises(block: Any) -> bool | None:
    """Whether the weights of a token's experts add up to 1, by values; None: the gate has another rule."""
    shape = tuple(map(int, block.gate.weight.shape))
    numbers = torch.Generator().manual_seed(0)
    gate = copy.copy(block.gate)
    weight = torch.randn(shape, generator=numbers) * shape[1] ** -0.5
    gate._parameters = {"weight": nn.Parameter(weight)}
    tokens = torch.randn(_TOKENS, shape[1], generator=numbers)
    experts = FusedExperts()
    vars(experts).update(gate=(gate,), num_experts=shape[0], top_k=gate.top_k)
    with torch.no_grad():
        wanted: tuple[Tensor, Tensor, Tensor] = gate(tokens)
        for normalises in (True, False):
            experts.normalises = normalises
            chosen, weights = experts.route(tokens)
            if torch.equal(chosen, wanted[2]) and torch.allclose(weights, wanted[1], rtol=1e-5, atol=1e-7):
                return normalises
    return None
