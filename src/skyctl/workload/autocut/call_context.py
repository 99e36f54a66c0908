"""The surroundings of a call of a forward: contexts that a layer enters again, and those that it can't.

``no_grad`` and ``autocast`` are written down with each call. An error names anything else that changes torch
from outside of a call (seeds, default dtypes, ``vmap``), with the line, so that nothing is lost.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.autocast_mode import autocast
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True)
class AutocastRequest:
    """An ``autocast`` under way: the arguments that it was made with; ``device``: its type."""

    device: str
    dtype: torch.dtype | None
    enabled: bool
    cache: bool | None


@dataclass(frozen=True)
class CallContext:
    """The contexts around a call.

    Attributes:
        grad: whether gradients are recorded.
        autocasts: the ``autocast`` contexts, outermost first.
    """

    grad: bool = True
    autocasts: tuple[AutocastRequest, ...] = ()

    def entered(self, device: torch.device) -> AbstractContextManager[Any]:
        """The same contexts, on the device on which the layer runs."""
        if not self.autocasts:
            return nullcontext() if self.grad else torch.no_grad()
        return self._all(device)

    @contextmanager
    def _all(self, device: torch.device) -> Iterator[None]:
        with ExitStack() as stack:
            if not self.grad:
                stack.enter_context(torch.no_grad())
            for request in self.autocasts:
                # traced on the CPU, so that ``x.device.type`` was "cpu": there the layer's device is meant
                kind = device.type if request.device == "cpu" else request.device
                stack.enter_context(autocast(kind, request.dtype, request.enabled, request.cache))
            yield


@contextmanager
def shared_autocast_cache() -> Iterator[None]:
    """Inside, weights that autocast converts are converted once, as within one ``autocast`` of the user's."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


class ContextWatch:
    """Follows the contexts of one forward.

    Attributes:
        autocasts: those under way.
    """

    def __init__(self) -> None:
        self.autocasts: list[AutocastRequest] = []
        self._dtype = torch.get_default_dtype()
        self._level = torch._C._functorch.maybe_current_level()
        self.note_generators()

    def context(self) -> CallContext:
        """The contexts around a call that is made now."""
        return CallContext(torch.is_grad_enabled(), tuple(self.autocasts))

    def note_generators(self) -> None:
        """Takes the generators as they are now, after a call that may have drawn from them."""
        self._generators = _generator_states()

    def what_is_lost(self) -> str | None:
        """The part of the surroundings of a call made now that a layer could not do again; None: nothing."""
        if torch.is_inference_mode_enabled():
            return "it runs under inference_mode; no_grad can be followed"
        if torch.get_default_dtype() != self._dtype:
            return "it changes torch's default dtype"
        if torch._C._functorch.maybe_current_level() != self._level:
            return "it runs under torch.vmap or another transform of torch.func"
        for name, state in _generator_states().items():
            if state != self._generators[name]:
                return f"it draws from or seeds {name} between calls, so all layers would draw the same again"
        return None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, every ``autocast`` that is entered is noted with its arguments.

        Its state does not do: where there is no CUDA, torch leaves ``autocast("cuda")`` switched off.
        """
        init, enter, leave = autocast.__init__, autocast.__enter__, autocast.__exit__

        def noting_init(
            self: Any,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            self._skyctl_request = AutocastRequest(device_type, dtype, enabled, cache_enabled)
            init(self, device_type, dtype, enabled, cache_enabled)

        def noting_enter(self: Any) -> Any:
            existing = getattr(self, "_skyctl_request", None)
            request = existing or AutocastRequest(
                self.device, self.fast_dtype, self._enabled, self._cache_enabled
            )
            watch.autocasts.append(request)
            return enter(self)  # type: ignore[no-untyped-call]

        def noting_exit(self: Any, *exc: Any) -> Any:
            watch.autocasts.pop()
            return leave(self, *exc)

        watch = self
        autocast.__init__, autocast.__enter__, autocast.__exit__ = noting_init, noting_enter, noting_exit  # type: ignore[method-assign]
        try:
            yield
        finally:
            autocast.__init__, autocast.__enter__, autocast.__exit__ = init, enter, leave  # type: ignore[method-assign]


def _generator_states() -> dict[str, Any]:
    """The states of the generators that have no owner, by what to call them."""
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        state = bytes(torch.default_generator.get_state().tolist())  # a node may lack NumPy
    states: dict[str, Any] = {"torch's generator": state, "Python's random": random.getstate()}
    if numpy_random is not None:
        name, keys, *rest = numpy_random.get_state()
        states["numpy.random"] = (name, keys.tobytes(), *rest)
    return states
