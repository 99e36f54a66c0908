"""Refuses what can't be done right with experts on hosts, before anything is built or connected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from skyctl.errors import RunError, WorkloadError
from skyctl.schedule.actions import ZERO_BUBBLE
from skyctl.worker.experts.held_experts import LayerExperts
from skyctl.worker.rank_order import RankOrder
from skyctl.workload.hf.fused_experts import FusedExpert
from skyctl.workload.shared_parameters import SharedParameter


def check_expert_order(order: RankOrder) -> None:
    """Checks that the order's steps can be made with experts on hosts.

    Raises:
        RunError: they can't; it says what stands against it.
    """
    if order.experts is None:
        return
    sums = order.sync
    against = {
        "activations that are computed again (recompute)": order.recompute,
        f"the schedule {ZERO_BUBBLE}": order.schedule == ZERO_BUBBLE,
        "rounds of local steps": order.rounds is not None,
        "a parameter server": sums is not None and sums.staleness is not None,
        "gradients that take effect one step later": sums is not None and sums.delay,
        "ranks that leave and join (--elastic)": order.elastic is not None,
        "devices that are shared by turns": order.turns is not None,
        "clipping by the norm of all gradients": order.recipe.clip_norm is not None,
    }
    found = [what for what, is_there in against.items() if is_there]
    if found:
        raise RunError(
            f"experts on other machines can't be trained with {' and '.join(found)}",
            hint="leave that out, or leave the experts where their layers are",
        )


def check_expert_modules(layers: Sequence[nn.Module], start: int, shared: Sequence[SharedParameter]) -> None:
    """Checks that each expert is a module of its own, with parameters alone.

    Raises:
        WorkloadError: an expert has buffers, shares a parameter, or is a model's of ``hf:`` and not trained.
    """
    hint = "leave the experts where their layers are, or make them without"
    for number, layer in enumerate(layers, start):
        experts = LayerExperts.of(layer).experts
        own = {id(parameter) for expert in experts for parameter in expert.parameters()}
        uses = Counter(id(p) for module in layer.modules() for p in module._parameters.values())
        tied = {name for entry in shared for at, name in entry.uses if at == number}
        for name, parameter in layer.named_parameters():
            if id(parameter) in own and (uses[id(parameter)] > 1 or name in tied):
                raise WorkloadError(f"{name} of layer {number}'s experts is used elsewhere, too", hint=hint)
        if len({*map(id, experts)}) < len(experts):
            raise WorkloadError(f"layer {number} has an expert twice", hint=hint)
        for place, expert in enumerate(experts):
            if isinstance(expert, FusedExpert) and not all(p.requires_grad for p in expert.parameters()):
                raise WorkloadError(
                    f"expert {place} of layer {number} is not trained, as with --lora, and hosts train "
                    "what they hold",
                    hint="leave the experts where their layers are, or train them",
                )
            if buffer := next((name for name, _ in expert.named_buffers()), None):
                raise WorkloadError(
                    f"expert {place} of layer {number} has a buffer ({buffer}), which hosts can't bring back",
                    hint=hint,
                )
