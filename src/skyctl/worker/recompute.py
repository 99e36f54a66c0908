"""A layer that keeps only its input between forward and backward, and runs again in the backward.

``torch.utils.checkpoint`` does the work (Chen et al. 2016). What it does not care for, this does: a layer
that overwrites its input gets a copy, for the second run needs the input of the first; a layer that changes
its buffers (batch norm's running statistics) finds those of the first run in the second, and keeps the change
of the first run only. Which layers these are is seen at their first call. Random numbers of torch's own
generators (dropout), and of Python's ``random``, are the same in both runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from skyctl.errors import RunError

_Place = tuple[nn.Module, str]


class Recomputed:
    """One layer; call it as the layer."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._buffers: list[_Place] = [
            (module, name) for module in layer.modules() for name in module._buffers
        ]
        self._overwrites = True
        self._known = False

    def __call__(self, value: Any) -> Any:
        """The layer's output."""
        return self._call(self._layer, value)

    def then(self, more: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The layer and what follows it (the loss), as one."""

        def both(value: Any) -> Any:
            # the second run ends with an exception once all is there that the first one kept; a layer
            # passes it on, but what follows may take it for an error
            with set_checkpoint_early_stop(False):
                return self._call(lambda given: more(self._layer(given)), value)

        return both

    def _call(self, run: Callable[[Any], Any], value: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(value)
        before = [(module, name, _copy(module._buffers[name])) for module, name in self._buffers]
        given: list[Tensor] = []
        numbers = random.getstate()
        versions = [tensor._version for tensor in _tensors(value)]

        def forward(value: Any) -> Any:
            if self._overwrites:
                value = tuple(t.clone() for t in value) if isinstance(value, tuple) else value.clone()
                if not self._known:
                    given.extend(_tensors(value))
            return run(value)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _with(before, numbers)

        fresh = not self._known
        out = checkpoint(forward, value, use_reentrant=False, context_fn=contexts)
        if fresh:
            self._overwrites = any(tensor._version for tensor in given)
            self._known = True
            given.clear()
            before[:] = [(m, name, kept) for m, name, kept in before if not _same(kept, m._buffers[name])]
            self._buffers = [(module, name) for module, name, _ in before]
        elif versions != [tensor._version for tensor in _tensors(value)]:
            raise RunError(
                f"layer {type(self._layer).__name__} has changed its input in place, which it did not the "
                "first time: it can't be run again in the backward",
                hint="let it change its input always or never, or plan without recomputation",
            )
        return out


@contextmanager
def _with(buffers: list[tuple[nn.Module, str, Tensor | None]], numbers: Any) -> Iterator[None]:
    """Puts these in the place of the modules' own, and Python's ``random`` where it was, for a while."""
    own_numbers = random.getstate()
    random.setstate(numbers)
    own = [module._buffers[name] for module, name, _ in buffers]
    for module, name, tensor in buffers:
        module._buffers[name] = tensor
    try:
        yield
    finally:
        random.setstate(own_numbers)
        for (module, name, _), tensor in zip(buffers, own, strict=True):
            module._buffers[name] = tensor


def _tensors(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
