"""Gradients of DistributedDataParallel weighted by each rank's samples, in the place of a mean of means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from skyctl.errors import InputError
from skyctl.torch.rank_shares import rank_and_world_size
from skyctl.torch.step_clock import count_samples

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def weigh(ddp_model: ModuleT, samples: Callable[..., float] | None = None) -> ModuleT:
    """Makes a DDP module's gradients the mean over all samples of the step, however many each rank has.

    DDP takes the mean of the ranks' gradients. With unequal batches that gives the samples of small batches
    more weight. Here each rank's gradient counts by its samples n: Σ n · gradient / Σ n. If each rank's loss
    is the mean over its samples, this is the gradient of one process with the whole batch.

    The loss has to be a **mean** over what is counted. With a sum, don't weigh. A rank that accumulates
    microbatches under ``no_sync`` has to make its gradient the mean over all of them: divide each loss by
    their number if they are equally large, else multiply it by its part of the rank's samples. Layers that
    look at a whole batch, such as BatchNorm, still see only their rank's.

    Samples are counted when the DDP module is called with gradients enabled: the first dimension of the
    first tensor among the arguments. If that is not the batch, or the loss is a mean over something else,
    such as tokens, say so with ``samples``. A rank that counts 0 adds nothing to the gradient.

    Args:
        ddp_model: a ``DistributedDataParallel`` without another communication hook; call it before the first
            backward. In a world of one rank any module will do, and is left as it is.
        samples: called with the arguments of each forward; gives what they count. A tensor is read at once,
            which waits for its device.

    Returns:
        The same module.

    Raises:
        InputError: it is no ``DistributedDataParallel``, or has another communication hook.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        if rank_and_world_size()[1] == 1:
            return ddp_model
        raise InputError(
            f"weigh() got a {type(ddp_model).__name__}; it needs a DistributedDataParallel",
            hint="pass what DistributedDataParallel(model) returns; FSDP and others reduce without its hooks",
        )
    weights = _GradientWeights(ddp_model, samples or _first_dimension)
    try:
        # a lambda, because DDP refuses annotations that are strings
        ddp_model.register_comm_hook(weights, lambda state, bucket: state.reduce(bucket))
    except RuntimeError as error:
        raise InputError(
            f"weigh() needs the module's communication hook, which can't be had: {error}",
            hint="leave out register_comm_hook and DDP's mixed_precision, and call weigh() only once",
        ) from error
    ddp_model.register_forward_pre_hook(weights.count, with_kwargs=True)
    return ddp_model


class _GradientWeights:
    """The samples that one rank counted since its last sum, and the communication hook that weights by them.

    The ranks' samples are summed alongside the first bucket, so that nothing waits for them. Buckets are
    scaled by the previous step's sum before they are reduced, and corrected to this step's afterwards: it
    keeps numbers of a narrow dtype in range, and costs no rounding while the sum stays the same.
    """

    def __init__(self, ddp_model: DistributedDataParallel, samples: Callable[..., float]) -> None:
        self._ddp_model = ddp_model
        self._samples = samples
        self._counted: float | None = None
        self._total = self._reference = torch.ones((), dtype=torch.float64)
        self._total_sum: torch.futures.Future[Any] | None = None

    def count(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Counts one forward's samples; a hook of the module's."""
        if torch.is_grad_enabled():
            samples = float(self._samples(*args, **kwargs))
            self._counted = (self._counted or 0.0) + samples
            count_samples(samples)

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: the weighted sum of a bucket (``torch.distributed.GradBucket``)."""
        buffer, group, samples = bucket.buffer(), self._ddp_model.process_group, self._counted_samples()
        if self._total_sum is None:
            # the mean over no samples at all is not a number, but the next step's has to be one
            self._reference = torch.where(self._total > 0, self._total, 1.0)
            self._total = torch.tensor(samples, dtype=torch.float64, device=buffer.device)
            self._total_sum = dist.all_reduce(self._total, group=group, async_op=True).get_future()
        total, reference, total_sum = self._total, self._reference, self._total_sum
        if samples == 0:
            buffer.zero_()  # the mean over nothing is not a number
        else:
            buffer.mul_(samples / reference)
        reduced = dist.all_reduce(buffer, group=group, async_op=True).get_future()
        if bucket.is_last():
            self._counted, self._total_sum = None, None
        both = torch.futures.collect_all([reduced, total_sum])
        return both.then(lambda done: _checked(done, buffer).mul_(reference / total))

    def _counted_samples(self) -> float:
        """The samples counted since the last sum.

        Within ``Join`` a rank that is out of samples calls no forward, and counts none.
        """
        if self._counted is not None:
            return self._counted
        if self._ddp_model._join_config.enable:
            return 0.0
        raise InputError(
            "weigh() has counted no samples: the backward did not follow a call of the DDP module",
            hint="call the module that weigh() returned, not its .module, with gradients enabled",
        )


def _checked(
    done: torch.futures.Future[list[torch.futures.Future[Any]]], buffer: torch.Tensor
) -> torch.Tensor:
    """The buffer, once all of its collectives have succeeded; raises the first one's error."""
    for future in done.value():
        future.value()
    return buffer


def _first_dimension(*args: Any, **kwargs: Any) -> int:
    """Samples of a forward: the first dimension of the first tensor among its arguments, in order."""
    tensor = _first_tensor((args, kwargs))
    if tensor is None:
        raise InputError(
            "weigh() finds no tensor with a batch dimension among the arguments of the DDP module",
            hint="pass samples=, a function of the same arguments that gives their number of samples",
        )
    return tensor.shape[0]


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value if value.dim() else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((tensor for part in parts if (tensor := _first_tensor(part)) is not None), None)
