"""Data sources: batches that are the same for one seed on every node, whole or only some samples of each."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from skyctl.errors import WorkloadError
from skyctl.workload import builtin
from skyctl.workload.deferred_init import derived_seed
from skyctl.workload.seen_numbers import Range, draw_numbers, seen_ranges
from skyctl.workload.structures import (
    Structure,
    StructureMismatchError,
    Value,
    check_value,
    flatten_as,
    flatten_value,
    map_tensors,
    read_structure,
    tensor_places,
    unflatten_value,
    value_tensors,
)

Batch = tuple[Value, Value]


def slice_samples(value: Value, start: int, stop: int) -> Value:
    """A value cut to samples [start, stop) of every tensor."""
    return map_tensors(lambda tensor: tensor[start:stop], value)


def check_batch(value: Any, who: str) -> Batch:
    """(inputs, targets) from a user's function ``who``; every tensor has the same number of samples.

    Raises:
        WorkloadError: it is anything else, or dimension 0 differs between its tensors (all are named).
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
        raise WorkloadError(
            f"{who} must give (inputs, targets), not a {type(value).__name__}{size}",
            hint='one batch of both: yield inputs, targets; of a dict, as in yield batch, batch["labels"]',
        )
    inputs, targets = check_value(value[0], "inputs", who), check_value(value[1], "targets", who)
    tensors = (*value_tensors(inputs), *value_tensors(targets))
    if not tensors[0].dim() or any(t.shape[:1] != tensors[0].shape[:1] for t in tensors):
        places = [
            place
            for name, side in (("inputs", inputs), ("targets", targets))
            for place in tensor_places(flatten_value(side)[1], name)
        ]
        shapes = ", ".join(f"{p} {list(t.shape)}" for p, t in zip(places, tensors, strict=True))
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


@dataclass
class EpochPosition:
    """The place in the epochs of data() that a batch comes from; epochs and batches are counted from 0.

    Attributes:
        length: batches of an epoch, where what data() gives has a length.
    """

    epoch: int = 0
    index: int = -1
    length: int | None = None


class UserData:
    """The batches of the user's ``data(batch_size, seed)``, epoch after epoch, each with the next seed.

    A batch with fewer samples than ``batch_size`` (the last of an epoch) is left out.

    Args:
        name: what to call the function in errors.
        owner: told to a function that takes it.

    Raises:
        WorkloadError: the function is of one owner's data, and there is no owner here.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, batch_size: int, seed: int, owner: str | None = None
    ) -> None:
        self.function, self.name, self.batch_size, self.seed = function, name, batch_size, seed
        self.takes_range = accepts_sample_range(function)
        self._owner_argument = {"owner": owner} if takes_owner(function) else {}
        if self._owner_argument and owner is None:
            raise WorkloadError(
                f"{name} takes an owner, so it is called on that owner's nodes alone",
                hint="define example(batch_size) to give the shapes; train with --local-steps and --owners",
            )
        self.position = EpochPosition()

    def batches(self, first_step: int, start: int, stop: int) -> Iterator[Batch]:
        step = 0
        position = self.position
        position.epoch = 0
        want = stop - start if self.takes_range else self.batch_size
        while True:
            for index, (inputs, targets) in enumerate(self._full(start, stop, want)):
                step += 1
                position.index = index
                if step > first_step:
                    yield (inputs, targets) if self.takes_range else (
                        slice_samples(inputs, start, stop), slice_samples(targets, start, stop)
                    )  # fmt: skip
            position.epoch += 1

    def once(self) -> Iterator[Batch]:
        """The full batches of one epoch."""
        return self._full(0, self.batch_size, self.batch_size)

    def _full(self, start: int, stop: int, want: int) -> Iterator[Batch]:
        full = 0
        seed = self.seed + self.position.epoch
        for raw in self._epoch(seed, start, stop):
            inputs, targets = check_batch(raw, self.name)
            have = value_tensors(inputs)[0].shape[0]
            if have > want:
                raise WorkloadError(f"{self.name} gave a batch of {have} samples when asked for {want}")
            if have == want:
                full += 1
                yield inputs, targets
        if not full and self.position.epoch:
            raise WorkloadError(
                f"{self.name} gave {self.position.index + 1} batches in epoch {self.position.epoch} and "
                f"none when it was called again for the next one (seed {seed})",
                hint="data() is called once an epoch, and must give a new iterator each time: one that is "
                "made outside of it is used up",
            )
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
            batches = self.function(self.batch_size, seed, **wanted, **self._owner_argument)
            self.position.length = _length_of(batches)
            iterator = iter(batches)
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


def _length_of(value: Any) -> int | None:
    """How many batches it says that it has; None where it does not know."""
    try:
        return len(value)
    except Exception:  # noqa: BLE001 - the user's code may raise anything
        return None


def accepts_sample_range(function: Callable[..., Any]) -> bool:
    """Whether a user's data function also takes ``start`` and ``stop``."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return "start" in parameters and "stop" in parameters


def takes_owner(function: Callable[..., Any]) -> bool:
    """Whether a user's data function is told whose data is asked for."""
    try:
        return "owner" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


@dataclass(frozen=True)
class TensorExample:
    """One tensor of a batch.

    Attributes:
        shape: without the dimension of samples.
        low, high: the range [low, high] of whole numbers; 0 and 1 for others that are all within [0, 1], as
            probabilities and pixels are: some losses take nothing else; 0 for the rest.
        ranges: the parts of [low, high] that whole numbers are drawn from, where that is not all of it.
    """

    shape: tuple[int, ...]
    dtype: str
    low: int
    high: int
    ranges: tuple[Range, ...] = ()

    def make(self, samples: int, generator: torch.Generator | None) -> Tensor:
        """A tensor of random values; without a generator, one on the meta device."""
        size = (samples, *self.shape)
        dtype: torch.dtype = getattr(torch, self.dtype)
        if generator is None:
            return torch.empty(size, dtype=dtype, device="meta")
        if dtype.is_floating_point or dtype.is_complex:
            draw = torch.rand if self.high else torch.randn
            return draw(size, generator=generator, dtype=dtype)
        return draw_numbers(self.ranges or ((self.low, self.high),), size, generator).to(dtype)


@dataclass(frozen=True)
class BatchExample:
    """The form of a batch, in JSON values, so that nodes without the data know the shapes."""

    inputs: tuple[TensorExample, ...]
    targets: tuple[TensorExample, ...]
    inputs_structure: Structure = None
    targets_structure: Structure = None

    @classmethod
    def of(cls, batch: Batch) -> BatchExample:
        """The example that this batch is."""
        (inputs, inputs_structure), (targets, targets_structure) = map(flatten_value, batch)
        return cls(
            tuple(map(_example_of_tensor, inputs)),
            tuple(map(_example_of_tensor, targets)),
            inputs_structure,
            targets_structure,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BatchExample:
        """The example that ``asdict`` described; WorkloadError for another."""
        inputs, targets = (
            tuple(_read_tensor_example(v) for v in values[side]) for side in ("inputs", "targets")
        )
        return cls(
            inputs,
            targets,
            read_structure(values, "inputs_structure", len(inputs)),
            read_structure(values, "targets_structure", len(targets)),
        )

    def make(self, samples: int, generator: torch.Generator | None) -> Batch:
        """A batch of random values with that many samples; without a generator, on the meta device."""
        inputs = [like.make(samples, generator) for like in self.inputs]
        targets = [like.make(samples, generator) for like in self.targets]
        return (
            unflatten_value(inputs, self.inputs_structure),
            unflatten_value(targets, self.targets_structure),
        )

    def conform(self, batch: Batch) -> Batch:
        """A batch that looks like this one, with the keys of its dicts in this one's order.

        Raises:
            StructureMismatchError: it has other keys or parts, or a tensor of another shape or dtype.
        """
        inputs = _conform_side("inputs", batch[0], self.inputs, self.inputs_structure)
        return inputs, _conform_side("targets", batch[1], self.targets, self.targets_structure)


def _conform_side(name: str, value: Value, examples: Sequence[TensorExample], structure: Structure) -> Value:
    tensors = flatten_as(value, structure, name)
    for number, (tensor, example) in enumerate(zip(tensors, examples, strict=True)):
        shape, dtype = tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")
        if (shape, dtype) != (example.shape, example.dtype):
            raise StructureMismatchError(
                tensor_places(structure, name)[number],
                f"of {dtype}{list(shape)} a sample",
                f"of {example.dtype}{list(example.shape)}",
            )
    return unflatten_value(tensors, structure)


def _example_of_tensor(tensor: Tensor) -> TensorExample:
    low, high = 0, 0
    ranges: tuple[Range, ...] = ()
    if tensor.numel() > 0 and tensor.device.type != "meta" and not tensor.dtype.is_complex:
        if not tensor.dtype.is_floating_point:
            ranges = seen_ranges(tensor)
            low, high = ranges[0][0], ranges[-1][1]
        elif tensor.min().item() >= 0 and tensor.max().item() <= 1:
            high = 1
    shape, dtype = tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")
    return TensorExample(shape, dtype, low, high, ranges if len(ranges) > 1 else ())


def _read_tensor_example(values: Mapping[str, Any]) -> TensorExample:
    ranges = tuple((int(low), int(high)) for low, high in values.get("ranges", ()))
    return TensorExample(tuple(values["shape"]), values["dtype"], values["low"], values["high"], ranges)


class RandomData:
    """Random batches that look like the example; ``TensorExample`` says which numbers are drawn."""

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
