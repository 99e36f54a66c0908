"""A collective that is under way, and the reductions that it may make."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from skyctl.errors import RunError
from skyctl.transport.work import NO_TIMEOUT

Tensor = torch.Tensor
Reduction = Callable[[Tensor, Tensor], Tensor]
_REDUCTIONS: tuple[tuple[Any, Reduction], ...] = (
    (dist.ReduceOp.SUM, Tensor.add_),
    (dist.ReduceOp.AVG, Tensor.add_),  # divided at the end
    (dist.ReduceOp.PRODUCT, Tensor.mul_),
    (dist.ReduceOp.MIN, lambda own, other: torch.minimum(own, other, out=own)),
    (dist.ReduceOp.MAX, lambda own, other: torch.maximum(own, other, out=own)),
    (dist.ReduceOp.BAND, operator.iand),
    (dist.ReduceOp.BOR, operator.ior),
    (dist.ReduceOp.BXOR, operator.ixor),
)


class CollectiveWork:
    """A collective that is under way."""

    def __init__(self, future: Future[None], result: Sequence[Tensor], timeout: timedelta) -> None:
        self._future, self._result, self._timeout = future, list(result), timeout

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Returns True once it is done.

        Args:
            timeout: ``NO_TIMEOUT``: the group's limit for each transfer.

        Raises:
            PeerLostError: a rank is gone.
            RunError: it was not done in time.
        """
        try:
            self._future.result(timeout.total_seconds() or None)
        except TimeoutError as exc:
            raise RunError(f"a collective was not done within {timeout.total_seconds():g} s") from exc
        return True

    def is_completed(self) -> bool:
        """Whether it is done, or has failed."""
        return self._future.done()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """torch's future of the tensors, as communication hooks of DDP return it."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

        def tell(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                future.set_exception(error)  # type: ignore[arg-type] # torch's stub is wrong
            else:
                future.set_result(self._result)

        self._future.add_done_callback(tell)
        return future


def reduction_of(op: Any) -> Reduction:
    """The reduction that torch calls so. Raises RunError where the backend has none."""
    for torch_op, reduce in _REDUCTIONS:
        if op == torch_op:
            return reduce
    raise RunError(
        f"the backend skyctl reduces nothing by {op}", hint="SUM, AVG, PRODUCT, MIN and MAX it does"
    )


def reduce_into(target: Tensor, parts: Sequence[Tensor], op: Any) -> None:
    """Reduces the parts, in their order."""
    reduce = reduction_of(op)
    for part in parts[1:]:
        reduce(parts[0], part)
    if op == dist.ReduceOp.AVG:
        parts[0].div_(len(parts))
    target.copy_(parts[0])
