"""How much memory a stage needs on its device: the contract's formula (``docs/contract.md``, Memory)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skyctl.records.problem import Device, Layer, Problem
from skyctl.schedule.actions import ZERO_BUBBLE

ROUNDING = 1e-12
"""A need this little above the available memory, relative, fits: sums in another order round differently."""


def received_bytes(problem: Problem, start: int, stop: int) -> float:
    """Bytes that stage [start, stop) receives per microbatch, both ways: activations in, gradients back."""
    ahead = problem.layers[start - 1].output_bytes if start > 0 else 0.0
    back = problem.layers[stop - 1].output_bytes if stop < len(problem.layers) else 0.0
    return ahead + back


def kept_bytes(layers: Sequence[Layer]) -> list[float]:
    """Bytes a recomputing stage keeps per layer and microbatch in flight: the layer's input."""
    return [
        min(layer.activation_bytes, layers[i - 1].output_bytes) if i else layer.activation_bytes
        for i, layer in enumerate(layers)
    ]


def stage_bytes(
    problem: Problem, start: int, stop: int, in_flight: int, deferred: int = 0, *, recompute: bool = False
) -> float:
    """Bytes that layers [start, stop) need on any device, its reserved bytes left out.

    ``deferred``: by how many microbatches weight gradients follow their backward (``zero-bubble``).
    """
    layers = problem.layers[start:stop]
    need = math.fsum(layer.state_bytes for layer in layers)
    need += problem.receive_window * received_bytes(problem, start, stop)
    if recompute:
        kept = math.fsum(kept_bytes(problem.layers[:stop])[start:])
        return need + in_flight * kept + max(x.activation_bytes + x.workspace_bytes for x in layers)
    if problem.schedule == ZERO_BUBBLE:
        need += (deferred + 1) * math.fsum(layer.deferred_bytes for layer in layers)
    need += in_flight * math.fsum(layer.activation_bytes for layer in layers)
    return need + max(layer.workspace_bytes for layer in layers)


def device_bytes(
    problem: Problem,
    device: Device,
    start: int,
    stop: int,
    in_flight: int,
    deferred: int = 0,
    *,
    recompute: bool = False,
) -> float:
    """Bytes that ``device`` needs to hold layers [start, stop), its reserved bytes included."""
    return device.reserved_bytes + stage_bytes(problem, start, stop, in_flight, deferred, recompute=recompute)


def fits_device(need_bytes: float, device: Device) -> bool:
    """Whether a device has that many bytes."""
    return device.memory_bytes is None or need_bytes <= device.memory_bytes * (1 + ROUNDING)


UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(count_bytes: float) -> str:
    """Bytes in words, such as ``3.2 GiB``."""
    value = float(count_bytes)
    for unit in UNITS:
        if abs(value) < 1024 or unit == UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or 1000 <= abs(value) < 1024 else f"{value:.3g} {unit}"
