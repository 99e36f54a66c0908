"""The losses of workloads that bring none: cross-entropy, and those of ``hf:`` models by their task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the field's name

from skyctl.errors import WorkloadError
from skyctl.workload.structures import Value, value_tensors

IGNORED_TARGET = -100
"""The target of a token that counts in no loss, as in ``transformers``."""


def cross_entropy(outputs: Value, targets: Value) -> Tensor:
    """The default loss: mean cross-entropy of scores and classes, a scalar.

    Classes are in the last dimension (scores [samples, …, classes], targets [samples, …]) or, as torch has
    it, in dimension 1. Targets of the scores' own shape are probabilities.

    Raises:
        WorkloadError: the model or the data gives several tensors.
    """
    given, wanted = value_tensors(outputs), value_tensors(targets)
    if len(given) != 1 or len(wanted) != 1:
        raise WorkloadError(
            "the default loss takes one tensor of scores and one of targets, the model gives "
            f"{len(given)} and the data {len(wanted)}",
            hint="define loss(outputs, targets) in the file",
        )
    scores, classes = given[0], wanted[0]
    if not classes.dtype.is_floating_point and scores.shape[:-1] == classes.shape:
        return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), classes.reshape(-1))
    return F.cross_entropy(scores, classes)


def loss_for_task(task: str) -> Callable[[Any, Any], Tensor]:
    """The loss that the library's model computes from ``labels``, for a task of ``HubSettings``."""
    by_task: dict[str, Callable[[Any, Any], Tensor]] = {
        "causal": _next_token_loss,
        "masked": _masked_token_loss,
        "classes": F.cross_entropy,
    }
    return by_task[task]


def _next_token_loss(scores: Tensor, ids: Tensor) -> Tensor:
    """Mean over all tokens but the last of each sample (``ForCausalLMLoss``)."""
    following = F.pad(ids, (0, 1), value=IGNORED_TARGET)[..., 1:]
    return _masked_token_loss(scores, following)


def _masked_token_loss(scores: Tensor, ids: Tensor) -> Tensor:
    """Mean over the tokens whose target is not ``IGNORED_TARGET`` (``ForMaskedLMLoss``)."""
    flat = scores.float().reshape(-1, scores.shape[-1])
    return F.cross_entropy(flat, ids.reshape(-1), ignore_index=IGNORED_TARGET)


def learnt_token_loss(scores: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """The summed loss of the tokens that are learnt, over the batch's learnt tokens for as many samples.

    Weighed by the share of the batch's samples and added up over its microbatches, this is the mean over the
    learnt tokens of the whole batch (``ForCausalLMLoss`` with ``num_items_in_batch``).
    """
    following = F.pad(targets["labels"], (0, 1), value=IGNORED_TARGET)[..., 1:]
    flat = scores.float().reshape(-1, scores.shape[-1])
    summed = F.cross_entropy(flat, following.reshape(-1), ignore_index=IGNORED_TARGET, reduction="sum")
    return summed / (targets["tokens"][0] * scores.shape[0])
