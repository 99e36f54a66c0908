"""Where the layers come from: a built-in model or the user's file, made with deferred initialisation.

The user's file defines ``model()`` and optionally ``data``, ``example``, ``loss`` and ``optimizer``; see
``workload.load``. Knows nothing of shapes, batches or costs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from skyctl.errors import WorkloadError
from skyctl.workload import builtin, mixed, usercode
from skyctl.workload.deferred import Record, check_made, deferring, is_deferred, tensors_of
from skyctl.workload.spec import Source

if TYPE_CHECKING:
    from skyctl.workload.hf.model import HubModel

FUNCTIONS = ("data", "validation", "example", "loss", "optimizer")


@dataclass(frozen=True)
class Model:
    """Layers without values, the record that makes the values, and the user's functions by name.

    ``dtype``: what the layers compute in where that is another than their own (see ``mixed``).
    ``hub``: for ``hf:``, what else is known of it.
    """

    who: str
    names: list[str]
    layers: list[nn.Module]
    record: Record
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    path: Path | None = None
    dtype: torch.dtype | None = None
    hub: HubModel | None = None

    def label(self, index: int) -> str:
        """``layer 3 (Linear)``, with the layer's own name where it has one, for messages."""
        kind, name = type(self.layers[index]).__name__, self.names[index]
        own = name != f"{index}.{kind}"
        if self.path is None:
            return f"layer {index} ({name})"
        return f"layer {index} ({name}, {kind})" if own else f"layer {index} ({kind})"

    def tensors(self, index: int) -> list[Tensor]:
        """Every tensor one layer holds, without values where they are deferred."""
        return tensors_of(self.layers[index])

    def build(self, index: int, device: torch.device) -> nn.Module:
        """A fresh copy of one layer with its values, which depend only on the seed and the index."""
        held = self.tensors(index)
        given = self._stored(index) if device.type != "meta" else {}
        deferred = [t for t in held if is_deferred(t) and id(t) not in given]
        made = self.record.real(deferred, f"layer {index}") if device.type != "meta" else deferred
        low = self.lowered(index)
        memo: dict[int, Any] = {}
        for tensor, values in zip(deferred, made, strict=True):
            memo[id(tensor)] = self._made(tensor, values.detach().to(device), low)
        for tensor in held:
            if id(tensor) in given:
                memo[id(tensor)] = self._made(tensor, given[id(tensor)].to(device, tensor.dtype), low)
            elif not is_deferred(tensor):
                memo[id(tensor)] = self._made(tensor, tensor.detach().to(device, copy=True), low)
        return self.copy(index, memo)

    def lowered(self, index: int) -> set[int]:
        """The ids of the tensors of one layer that are held in ``dtype``."""
        return mixed.lowered(self.layers[index]) if self.dtype is not None else set()

    def _made(self, old: Tensor, values: Tensor, low: set[int]) -> Tensor:
        if self.dtype is not None and id(old) in low:
            return mixed.lower(old, values, self.dtype)
        return _like(old, values)

    def _stored(self, index: int) -> dict[int, Tensor]:
        """By tensor, the values it has in a file."""
        if self.hub is None or self.hub.values is None:
            return {}
        held = self.layers[index].state_dict(keep_vars=True)
        return {id(held[name]): values for name, values in self.hub.values(index).items()}

    def copy(self, index: int, memo: dict[int, Any]) -> nn.Module:
        """A deep copy of one layer with other tensors in place of its own (by id)."""
        try:
            return copy.deepcopy(self.layers[index], memo)
        except Exception as exc:
            raise WorkloadError(
                f"{self.who}: {self.label(index)} can't be copied: {usercode.in_words(exc)}",
                hint="keep locks, files and generators out of the layers",
            ) from exc


def _like(old: Tensor, new: Tensor) -> Tensor:
    """``new`` as a parameter where ``old`` is one."""
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new


def make(source: Source, seed: int, *, part: str | None = None, count: int | None = None) -> Model:
    """The model of a source.

    ``part`` and ``count``: for ``hf:`` on a node, see ``hf.model.make``.

    Raises:
        WorkloadError: the file is missing, raises, or its model() gives no usable layers.
    """
    if source.kind == "hf":
        return _hub(source, seed, part, count)
    if source.kind != "file":
        with deferring(seed) as record:
            pairs = builtin.layers(source.kind, source.sizes)
        return Model(source.canonical, [n for n, _ in pairs], [m for _, m in pairs], record)
    assert source.path is not None
    module, scope = usercode.import_file(source.path)
    who = source.path.name
    functions = {name: getattr(module, name) for name in ("model", *FUNCTIONS) if hasattr(module, name)}
    for name, function in functions.items():
        if not callable(function):
            raise WorkloadError(f"{who}: {name} must be a function, it is a {type(function).__name__}")
    if "model" not in functions:
        raise WorkloadError(
            f"{who} defines no model()", hint="def model(): return nn.Sequential(…), a layer per pipeline cut"
        )
    with deferring(seed) as record, usercode.user_errors(source.path, "model()"), scope.running():
        given = functions.pop("model")()
    names, layers = _layers(given, who)
    model = Model(who, names, layers, record, functions, source.path)
    for index in range(len(layers)):
        check_made(record, model.tensors(index), f"{who}: {model.label(index)}")
    _check_untied(model)
    return model


def _hub(source: Source, seed: int, part: str | None, count: int | None) -> Model:
    from skyctl.workload.hf import model as hf  # late: it needs transformers

    assert source.path is not None
    made = hf.make(source.path, source.options, seed, part=part, count=count)
    names, layers = [name for name, _ in made.layers], [layer for _, layer in made.layers]
    who = f"hf:{source.path.name}"
    model = Model(who, names, layers, made.record, {"loss": made.losses()}, hub=made)
    _check_untied(model)
    return model


def _layers(given: Any, who: str) -> tuple[list[str], list[nn.Module]]:
    if isinstance(given, nn.Sequential | nn.ModuleList):
        named = list(given._modules.items())
    elif isinstance(given, list | tuple):
        named = [(str(i), layer) for i, layer in enumerate(given)]
    else:
        extra = "; a plain nn.Module can't be cut" if isinstance(given, nn.Module) else ""
        raise WorkloadError(
            f"{who}: model() must give an nn.Sequential or a list of layers, "
            f"not {type(given).__name__}{extra}"
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


def _check_untied(model: Model) -> None:
    """Parameters shared by two layers could end up on two machines: refused."""
    owners: dict[int, tuple[int, str]] = {}
    for index, layer in enumerate(model.layers):
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            if parameter.numel() == 0:
                continue
            key = parameter.untyped_storage()._cdata
            first, first_name = owners.setdefault(key, (index, name))
            if first != index:
                raise WorkloadError(
                    f"{model.who}: {model.label(first)} and {model.label(index)} share a parameter "
                    f"({first_name} and {name}); every layer must have its own",
                    hint="untie them, or put both uses into one layer",
                )
