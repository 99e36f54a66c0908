"""Which device holds which layers while text is generated: one token goes through all of them in turn.

No two devices work at the same time then, so that a token comes soonest from as few and as fast ones as hold
the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyctl.errors import InfeasibleError
from skyctl.records.profile import DeviceProfile

USED_SHARE = 0.8
"""Of a device's memory; the rest is for keys and values of earlier tokens, and for what layers compute."""


@dataclass(frozen=True)
class StageLayers:
    """Layers [start, stop) on a device."""

    device: str
    start: int
    stop: int


def fill_devices(layer_bytes: Sequence[float], devices: Sequence[DeviceProfile]) -> list[StageLayers]:
    """Gives the fastest device as many of the first layers as it holds, the next one those that follow, ….

    Args:
        layer_bytes: of the parameters and buffers of each layer.

    Raises:
        InfeasibleError: all of them together do not hold the model.
    """
    stages: list[StageLayers] = []
    start = 0
    for device in sorted(devices, key=lambda device: -device.flops_per_s):
        free = USED_SHARE * (device.memory_bytes - device.reserved_bytes)
        stop = start
        while stop < len(layer_bytes) and layer_bytes[stop] <= free:
            free -= layer_bytes[stop]
            stop += 1
        if stop > start:
            stages.append(StageLayers(device.id, start, stop))
        start = stop
    if start < len(layer_bytes):
        room = sum(max(0.0, device.memory_bytes - device.reserved_bytes) for device in devices)
        raise InfeasibleError(
            f"the model has {sum(layer_bytes) / 2**30:.2f} GiB of weights; {USED_SHARE:.0%} of what is free "
            f"on {len(devices)} devices is {USED_SHARE * room / 2**30:.2f} GiB, and layer {start} fits on "
            "none that is left",
            hint="--dtype bfloat16 halves the weights; or add a node",
        )
    return stages
