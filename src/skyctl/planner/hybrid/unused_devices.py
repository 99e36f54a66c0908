"""Why a device is in none of a plan's pipelines: no memory for any layer, or nothing faster with it."""

from __future__ import annotations

from skyctl.planner.hybrid.hybrid_model import HybridModel, HybridStep
from skyctl.planner.stage_memory import human_bytes
from skyctl.records.plan import Certificate, Unused


def explain_unused(model: HybridModel, step: HybridStep, proof: Certificate) -> tuple[Unused, ...]:
    """The devices that hold no stage, and why."""
    busy = {stage.device for placement in step.candidate.placements for stage in placement}
    known = "the plan is proved best without it" if proof.status == "optimal" else "no faster plan was found"
    return tuple(
        Unused(device=model.ids[d], reason=_no_room(model, d) or known)
        for d in range(model.devices)
        if d not in busy
    )


def _no_room(model: HybridModel, device: int) -> str | None:
    """What the device lacks for the smallest layer; None: one fits."""
    least = min(model.base.need_bytes(i, i + 1, 1) for i in range(model.layers))
    room = model.base.available_bytes[device]
    if least <= room:
        return None
    has = human_bytes(max(0.0, room))
    return f"no layer fits: the smallest needs {human_bytes(least)}, it has {has} left"
