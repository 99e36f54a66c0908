"""A workload: a model as layers, its batches, loss and optimizer, loaded from one ``WorkloadSpec``.

Launcher and nodes load the same. Knows nothing of stages or devices: a stage asks for its own layers, the
last one for the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyctl.device.torch_import import import_torch, paused_collection

import_torch()

import torch  # noqa: E402 - after that
from torch import Tensor, nn  # noqa: E402

from skyctl.errors import WorkloadError  # noqa: E402
from skyctl.transport.torch_backend import join_alone  # noqa: E402
from skyctl.workload import builtin, mixed_precision, opened_files, optimizers, user_code  # noqa: E402
from skyctl.workload.corpus import read_corpus  # noqa: E402
from skyctl.workload.data import (  # noqa: E402
    Batch,
    BatchExample,
    EpochPosition,
    RandomData,
    TextData,
    UserData,
    accepts_sample_range,
    training_or_held_out,
)
from skyctl.workload.deferred_init import derived_seed  # noqa: E402
from skyctl.workload.example_batch import find_example, make_user_data  # noqa: E402
from skyctl.workload.layered_model import LayeredModel, make_model  # noqa: E402
from skyctl.workload.loss_functions import cross_entropy  # noqa: E402
from skyctl.workload.recipe import Recipe  # noqa: E402
from skyctl.workload.shape_inference import ShapeInference, TensorSpec  # noqa: E402
from skyctl.workload.shared_parameters import SharedParameter, find_shared_parameters  # noqa: E402
from skyctl.workload.shipped_files import digest_data, digest_workload, files_to_ship  # noqa: E402
from skyctl.workload.structures import Structure, StructureMismatchError, Value  # noqa: E402
from skyctl.workload.validation_metrics import read_metrics  # noqa: E402
from skyctl.workload.workload_spec import ModelSource, WorkloadSpec, check_options, resolve_source  # noqa: E402

if TYPE_CHECKING:
    from skyctl.workload.datasets.record_batches import RecordData
    from skyctl.workload.datasets.record_files import RecordFile
    from skyctl.workload.datasets.row_order import BlockReader
    from skyctl.workload.hf.hub_model import HubModel
    from skyctl.workload.hf.token_data import TokenData

DEFAULT_LEARNING_RATE = 1e-3


class Workload:
    """A loaded workload; ``load_workload`` makes one.

    Attributes:
        model: the layers without values.
        example: what a batch looks like.
        shapes: the layers on fake tensors.
        names: the layers' names, in order.
        digest: changes with the model's source, not with batch size, seed or learning rate.
    """

    def __init__(
        self,
        spec: WorkloadSpec,
        source: ModelSource,
        model: LayeredModel,
        example: BatchExample,
        shapes: ShapeInference,
    ) -> None:
        self._spec, self._source = spec, source
        self.model, self.example, self.shapes = model, example, shapes
        self.names = list(model.names)
        self.digest = digest_workload(spec)

    @cached_property
    def spec(self) -> WorkloadSpec:
        """The spec with what was found out here filled in, as the nodes are given it."""
        return replace(
            self._spec,
            example=asdict(self.example),
            boundaries=self._spec.boundaries or self.shapes.portable_boundaries(self._spec.batch_size),
            data_digest=self._spec.data_digest or digest_data(self._spec),
        )

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return len(self.names)

    def build(self, start: int, stop: int, device: str | torch.device = "cpu") -> list[nn.Module]:
        """Builds layers [start, stop) on the device; only these ever get memory.

        Initial weights depend only on the seed and on model(). Each call builds new layers, and
        parameters that several of them share once.

        Raises:
            WorkloadError: the model has no such layers.
        """
        if not 0 <= start <= stop <= self.layers:
            raise WorkloadError(f"layers [{start}, {stop}) are not within the model's {self.layers}")
        shared: dict[int, Tensor] = {}
        return [self.model.build(index, torch.device(device), shared) for index in range(start, stop)]

    @property
    def shared_parameters(self) -> tuple[SharedParameter, ...]:
        """The parameters that several layers use: who shares what with whom."""
        return self.model.shared_parameters

    def weight_names(self, index: int) -> dict[str, str]:
        """A layer's own names of what its ``state_dict`` holds → their names in ``weights.safetensors``."""
        return self.model.weight_names(index)

    def boundary(self, index: int, samples: int) -> list[TensorSpec]:
        """The tensors that enter layer ``index`` for that many samples; ``index`` 0: the inputs."""
        return self.shapes.boundaries(samples)[index].tensors

    def structure(self, index: int) -> Structure:
        """How the tensors that enter layer ``index`` make up the one value that it is called with."""
        return self.shapes.boundaries(self._spec.batch_size)[index].structure

    def batches(
        self,
        first_step: int = 0,
        start: int = 0,
        stop: int | None = None,
        position: EpochPosition | None = None,
    ) -> Iterator[Batch]:
        """Endless (inputs, targets) of each step from ``first_step`` on, cut to samples [start, stop).

        Args:
            position: set to where in the user's data() each batch comes from, before it is given.

        Raises:
            WorkloadError: the user's data() raised, or gave a batch of another shape than the first.
        """
        stop = self._spec.batch_size if stop is None else stop
        if not 0 <= start < stop <= self._spec.batch_size:
            raise WorkloadError(
                f"samples [{start}, {stop}) are not within the batch's {self._spec.batch_size}"
            )
        data = self._data()
        if position is not None and isinstance(data, UserData):
            data.position = position
        yield from self._checked(data.batches(first_step, start, stop), "data()", first_step)

    @property
    def reads_whole_batches(self) -> bool:
        """Whether its data comes in whole batches only, so that some samples are cut from all of them."""
        function = self.model.functions.get("data")
        from_file = self._source.kind == "file" and not self._spec.random_inputs
        return from_file and function is not None and not accepts_sample_range(function)

    def validation(self) -> Iterator[Batch]:
        """Held-out batches, the same ones at each call; without end, except from a user's validation().

        Raises:
            WorkloadError: there is no held-out data, or the user's validation() is wrong.
        """
        batch_size = self._spec.batch_size
        if self._source.kind != "file" or self._spec.random_inputs:
            yield from self._checked(self._data(validation=True).batches(0, 0, batch_size), "validation()")
            return
        self.check_validation()
        function = self.model.functions["validation"]
        name = f"{self.model.source_name}: validation()"
        data = UserData(function, name, batch_size, self._spec.seed, self._spec.owner)
        yield from self._checked(data.once(), "validation()")

    def check_validation(self) -> None:
        """Checks that there is held-out data; WorkloadError where there is none."""
        if self._spec.random_inputs:
            return
        if self._source.kind != "file":
            self._data()
            held_out = self._data(validation=True)
            if self._spec.records is not None:
                next(held_out.batches(0, 0, self._spec.batch_size))
        elif "validation" not in self.model.functions:
            raise WorkloadError(
                f"{self.model.source_name} defines no validation(), so there is nothing to validate on",
                hint="def validation(batch_size, seed): yield inputs, targets that data() does not give",
            )

    def check_recipe(self, recipe: Recipe) -> None:
        """Checks that the workload can be trained and validated as the recipe says.

        Raises:
            WorkloadError: it validates and there is nothing to validate on, or the user's ``lr_scheduler`` is
                wrong or goes against the recipe.
        """
        if recipe.validate_every is not None:
            self.check_validation()
        optimizers.check_lr_scheduler(
            self.model,
            recipe,
            lambda: self.optimizer(p for layer in self.shapes.fake_layers for p in layer.parameters()),
        )

    def _checked(self, batches: Iterator[Batch], what: str, step: int = 0) -> Iterator[Batch]:
        """The batches with inputs in the layers' dtype; the user's errors are named, the shapes checked."""
        while True:
            with self.user_errors(what):
                batch = next(batches, None)
            if batch is None:
                return
            if self._spec.path is not None:
                batch = self._conform(batch, what, step)
            inputs, targets = batch
            yield mixed_precision.cast_value(inputs, self.model.dtype), targets
            step += 1

    def loss(self, outputs: Value, targets: Value) -> Tensor:
        """The mean loss over the samples given, a scalar: the user's, or cross-entropy.

        It is given bfloat16 outputs in float32.

        Raises:
            WorkloadError: the user's loss() raised, or did not give one number.
        """
        function = self.model.functions.get("loss")
        if self.model.dtype is not None:
            outputs = mixed_precision.upcast(outputs)
        if function is None:
            return cross_entropy(outputs, targets)
        with self.user_errors("loss()"):
            value = function(outputs, targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = (
                f"a tensor of shape {list(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise WorkloadError(
                f"{self.model.source_name}: loss() must give one number in a tensor, not {shape}"
            )
        return value.reshape(())

    def metrics(self, outputs: Value, targets: Value) -> dict[str, float]:
        """The user's ``metrics`` of some samples, by name; {} where there is no such function.

        It is given bfloat16 outputs in float32.

        Raises:
            WorkloadError: the user's metrics() raised, or gave something else than numbers by name.
        """
        function = self.model.functions.get("metrics")
        if function is None:
            return {}
        if self.model.dtype is not None:
            outputs = mixed_precision.upcast(outputs)
        with self.user_errors("metrics()"):
            return read_metrics(function(outputs, targets), f"{self.model.source_name}: metrics()")

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The user's optimizer, or AdamW, over those parameters; one that does nothing where there are none.

        The user's is also told their names in the whole model's weights, if they are a built layer's.
        ``--learning-rate`` wins over the user's own rate. In mixed precision the optimizer works on the
        masters, and the parameters are set from them (see ``mixed_precision``).
        """
        trained = [p for p in parameters if p.requires_grad]
        optimizer = self._optimizer([mixed_precision.master_of(p) for p in trained])
        mixed_precision.copy_masters_after_step(optimizer, trained)
        return optimizer

    def _optimizer(self, wanted: list[nn.Parameter]) -> torch.optim.Optimizer:
        if "optimizer" in self.model.functions and wanted:
            return optimizers.make_users_optimizer(self.model, wanted, self._spec.learning_rate)
        rate = self._spec.learning_rate or self._default_rate()
        betas = builtin.BETAS if self._source.sizes else (0.9, 0.999)
        return optimizers.make_default_optimizer(wanted, rate, betas)

    @property
    def notes(self) -> list[str]:
        """Notes for the user: how an ``hf:`` model was cut and initialised, what was left out of a file's."""
        return [*self.model.notes, *(self.model.hub.notes if self.model.hub is not None else ())]

    def _default_rate(self) -> float:
        if self.model.hub is not None:
            stored = self.model.values is not None or self._spec.init_sha256 is not None
            return self.model.hub.learning_rate(stored=stored)
        sizes = self._source.sizes
        return builtin.default_learning_rate(sizes["hidden"]) if sizes else DEFAULT_LEARNING_RATE

    def user_errors(self, doing: str) -> Any:
        """A context in which what the user's file raises is a WorkloadError that names its line."""
        return user_code.user_errors(self.model.path or Path(), doing)

    def _data(self, *, validation: bool = False) -> TextData | UserData | RandomData | TokenData | RecordData:
        spec, source = self._spec, self._source
        seed = spec.seed if spec.owner is None else derived_seed(spec.seed, f"owner {spec.owner}")
        if spec.random_inputs:
            seed = derived_seed(seed, "validation") if validation else seed
            return RandomData(self.example, spec.batch_size, seed)
        if source.kind == "file":
            return make_user_data(self.model, spec)
        name = spec.data_path or "of the standard library"
        if spec.validated or validation:
            name += ", the part held out for validation," if validation else " without what is held out"
        if self.model.hub is not None and spec.records is not None:
            from skyctl.workload.datasets.record_batches import RecordData

            held_out = validation if spec.validated or validation else None
            return RecordData(self.record_reader(held_out), spec.batch_size, seed)
        if self.model.hub is not None:
            return self._hub_data(self.model.hub, name, seed, validation=validation)
        text = read_corpus(spec.data_path)
        if spec.validated or validation:
            text = training_or_held_out(text, held_out=validation)
        builtin.check_text(source.kind, source.sizes, text, name)
        return TextData(source.kind, source.sizes, text, spec.batch_size, seed)

    def record_reader(self, held_out: bool | None = None) -> BlockReader:
        """The reader of the records of ``--data`` as rows for the model.

        Args:
            held_out: those that are held out for validation, or all others; None: all, for none is.

        Raises:
            WorkloadError: a file of them, or the tokenizer, can't be read.
        """
        from skyctl.workload.datasets.record_files import RecordOptions, is_file_list
        from skyctl.workload.datasets.row_order import BlockReader
        from skyctl.workload.datasets.sample_maker import SampleMaker

        made, spec = self.model.hub, self._spec
        assert made is not None
        assert spec.records is not None
        options, settings = RecordOptions.from_dict(spec.records), made.settings
        inputs = options.train_on_inputs
        maker = SampleMaker(made.folder, settings.context, settings.vocabulary, train_on_inputs=inputs)
        # on a node, beside the list of files, which is there as long as the run's session
        listed = Path(spec.data_path or "")
        counts = listed.with_name(f"{listed.name}.rows") if is_file_list(listed) else None
        return BlockReader(self._record_files, options, maker, held_out, counts)

    @cached_property
    def _record_files(self) -> list[RecordFile]:
        """The files of ``--data`` as lines; what was converted for it lasts as long as the workload."""
        from skyctl.workload.datasets.line_conversion import open_records

        assert self._spec.data_path is not None
        return open_records(Path(self._spec.data_path))

    def _hub_data(self, hub_model: HubModel, name: str, seed: int, *, validation: bool) -> TokenData:
        from skyctl.workload.hf import token_data

        spec = self._spec
        tokens = token_data.parse_tokens(token_data.tokenize(hub_model.folder, read_corpus(spec.data_path)))
        if spec.validated or validation:
            tokens = replace(tokens, ids=training_or_held_out(tokens.ids, held_out=validation))
        return token_data.TokenData(hub_model.settings, tokens, spec.batch_size, seed, name)

    def _conform(self, batch: Batch, what: str, step: int) -> Batch:
        try:
            return self.example.conform(batch)
        except StructureMismatchError as exc:
            raise WorkloadError(
                f"{self.model.source_name}: {what} gives {exc.place} {exc.received} in step {step}, "
                f"{exc.wanted} in the first batch of data()",
                hint="every batch must have the same keys, shapes and dtypes: pad, cut or convert in data()",
            ) from exc


def load_workload(spec: WorkloadSpec) -> Workload:
    """Loads a workload and checks it: runs every layer and the loss on fake tensors (shapes without memory).

    A user's file defines:

    - ``model() -> nn.Module | list[nn.Module]``: an ordinary module, which is cut between its blocks, or the
      layers (an ``nn.Sequential`` is a list), each of which maps one value to one value: a tensor, or tuples,
      lists and dicts of tensors. Called under deferred initialisation: make the layers in it, not on import.
    - ``data(batch_size, seed) -> iterable of (inputs, targets)``, optional; such values, too, dimension 0 is
      the samples. With ``start`` and ``stop`` in its signature it is asked for those samples of each only.
    - ``validation(batch_size, seed) -> iterable of (inputs, targets)``, optional: what ``--validate-every``
      takes its batches from; called anew each time.
    - ``owner`` in the signature of these two: in rounds of several owners it says whose data is asked for;
      such functions are called on that owner's nodes alone. ``local_steps(owner, round) -> int``, optional:
      how many of the steps asked for that owner can make in that round, counted from 0.
    - ``example(batch_size) -> (inputs, targets)``, optional: a batch to take shapes from where ``data`` must
      not be called (``--random-inputs`` without data, or data that is only on the nodes).
    - ``loss(outputs, targets)``: mean over the samples; ``metrics(outputs, targets)``: a dict of such means,
      at validations. Optional both.
    - ``optimizer(parameters)`` or ``optimizer(parameters, named)``, and ``lr_scheduler(optimizer)`` or
      ``lr_scheduler(optimizer, steps)``, optional: called by each stage that trains anything.

    With arguments (``train.py,width=512``) ``model`` is called with them, and so are those other functions
    that have parameters of their names.

    All of these may ask ``torch.distributed`` which rank they are in, of how many: 0 of 1 outside a run.

    Raises:
        WorkloadError: names the layer, the shapes, or the line of the user's file.
    """
    join_alone()
    with paused_collection():  # torch's modules for fake tensors are imported a quarter faster
        return _load_workload(spec)


def _load_workload(spec: WorkloadSpec) -> Workload:
    check_options(spec)
    source = resolve_source(spec)
    if source.path is not None and spec.path is None:
        spec = replace(spec, path=str(source.path), arguments=dict(source.arguments) or None)
    count = len(spec.boundaries) - 1 if spec.boundaries is not None else None
    on_launcher = source.kind == "file" and spec.example is None
    noting = opened_files.note_opened_files if on_launcher else nullcontext
    with noting() as opened_by_model:
        own = spec.init_from is None or spec.lora is not None  # of adapters it may give these alone
        model = make_model(source, spec.seed, part=spec.weights, count=count, own_weights=own)
    model = replace(model, dtype=mixed_precision.compute_dtype(spec.dtype))
    with noting() as opened_by_data:
        example = find_example(model, source, spec)
        if model.ordinary:
            # late: lists of layers need no fake tensors
            from skyctl.workload.autocut.module_cutter import cut_model

            model = cut_model(model, example, count)
        if spec.init_from is not None and count is None:
            with opened_files.note_opened_files():  # of our own reading nothing is told to the context around
                model = model.starting_from(Path(spec.init_from))
        find_shared_parameters(model.layers, model.source_name)  # refuses what can't be shared
        shapes = ShapeInference(model, example, spec.boundaries)
        workload = Workload(spec, source, model, example, shapes)
        if on_launcher and spec.validated and "example" not in model.functions:
            with suppress(WorkloadError):  # it may be only the nodes that have held-out data
                next(workload.validation(), None)
    if source.path is not None and opened_by_model is not None and opened_by_data is not None:
        opened = opened_by_model if spec.random_inputs else opened_by_model | opened_by_data
        opened_files.refuse_unshipped(source.path, opened, files_to_ship(spec))
    if spec.boundaries is None:
        shapes.check_model(spec.batch_size, workload.loss)
    return workload
