"""The report on an exception that ends a rank: its first cause, and the phase it happened in."""

from __future__ import annotations

import traceback

import torch

from skyctl.agent.task_runner import AgentGoneError
from skyctl.errors import RunError, SkyctlError, WorkloadError
from skyctl.transport.transfer_errors import PeerError

_CPU_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory")
"""In messages of torch's allocator for CPUs, by platform: it raises a plain RuntimeError."""


def find_dead_worker(exc: BaseException) -> BaseException | None:
    """Finds the error that torch raises when a DataLoader's worker dies; None: not that.

    Torch raises it wherever this process just is.
    """
    error: BaseException | None = exc
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # who raises one again may have closed a circle
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__") == "torch.utils.data._utils.signal_handling":
                return error
        error = error.__cause__ or error.__context__
    return None


def with_phase(exc: Exception, phase: str, device: str) -> Exception:
    """The error to report for ``exc``: with the phase it happened in, and the cause in the first line.

    A user's or workload's own error, a missing module, and the agent's end stay as they are.
    """
    worker = find_dead_worker(exc) if not isinstance(exc, WorkloadError) else None
    if worker is not None:
        return WorkloadError(
            f"{phase}: a worker process of a DataLoader in data() has died: {worker}",
            hint="see what it printed, and whether memory ran out; num_workers=0 shows the error itself",
        )
    if isinstance(exc, PeerError):
        return type(exc)(f"{phase}: {exc.message}", peer_rank=exc.peer_rank, hint=exc.hint, log=exc.log)
    if isinstance(exc, RunError):
        return RunError(f"{phase}: {exc.message}", hint=exc.hint, log=exc.log)
    if isinstance(exc, SkyctlError | AgentGoneError | ImportError):
        return exc
    text = str(exc).strip()
    out_of_memory = isinstance(exc, MemoryError | torch.OutOfMemoryError)
    if out_of_memory or any(sign in text for sign in _CPU_OUT_OF_MEMORY):
        return RunError(
            f"{phase}: out of memory on {device}: {text or type(exc).__name__}",
            hint="plan with more microbatches (smaller ones), or a smaller memory_gib for this node",
        )
    return RunError(f"{phase}: {type(exc).__name__}: {text}" if text else f"{phase}: {type(exc).__name__}")
