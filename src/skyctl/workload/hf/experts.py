"""Experts of the ``transformers`` library, computed with shapes that do not depend on what a router chooses.

The library's ``eager`` way takes shapes from the values of a batch. Its ``grouped_mm`` runs without values in
bfloat16 only. ``experts_forward`` is the same sum by the operation that the library itself falls back to.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

_MORE = ("has_bias", "has_post_expert_norm", "is_transposed")
EXPERTS = "skyctl"
"""The name under which ``register_experts`` makes ``experts_forward`` known to the library."""


def register_experts() -> bool:
    """Makes ``experts_forward`` known to the library; False where the library has no such operation."""
    moe: Any = importlib.import_module("transformers.integrations.moe")
    if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        return False
    moe.ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
    if torch.ops.transformers.grouped_mm_fallback not in flop_registry:
        register_flop_formula(torch.ops.transformers.grouped_mm_fallback)(_forward_flops)
        register_flop_formula(torch.ops.transformers.grouped_mm_fallback_backward)(_backward_flops)
    return True


def experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Σ weight · expert(token) over the experts that each token was routed to.

    Args:
        experts: the library's module, with ``gate_up_proj`` [experts, 2 · inner, hidden] and ``down_proj``
            [experts, hidden, inner].
        hidden_states: [tokens, hidden].
        top_k_index: [tokens, k], the experts of each token.
        top_k_weights: [tokens, k].

    Returns:
        [tokens, hidden].

    Raises:
        NotImplementedError: an expert computes more than that.
    """
    more = [name for name in _MORE if getattr(experts, name, False)]
    if more or not getattr(experts, "has_gate", True):
        raise NotImplementedError(f"{type(experts).__name__} has {', '.join(more) or 'no gate'}")
    tokens, k = top_k_index.shape
    chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
    counts = torch.histc(chosen.float(), bins=experts.num_experts, min=0, max=experts.num_experts - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    grouped = torch.ops.transformers.grouped_mm_fallback
    up = grouped(hidden_states[order // k], experts.gate_up_proj.transpose(-2, -1), ends)
    down = grouped(experts._apply_gate(up), experts.down_proj.transpose(-2, -1), ends)
    weighted = down * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    summed = weighted[back].view(tokens, k, -1).sum(dim=1)
    result: Tensor = summed.to(hidden_states.dtype)
    return result


def _forward_flops(rows: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Of the shapes [rows, in] and [experts, in, out]: each row meets one expert."""
    return int(2 * rows[0] * weight[1] * weight[2])


def _backward_flops(rows: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * _forward_flops(rows, weight)
