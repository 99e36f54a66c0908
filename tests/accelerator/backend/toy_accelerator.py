"""``torch.toy``: the small accelerator of ``toy.cpp``, as a module of torch.

Python finds it by its entry point (``torch.backends``), as it does any accelerator's package.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

Device = torch.device | str | int | None


def register() -> None:
    """Makes ``toy`` torch's accelerator."""
    torch.ops.load_library(str(Path(__file__).with_name("toy.so")))
    torch.utils.rename_privateuse1_backend("toy")
    torch._register_device_module("toy", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return bool(torch.ops.toy.is_used())


def _is_in_bad_fork() -> bool:
    return bool(torch.ops.toy.is_in_bad_fork())


def device_count() -> int:
    return 2


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Device) -> None:
    torch.accelerator.set_device_index(_index(device))


def get_device_name(device: Device = None) -> str:
    return f"toy accelerator {_index(device)}"


def get_device_properties(device: Device = None) -> SimpleNamespace:
    return SimpleNamespace(uuid=f"toy-{_index(device)}")


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def manual_seed(seed: int) -> None:
    torch.ops.toy.manual_seed(current_device(), seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        torch.ops.toy.manual_seed(index, seed)


def get_rng_state(device: Device = None) -> torch.Tensor:
    return torch.ops.toy.get_rng_state(_index(device))


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    torch.ops.toy.set_rng_state(_index(device), state)


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index
