"""Bytes of memory: what recomputing stages keep, whether a need fits a device, and bytes in words."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.records.problem import Device, Layer

ROUNDING = 1e-12
"""A need this little above the available memory, relative, fits: sums in another order round differently."""


def kept_bytes(layers: Sequence[Layer]) -> list[float]:
    """Bytes a recomputing stage keeps per layer and microbatch in flight: the layer's input."""
    return [
        min(layer.activation_bytes, layers[i - 1].output_bytes) if i else layer.activation_bytes
        for i, layer in enumerate(layers)
    ]


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
