"""Makes ``skyctl`` known to torch.distributed as the name of a backend.

Where skyctl is installed, ``import torch`` calls ``register`` (the entry point ``torch.backends``); on nodes,
whose skyctl has been sent there, ranks call it themselves. It imports next to nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

BACKEND = "skyctl"


def register() -> None:
    """Registers the backend, for the CPU and the node's kind of accelerator; a second call does nothing."""
    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        accelerator = torch.accelerator.current_accelerator()
        devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=devices)


def _make_group(made: Any, options: Any) -> Any:
    from skyctl.transport.process_group import make_group

    return make_group(made, options)
