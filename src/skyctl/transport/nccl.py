"""NCCL between two CUDA devices, beside the pair's Gloo connection: one communicator for each direction.

Two, because one communicator runs its operations one after the other, and activations and gradients must
pass each other. NCCL knows no tags: operations of one direction match in the order they are posted.
Written from NCCL's and PyTorch's documentation; it needs two GPUs, and no test here has had them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from skyctl.transport.pair import Pair

_c10d: Any = dist  # what follows is not in torch's type stubs


def lanes_wanted(store: Any, rank: int, device: torch.device) -> bool:
    """Whether both ends are CUDA, have NCCL, and are not the same GPU (which NCCL refuses)."""
    mine = ""
    if device.type == "cuda" and dist.is_nccl_available():
        mine = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    store.set(f"gpu-{rank}", mine or "none")
    theirs = store.get(f"gpu-{1 - rank}").decode()
    return bool(mine) and theirs not in ("none", mine)


class Lanes:
    """Lane 0 runs from the listening end to the other, lane 1 back."""

    def __init__(self, store: Any, rank: int, device: torch.device, limit: timedelta, pair: Pair) -> None:
        self._rank, self._device, self._pair = rank, device, pair
        torch.cuda.set_device(device)
        self._groups = []
        for lane in (0, 1):
            options = _c10d.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._groups.append(
                _c10d.ProcessGroupNCCL(_c10d.PrefixStore(f"lane-{lane}", store), rank, 2, options)
            )
        # The first operation makes the communicator and blocks until both ends are there: in one order, now.
        word = torch.zeros(1, device=device)
        for lane in (0, 1):
            group = self._groups[lane]
            (group.send if lane == rank else group.recv)([word], 1 - rank, 0).wait()
        torch.cuda.synchronize(device)

    def send(self, tensor: torch.Tensor) -> _NcclWork:
        """Queues a send behind what the current stream has computed."""
        return _NcclWork(self, self._groups[self._rank].send([tensor], 1 - self._rank, 0), tensor)

    def recv(self, tensor: torch.Tensor) -> _NcclWork:
        """Queues a receive."""
        return _NcclWork(self, self._groups[1 - self._rank].recv([tensor], 1 - self._rank, 0), tensor)

    def close(self) -> None:
        """Aborts what is still under way: at an orderly end there is nothing."""
        for group in self._groups:
            group.abort()

    def done(self, work: Any) -> None:
        """Blocks the host until the transfer is over, so that waiting can be told from computing."""
        try:
            work.wait()
            torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as exc:
            raise self._pair.lost(exc, self._pair.timeout_s) from exc


class _NcclWork:
    __slots__ = ("_buffer", "_lanes", "_work")

    def __init__(self, lanes: Lanes, work: Any, buffer: torch.Tensor) -> None:
        self._lanes, self._work, self._buffer = lanes, work, buffer

    def wait(self, timeout_s: float | None = None) -> None:  # noqa: ARG002 — NCCL's own watchdog has the deadline
        self._lanes.done(self._work)
