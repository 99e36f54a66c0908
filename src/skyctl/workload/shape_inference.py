"""Shape inference: runs the layers on fake tensors, for shapes and dtypes between layers without memory.

Fake tensors are meta tensors that say they are on a device; so a layer that asks for ``x.device`` or makes a
tensor of its own works, and attention takes the kernel that a CPU takes. A layer that asks for a tensor's
values is run on real ones (``real_runs``).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.errors import WorkloadError
from skyctl.workload import mixed_precision, user_code
from skyctl.workload.data import BatchExample
from skyctl.workload.layered_model import LayeredModel
from skyctl.workload.real_runs import (
    FEW_SAMPLES,
    MOST_SAMPLES,
    NeedsValuesError,
    RealLayers,
    draw_tensor,
    drawn_alike,
    is_for_lack_of_values,
)
from skyctl.workload.received_values import attach_inputs, received_value
from skyctl.workload.structures import (
    Structure,
    Value,
    check_value,
    describe_structure,
    flatten_value,
    map_tensors,
    read_structure,
    tensor_places,
    unflatten_value,
)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor between two layers.

    Attributes:
        dtype: its name in torch, as in ``float32``.
        requires_grad: whether a gradient comes back for it.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        count = 1
        for size in self.shape:
            count *= size
        return count * int(getattr(torch, self.dtype).itemsize)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class LayerBoundary:
    """The tensors that pass from one layer to the next, and how they make up the one value that it takes."""

    tensors: list[TensorSpec]
    structure: Structure

    def __str__(self) -> str:
        return describe_structure(self.structure, map(str, self.tensors))


def _parse_boundary(values: Mapping[str, Any], samples: int) -> LayerBoundary:
    tensors = []
    for tensor in values["tensors"]:
        shape = tuple(fixed + each * samples for fixed, each in tensor["shape"])
        tensors.append(TensorSpec(shape, tensor["dtype"], tensor["requires_grad"]))
    return LayerBoundary(tensors, read_structure(values, "structure", len(tensors)))


def boundary_of(value: Value) -> LayerBoundary:
    """The boundary that a value passes: its tensors' shapes and dtypes."""
    tensors, structure = flatten_value(value)
    specs = [
        TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad) for t in tensors
    ]
    return LayerBoundary(specs, structure)


@contextmanager
def _quiet_fake_tensors() -> Iterator[None]:
    """Inside, fake tensors do not log an operation that fails; they raise its error all the same."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class ShapeInference:
    """The boundaries of a model by number of samples, each found by one run on fake tensors.

    Layers that need values are run on real tensors instead, at few samples.

    Args:
        portable: what ``portable_boundaries`` gave elsewhere; nothing is run then.
    """

    def __init__(
        self, model: LayeredModel, example: BatchExample, portable: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self.model = model
        self.example = example
        self._portable = portable
        self._boundaries: dict[int, list[LayerBoundary]] = {}
        self._label = f"{model.source_name}: "
        self._with_values: set[int] = set()
        self._real_layers = RealLayers(model)

    @cached_property
    def fake_mode(self) -> Any:
        """The fake tensor mode; loaded on use, for nodes that were given the boundaries do without it."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        return FakeTensorMode(allow_non_fake_inputs=True)

    @cached_property
    def fake_layers(self) -> list[nn.Module]:
        """The layers with fake tensors in place of their own."""
        return [self._fake_layer(index) for index in range(len(self.model.layers))]

    def boundaries(self, samples: int) -> list[LayerBoundary]:
        """The boundaries for that many samples: ``i`` is before layer ``i``, the last one after the model."""
        if samples not in self._boundaries and self._portable is not None:
            self._boundaries[samples] = [_parse_boundary(values, samples) for values in self._portable]
        elif samples not in self._boundaries and not self._with_values:
            self._run(samples)
        if samples not in self._boundaries and samples <= MOST_SAMPLES:
            self._run(samples)
        elif samples not in self._boundaries:
            portable = self.portable_boundaries(FEW_SAMPLES)
            self._boundaries[samples] = [_parse_boundary(values, samples) for values in portable]
        return self._boundaries[samples]

    def portable_boundaries(self, samples: int) -> list[dict[str, Any]]:
        """Every boundary as JSON values that hold for any number of samples.

        A dimension is [fixed, each], meaning ``fixed + each * samples``.

        Raises:
            WorkloadError: a dimension does not grow in proportion to the samples.
        """
        runs, apart = self._three_runs(samples)
        boundaries = []
        for index, (one, two, three) in enumerate(zip(*runs, strict=True)):
            tensors = []
            if len({tuple(tensor_places(run.structure, "")) for run in (one, two, three)}) != 1:
                raise WorkloadError(
                    f"{self._label}{self.model.label(index - 1)} gives {one} for {samples} samples but "
                    f"{three} for {samples + 2}: its keys and parts must not depend on their number"
                )
            for a, b, c in zip(one.tensors, two.tensors, three.tensors, strict=True):
                steps = [(y - x, z - y) for x, y, z in zip(a.shape, b.shape, c.shape, strict=True)]
                if any(first != second or first % apart for first, second in steps):
                    raise WorkloadError(
                        f"{self._label}{self.model.label(index - 1)} gives {a} for {samples} samples but "
                        f"{c} for {samples + 2 * apart}: its shape does not grow in proportion to the samples"
                    )
                grows = [step // apart for step, _ in steps]
                dims = [[x - each * samples, each] for x, each in zip(a.shape, grows, strict=True)]
                tensors.append({**asdict(a), "shape": dims})
            boundaries.append({"tensors": tensors, "structure": one.structure})
        return boundaries

    def _three_runs(self, samples: int) -> tuple[list[list[LayerBoundary]], int]:
        """The boundaries for ``samples`` and two larger numbers, and how far these are from each other.

        If the numbers next to it are refused (a layer that takes even ones only), its multiples serve.
        """
        try:
            return [self.boundaries(samples + more) for more in range(3)], 1
        except WorkloadError:
            return [self.boundaries(samples * times) for times in (1, 2, 3)], samples

    def needs_values(self, index: int) -> bool:
        """Whether layer ``index``, or the loss behind it, is run on real tensors."""
        return index in self._with_values

    def use_values(self, index: int) -> None:
        """Has layer ``index`` run on real tensors from now on."""
        self._with_values.add(index)

    def layer(self, index: int) -> nn.Module:
        """The layer as it is run here: on fake tensors, or built for this call and those after it."""
        return self._real_layers.layer(index) if index in self._with_values else self.fake_layers[index]

    def mode(self, index: int) -> AbstractContextManager[Any]:
        """To be entered around whatever computes with the tensors of layer ``index``."""
        return drawn_alike() if index in self._with_values else self.fake_mode

    def received(self, index: int, boundary: LayerBoundary, samples: int) -> Value:
        """The input of layer ``index``: fake tensors, or drawn ones (layer 0: as the batch has them)."""
        if index not in self._with_values:
            return self.fake_value(boundary)
        if index == 0:
            return self.batch(0, samples)[0]
        with drawn_alike():
            tensors = [draw_tensor(spec.shape, getattr(torch, spec.dtype)) for spec in boundary.tensors]
        received, _ = attach_inputs(tensors, [spec.requires_grad for spec in boundary.tensors])
        return unflatten_value(received, boundary.structure)

    def batch(self, index: int, samples: int) -> tuple[Value, Value]:
        """(inputs, targets) of fake tensors, or of drawn ones where layer ``index`` needs values."""
        if index not in self._with_values:
            return self.fake_batch(samples)
        inputs, targets = self.example.make(samples, torch.Generator().manual_seed(0))
        return mixed_precision.cast_value(inputs, self.model.dtype), targets

    def fake_batch(self, samples: int) -> tuple[Value, Value]:
        """A batch of fake tensors: (inputs, targets)."""
        with self.fake_mode:
            meta_inputs, meta_targets = self.example.make(samples, None)
            inputs = mixed_precision.cast_value(self._on_cpu(meta_inputs), self.model.dtype)
            return inputs, self._on_cpu(meta_targets)

    def fake_value(self, boundary: LayerBoundary) -> Value:
        """Fake tensors as a layer after that boundary receives them."""
        with self.fake_mode:
            tensors = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in boundary.tensors]
            received, _ = attach_inputs(tensors, [spec.requires_grad for spec in boundary.tensors])
        return unflatten_value(received, boundary.structure)

    def check_model(self, samples: int, loss: Callable[[Value, Value], Tensor]) -> None:
        """Runs every layer and the loss once.

        Raises:
            WorkloadError: a layer rejects the output of the one before (both named, with the shapes) or gives
                no tensors, or the loss rejects the outputs.
        """
        end = len(self.model.layers) - 1
        if self.needs_values(end):
            samples = min(samples, MOST_SAMPLES)
            given = self.received(end, self.boundaries(samples)[end], samples)
            last = self.run_layer(end, given, self.boundaries(samples)[end])
        else:
            last = self.fake_value(self.boundaries(samples)[-1])
        _, targets = self.batch(end, samples)
        try:
            with self.mode(end), _quiet_fake_tensors():
                value = loss(last, targets)
        except Exception as exc:
            if self.needs_values(end) or not is_for_lack_of_values(exc):
                raise self._loss_misfit(last, targets, exc) from exc
            self.use_values(end)
            self.check_model(samples, loss)
            return
        if not value.requires_grad:
            raise WorkloadError(f"{self._label}the loss depends on no parameter that can be trained")

    def _loss_misfit(self, last: Value, targets: Value, exc: Exception) -> WorkloadError:
        if isinstance(exc, WorkloadError):
            return WorkloadError(f"{exc.message} (outputs {boundary_of(last)})", hint=exc.hint)
        return WorkloadError(
            f"{self._label}the loss does not take outputs {boundary_of(last)} with targets "
            f"{boundary_of(targets)}: {user_code.describe_exception(exc)}",
            hint="define loss(outputs, targets) in the file" if "loss" not in self.model.functions else None,
        )

    def run_layer(self, index: int, value: Value, boundary: LayerBoundary) -> Value:
        """Runs layer ``index`` on what ``received`` gave for it.

        Raises:
            NeedsValuesError: it can't be run on fake tensors; ``use_values`` may help.
            WorkloadError: the layer fails, or gives no tensors; names the layer and its input.
        """
        layer = self.layer(index)  # made outside of the fake mode: a copy may hold tensors of its own
        try:
            with self.mode(index), _quiet_fake_tensors(), self._strict():
                out: Any = layer(value)
        except Exception as exc:
            error = WorkloadError(self._misfit(index, boundary, exc), hint=self._misfit_hint(exc))
            if index not in self._with_values and is_for_lack_of_values(exc):
                raise NeedsValuesError(index, error) from exc
            raise error from exc
        return check_value(out, "output", f"{self._label}{self.model.label(index)}")

    def _run(self, samples: int) -> None:
        """Finds the boundaries for that many samples; not where a layer needs values, and they are many."""
        value, _ = self.fake_batch(samples)
        boundaries = [boundary_of(value)]
        for index in range(len(self.model.layers)):
            try:
                if self.needs_values(index):
                    value = self.received(index, boundaries[-1], samples)
                given = self.run_layer(index, value, boundaries[-1])
            except NeedsValuesError:
                self.use_values(index)
                if samples > MOST_SAMPLES:
                    return
                given = self.run_layer(index, self.received(index, boundaries[-1], samples), boundaries[-1])
            boundaries.append(boundary_of(given))
            value = self.fake_value(boundaries[-1]) if self.needs_values(index) else received_value(given)
        self._boundaries[samples] = boundaries

    def _misfit(self, index: int, boundary: LayerBoundary, exc: Exception) -> str:
        given = "the inputs" if index == 0 else f"what {self.model.label(index - 1)} gives"
        place = ""
        if self.model.path is not None:
            line = user_code.locate_error(exc, self.model.path)
            place = f" ({line})" if line is not None else ""
        return (
            f"{self._label}{self.model.label(index)} does not take {given}, {boundary}: "
            f"{user_code.describe_exception(exc)}{place}"
        )

    def _strict(self) -> Any:
        return nullcontext() if self.model.dtype is None else mixed_precision.SameDtypeMode()  # type: ignore[no-untyped-call]

    def _misfit_hint(self, exc: Exception) -> str:
        if self.model.dtype is None or not re.search("dtype|scalar type", str(exc)):
            return (
                "each layer must take what the one before it gives, for any number of samples, each time anew"
            )
        return (
            "with --dtype bfloat16 a layer gets bfloat16: let it make tensors in its input's dtype "
            "(dtype=x.dtype), or train with --dtype float32"
        )

    def _fake_layer(self, index: int) -> nn.Module:
        low = self.model.lowered(index)
        memo: dict[int, Any] = {}
        with self.fake_mode:
            for tensor in self.model.tensors(index):
                stand_in = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                if self.model.dtype is not None and id(tensor) in low:
                    stand_in = mixed_precision.to_low_precision(
                        tensor, stand_in, self.model.dtype, real=False
                    )
                elif isinstance(tensor, nn.Parameter):
                    stand_in = nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
                memo[id(tensor)] = stand_in
        return self.model.copy(index, memo)

    @staticmethod
    def _on_cpu(value: Value) -> Value:
        return map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype), value)
