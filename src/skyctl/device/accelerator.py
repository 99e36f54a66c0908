"""The node's accelerator, of whatever kind: what ``torch.accelerator`` calls the current one.

The one place that knows where kinds differ. ``torch.accelerator`` carries devices, streams, events and
memory, but no random numbers and no names of devices: these are in each kind's own module (``torch.cuda``,
``torch.xpu``, …). MPS makes no streams, and its memory is the machine's. A torch before 2.9 counts memory in
the kind's module alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

UNIFIED_MEMORY = frozenset({"mps"})
"""Kinds whose memory is the machine's."""


def list_accelerators() -> list[dict[str, Any]]:
    """Every device of the current kind, as ``{"id": "cuda:0", "name": …}``; empty if there is none."""
    if not torch.accelerator.is_available():
        return []
    current = torch.accelerator.current_accelerator()
    assert current is not None
    devices = [torch.device(current.type, index) for index in range(torch.accelerator.device_count())]
    return [{"id": str(device), "name": device_name(device)} for device in devices]


def device_name(device: torch.device) -> str:
    """The device's product name, or its kind where torch does not tell one."""
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if named is None else str(named(device.index or 0))


def device_uuid(device: torch.device) -> str | None:
    """The card's own id; None: torch does not tell it."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(device.index or 0), "uuid", None)
    return None if uuid is None else str(uuid)


def has_own_memory(device: torch.device) -> bool:
    """Whether the device's memory is apart from the machine's."""
    return device.type not in {"cpu", *UNIFIED_MEMORY}


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes free on the device, for all processes, and its capacity.

    Raises:
        RuntimeError: the device is not there.
    """
    free, total = _memory_function(device, "get_memory_info", "mem_get_info")(device.index or 0)
    return int(free), int(total)


def reserved_bytes(device: torch.device) -> int:
    """Bytes that this process's allocator holds on the device, those that no tensor uses included."""
    return int(_memory_function(device, "memory_reserved")(device.index or 0))


def empty_cache(device: torch.device) -> None:
    """Gives memory that no tensor uses back to the device."""
    _memory_function(device, "empty_cache")()


def peak_bytes(device: torch.device) -> int | None:
    """The most bytes that this process's tensors took on the device; None: its kind does not count them."""
    if not has_own_memory(device):
        return None
    return int(_memory_function(device, "max_memory_allocated")(device.index or 0))


def seed_function(device: torch.device) -> Callable[[int], object]:
    """Seeds the generator from which that device draws; it is the process's current device."""
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())  # faster than CUDA's and XPU's own ``manual_seed``
    seed: Callable[[int], object] = (
        generators[device.index or 0].manual_seed if generators else module.manual_seed
    )
    return seed


def random_state(device: torch.device) -> torch.Tensor:
    """The state of that device's generator; it is the process's current device."""
    state: torch.Tensor = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Sets the state of the device's generator, as ``random_state`` gave it."""
    torch.get_device_module(device).set_rng_state(state)


def make_stream(device: torch.device) -> torch.Stream | None:
    """A new stream of the device; None: devices of its kind have one only."""
    with suppress(RuntimeError):
        return torch.Stream(device)
    return None


def _memory_function(device: torch.device, name: str, older_name: str | None = None) -> Any:
    """``torch.accelerator``'s, or the kind's own where torch is too old to have it."""
    function = getattr(torch.accelerator, name, None)
    return function or getattr(torch.get_device_module(device), older_name or name)
