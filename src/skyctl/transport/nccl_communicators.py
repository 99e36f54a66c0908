"""NCCL between two CUDA devices, next to their own connection: one communicator for each direction.

Two, because one communicator runs its operations one after the other, and activations and gradients must
pass each other. NCCL knows no tags: operations of one direction match in the order they are posted.
Written from NCCL's and PyTorch's documentation; it needs two GPUs, and no test here has had them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_c10d: Any = dist  # what follows is not in torch's type stubs


def is_nccl_usable(store: Any, rank: int, device: torch.device) -> bool:
    """Whether both ends are CUDA, have NCCL, and are not the same GPU (which NCCL refuses)."""
    mine = ""
    if device.type == "cuda" and dist.is_nccl_available():
        mine = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    store.set(f"gpu-{rank}", mine or "none")
    theirs = store.get(f"gpu-{1 - rank}").decode()
    return bool(mine) and theirs not in ("none", mine)


class NcclCommunicators:
    """Two communicators: number 0 from the listening end (rank 0) to the other, number 1 back.

    Args:
        translate_error: turns NCCL's RuntimeError into the error to raise.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        device: torch.device,
        limit: timedelta,
        translate_error: Callable[[RuntimeError], Exception],
    ) -> None:
        self._rank, self._device, self._translate_error = rank, device, translate_error
        torch.cuda.set_device(device)
        self._groups = []
        for direction in (0, 1):
            options = _c10d.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._groups.append(
                _c10d.ProcessGroupNCCL(_c10d.PrefixStore(f"direction-{direction}", store), rank, 2, options)
            )
        # The first operation makes the communicator and blocks until both ends are there: in one order, now.
        word = torch.zeros(1, device=device)
        for direction in (0, 1):
            group = self._groups[direction]
            (group.send if direction == rank else group.recv)([word], 1 - rank, 0).wait()
        torch.cuda.synchronize(device)

    def send(self, tensor: torch.Tensor) -> _NcclWork:
        """Queues a send behind what the current stream has computed."""
        return _NcclWork(self, self._groups[self._rank].send([tensor], 1 - self._rank, 0), tensor)

    def recv(self, tensor: torch.Tensor) -> _NcclWork:
        """Queues a receive, behind what the current stream has computed."""
        return _NcclWork(self, self._groups[1 - self._rank].recv([tensor], 1 - self._rank, 0), tensor)

    def close(self) -> None:
        """Aborts what is still in flight: after a graceful close nothing is."""
        for group in self._groups:
            group.abort()

    def wait_for(self, work: Any) -> None:
        """Blocks the host until the transfer is over, so that waiting can be told from computing."""
        try:
            work.wait()
            torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as exc:
            raise self._translate_error(exc) from exc


class _NcclWork:
    __slots__ = ("_buffer", "_communicators", "_work")

    def __init__(self, communicators: NcclCommunicators, work: Any, buffer: torch.Tensor) -> None:
        self._communicators, self._work, self._buffer = communicators, work, buffer

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002 — NCCL's watchdog has the deadline
        self._communicators.wait_for(self._work)
        return True
