"""What a rank reports of an error."""

from __future__ import annotations

import torch

from skyctl.agent.task import AgentGoneError
from skyctl.errors import RunError, SkyctlError
from skyctl.transport.pair import PeerLostError

_NO_MEMORY = ("not enough memory", "can't allocate memory")
"""Of torch's allocator for CPUs, by platform."""


def explained(exc: Exception, phase: str, device: str) -> Exception:
    """The error with the phase it happened in, and the cause in the first line."""
    if isinstance(exc, PeerLostError):
        return PeerLostError(f"{phase}: {exc.message}", hint=exc.hint, log=exc.log)
    if isinstance(exc, RunError):
        return RunError(f"{phase}: {exc.message}", hint=exc.hint, log=exc.log)
    if isinstance(exc, SkyctlError | AgentGoneError | ImportError):
        return exc
    text = str(exc).strip()
    if isinstance(exc, MemoryError | torch.OutOfMemoryError) or any(sign in text for sign in _NO_MEMORY):
        return RunError(
            f"{phase}: out of memory on {device}: {text or type(exc).__name__}",
            hint="plan with more microbatches (smaller ones), or a smaller memory_gib for this node",
        )
    return RunError(f"{phase}: {type(exc).__name__}: {text}" if text else f"{phase}: {type(exc).__name__}")
