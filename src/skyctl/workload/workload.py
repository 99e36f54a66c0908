"""A model as layers, its batches, loss and optimizer: what launcher and nodes both load from one
``WorkloadSpec``.

Knows nothing of stages or devices: a stage asks for its own layers, the last one for the loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from skyctl.errors import WorkloadError
from skyctl.workload import builtin, mixed, usercode
from skyctl.workload.corpus import read_corpus
from skyctl.workload.data import (
    Batch,
    Example,
    RandomData,
    TextData,
    UserData,
    Value,
    as_batch,
    leaves,
    part_of,
)
from skyctl.workload.deferred import derived_seed
from skyctl.workload.hf import source as hub
from skyctl.workload.losses import cross_entropy
from skyctl.workload.model import Model, make
from skyctl.workload.shapes import Shapes, TensorSpec
from skyctl.workload.shipping import encoded, ship, shipped, stored_weights
from skyctl.workload.spec import Source, WorkloadSpec, check_options, make_spec, parse_source, source_of

if TYPE_CHECKING:
    from skyctl.workload.hf.model import HubModel
    from skyctl.workload.hf.text import HubData

__all__ = [
    "Batch",
    "TensorSpec",
    "Value",
    "Workload",
    "WorkloadSpec",
    "encoded",
    "load",
    "make_spec",
    "parse_source",
    "ship",
    "shipped",
    "stored_weights",
]

DEFAULT_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Parts:
    """What ``load`` puts together."""

    spec: WorkloadSpec
    source: Source
    model: Model
    example: Example
    shapes: Shapes


class Workload:
    """A loaded workload; ``load`` makes one.

    Attributes:
        names: the layers' names, in order.
        digest: changes with the model's source, not with batch size, seed or learning rate.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.names = list(parts.model.names)
        self.digest = _digest(parts.source, parts.spec)

    @cached_property
    def spec(self) -> WorkloadSpec:
        """The spec with ``example`` and ``boundaries`` filled in: hand this one to the nodes."""
        return replace(
            self._spec,
            example=asdict(self._parts.example),
            boundaries=self._spec.boundaries or self._parts.shapes.portable(self._spec.batch_size),
        )

    @property
    def _spec(self) -> WorkloadSpec:
        return self._parts.spec

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.names)

    def build(self, start: int, stop: int, device: str | torch.device = "cpu") -> list[nn.Module]:
        """Layers [start, stop) on the device; only these ever get memory.

        A layer's weights depend only on the seed and its index. Each call makes new ones.
        """
        if not 0 <= start <= stop <= self.layers:
            raise WorkloadError(f"layers [{start}, {stop}) are not within the model's {self.layers}")
        return [self._parts.model.build(index, torch.device(device)) for index in range(start, stop)]

    def boundary(self, index: int, samples: int) -> list[TensorSpec]:
        """What layer ``index - 1`` gives to layer ``index`` for that many samples; index 0: the inputs."""
        return self._parts.shapes.at(samples)[index].tensors

    def is_tuple(self, index: int) -> bool:
        """Whether that boundary is a tuple (of one or more tensors) and not a bare tensor."""
        return self._parts.shapes.at(self._spec.batch_size)[index].is_tuple

    def batches(self, step0: int = 0, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """(inputs, targets) of step ``step0`` and on, without end; samples [start, stop) of each batch.

        Raises:
            WorkloadError: the user's data() raised, or gave something of another shape than before.
        """
        stop = self._spec.batch_size if stop is None else stop
        if not 0 <= start < stop <= self._spec.batch_size:
            raise WorkloadError(
                f"samples [{start}, {stop}) are not within the batch's {self._spec.batch_size}"
            )
        yield from self._checked(self._data().batches(step0, start, stop), "data()", step0)

    def validation(self) -> Iterator[Batch]:
        """Held-out batches, the same ones at each call; without end, but for a user's validation().

        Raises:
            WorkloadError: there is no held-out data, or the user's validation() is wrong.
        """
        batch_size = self._spec.batch_size
        if self._parts.source.kind != "file" or self._spec.random_inputs:
            yield from self._checked(self._data(validation=True).batches(0, 0, batch_size), "validation()")
            return
        self.check_validation()
        function = self._parts.model.functions["validation"]
        name = f"{self._parts.model.who}: validation()"
        data = UserData(function, name, batch_size, self._spec.seed)
        yield from self._checked(data.once(), "validation()")

    def check_validation(self) -> None:
        """Raises WorkloadError where there is nothing to validate on."""
        if self._spec.random_inputs:
            return
        if self._parts.source.kind != "file":
            self._data()
            self._data(validation=True)
        elif "validation" not in self._parts.model.functions:
            raise WorkloadError(
                f"{self._parts.model.who} defines no validation(), so there is nothing to validate on",
                hint="def validation(batch_size, seed): yield inputs, targets that data() does not give",
            )

    def _checked(self, batches: Iterator[Batch], what: str, step: int = 0) -> Iterator[Batch]:
        """The batches with the user's errors named, their shapes looked at, inputs in the layers' dtype."""
        while True:
            with self._user_errors(what):
                batch = next(batches, None)
            if batch is None:
                return
            if self._spec.path is not None:
                self._check_batch(batch, what, step)
            inputs, targets = batch
            yield mixed.cast(inputs, self._parts.model.dtype), targets
            step += 1

    def loss(self, outputs: Value, targets: Value) -> Tensor:
        """The mean loss over the samples given, a scalar: the user's, or cross-entropy.

        Outputs in bfloat16 are given to it in float32.

        Raises:
            WorkloadError: the user's loss() raised, or gave something else than one number.
        """
        function = self._parts.model.functions.get("loss")
        if self._parts.model.dtype is not None:
            outputs = mixed.widened(outputs)
        if function is None:
            return cross_entropy(outputs, targets)
        with self._user_errors("loss()"):
            value = function(outputs, targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = (
                f"a tensor of shape {list(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise WorkloadError(
                f"{self._parts.model.who}: loss() must give one number in a tensor, not {shape}"
            )
        return value.reshape(())

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The user's optimizer, or AdamW, over those parameters; one that does nothing where there are none.

        ``--learning-rate`` wins over the user's own rate. In mixed precision it works on the masters, and
        the parameters follow (see ``mixed``).
        """
        trained = [p for p in parameters if p.requires_grad]
        made = self._optimizer([mixed.master_of(p) for p in trained])
        mixed.follow(made, trained)
        return made

    def _optimizer(self, wanted: list[nn.Parameter]) -> torch.optim.Optimizer:
        if not wanted:
            return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)
        function = self._parts.model.functions.get("optimizer")
        if function is None:
            rate = self._spec.learning_rate or self._default_rate()
            betas = builtin.BETAS if self._parts.source.sizes else (0.9, 0.999)
            fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in wanted)
            return torch.optim.AdamW(wanted, lr=rate, betas=betas, fused=fused or None)
        with self._user_errors("optimizer()"):
            made = function(wanted)
        if not isinstance(made, torch.optim.Optimizer):
            raise WorkloadError(
                f"{self._parts.model.who}: optimizer() must give a torch optimizer, not {type(made).__name__}"
            )
        if self._spec.learning_rate is not None:
            for group in made.param_groups:
                group["lr"] = self._spec.learning_rate
        return made

    @property
    def notes(self) -> list[str]:
        """What a user should know of how the model was taken."""
        return list(self.model.hub.notes) if self.model.hub is not None else []

    @property
    def model(self) -> Model:
        """The layers without values (for ``costs``)."""
        return self._parts.model

    @property
    def shapes(self) -> Shapes:
        """The layers on fake tensors (for ``costs``)."""
        return self._parts.shapes

    @property
    def example(self) -> Example:
        """What a batch looks like."""
        return self._parts.example

    def _default_rate(self) -> float:
        if self.model.hub is not None:
            return self.model.hub.learning_rate
        sizes = self._parts.source.sizes
        return builtin.learning_rate(sizes) if sizes else DEFAULT_LEARNING_RATE

    def _user_errors(self, doing: str) -> Any:
        return usercode.user_errors(self._parts.model.path or Path(), doing)

    def _data(self, *, validation: bool = False) -> TextData | UserData | RandomData | HubData:
        spec, source = self._spec, self._parts.source
        if spec.random_inputs:
            seed = derived_seed(spec.seed, "validation") if validation else spec.seed
            return RandomData(self._parts.example, spec.batch_size, seed)
        if source.kind == "file":
            return _user_data(self._parts.model, spec)
        name = spec.data_path or "of the standard library"
        if spec.validated or validation:
            name += ", the part held out for validation," if validation else " without what is held out"
        if self.model.hub is not None:
            return self._hub_data(self.model.hub, name, validation=validation)
        text = read_corpus(spec.data_path)
        if spec.validated or validation:
            text = part_of(text, held_out=validation)
        builtin.check_text(source.kind, source.sizes, text, name)
        return TextData(source.kind, source.sizes, text, spec.batch_size, spec.seed)

    def _hub_data(self, made: HubModel, name: str, *, validation: bool) -> HubData:
        from skyctl.workload.hf import text

        spec = self._spec
        tokens = text.decode(text.encode(made.folder, read_corpus(spec.data_path)))
        if spec.validated or validation:
            tokens = replace(tokens, ids=part_of(tokens.ids, held_out=validation))
        return text.HubData(made.settings, tokens, spec.batch_size, spec.seed, name)

    def _check_batch(self, batch: Batch, what: str, step: int) -> None:
        kinds = (self._parts.example.inputs, self._parts.example.targets)
        for side, value, likes in zip(("inputs", "targets"), batch, kinds, strict=True):
            have = [(tuple(t.shape[1:]), str(t.dtype).removeprefix("torch.")) for t in leaves(value)]
            want = [(like.shape, like.dtype) for like in likes]
            if have != want:
                raise WorkloadError(
                    f"{self._parts.model.who}: {what} gives {side} of {_shapes(have)} a sample "
                    f"in step {step}, of {_shapes(want)} in the first batch of data()",
                    hint="every batch must have the same shapes: pad, or cut to one length",
                )


def load(spec: WorkloadSpec) -> Workload:
    """Loads a workload and checks it: every layer is run on fake tensors (shapes without memory), and the
    loss.

    A user's file defines:

    - ``model() -> nn.Sequential | list[nn.Module]``: the layers; each takes and gives one tensor or one tuple
      of tensors. Called under deferred initialisation: make the layers inside it, not while importing.
    - ``data(batch_size, seed) -> iterable of (inputs, targets)``, optional; dimension 0 is the samples. With
      ``start`` and ``stop`` in its signature it is asked for those samples of each batch only.
    - ``validation(batch_size, seed) -> iterable of (inputs, targets)``, optional: what ``--validate-every``
      looks at; read from its start each time.
    - ``example(batch_size) -> (inputs, targets)``, optional: a batch to take shapes from where ``data`` must
      not be called (``--random-inputs`` without data, or data that is only on the nodes).
    - ``loss(outputs, targets)``: mean over the samples; ``optimizer(parameters)``. Optional both.

    Raises:
        WorkloadError: names the layer, the shapes, or the line of the user's file.
    """
    check_options(spec)
    source = source_of(spec)
    if source.path is not None and spec.path is None:
        spec = replace(spec, path=str(source.path))
    count = len(spec.boundaries) - 1 if spec.boundaries is not None else None
    made = make(source, spec.seed, part=spec.weights, count=count)
    model = replace(made, dtype=mixed.compute_dtype(spec.dtype))
    example = _example(model, source, spec)
    shapes = Shapes(model, example, spec.boundaries)
    workload = Workload(Parts(spec, source, model, example, shapes))
    if spec.boundaries is None:
        shapes.check(spec.batch_size, workload.loss)
    return workload


def _example(model: Model, source: Source, spec: WorkloadSpec) -> Example:
    if spec.example is not None:
        return Example.from_dict(spec.example)
    if model.hub is not None:
        from skyctl.workload.hf import text as hub_text

        return hub_text.example(model.hub.settings)
    if source.path is None:
        text = bytes(range(256)) * (2 * source.sizes["context"] // 256 + 2)
        batch = builtin.samples(source.kind, source.sizes, text, 1, 0, 0, 0, 1)
        top = 255 if source.kind == "gpt" else builtin.CLASSES - 1
        found = Example.of(batch)
        return replace(
            found,
            inputs=(replace(found.inputs[0], low=0, high=255),),
            targets=(replace(found.targets[0], low=0, high=top),),
        )
    if "example" in model.functions:
        with usercode.user_errors(source.path, "example()"):
            return Example.of(
                as_batch(model.functions["example"](spec.batch_size), f"{model.who}: example()")
            )
    try:
        with usercode.user_errors(source.path, "data()"):
            return Example.of(next(_user_data(model, spec).batches(0, 0, spec.batch_size)))
    except WorkloadError as exc:
        exc.hint = exc.hint or "where this machine has no data, define example(batch_size) to give the shapes"
        raise


def _user_data(model: Model, spec: WorkloadSpec) -> UserData:
    function: Callable[..., Any] | None = model.functions.get("data")
    if function is None:
        what = "neither data() nor example()" if spec.random_inputs else "no data()"
        raise WorkloadError(
            f"{model.who} defines {what}, so there is nothing to train on",
            hint="def data(batch_size, seed): yield inputs, targets; or, to try a model on random inputs, "
            "def example(batch_size): return inputs, targets and --random-inputs",
        )
    return UserData(function, f"{model.who}: data()", spec.batch_size, spec.seed)


def _digest(source: Source, spec: WorkloadSpec) -> str:
    digest = hashlib.sha256(f"{source.canonical} {spec.dtype}".encode())
    known = hub.digested(source.path) if source.kind == "hf" and source.path is not None else ship(spec)
    for name, content in known.items():
        digest.update(f"\0{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _shapes(kinds: list[tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds)
