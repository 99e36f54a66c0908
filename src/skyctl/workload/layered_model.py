"""A model as named layers: built in, from the user's file or from ``hf:``, with deferred initialisation.

The user's file defines ``model()`` and optionally the ``OPTIONAL_FUNCTIONS``; see ``load_workload``. Knows
nothing of shapes, batches or costs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, update_wrapper
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from skyctl.errors import WorkloadError
from skyctl.workload import builtin, mixed_precision, user_code
from skyctl.workload.deferred_init import (
    OperationTape,
    check_materializable,
    deferred_initialization,
    is_deferred,
    tensors_of,
)
from skyctl.workload.hooks import carry_hooks, module_hooks, refuse_accumulate_hooks
from skyctl.workload.parameter_names import name_parameters
from skyctl.workload.plain_modules import (
    leave_out_caches,
    leave_out_synced_norms,
    refuse_scripted,
    uncompiled,
)
from skyctl.workload.script_functions import bind_functions, locate_function
from skyctl.workload.shared_parameters import SharedParameter, find_shared_parameters
from skyctl.workload.shipped_weights import ShippedWeights
from skyctl.workload.stored_weights import LayerValues, StoredWeights, WeightNaming, match_weights
from skyctl.workload.workload_spec import ModelSource

if TYPE_CHECKING:
    from skyctl.workload.hf.hub_model import HubModel

OPTIONAL_FUNCTIONS = (
    *("data", "validation", "example", "loss", "metrics", "optimizer", "lr_scheduler"),
    "local_steps",
)
_NEWER_FUNCTIONS = ("metrics", "lr_scheduler", "local_steps")
"""A module of that name, as after ``from torch.optim import lr_scheduler``, is not meant as the function."""


@dataclass(frozen=True)
class LayeredModel:
    """A model's layers without values, and all it takes to build them.

    Attributes:
        source_name: what to call the model in errors, as in ``train.py``.
        names: the layers' names, in order.
        tape: makes the layers' initial values.
        functions: the user's functions by name, of ``OPTIONAL_FUNCTIONS``.
        path: the user's file.
        dtype: what the layers compute in, where that is not their own dtype (see ``mixed_precision``).
        values: stored values of the layers; None where all start at random.
        stored: on the launcher, the files they come from, of which nodes are sent their layers; else None.
        hub: what else is known of an ``hf:`` model.
        trains_adapters: frozen weights are kept neither in checkpoints nor in what a run ends with: the seed
            and the stored values give them again.
        ordinary: model() gave a module with a forward of its own: weights keep the names they have in it.
        make: of a user's file, calls its model(): what it gives, in ``train()``.
        notes: for the user, on what was left out of a file's model.
    """

    source_name: str
    names: list[str]
    layers: list[nn.Module]
    tape: OperationTape
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    path: Path | None = None
    dtype: torch.dtype | None = None
    values: LayerValues | None = None
    stored: StoredWeights | None = None
    hub: HubModel | None = None
    trains_adapters: bool = False
    ordinary: bool = False
    make: Callable[[], Any] | None = None
    notes: list[str] = field(default_factory=list)

    def label(self, index: int) -> str:
        """``layer 3 (Linear)``, or with the layer's own name where it has one: what errors call it."""
        kind, name = type(self.layers[index]).__name__, self.names[index]
        own = name != f"{index}.{kind}"
        if self.path is None or self.ordinary:
            return f"layer {index} ({name})"
        return f"layer {index} ({name}, {kind})" if own else f"layer {index} ({kind})"

    def place_of(self, name: str) -> str:
        """The line at which the user's function of that name begins, or model(): ``train.py, line 12``."""
        function = self.functions.get(name) or self.make
        if function is None or self.path is None:
            return self.source_name
        return locate_function(function, self.path)

    def tensors(self, index: int) -> list[Tensor]:
        """Every tensor that one layer holds; deferred ones have no values."""
        return tensors_of(self.layers[index])

    def weight_names(self, index: int) -> dict[str, str]:
        """The names in one layer's ``state_dict`` → names in the file of the whole model's weights."""
        prefix = "" if self.ordinary else f"{index}."
        return {name: prefix + name for name in self.layers[index].state_dict(keep_vars=True)}

    @cached_property
    def shared_parameters(self) -> tuple[SharedParameter, ...]:
        """The parameters that several layers use.

        Raises:
            WorkloadError: layers share memory in a way that can't be trained.
        """
        return find_shared_parameters(self.layers, self.source_name)

    @cached_property
    def _shared_ids(self) -> set[int]:
        """The ids of the parameters that several layers use."""
        firsts = [shared.uses[0] for shared in self.shared_parameters]
        return {id(self.layers[index].get_parameter(name)) for index, name in firsts}

    def build(self, index: int, device: torch.device, shared: dict[int, Tensor] | None = None) -> nn.Module:
        """Builds one layer on a device, with initial values that depend only on the seed and on model().

        Args:
            shared: by the id of the model's parameter, those that layers built before have; this layer takes
                them, and adds its own. None: it is built alone.
        """
        shared = {} if shared is None else shared
        held = self.tensors(index)
        memo: dict[int, Any] = {id(t): shared[id(t)] for t in held if id(t) in shared}
        stored = self._stored(index) if device.type != "meta" else {}
        low = self.lowered(index)
        wanted = [t for t in held if is_deferred(t) and id(t) not in memo and id(t) not in stored]
        known = [(t, stored[id(t)]) for t in held if id(t) in stored]
        materialized = wanted if device.type == "meta" else self.tape.materialize(wanted, known)
        for tensor, values in zip(wanted, materialized, strict=True):
            memo[id(tensor)] = self._converted(tensor, values.detach().to(device), low)
        for tensor in held:
            if id(tensor) in memo:
                continue
            if id(tensor) in stored:
                memo[id(tensor)] = self._loaded(tensor, stored[id(tensor)]().to(device), low)
            elif not is_deferred(tensor):
                memo[id(tensor)] = self._converted(tensor, tensor.detach().to(device, copy=True), low)
        shared.update({key: memo[key] for key in self._shared_ids if key in memo})
        return self.copy(index, memo)

    def lowered(self, index: int) -> set[int]:
        """The ids of the tensors of one layer that mixed precision converts to ``dtype``.

        Of shared parameters those that no layer keeps as they are.
        """
        if self.dtype is None:
            return set()
        low = mixed_precision.low_precision_ids(self.layers[index])
        for shared in self.shared_parameters:
            key = id(self.layers[shared.layers[0]].get_parameter(shared.uses[0][1]))
            if key in low and any(
                key not in mixed_precision.low_precision_ids(self.layers[layer]) for layer in shared.layers
            ):
                low.discard(key)
        return low

    def _loaded(self, old: Tensor, values: Tensor, low: set[int]) -> Tensor:
        """Stored values in place of a tensor; frozen ones in the dtype they are wanted in stay as read."""
        if values.dtype is self.dtype and id(old) in low and not old.requires_grad:
            return _like(old, values)
        return self._converted(old, values.to(old.dtype), low)

    def _converted(self, old: Tensor, values: Tensor, low: set[int]) -> Tensor:
        if self.dtype is not None and id(old) in low:
            return mixed_precision.to_low_precision(old, values, self.dtype)
        return _like(old, values)

    def _stored(self, index: int) -> dict[int, Callable[[], Tensor]]:
        """By the tensor's id, what reads its values from a file of stored weights."""
        if self.values is None:
            return {}
        held, values = self.layers[index].state_dict(keep_vars=True), self.values(index)
        return {id(held[name]): partial(values.__getitem__, name) for name in values}

    def starting_from(self, path: Path) -> LayeredModel:
        """The same model with the values of ``--init-from``: a file, or a folder as of ``save_pretrained``.

        With adapters they are those of the adapters, or of the model without them; the others stay.

        Raises:
            WorkloadError: the weights are not just the model's; names what is missing, left over or other.
        """
        layers = [
            {name: t for name, t in layer.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
            for layer in self.layers
        ]
        if self.hub is not None and self.hub.adapters is not None:
            stored = self.hub.match_weights(path, layers, self.source_name).sharing(self.shared_parameters)
            stored = stored if self.stored is None else stored.over(self.stored)
            return replace(self, values=stored.layer, stored=stored)
        namings = [WeightNaming([self.weight_names(index) for index in range(len(layers))])]
        if self.hub is not None:
            namings.append(self.hub.naming)
        stored = match_weights(path, namings, layers, self.source_name).sharing(self.shared_parameters)
        return replace(self, values=stored.layer, stored=stored)

    def copy(self, index: int, memo: dict[int, Any]) -> nn.Module:
        """A deep copy of one layer, with the tensors of ``memo`` in place of its own (by id)."""
        try:
            layer = copy.deepcopy(self.layers[index], memo)
        except Exception as exc:
            reason = user_code.describe_exception(exc)
            raise WorkloadError(
                f"{self.source_name}: {self.label(index)} can't be copied: {reason}",
                hint="keep locks, files and generators out of the layers",
            ) from exc
        carry_hooks(self.layers[index], {id(t): t for t in self.tensors(index)}, layer, memo, self.path)
        name_parameters(layer, self.weight_names(index) | self._names_of_first_layers(index))
        return layer

    def _names_of_first_layers(self, index: int) -> dict[str, str]:
        """A layer's own names of shared parameters → the first layers' names in the file of weights."""
        names: dict[str, str] = {}
        for shared in self.shared_parameters:
            first, name = shared.uses[0]
            names |= {own: self.weight_names(first)[name] for layer, own in shared.uses if layer == index}
        return names


def _like(old: Tensor, new: Tensor) -> Tensor:
    """``new``, as a parameter where ``old`` is one."""
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new


def make_model(
    source: ModelSource,
    seed: int,
    *,
    part: str | None = None,
    count: int | None = None,
    own_weights: bool = True,
) -> LayeredModel:
    """Makes the model of a source, without values but for stored ones.

    Args:
        part: on a node, the file with its layers' stored values; None on the launcher, and where there are
            none.
        count: on a node, the number of layers that the launcher found; None on the launcher.
        own_weights: whether those in the folder of ``hf:`` are wanted, where it has any.

    Raises:
        WorkloadError: the file is missing or raises, or its model() gives no usable layers.
    """
    model = _make_model(source, seed, count, own_weights=own_weights and part is None)
    return model if part is None else replace(model, values=ShippedWeights(Path(part)).layer)


def _make_model(source: ModelSource, seed: int, count: int | None, *, own_weights: bool) -> LayeredModel:
    if source.kind == "hf":
        return _make_from_hub(source, seed, count, own_weights=own_weights)
    if source.kind != "file":
        with deferred_initialization(seed) as tape:
            pairs = builtin.build_layers(source.kind, source.sizes)
        return LayeredModel(source.canonical, [n for n, _ in pairs], [m for _, m in pairs], tape)
    assert source.path is not None
    who = source.path.name
    notes: list[str] = []
    with uncompiled(who, notes):
        module, scope = user_code.import_file(source.path)
    functions = {
        name: getattr(module, name)
        for name in ("model", *OPTIONAL_FUNCTIONS)
        if hasattr(module, name)
        and not (name in _NEWER_FUNCTIONS and isinstance(getattr(module, name), ModuleType))
        and not (name == "local_steps" and not callable(getattr(module, name)))  # a script's own number
    }
    for name, function in functions.items():
        if not callable(function):
            raise WorkloadError(f"{who}: {name} must be a function, it is a {type(function).__name__}")
    if "model" not in functions:
        raise user_code.no_model_error(who)
    functions = bind_functions(functions, source.arguments, source.path)
    function = functions.pop("model")
    make = partial(_call_model, function, source.path, scope, notes)
    update_wrapper(make, function, (), ())  # so that errors can name its line
    with deferred_initialization(seed) as tape:
        given = make()
    ordinary = isinstance(given, nn.Module) and not _is_sequence(given)
    names, layers = _named_layers([given] if ordinary else given, who)
    model = LayeredModel(
        who, names, layers, tape, functions, source.path, ordinary=ordinary, make=make, notes=notes
    )
    place = locate_function(function, source.path)
    for index in range(len(layers)):
        check_materializable(tape, model.tensors(index), f"{place}: {model.label(index)}")
        refuse_accumulate_hooks(layers[index], model.label(index), source.path)
    return model


def _call_model(
    function: Callable[[], Any], path: Path, scope: user_code.UserImports, notes: list[str]
) -> Any:
    """The result of a user's model(), in ``train()`` as a training loop puts it; adds to ``notes``."""
    with (
        user_code.user_errors(path, "model()"),
        user_code.own_arguments(path),
        scope.running(),
        uncompiled(path.name, notes),
    ):
        given = function()
        refuse_scripted(given, path.name)
        leave_out_caches(given, path.name, notes)
        leave_out_synced_norms(given, path.name, notes)
        for module in given if isinstance(given, list | tuple) else [given]:
            if isinstance(module, nn.Module):
                module.train()
    return given


def _make_from_hub(source: ModelSource, seed: int, count: int | None, *, own_weights: bool) -> LayeredModel:
    from skyctl.workload.hf import hub_model as hf  # late: it needs transformers

    assert source.path is not None
    hub_model = hf.make_hub_model(
        source.path, source.options, seed, lora=source.lora, count=count, own_weights=own_weights
    )
    names, layers = [name for name, _ in hub_model.layers], [layer for _, layer in hub_model.layers]
    who = f"hf:{source.path.name}"
    functions = {"loss": hub_model.loss_fn()}
    lora = hub_model.adapters is not None
    model = LayeredModel(who, names, layers, hub_model.tape, functions, hub=hub_model, trains_adapters=lora)
    if hub_model.stored is None:
        return model
    stored = hub_model.stored.sharing(model.shared_parameters)
    return replace(model, values=stored.layer, stored=stored)


def _is_sequence(given: nn.Module) -> bool:
    """Whether a module is called one item after the other and does nothing else: its items are the layers."""
    if isinstance(given, nn.ModuleList):
        return True
    kind = type(given)
    plain = kind.forward is nn.Sequential.forward and kind.__call__ is nn.Module.__call__
    hooks = module_hooks(given, backward=True) + module_hooks(given, backward=False)
    return plain and kind.train is nn.Module.train and not hooks


def _named_layers(given: Any, who: str) -> tuple[list[str], list[nn.Module]]:
    if isinstance(given, nn.Sequential | nn.ModuleList):
        named = list(given._modules.items())
    elif isinstance(given, list | tuple):
        named = [(str(i), layer) for i, layer in enumerate(given)]
    else:
        raise WorkloadError(
            f"{who}: model() must give an nn.Module or a list of layers, not {type(given).__name__}"
        )
    if not named:
        raise WorkloadError(f"{who}: model() gives no layers")
    names, layers = [], []
    for index, (name, layer) in enumerate(named):
        if not isinstance(layer, nn.Module):
            raise WorkloadError(
                f"{who}: layer {index} that model() gives must be an nn.Module, not {type(layer).__name__}"
            )
        names.append(f"{index}.{type(layer).__name__}" if name.isdigit() else name)
        layers.append(layer)
    return names, layers
