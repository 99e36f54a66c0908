"""A forward as a list of calls: of submodules as a whole, and of torch's functions between them.

Arguments are kept as they were given, however nested, with references in the place of tensors, and with
``SampleNumber`` where a number grows with the samples. ``map_leaves`` is the one walk over such values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor

from skyctl.workload.autocut.call_context import CallContext


@dataclass(frozen=True)
class ValueRef:
    """A tensor that flows: one of the model's inputs, or what a call gave."""

    number: int


@dataclass(frozen=True)
class HeldRef:
    """A parameter, buffer or other tensor that the model holds, by its dotted name."""

    path: str


@dataclass(frozen=True)
class ConstantRef:
    """A tensor that exists outside of the model, such as a global of the user's file."""

    number: int


@dataclass(frozen=True)
class SampleNumber:
    """A number that is ``fixed + each * samples``; ``inverse``: ``each / samples``."""

    fixed: Fraction
    each: Fraction
    whole: bool
    inverse: bool = False

    def at(self, samples: int) -> int | float:
        """The number for so many samples."""
        exact = self.each / samples if self.inverse else self.fixed + self.each * samples
        return int(exact) if self.whole else float(exact)


@dataclass(frozen=True)
class ByMode:
    """An argument that is one thing in ``train()`` and another in ``eval()``."""

    training: Any
    evaluating: Any


class RunDevice:
    """In the place of a device: the one on which the layer runs."""


@dataclass(frozen=True)
class Rebuilt:
    """A dataclass object, as its class and its fields."""

    cls: type
    fields: tuple[tuple[str, Any], ...]


def map_leaves(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """``value`` with ``leaf`` called on all that is no tuple, list, dict, slice or dataclass object.

    Dataclass objects come out as ``Rebuilt``, and these as objects of the class.
    """
    if isinstance(value, tuple):
        items = [map_leaves(item, leaf) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [map_leaves(item, leaf) for item in value]
    if isinstance(value, slice):
        return slice(*(map_leaves(item, leaf) for item in (value.start, value.stop, value.step)))
    if isinstance(value, Rebuilt):
        return value.cls(**{name: map_leaves(item, leaf) for name, item in value.fields})
    if is_data_object(value):
        names = [field.name for field in dataclasses.fields(value)]
        return Rebuilt(type(value), tuple((n, map_leaves(getattr(value, n), leaf)) for n in names))
    if isinstance(value, Mapping):
        return {key: map_leaves(item, leaf) for key, item in value.items()}
    return leaf(value)


def is_data_object(value: Any) -> bool:
    """Whether a value is an object of a dataclass that is not one of this module's own."""
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, *OWN_KINDS))


OWN_KINDS = (ValueRef, HeldRef, ConstantRef, SampleNumber, ByMode, RunDevice, Rebuilt)


def leaves_of(value: Any) -> list[Any]:
    """All leaves of a value, in the order of ``map_leaves``."""
    if is_data_object(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Rebuilt):
        value = [item for _, item in value.fields]
    elif isinstance(value, slice):
        value = [value.start, value.stop, value.step]
    elif isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves_of(item)]
    return [value]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a value, in the order of ``map_leaves``."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class FlowingValue:
    """The known properties of a tensor that flows.

    Attributes:
        shape: at the samples of its trace.
        storage: the same for views of each other.
        producer: the call that gives it; -1 for the model's inputs.
    """

    shape: tuple[int, ...]
    nbytes: int
    storage: int
    requires_grad: bool
    producer: int


@dataclass(frozen=True)
class Call:
    """One call of a forward.

    Attributes:
        function: what is called; None where ``module`` is.
        module: the dotted name of the submodule that is called as a whole.
        args, kwargs: with references in the place of tensors.
        outputs: numbers of the flowing values that it gives, one for each tensor in its result.
        writes: storages of flowing values that it changes in place.
        held_writes: dotted names of the tensors held that it changes in place.
        context: what surrounded it.
        random: whether it draws random numbers.
        flops: of the forward, at the samples of the trace.
        scopes: the modules that were under way, outermost first, as (dotted name, which of its calls).
        line: where it stands, as in ``train.py, line 12``.
    """

    function: Callable[..., Any] | None
    module: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    writes: frozenset[int]
    held_writes: frozenset[str]
    context: CallContext
    random: bool
    flops: int
    scopes: tuple[tuple[str, int], ...]
    line: str

    @property
    def what(self) -> str:
        """The called module or function, in words for errors: ``layer1.0`` or ``torch.cat``."""
        if self.module is not None:
            return self.module
        name = getattr(self.function, "__qualname__", "") or getattr(self.function, "__name__", "")
        return str(name or "a function")

    def refs(self) -> list[Any]:
        """All leaves of its arguments."""
        return leaves_of((self.args, self.kwargs))


@dataclass(frozen=True)
class Trace:
    """One run of a forward.

    Attributes:
        samples: how many samples the inputs had.
        inputs: how many tensors they are: flowing values 0 to ``inputs`` - 1.
        output: what the forward returned, with references.
        constants: the tensors of ``ConstantRef``.
    """

    samples: int
    training: bool
    inputs: int
    calls: tuple[Call, ...]
    values: tuple[FlowingValue, ...]
    output: Any
    constants: tuple[Tensor, ...]
