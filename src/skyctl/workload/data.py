"""Data sources: batches that are the same for one seed on every node, whole or only some samples of each."""

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
from skyctl.workload.deferred_init import derived_seed

Value = Tensor | tuple[Tensor, ...]
Batch = tuple[Value, Value]


def tensors_of_value(value: Value) -> tuple[Tensor, ...]:
    """The tensors that a value is made of, as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def slice_samples(value: Value, start: int, stop: int) -> Value:
    """A value cut to samples [start, stop) of every tensor."""
    if isinstance(value, tuple):
        return tuple(t[start:stop] for t in value)
    return value[start:stop]


def check_value(value: Any, what: str, who: str) -> Value:
    """A tensor or a tuple of tensors, from a user's function; a list becomes a tuple.

    Args:
        what: what the value is, as in ``inputs``.
        who: the function that gave it, as in ``train.py: data()``.

    Raises:
        WorkloadError: it is anything else.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple | list) and value and all(isinstance(t, Tensor) for t in value):
        return tuple(value)
    inside = f" of {', '.join(type(t).__name__ for t in value)}" if isinstance(value, tuple | list) else ""
    raise WorkloadError(
        f"{who}: {what} must be a tensor or a tuple of tensors, not {type(value).__name__}{inside}"
    )


def check_batch(value: Any, who: str) -> Batch:
    """(inputs, targets) from a user's function ``who``; every tensor has the same number of samples.

    Raises:
        WorkloadError: it is anything else, or dimension 0 differs between its tensors.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
        raise WorkloadError(f"{who} must give (inputs, targets), not a {type(value).__name__}{size}")
    inputs, targets = check_value(value[0], "inputs", who), check_value(value[1], "targets", who)
    counts = {
        t.shape[0] if t.dim() else None for t in (*tensors_of_value(inputs), *tensors_of_value(targets))
    }
    if len(counts) != 1 or None in counts:
        shapes = ", ".join(
            str(list(t.shape)) for t in (*tensors_of_value(inputs), *tensors_of_value(targets))
        )
        raise WorkloadError(
            f"{who}: dimension 0 must be the samples in every tensor; the shapes are {shapes}"
        )
    return inputs, targets


HELD_OUT_SHARE = 0.05
"""The share of a text, at its end, that is held out for validation."""


T = TypeVar("T", bytes, Tensor)


def training_or_held_out(text: T, *, held_out: bool) -> T:
    """The end of a text (bytes, or token ids), which is held out for validation, or the rest, to train on."""
    cut = len(text) - int(len(text) * HELD_OUT_SHARE)
    return text[cut:] if held_out else text[:cut]


class TextData:
    """The batches of the built-in models, drawn from a text."""

    def __init__(self, kind: str, sizes: Mapping[str, int], text: bytes, batch_size: int, seed: int) -> None:
        self.kind, self.sizes, self.text, self.batch_size, self.seed = kind, sizes, text, batch_size, seed

    def batches(self, first_step: int, start: int, stop: int) -> Iterator[Batch]:
        step = first_step
        while True:
            yield builtin.draw_samples(
                self.kind, self.sizes, self.text, self.batch_size, self.seed, step, start, stop
            )
            step += 1


class UserData:
    """The batches of the user's ``data(batch_size, seed)``, epoch after epoch, each with the next seed.

    A batch with fewer samples than ``batch_size`` (the last of an epoch) is left out.

    Args:
        name: what to call the function in errors.
    """

    def __init__(self, function: Callable[..., Any], name: str, batch_size: int, seed: int) -> None:
        self.function, self.name, self.batch_size, self.seed = function, name, batch_size, seed
        self.takes_range = accepts_sample_range(function)

    def batches(self, first_step: int, start: int, stop: int) -> Iterator[Batch]:
        step = 0
        epoch = 0
        want = stop - start if self.takes_range else self.batch_size
        while True:
            for inputs, targets in self._full(self.seed + epoch, start, stop, want):
                step += 1
                if step > first_step:
                    yield (inputs, targets) if self.takes_range else (
                        slice_samples(inputs, start, stop), slice_samples(targets, start, stop)
                    )  # fmt: skip
            epoch += 1

    def once(self) -> Iterator[Batch]:
        """The full batches of one epoch."""
        return self._full(self.seed, 0, self.batch_size, self.batch_size)

    def _full(self, seed: int, start: int, stop: int, want: int) -> Iterator[Batch]:
        full = 0
        for raw in self._epoch(seed, start, stop):
            inputs, targets = check_batch(raw, self.name)
            have = tensors_of_value(inputs)[0].shape[0]
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
        """The raw batches of one epoch; global generators are seeded, so that plain shuffling is the same
        everywhere."""
        state, python_state = torch.default_generator.get_state(), random.getstate()
        torch.default_generator.manual_seed(derived_seed(seed, "data"))
        random.seed(f"skyctl {seed} data")
        try:
            wanted = {"start": start, "stop": stop} if self.takes_range else {}
            iterator = iter(self.function(self.batch_size, seed, **wanted))
            user_state, user_python_state = torch.default_generator.get_state(), random.getstate()
        finally:
            torch.default_generator.set_state(state)
            random.setstate(python_state)
        while True:
            state, python_state = torch.default_generator.get_state(), random.getstate()
            torch.default_generator.set_state(user_state)
            random.setstate(user_python_state)
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                user_state, user_python_state = torch.default_generator.get_state(), random.getstate()
                torch.default_generator.set_state(state)
                random.setstate(python_state)
            yield item


def accepts_sample_range(function: Callable[..., Any]) -> bool:
    """Whether a user's data function also takes ``start`` and ``stop``."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return "start" in parameters and "stop" in parameters


@dataclass(frozen=True)
class TensorExample:
    """One tensor of a batch.

    Attributes:
        shape: without the dimension of samples.
        low, high: the range [low, high] of whole numbers; 0 for others.
    """

    shape: tuple[int, ...]
    dtype: str
    low: int
    high: int

    def make(self, samples: int, generator: torch.Generator | None) -> Tensor:
        """A tensor of random values; without a generator, one on the meta device."""
        size = (samples, *self.shape)
        dtype: torch.dtype = getattr(torch, self.dtype)
        if generator is None:
            return torch.empty(size, dtype=dtype, device="meta")
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(size, generator=generator, dtype=dtype)
        return torch.randint(self.low, self.high + 1, size, generator=generator).to(dtype)


@dataclass(frozen=True)
class BatchExample:
    """What a batch looks like, in JSON values, so that nodes without the data know the shapes."""

    inputs: tuple[TensorExample, ...]
    targets: tuple[TensorExample, ...]
    inputs_tuple: bool
    targets_tuple: bool

    @classmethod
    def of(cls, batch: Batch) -> BatchExample:
        inputs, targets = batch
        return cls(
            tuple(map(_example_of_tensor, tensors_of_value(inputs))),
            tuple(map(_example_of_tensor, tensors_of_value(targets))),
            isinstance(inputs, tuple),
            isinstance(targets, tuple),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BatchExample:
        made = {
            side: tuple(
                TensorExample(tuple(v["shape"]), v["dtype"], v["low"], v["high"]) for v in values[side]
            )
            for side in ("inputs", "targets")
        }
        return cls(
            made["inputs"], made["targets"], bool(values["inputs_tuple"]), bool(values["targets_tuple"])
        )

    def make(self, samples: int, generator: torch.Generator | None) -> Batch:
        """A batch of random values with that many samples; without a generator, on the meta device."""
        inputs = tuple(like.make(samples, generator) for like in self.inputs)
        targets = tuple(like.make(samples, generator) for like in self.targets)
        return (inputs if self.inputs_tuple else inputs[0]), (targets if self.targets_tuple else targets[0])


def _example_of_tensor(tensor: Tensor) -> TensorExample:
    whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.numel() > 0
    low, high = (int(tensor.min()), int(tensor.max())) if whole and tensor.device.type != "meta" else (0, 0)
    return TensorExample(tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."), low, high)


class RandomData:
    """Random batches that look like the example: normal numbers, and whole ones in the example's range."""

    def __init__(self, example: BatchExample, batch_size: int, seed: int) -> None:
        self.example, self.batch_size, self.seed = example, batch_size, seed

    def batches(self, first_step: int, start: int, stop: int) -> Iterator[Batch]:
        step = first_step
        generator = torch.Generator()
        while True:
            generator.manual_seed(derived_seed(self.seed, f"random inputs {step}"))
            inputs, targets = self.example.make(self.batch_size, generator)
            yield slice_samples(inputs, start, stop), slice_samples(targets, start, stop)
            step += 1
