"""Activation recomputation: a layer that keeps only its input, and runs again in the backward.

``torch.utils.checkpoint`` does the work (Chen et al. 2016). This adds what it leaves out: a layer that
overwrites its input gets a copy, for the second run needs the input of the first; a layer that changes its
buffers (batch norm's running statistics) finds those of the first run in the second, and keeps the change of
the first run only. Which layers these are is seen at their first call. Random numbers of torch's own
generators (dropout), and of Python's ``random``, are the same in both runs, on accelerators of any kind:
torch itself leaves MPS's out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from skyctl.device.accelerator import random_state, set_random_state
from skyctl.errors import RunError
from skyctl.workload.structures import copy_containers, map_tensors, value_tensors

_BufferName = tuple[nn.Module, str]
"""The module that has the buffer, and the buffer's name there."""
_SavedBuffer = tuple[nn.Module, str, Tensor | None]
"""A buffer's name, and values to put there."""


class RecomputedLayer:
    """A layer that is run again in the backward; called as the layer itself."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._changing: list[_BufferName] = [
            (module, name) for module in layer.modules() for name in module._buffers
        ]
        self._unchanging: list[_BufferName] = []
        self._overwrites_input = True
        self._called_before = False

    def __call__(self, value: Any) -> Any:
        """The layer's output, from which a backward runs the layer again."""
        return self._call(self._layer, value)

    def followed_by(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The layer and then ``function`` (the loss), recomputed as one."""

        return lambda value: self._call(lambda given: function(self._layer(given)), value)

    def _call(self, run: Callable[[Any], Any], value: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(value)
        before: list[_SavedBuffer] = [
            (module, name, _copy(module._buffers[name])) for module, name in self._changing
        ]
        watched = self._unchanging if self._called_before else self._changing
        snapshots = [_take_snapshot(buffer) for buffer in watched]
        copied_inputs: list[Tensor] = []
        device = next((t.device for t in value_tensors(value) if t.device.type != "cpu"), torch.device("cpu"))
        drawn = _RandomStates(device)
        versions = [tensor._version for tensor in value_tensors(value)]

        def forward(value: Any) -> Any:
            if self._overwrites_input:
                value = map_tensors(lambda tensor: tensor.clone(), value)
                if not self._called_before:
                    copied_inputs.extend(value_tensors(value))
            else:
                value = copy_containers(value)  # the second run needs the same dicts
            return run(value)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _RestoredState(before, drawn)

        first_call = not self._called_before
        # Else the second run ends with an exception once all is there that the first kept. The user's code
        # may take that for an error, and an operation that fills what it keeps (RReLU) has not run by then.
        with set_checkpoint_early_stop(False):
            out = checkpoint(
                forward, value, use_reentrant=False, context_fn=contexts, preserve_rng_state=False
            )
        if first_call:
            self._overwrites_input = any(tensor._version for tensor in copied_inputs)
            copied_inputs.clear()
            self._learn_buffers(before, snapshots)
        else:
            self._check_unchanged(before, snapshots)
            if versions != [tensor._version for tensor in value_tensors(value)]:
                raise self._changed_behaviour("its input in place", "its input")
        return out

    def _learn_buffers(self, before: list[_SavedBuffer], snapshots: list[_BufferSnapshot]) -> None:
        """After the first call: which buffers change; ``before`` is left with those alone."""
        self._called_before = True
        before[:] = [
            saved
            for saved, snapshot in zip(before, snapshots, strict=True)
            if snapshot.must_be_restored(saved[2])
        ]
        self._changing = [(module, name) for module, name, _ in before]
        self._unchanging = [
            snapshot.buffer for snapshot in snapshots if snapshot.buffer not in self._changing
        ]

    def _check_unchanged(self, before: list[_SavedBuffer], snapshots: list[_BufferSnapshot]) -> None:
        """After a later call: adds to ``before`` the buffers that were replaced for the first time.

        Raises:
            RunError: one was changed in place for the first time, so its values before are lost.
        """
        for snapshot in snapshots:
            if snapshot.overwritten:
                raise self._changed_behaviour("a buffer in place", "its buffers")
            if snapshot.must_be_restored(snapshot.tensor):
                before.append((*snapshot.buffer, snapshot.tensor))

    def _changed_behaviour(self, what: str, which: str) -> RunError:
        return RunError(
            f"layer {type(self._layer).__name__} has changed {what}, which it did not the first time: it "
            "can't be run again in the backward",
            hint=f"let it change {which} always or never, or plan without recomputation",
        )


class _RandomStates:
    """The states from which Python's ``random``, and torch on the CPU and on that device, draw next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._python, self._cpu = random.getstate(), torch.default_generator.get_state()
        self._accelerator = None if device.type == "cpu" else random_state(device)

    def restore(self) -> None:
        """They will draw the same again."""
        random.setstate(self._python)
        torch.default_generator.set_state(self._cpu)
        if self._accelerator is not None:
            set_random_state(self.device, self._accelerator)


class _RestoredState(AbstractContextManager[None]):
    """Inside, these buffers replace the modules' own, and random numbers are drawn from those states.

    It may be entered several times: a layer that calls ``autograd.grad`` is run again within its forward.
    """

    def __init__(self, buffers: list[_SavedBuffer], drawn: _RandomStates) -> None:
        self._buffers, self._drawn = buffers, drawn
        self._outside: list[tuple[_RandomStates, list[Tensor | None]]] = []

    def __enter__(self) -> None:
        own = [module._buffers[name] for module, name, _ in self._buffers]
        self._outside.append((_RandomStates(self._drawn.device), own))
        self._drawn.restore()
        for module, name, tensor in self._buffers:
            module._buffers[name] = tensor

    def __exit__(self, *exc: object) -> None:
        drawn, own = self._outside.pop()
        drawn.restore()
        for (module, name, _), tensor in zip(self._buffers, own, strict=True):
            module._buffers[name] = tensor


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


class _BufferSnapshot(NamedTuple):
    """A buffer as it was before a call: its tensor, and how often that had been written to."""

    buffer: _BufferName
    tensor: Tensor | None
    version: int

    @property
    def overwritten(self) -> bool:
        """Whether its values have been written to since, as far as torch counts it (not in a batch norm)."""
        return self.tensor is not None and self.tensor._version != self.version

    def must_be_restored(self, values: Tensor | None) -> bool:
        """Whether it must be put back for the second run. ``values``: what it held before the call."""
        module, name = self.buffer
        now = module._buffers[name]
        return self.overwritten or (now is not values and not _equal(values, now))


def _take_snapshot(buffer: _BufferName) -> _BufferSnapshot:
    module, name = buffer
    tensor = module._buffers[name]
    return _BufferSnapshot(buffer, tensor, 0 if tensor is None else tensor._version)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
