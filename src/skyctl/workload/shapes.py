"""The layers on fake tensors: shapes and types of everything that passes between layers, without memory.

Fake tensors are meta tensors that say they are on a device; so a layer that asks for ``x.device`` or makes a
tensor of its own works, and attention takes the kernel that a CPU takes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.errors import WorkloadError
from skyctl.workload import mixed, usercode
from skyctl.workload.data import Example, Value, leaves
from skyctl.workload.model import Model


@dataclass(frozen=True)
class TensorSpec:
    """One tensor between two layers. ``dtype`` as in ``torch.float32`` without the ``torch.``.

    ``requires_grad``: whether a gradient comes back for it.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        count = 1
        for size in self.shape:
            count *= size
        return count * int(getattr(torch, self.dtype).itemsize)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Boundary:
    """What passes from one layer to the next."""

    tensors: list[TensorSpec]
    is_tuple: bool

    def __str__(self) -> str:
        inside = ", ".join(map(str, self.tensors))
        return f"({inside})" if self.is_tuple else inside


def _boundary_from(values: Mapping[str, Any], samples: int) -> Boundary:
    tensors = []
    for tensor in values["tensors"]:
        shape = tuple(fixed + each * samples for fixed, each in tensor["shape"])
        tensors.append(TensorSpec(shape, tensor["dtype"], tensor["requires_grad"]))
    return Boundary(tensors, values["is_tuple"])


def boundary_of(value: Value) -> Boundary:
    """The shapes of a value."""
    specs = [
        TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad)
        for t in leaves(value)
    ]
    return Boundary(specs, isinstance(value, tuple))


def detached(value: Value) -> Value:
    """The same values, as a stage receives them: no history, a gradient wanted where there was one."""
    if isinstance(value, tuple):
        return tuple(t.detach().requires_grad_(t.requires_grad) for t in value)
    return value.detach().requires_grad_(value.requires_grad)


@contextmanager
def _quiet() -> Iterator[None]:
    """Fake tensors log an operation that fails before they raise its error; the error is enough."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class Shapes:
    """A model's boundaries by number of samples, found by running it once on fake tensors and kept."""

    def __init__(
        self, model: Model, example: Example, portable: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self.model = model
        self.example = example
        self._portable = portable
        self._layers: list[nn.Module] | None = None
        self._known: dict[int, list[Boundary]] = {}
        self._label = f"{model.who}: "

    @cached_property
    def mode(self) -> Any:
        """The fake tensor mode (loaded here: nodes that were given the boundaries do without it)."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        return FakeTensorMode(allow_non_fake_inputs=True)

    def layers(self) -> list[nn.Module]:
        """The layers with fake tensors in place of their own."""
        if self._layers is None:
            self._layers = [self._fake(index) for index in range(len(self.model.layers))]
        return self._layers

    def at(self, samples: int) -> list[Boundary]:
        """Boundary ``i`` lies before layer ``i``; the last one is what the model gives."""
        if samples not in self._known and self._portable is not None:
            self._known[samples] = [_boundary_from(values, samples) for values in self._portable]
        elif samples not in self._known:
            self._run(samples)
        return self._known[samples]

    def portable(self, samples: int) -> list[dict[str, Any]]:
        """Every boundary as plain JSON values that hold for any number of samples: a dimension is [fixed,
        each], meaning ``fixed + each * samples``.

        Raises:
            WorkloadError: a dimension does not grow in proportion to the samples.
        """
        runs = [self.at(samples + more) for more in range(3)]
        found = []
        for index, (one, two, three) in enumerate(zip(*runs, strict=True)):
            tensors = []
            for a, b, c in zip(one.tensors, two.tensors, three.tensors, strict=True):
                steps = [(y - x, z - y) for x, y, z in zip(a.shape, b.shape, c.shape, strict=True)]
                if any(first != second for first, second in steps):
                    raise WorkloadError(
                        f"{self._label}{self.model.label(index - 1)} gives {a} for {samples} samples but "
                        f"{c} for {samples + 2}: its shape does not grow in proportion to the samples"
                    )
                dims = [[x - each * samples, each] for x, (each, _) in zip(a.shape, steps, strict=True)]
                tensors.append({**asdict(a), "shape": dims})
            found.append({"tensors": tensors, "is_tuple": one.is_tuple})
        return found

    def inputs(self, samples: int) -> tuple[Value, Value]:
        """Fake inputs and targets."""
        with self.mode:
            meta_inputs, meta_targets = self.example.make(samples, None)
            inputs = mixed.cast(self._on_cpu(meta_inputs), self.model.dtype)
            return inputs, self._on_cpu(meta_targets)

    def give(self, boundary: Boundary) -> Value:
        """Fake tensors as a layer receives them at that boundary."""
        with self.mode:
            made = tuple(
                torch.empty(s.shape, dtype=getattr(torch, s.dtype), requires_grad=s.requires_grad)
                for s in boundary.tensors
            )
        return made if boundary.is_tuple else made[0]

    def check(self, samples: int, loss: Callable[[Value, Value], Tensor]) -> None:
        """Runs everything once, the loss too.

        Raises:
            WorkloadError: a layer does not take what the one before gives (both named, with the shapes),
                gives no tensors, or the loss does not take the outputs.
        """
        last = self.give(self.at(samples)[-1])
        _, targets = self.inputs(samples)
        try:
            with self.mode, _quiet():
                value = loss(last, targets)
        except WorkloadError as exc:
            raise WorkloadError(f"{exc.message} (outputs {boundary_of(last)})", hint=exc.hint) from exc
        except Exception as exc:
            raise WorkloadError(
                f"{self._label}the loss does not take outputs {boundary_of(last)} with targets "
                f"{boundary_of(targets)}: {usercode.in_words(exc)}",
                hint="define loss(outputs, targets) in the file"
                if "loss" not in self.model.functions
                else None,
            ) from exc
        if not value.requires_grad:
            raise WorkloadError(f"{self._label}the loss depends on no parameter that can be trained")

    def call(self, index: int, value: Value, boundary: Boundary) -> Value:
        """Layer ``index`` on fake tensors, its errors named."""
        try:
            with self.mode, _quiet(), self._strict():
                out: Any = self.layers()[index](value)
        except Exception as exc:
            raise WorkloadError(self._misfit(index, boundary, exc), hint=self._dtype_hint(exc)) from exc
        if isinstance(out, list):
            out = tuple(out)
        parts: Sequence[Any] = out if isinstance(out, tuple) else (out,)
        if not parts or not all(isinstance(t, Tensor) for t in parts):
            kinds = ", ".join(type(t).__name__ for t in parts)
            shown = f"a tuple of {kinds or 'nothing'}" if isinstance(out, tuple) else kinds
            raise WorkloadError(
                f"{self._label}{self.model.label(index)} must give a tensor or a tuple of tensors, "
                f"it gives {shown}"
            )
        return out  # type: ignore[no-any-return]

    def _run(self, samples: int) -> None:
        value, _ = self.inputs(samples)
        found = [boundary_of(value)]
        for index in range(len(self.model.layers)):
            value = detached(self.call(index, value, found[-1]))
            found.append(boundary_of(value))
        self._known[samples] = found

    def _misfit(self, index: int, boundary: Boundary, exc: Exception) -> str:
        given = "the inputs" if index == 0 else f"what {self.model.label(index - 1)} gives"
        place = ""
        if self.model.path is not None:
            line = usercode.where(exc, self.model.path)
            place = f" ({line})" if ", line " in line else ""
        return (
            f"{self._label}{self.model.label(index)} does not take {given}, {boundary}: "
            f"{usercode.in_words(exc)}{place}"
        )

    def _strict(self) -> Any:
        return nullcontext() if self.model.dtype is None else mixed.SameDtype()  # type: ignore[no-untyped-call]

    def _dtype_hint(self, exc: Exception) -> str | None:
        if self.model.dtype is None or not re.search("dtype|scalar type", str(exc)):
            return None
        return (
            "with --dtype bfloat16 a layer gets bfloat16: let it make tensors in its input's dtype "
            "(dtype=x.dtype), or train with --dtype float32"
        )

    def _fake(self, index: int) -> nn.Module:
        low = self.model.lowered(index)
        memo: dict[int, Any] = {}
        with self.mode:
            for tensor in self.model.tensors(index):
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                if self.model.dtype is not None and id(tensor) in low:
                    made = mixed.lower(tensor, made, self.model.dtype, real=False)
                elif isinstance(tensor, nn.Parameter):
                    made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                memo[id(tensor)] = made
        return self.model.copy(index, memo)

    @staticmethod
    def _on_cpu(value: Value) -> Value:
        made = tuple(torch.empty(t.shape, dtype=t.dtype) for t in leaves(value))
        return made if isinstance(value, tuple) else made[0]
