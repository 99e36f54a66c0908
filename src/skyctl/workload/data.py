"""Batches: alike for the same seed on every node, whole or only some samples of each."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from skyctl.errors import WorkloadError
from skyctl.workload import builtin
from skyctl.workload.deferred import derived_seed

Value = Tensor | tuple[Tensor, ...]
Batch = tuple[Value, Value]


def leaves(value: Value) -> tuple[Tensor, ...]:
    """The tensors of a tensor or a tuple of tensors."""
    return value if isinstance(value, tuple) else (value,)


def cut(value: Value, start: int, stop: int) -> Value:
    """Samples [start, stop) of every tensor."""
    if isinstance(value, tuple):
        return tuple(t[start:stop] for t in value)
    return value[start:stop]


def as_value(value: Any, what: str, who: str) -> Value:
    """A tensor or tuple of tensors as it is, a list as a tuple; anything else is a WorkloadError."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple | list) and value and all(isinstance(t, Tensor) for t in value):
        return tuple(value)
    inside = f" of {', '.join(type(t).__name__ for t in value)}" if isinstance(value, tuple | list) else ""
    raise WorkloadError(
        f"{who}: {what} must be a tensor or a tuple of tensors, not {type(value).__name__}{inside}"
    )


def as_batch(value: Any, who: str) -> Batch:
    """(inputs, targets), every tensor with the same number of samples in dimension 0."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
        raise WorkloadError(f"{who} must give (inputs, targets), not a {type(value).__name__}{size}")
    inputs, targets = as_value(value[0], "inputs", who), as_value(value[1], "targets", who)
    counts = {t.shape[0] if t.dim() else None for t in (*leaves(inputs), *leaves(targets))}
    if len(counts) != 1 or None in counts:
        shapes = ", ".join(str(list(t.shape)) for t in (*leaves(inputs), *leaves(targets)))
        raise WorkloadError(
            f"{who}: dimension 0 must be the samples in every tensor; the shapes are {shapes}"
        )
    return inputs, targets


HELD_OUT = 0.05
"""The share of a text, at its end, that is kept for validation."""


T = TypeVar("T", bytes, Tensor)


def part_of(text: T, *, held_out: bool) -> T:
    """The end of a text (bytes, or token ids), which is validated on, or all that comes before it."""
    cut = len(text) - int(len(text) * HELD_OUT)
    return text[cut:] if held_out else text[:cut]


class TextData:
    """The built-in models' batches out of a text."""

    def __init__(self, kind: str, sizes: Mapping[str, int], text: bytes, batch_size: int, seed: int) -> None:
        self.kind, self.sizes, self.text, self.batch_size, self.seed = kind, sizes, text, batch_size, seed

    def batches(self, step0: int, start: int, stop: int) -> Iterator[Batch]:
        step = step0
        while True:
            yield builtin.samples(
                self.kind, self.sizes, self.text, self.batch_size, self.seed, step, start, stop
            )
            step += 1


class UserData:
    """The user's ``data(batch_size, seed)``, epoch after epoch, the seed one higher each time.

    A batch with fewer samples than ``batch_size`` (the last of an epoch) is left out.
    """

    def __init__(self, function: Callable[..., Any], name: str, batch_size: int, seed: int) -> None:
        self.function, self.name, self.batch_size, self.seed = function, name, batch_size, seed
        self.takes_range = takes_range(function)

    def batches(self, step0: int, start: int, stop: int) -> Iterator[Batch]:
        step = 0
        epoch = 0
        want = stop - start if self.takes_range else self.batch_size
        while True:
            for inputs, targets in self._full(self.seed + epoch, start, stop, want):
                step += 1
                if step > step0:
                    yield (inputs, targets) if self.takes_range else (
                        cut(inputs, start, stop), cut(targets, start, stop)
                    )  # fmt: skip
            epoch += 1

    def once(self) -> Iterator[Batch]:
        """The whole batches of one epoch."""
        return self._full(self.seed, 0, self.batch_size, self.batch_size)

    def _full(self, seed: int, start: int, stop: int, want: int) -> Iterator[Batch]:
        full = 0
        for raw in self._epoch(seed, start, stop):
            inputs, targets = as_batch(raw, self.name)
            have = leaves(inputs)[0].shape[0]
            if have > want:
                raise WorkloadError(f"{self.name} gave a batch of {have} samples when asked for {want}")
            if have == want:
                full += 1
                yield inputs, targets
        if not full:
            raise WorkloadError(
                f"{self.name} with seed {seed} gives no batch of {want} samples",
                hint="a smaller --batch-size, or more data",
            )

    def _epoch(self, seed: int, start: int, stop: int) -> Any:
        """One epoch's iterable; the global generators are seeded, so that plain shuffling is alike
        everywhere."""
        state, python_state = torch.default_generator.get_state(), random.getstate()
        torch.default_generator.manual_seed(derived_seed(seed, "data"))
        random.seed(f"skyctl {seed} data")
        try:
            wanted = {"start": start, "stop": stop} if self.takes_range else {}
            iterator = iter(self.function(self.batch_size, seed, **wanted))
            own, own_python = torch.default_generator.get_state(), random.getstate()
        finally:
            torch.default_generator.set_state(state)
            random.setstate(python_state)
        while True:
            state, python_state = torch.default_generator.get_state(), random.getstate()
            torch.default_generator.set_state(own)
            random.setstate(own_python)
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                own, own_python = torch.default_generator.get_state(), random.getstate()
                torch.default_generator.set_state(state)
                random.setstate(python_state)
            yield item


def takes_range(function: Callable[..., Any]) -> bool:
    """Whether the function also takes ``start`` and ``stop``."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return "start" in parameters and "stop" in parameters


@dataclass(frozen=True)
class Like:
    """One tensor of a batch without its samples: shape, dtype, and the whole numbers' range [low, high]."""

    shape: tuple[int, ...]
    dtype: str
    low: int
    high: int

    def make(self, samples: int, generator: torch.Generator | None) -> Tensor:
        """Random values of that kind; without a generator, zeros on the meta device."""
        size = (samples, *self.shape)
        dtype: torch.dtype = getattr(torch, self.dtype)
        if generator is None:
            return torch.empty(size, dtype=dtype, device="meta")
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(size, generator=generator, dtype=dtype)
        return torch.randint(self.low, self.high + 1, size, generator=generator).to(dtype)


@dataclass(frozen=True)
class Example:
    """What a batch looks like. JSON-able, so that nodes without the data know the shapes."""

    inputs: tuple[Like, ...]
    targets: tuple[Like, ...]
    inputs_tuple: bool
    targets_tuple: bool

    @classmethod
    def of(cls, batch: Batch) -> Example:
        inputs, targets = batch
        return cls(
            tuple(map(_like, leaves(inputs))),
            tuple(map(_like, leaves(targets))),
            isinstance(inputs, tuple),
            isinstance(targets, tuple),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Example:
        made = {
            side: tuple(Like(tuple(v["shape"]), v["dtype"], v["low"], v["high"]) for v in values[side])
            for side in ("inputs", "targets")
        }
        return cls(
            made["inputs"], made["targets"], bool(values["inputs_tuple"]), bool(values["targets_tuple"])
        )

    def make(self, samples: int, generator: torch.Generator | None) -> Batch:
        """A batch of that many samples; without a generator, on the meta device."""
        inputs = tuple(like.make(samples, generator) for like in self.inputs)
        targets = tuple(like.make(samples, generator) for like in self.targets)
        return (inputs if self.inputs_tuple else inputs[0]), (targets if self.targets_tuple else targets[0])


def _like(tensor: Tensor) -> Like:
    whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.numel() > 0
    low, high = (int(tensor.min()), int(tensor.max())) if whole and tensor.device.type != "meta" else (0, 0)
    return Like(tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."), low, high)


class RandomData:
    """Made-up batches that look like the example: normal numbers, and whole ones in the example's range."""

    def __init__(self, example: Example, batch_size: int, seed: int) -> None:
        self.example, self.batch_size, self.seed = example, batch_size, seed

    def batches(self, step0: int, start: int, stop: int) -> Iterator[Batch]:
        step = step0
        generator = torch.Generator()
        while True:
            generator.manual_seed(derived_seed(self.seed, f"random inputs {step}"))
            inputs, targets = self.example.make(self.batch_size, generator)
            yield cut(inputs, start, stop), cut(targets, start, stop)
            step += 1
