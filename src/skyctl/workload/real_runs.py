"""Layers run on real tensors, where fake ones can't answer: what a layer does depends on their values.

Boolean masks, ``if x.isnan().any()``, ``item()``, NumPy and packed sequences are of that kind. Such a layer
is built on this machine's CPU, by itself, and run with random inputs as the probe draws them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from skyctl.device.cgroup import read_limits
from skyctl.device.node_environment import host_memory
from skyctl.errors import WorkloadError
from skyctl.workload.layered_model import LayeredModel

MOST_SAMPLES = 8
"""So many at most are run to learn shapes; those of more follow, because they grow with the samples."""

FEW_SAMPLES = 2
"""From so many on the numbers of samples are run that tell how shapes grow."""

ROOM = 4
"""A layer takes so many times its tensors' bytes: itself, what it is made of, gradients and activations."""

_WITHOUT_VALUES = re.compile(
    "not supported for tensor subclasses|data pointer|out of meta tensor|meta tensors|'Meta' backend"
    "|FakeTensor"
)
"""In errors of what asks a tensor for its memory."""


class NeedsValuesError(WorkloadError):
    """A layer, or the loss behind the last one, can't be run on fake tensors, but maybe on real ones.

    Attributes:
        index: the layer's.
    """

    def __init__(self, index: int, error: WorkloadError) -> None:
        super().__init__(error.message, hint=error.hint)
        self.index = index


class TooLargeError(WorkloadError):
    """A run that is needed here does not fit this machine's free memory."""


def is_for_lack_of_values(error: BaseException) -> bool:
    """Whether a run on fake tensors failed because they have no values, and not for what it does."""
    from torch._subclasses import fake_tensor

    kinds = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )
    cause: BaseException | None = error
    for _ in range(16):  # causes may be a circle
        if cause is None:
            return False
        if isinstance(cause, kinds):
            return True
        if isinstance(cause, RuntimeError | TypeError) and _WITHOUT_VALUES.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def draw_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Values for a tensor between layers, of which only the shape is known: normal ones, or ones."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.ones(shape, dtype=dtype, device=device)


@contextmanager
def drawn_alike() -> Iterator[None]:
    """Inside, torch draws the same random numbers each time; outside, as if nothing had been drawn."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


class RealLayers:
    """The layers of a model on the CPU, one at a time in memory."""

    def __init__(self, model: LayeredModel) -> None:
        self._model = model
        self._last: tuple[int, nn.Module] | None = None

    def layer(self, index: int) -> nn.Module:
        """Builds a layer, unless it is the one asked for last.

        Raises:
            TooLargeError: this machine has no memory for it.
        """
        if self._last is None or self._last[0] != index:
            self._last = None  # its memory is needed
            what = f"{self._model.source_name}: what {self._model.label(index)} does"
            refuse_too_large(self._model.tensors(index), what)
            self._last = index, self._model.build(index, torch.device("cpu"))
        return self._last[1]


def refuse_too_large(tensors: Sequence[Tensor], what: str) -> None:
    """Raises a TooLargeError where what holds these tensors does not fit this machine's free memory.

    Args:
        what: is said to depend on values, as in ``train.py: what layer 3 (Experts) does``.
    """
    need = ROOM * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    have = host_memory(read_limits())["available_bytes"]
    if need <= have:
        return
    raise TooLargeError(
        f"{what} depends on its tensors' values, so it must be run here once, which needs "
        f"{need / 2**30:.3g} GiB; this machine has {have / 2**30:.3g} GiB free",
        hint="let what it does depend on shapes alone (torch.where or a product with the mask in the place "
        "of x[mask]), or plan on a machine with more memory",
    )
