"""The loss of a workload that brings none."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the field's name

from skyctl.errors import WorkloadError
from skyctl.workload.data import Value


def cross_entropy(outputs: Value, targets: Value) -> Tensor:
    """The default loss: mean cross-entropy of scores and classes.

    Classes lie in the last dimension (scores [samples, …, classes], targets [samples, …]) or, as torch has
    it, in dimension 1. Targets of the scores' own shape are probabilities.
    """
    if isinstance(outputs, tuple) and len(outputs) == 1:
        outputs = outputs[0]
    if isinstance(targets, tuple) and len(targets) == 1:
        targets = targets[0]
    if isinstance(outputs, tuple) or isinstance(targets, tuple):
        raise WorkloadError(
            "the default loss takes one tensor of scores and one of targets, the model gives a tuple",
            hint="define loss(outputs, targets) in the file",
        )
    if not targets.dtype.is_floating_point and outputs.shape[:-1] == targets.shape:
        return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))
    return F.cross_entropy(outputs, targets)
