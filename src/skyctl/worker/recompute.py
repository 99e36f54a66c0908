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
from typing import Any, NamedTuple

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
        self._fixed: list[_Place] = []
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
        seen = [_seen(place) for place in (self._fixed if self._known else self._buffers)]
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
            before[:] = [kept for kept, one in zip(before, seen, strict=True) if one.changed(kept[2])]
            self._buffers = [(module, name) for module, name, _ in before]
            self._fixed = [one.place for one in seen if one.place not in self._buffers]
            return out
        for one in seen:
            if one.overwritten:
                raise RunError(
                    f"layer {type(self._layer).__name__} has changed a buffer in place, which it did not the "
                    "first time: it can't be run again in the backward",
                    hint="let it change its buffers always or never, or plan without recomputation",
                )
            if one.changed(one.tensor):
                before.append((*one.place, one.tensor))
        if versions != [tensor._version for tensor in _tensors(value)]:
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


class _Seen(NamedTuple):
    """A buffer before a call."""

    place: _Place
    tensor: Tensor | None
    version: int

    @property
    def overwritten(self) -> bool:
        """Whether its values have been written to since, as far as torch counts it (not in a batch norm)."""
        return self.tensor is not None and self.tensor._version != self.version

    def changed(self, was: Tensor | None) -> bool:
        """Whether it must be put back for the second run. ``was``: its values before the call."""
        module, name = self.place
        now = module._buffers[name]
        return self.overwritten or (now is not was and not _same(was, now))


def _seen(place: _Place) -> _Seen:
    tensor = place[0]._buffers[place[1]]
    return _Seen(place, tensor, 0 if tensor is None else tensor._version)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
