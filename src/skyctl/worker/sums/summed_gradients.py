"""The gradients that a group sums, as flat tensors: as they are, or as integers with shared exponents.

``FloatGradients`` are the ones that backwards accumulate, in place. ``IntegerGradients`` (``fixed32``) round
the gradient of each microbatch by itself and add up the integers, so it does not matter which rank has which
microbatches, nor in which order anything is added: the sum has the same bits. With exponent e it is off by at
most M · 2^(e - 1) after M microbatches, and then rounded once to the parameter's own kind of number.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from skyctl.errors import RunError, WorkloadError
from skyctl.worker.sums.shared_exponents import NONE, NOT_FINITE, SharedExponents, magnitude_code
from skyctl.workload.mixed_precision import master_of
from skyctl.workload.parameter_names import weight_name

Tensor = torch.Tensor

PIPELINE_HINT = "a pipeline (skyctl plan … --parallel pipeline) trains it as it is"
AGREED_FLAGS = 2
"""Flags, agreed on before a code for each parameter: whether the step is the last, and is made again."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of a number, the whole numbers of that size."""
_PART_NUMEL = 65_536
"""Numbers rounded at a time, so that intermediate results stay in a processor's cache."""


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter that is trained; ``layer``: its first, counted in the stage."""

    layer: int
    master: nn.Parameter


class SummedGradients(ABC):
    """The gradients of a group's parameters, by their place. Codes of a byte say what holds of them.

    Attributes:
        largest_code: no code is larger. 0 is a parameter without gradient. Ranks agree on the maximum.
        is_summable: False where the next pass of a step only finds codes, and nothing is to be summed.
    """

    largest_code = 1

    def __init__(self, parameters: Sequence[TrainedParameter]) -> None:
        self._masters = [parameter.master for parameter in parameters]

    @property
    def is_summable(self) -> bool:
        """Whether there is anything to sum."""
        return True

    def restart(self) -> None:  # noqa: B027 — most formats have nothing to do here
        """A step begins, or begins again."""

    def begin(self, step: int) -> None:  # noqa: B027
        """The step's last backward is next."""

    def end_microbatch(self) -> None:  # noqa: B027
        """A microbatch's backward is over, and is not the last."""

    @abstractmethod
    def take(self, place: int) -> Tensor:
        """A parameter's own numbers, after its last backward: flat; they will hold the sum in the end."""

    @abstractmethod
    def codes(self) -> bytes:
        """Of all parameters, once all are taken."""

    def overflows(self) -> bool:
        """Whether the step must be made again, once all are taken."""
        return False

    def repeat(self, codes: bytes) -> None:  # noqa: ARG002
        """The step is made again; ``codes``: what all ranks have agreed on. RunError: there is no need to."""
        raise RunError("a rank wants a step to be made again, and sums of floats never need that")

    def mark_step(self) -> None:  # noqa: B027
        """The step begins: ``revert`` leads back to what all ranks share now."""

    def revert(self) -> bool:
        """Back to what all ranks shared as the step began, for some may not have heard that it is repeated.

        Returns:
            Whether this rank had; then the step's microbatches are to be made again.
        """
        return False

    def shared_state(self) -> Any:
        """The state that all ranks shared for their sums as the step began, as JSON values; None: nothing."""
        return None

    def take_shared_state(self, state: Any) -> None:
        """Takes over what other ranks share. Raises ValueError where it is none."""
        if state is not None:
            raise ValueError("these sums share nothing")

    def second_pass(self, codes: bytes) -> Sequence[Tensor]:  # noqa: ARG002
        """The flat tensors to sum after those that were taken, in the same order; most formats have none."""
        return ()

    @abstractmethod
    def finish(self, codes: bytes) -> None:
        """All is summed: puts the sums where optimizers look for them."""

    def reset_residuals(self) -> None:  # noqa: B027
        """Drops what a run that resumes here would not have, and that makes a difference to its sums."""


class FloatGradients(SummedGradients):
    """Sums of floats; a gradient that is None counts as zeros unless it is None everywhere."""

    def __init__(self, parameters: Sequence[TrainedParameter]) -> None:
        super().__init__(parameters)
        self._taken: list[tuple[Tensor, bool]] = []

    def take(self, place: int) -> Tensor:
        """The gradient itself where it is contiguous."""
        assert place == len(self._taken)
        master = self._masters[place]
        gradient = master.grad
        if gradient is None:
            flat = torch.zeros(master.numel(), dtype=master.dtype, device=master.device)
        else:
            check_dense(master, gradient)
            flat = gradient.detach().view(-1) if gradient.is_contiguous() else gradient.detach().reshape(-1)
        self._taken.append((flat, gradient is not None))
        return flat

    def begin(self, step: int) -> None:  # noqa: ARG002
        """As of ``SummedGradients``: what was taken before is taken again."""
        self._taken = []

    def codes(self) -> bytes:
        """1 where this rank has a gradient."""
        return bytes(had_gradient for _, had_gradient in self._taken)

    def finish(self, codes: bytes) -> None:
        """Puts the sums into the gradients; one that was summed in place is there already."""
        for place, ((flat, had_gradient), present) in enumerate(zip(self._taken, codes, strict=True)):
            self._put(place, flat, had_gradient, present=bool(present))
        self._taken = []

    def _put(self, place: int, flat: Tensor, had_gradient: bool, *, present: bool) -> None:
        """Puts a sum into the gradient.

        ``had_gradient``: there was one before; ``present``: some rank had one.
        """
        master = self._masters[place]
        gradient = master.grad
        if not had_gradient and present:
            master.grad = flat.view(master.shape)
        elif had_gradient and gradient is not None and not gradient.is_contiguous():
            gradient.copy_(flat.view(gradient.shape))


class DetachedGradients(FloatGradients):
    """Sums of floats that are made while the next backwards already make new gradients.

    ``take`` leaves parameters without a gradient, and ``finish`` gives them the sums.
    """

    def take(self, place: int) -> Tensor:
        """As of ``FloatGradients``; the next backward begins a new gradient."""
        flat = super().take(place)
        self._masters[place].grad = None
        return flat

    def finish(self, codes: bytes) -> None:
        """Sums take the place of whatever gradients there are."""
        for master, (flat, _), present in zip(self._masters, self._taken, codes, strict=True):
            master.grad = flat.view(master.shape) if present else None
        self._taken = []


class KeptGradients(SummedGradients):
    """Gradients of which copies are summed: a rank's own stay, so that a sum can be made again.

    Args:
        own: they are put where optimizers look for them by ``apply``, after ``finish``.
    """

    def __init__(self, own: SummedGradients) -> None:
        super().__init__(())
        self._own = own
        self.largest_code = own.largest_code
        self._sums: list[tuple[Tensor, Tensor]] = []
        self._codes = b""

    @property
    def is_summable(self) -> bool:
        """As of ``SummedGradients``."""
        return self._own.is_summable

    def restart(self) -> None:
        """As of ``SummedGradients``."""
        self._sums = []
        self._own.restart()

    def begin(self, step: int) -> None:
        """As of ``SummedGradients``; the copies of a sum that did not end are dropped."""
        self._sums = []
        self._own.begin(step)

    def end_microbatch(self) -> None:
        """As of ``SummedGradients``."""
        self._own.end_microbatch()

    def take(self, place: int) -> Tensor:
        """A copy of the rank's own numbers."""
        own = self._own.take(place)
        copy = own.clone()
        self._sums.append((own, copy))
        return copy

    def codes(self) -> bytes:
        """As of ``SummedGradients``."""
        return self._own.codes()

    def overflows(self) -> bool:
        """As of ``SummedGradients``."""
        return self._own.overflows()

    def repeat(self, codes: bytes) -> None:
        """As of ``SummedGradients``."""
        self._own.repeat(codes)

    def mark_step(self) -> None:
        """As of ``SummedGradients``."""
        self._own.mark_step()

    def revert(self) -> bool:
        """As of ``SummedGradients``."""
        return self._own.revert()

    def shared_state(self) -> Any:
        """As of ``SummedGradients``."""
        return self._own.shared_state()

    def take_shared_state(self, state: Any) -> None:
        """As of ``SummedGradients``."""
        self._own.take_shared_state(state)

    def finish(self, codes: bytes) -> None:
        """All is summed, and waits for ``apply``."""
        self._codes = codes

    def digest(self) -> str:
        """Of the sum's bytes, 32 hexadecimal digits: not the same where one number is another."""
        digest = hashlib.blake2b(self._codes, digest_size=16)
        for _, summed in self._sums:
            words = summed.view(_WORDS[summed.element_size()])
            digest.update(str(torch.sum(words, dtype=torch.int64).item()).encode())
        return digest.hexdigest()

    def apply(self) -> None:
        """Puts the sums where optimizers look for them."""
        for own, summed in self._sums:
            own.copy_(summed)
        self._sums = []
        self._own.finish(self._codes)


class IntegerGradients(SummedGradients):
    """Sums of integers: four bytes for each number trained, which become the gradient's own in the end.

    Attributes:
        exponents: as all ranks have them.

    Args:
        microbatches: of a step, over all ranks.
    """

    largest_code = NOT_FINITE

    def __init__(self, parameters: Sequence[TrainedParameter], microbatches: int) -> None:
        super().__init__(parameters)
        self.exponents = SharedExponents(len(parameters), microbatches)
        self._marked = self.exponents.exponents
        self._integers: list[Tensor | None] = []
        self._magnitudes: list[Tensor | None] = []
        self._codes = b""
        self.restart()

    @property
    def is_summable(self) -> bool:
        """Whether there are exponents."""
        return self.exponents.exponents is not None

    def restart(self) -> None:
        """Drops what gradients there are."""
        self._integers = [None] * len(self._masters)
        self._magnitudes = [None] * len(self._masters)
        self._codes = b""
        for master in self._masters:
            master.grad = None

    def begin(self, step: int) -> None:  # noqa: ARG002
        """As of ``SummedGradients``: there may be more of them than at the last time."""
        self._codes = b""

    def end_microbatch(self) -> None:
        """Takes every gradient, so that the next backward begins a new one."""
        for place in range(len(self._masters)):
            self._add(place)

    def take(self, place: int) -> Tensor:
        """The integers of all of this rank's microbatches; none where nothing is summed yet."""
        self._add(place)
        if not self.is_summable:
            return torch.empty(0, dtype=torch.int32)
        integers, master = self._integers[place], self._masters[place]
        if integers is None:
            integers = torch.zeros(master.numel(), dtype=torch.int32, device=master.device)
            self._integers[place] = integers
        return integers

    def codes(self) -> bytes:
        """The largest magnitude of each in any of this rank's microbatches (``magnitude_code``)."""
        if not self._codes:
            codes = [NONE if m is None else magnitude_code(m.item()) for m in self._magnitudes]
            self._codes = bytes(codes)
        return self._codes

    def overflows(self) -> bool:
        """Whether a microbatch's gradient did not fit, or there are no exponents yet."""
        return self.exponents.overflows(self.codes())

    def mark_step(self) -> None:
        """As of ``SummedGradients``: exponents are shared."""
        self._marked = self.exponents.exponents

    def revert(self) -> bool:
        """As of ``SummedGradients``."""
        has_widened = self.exponents.exponents != self._marked
        self.exponents.exponents = self._marked
        return has_widened

    def shared_state(self) -> Any:
        """As of ``SummedGradients``: exponents, and what they follow from."""
        return self.exponents.state(self._marked)

    def take_shared_state(self, state: Any) -> None:
        """As of ``SummedGradients``."""
        self.exponents.take(state)
        self._marked = self.exponents.exponents

    def repeat(self, codes: bytes) -> None:
        """Takes exponents that fit."""
        self.exponents.widen(codes)
        self.restart()

    def finish(self, codes: bytes) -> None:
        """Gradients are made of the integers, in their memory; NaN where one was not finite."""
        for place, code in enumerate(codes):
            if code != NONE:
                self._set_gradient(place, is_finite=code != NOT_FINITE)
        self._integers = [None] * len(self._masters)
        self.exponents.follow(codes)

    def _add(self, place: int) -> None:
        """Rounds what a backward has left, and adds it to the integers."""
        master = self._masters[place]
        gradient = master.grad
        if gradient is None:
            return
        check_dense(master, gradient)
        master.grad = None
        flat = gradient.detach().reshape(-1)
        magnitude = torch.stack(torch.aminmax(flat)).abs().amax() if flat.numel() else flat.new_zeros(())
        before = self._magnitudes[place]
        self._magnitudes[place] = magnitude if before is None else torch.maximum(before, magnitude)
        if self.exponents.exponents is None:
            return
        integers = self._integers[place]
        is_first = integers is None
        if integers is None:
            integers = self._integers[place] = torch.empty_like(flat, dtype=torch.int32)
        scale = 2.0 ** -self.exponents.exponents[place]
        wide = torch.promote_types(flat.dtype, torch.float32)
        parts = torch.split(flat, _PART_NUMEL), torch.split(integers, _PART_NUMEL)
        for part, whole in zip(*parts, strict=True):
            rounded = part.to(wide).mul(scale).round_()
            if is_first:
                whole.copy_(rounded)
            else:
                whole.add_(rounded.to(torch.int32))

    def _set_gradient(self, place: int, *, is_finite: bool) -> None:
        master, integers = self._masters[place], self._integers[place]
        assert integers is not None, "finish() after take()"
        assert self.exponents.exponents is not None, "a sum has exponents"
        floats = integers.view(torch.float32)
        scale = 2.0 ** self.exponents.exponents[place]
        for part, out in zip(
            torch.split(integers, _PART_NUMEL), torch.split(floats, _PART_NUMEL), strict=True
        ):
            out.copy_(part.to(torch.float32).mul_(scale))
        if not is_finite:
            floats.fill_(torch.nan)
        master.grad = floats.view(master.shape).to(master.dtype)


def check_dense(master: nn.Parameter, gradient: Tensor) -> None:
    """Raises WorkloadError where a parameter's gradient is sparse."""
    if gradient.layout is not torch.strided:
        raise sparse_error(f"the gradient of {weight_name(master) or 'a parameter'} is sparse")


def check_summable(layers: Sequence[nn.Module]) -> None:
    """Raises WorkloadError where gradients of these layers will be sparse or complex, and can't be summed."""
    for layer in layers:
        kind = f"layer {type(layer).__name__}"
        for name, module in layer.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise sparse_error(f"{kind}{name and f': {name}'} is an embedding with sparse=True")
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad and not parameter.is_floating_point():
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise WorkloadError(
                    f"{kind}: {name} is {dtype}; gradients of several pipelines are summed as real numbers",
                    hint=PIPELINE_HINT,
                )


def find_trained(layers: Sequence[nn.Module]) -> list[TrainedParameter]:
    """The parameters that are trained, each once: in its first layer."""
    seen: set[int] = set()
    parameters = []
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            if id(parameter) not in seen and parameter.requires_grad:
                seen.add(id(parameter))
                parameters.append(TrainedParameter(number, master_of(parameter)))
    return parameters


def sparse_error(what: str) -> WorkloadError:
    """The error that names what is sparse."""
    return WorkloadError(
        f"{what}, and gradients of several pipelines can't be summed where they are sparse",
        hint=f"sparse=False makes it dense; {PIPELINE_HINT}",
    )
