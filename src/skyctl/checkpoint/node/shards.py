"""Shards: the training state of one layer as one safetensors file, from which any plan can resume.

A shard's tensors are ``model.NAME`` (from ``state_dict()``: parameters, or their float32 masters, and
buffers), ``buffer.NAME`` (non-persistent buffers that have changed since the layer was built), ``extra.…``,
``optimizer.KEY.NAME`` and ``outer.NAME`` (the momentum of an outer optimizer). Its metadata is the stamp,
and, as JSON, the optimizer's plain numbers by parameter and those options of its groups that have changed
since it was made. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from skyctl.checkpoint.node import safetensors
from skyctl.checkpoint.node.atomic_file import FileDigest
from skyctl.checkpoint.node.state_values import decode_value, encode_value, keep_placement, placement_for
from skyctl.errors import RecordError, WorkloadError

SHARD_FORMAT, SHARD_VERSION = "skyctl/shard", 1
MODEL_PREFIX, BUFFER_PREFIX, EXTRA_PREFIX, OPTIMIZER_PREFIX = "model.", "buffer.", "extra.", "optimizer."
OUTER_PREFIX = "outer."
_EXTRA_STATE = "_extra_state"
_UNSUPPORTED_HINT = "train without checkpoints, or with another optimizer"

MasterOf = Callable[[nn.Parameter], nn.Parameter]


class OuterMomentum(Protocol):
    """The momentum that an outer optimizer has of each parameter (``worker.outer_optimizer``)."""

    def momentum_of(self, weight: nn.Parameter, /) -> Tensor | None:
        """The momentum of a parameter, of the parameter's shape; None: it has none yet."""

    def restore_momentum(self, weight: nn.Parameter, value: Tensor, /) -> None:
        """Sets the momentum of a parameter from a checkpoint. Raises RecordError where its shape differs."""


@dataclass(frozen=True)
class ShardStamp:
    """The run, step, layer and workload that a shard is of.

    Attributes:
        step: how many steps were done.
        layers: how many layers the model has.
        workload: the digest of what is trained.
        own_names: the layer's tensors have the names that they have in the whole model.
    """

    run_id: str
    step: int
    layer: int
    name: str
    layers: int
    workload: str
    dtype: str
    seed: int
    own_names: bool = False

    def to_metadata(self) -> dict[str, str]:
        """The stamp as a safetensors file's metadata."""
        own = {key: str(value) for key, value in vars(self).items()}
        return {"format": SHARD_FORMAT, "version": str(SHARD_VERSION), **own}


def check_stamp(path: Path | str, metadata: Mapping[str, str], wanted: ShardStamp) -> None:
    """Checks that a file is the wanted shard; only the run may be another.

    Raises:
        RecordError: it is another one; says what it is and what it must be.
    """
    if metadata.get("format") != SHARD_FORMAT:
        raise RecordError(f"{path} is no shard of a checkpoint: its format is {metadata.get('format')!r}")
    version = metadata.get("version", "")
    if version != str(SHARD_VERSION):
        raise RecordError(
            f"{path} is a shard of version {version[:20]!r}, this skyctl reads {SHARD_VERSION}",
            hint="use the skyctl that has written it, or train anew: skyctl launch PLAN",
        )
    for key in ("layer", "step", "layers", "dtype", "seed", "workload"):
        have, need = metadata.get(key), str(getattr(wanted, key))
        if have != need:
            raise RecordError(
                f"{path} is of {key} {have!r:.80}, needed is {need!r}",
                hint="a run goes on with the model, the data type and the seed that it has begun with",
            )


class StageState:
    """The state of a stage's layers and of their optimizer, written and read as one shard per layer.

    Make it when both are new, before anything is restored: it notes what changes afterwards.

    Args:
        layers: the stage's.
        optimizer: over the parameters' masters; None for a stage that trains nothing.
        master_of: parameter → the parameter that the optimizer works on.
        skip: options of the optimizer's groups that are set by someone else, and not saved.
        outer: momentum that is kept beside the optimizer's state; None: none is, nor restored.
        trained_alone: frozen weights are left out, for layers are built with them.

    Raises:
        WorkloadError: the optimizer's state is not kept per parameter.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        master_of: MasterOf,
        skip: Collection[str] = (),
        outer: OuterMomentum | None = None,
        *,
        trained_alone: bool = False,
    ) -> None:
        self.notes: list[str] = []
        self._layers, self._optimizer, self._master_of = list(layers), optimizer, master_of
        self._skip, self._outer = {"params", "initial_lr", *skip}, outer
        self._left_out = [frozen_names(layer) if trained_alone else frozenset() for layer in layers]
        self._groups: dict[int, dict[str, Any]] = {}
        self._fresh: dict[int, dict[str, str]] = {}
        for group in [] if optimizer is None else optimizer.param_groups:
            options = self._options(group)
            for parameter in group["params"]:
                self._groups[id(parameter)] = group
                self._fresh[id(parameter)] = options
        self._buffers = [
            {name: (b, b._version) for name, b in _non_persistent_buffers(layer)} for layer in layers
        ]
        if isinstance(optimizer, torch.optim.LBFGS):
            raise WorkloadError(
                "LBFGS keeps one state over all parameters, so it can't be kept by layer",
                hint=_UNSUPPORTED_HINT,
            )

    def write(self, position: int, path: Path, stamp: ShardStamp) -> FileDigest:
        """Writes one layer's shard (mode 0600), whole or not at all.

        Args:
            position: the layer's in the stage.

        Raises:
            WorkloadError: some of its state can't be saved; says what and why.
            SkyctlError: the disk is full or not writable.
        """
        return safetensors.save(path, *self.collect(position, stamp), mode=0o600)

    def collect(self, position: int, stamp: ShardStamp) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The contents of a layer's shard: its tensors, which are the layer's own, and its metadata.

        Raises:
            WorkloadError: some of its state can't be saved; says what and why.
        """
        layer = self._layers[position]
        tensors: dict[str, Tensor] = {}
        extra = self._model(layer, tensors, stamp, self._left_out[position])
        for name, buffer in _non_persistent_buffers(layer):
            built, version = self._buffers[position].get(name, (None, 0))
            if built is not buffer or version != buffer._version:
                tensors[BUFFER_PREFIX + name] = buffer
        states, options = self._optimizer_state(layer, tensors, stamp)
        if (outer := self._outer) is not None:
            found = {name: outer.momentum_of(parameter) for name, parameter in layer.named_parameters()}
            tensors |= {OUTER_PREFIX + name: value for name, value in found.items() if value is not None}
        for name, tensor in tensors.items():
            if tensor.layout is not torch.strided or tensor.dtype not in safetensors.DTYPES.values():
                kind = f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
                raise WorkloadError(
                    f"layer {stamp.layer} ({stamp.name}): {name} ({kind}) can't be kept in a checkpoint",
                    hint=_UNSUPPORTED_HINT,
                )
        plain = {"extra": extra, "optimizer": states, "options": options}
        return tensors, stamp.to_metadata() | {key: json.dumps(value) for key, value in plain.items()}

    def read(self, position: int, path: Path, stamp: ShardStamp) -> None:
        """Restores a layer and its optimizer from a shard.

        Raises:
            RecordError: the shard is damaged, or of another layer, model, dtype or seed.
        """
        header = safetensors.read_header(path)
        check_stamp(path, header.metadata, stamp)
        self.restore(position, safetensors.load(path), header.metadata, stamp, str(path))

    def restore(
        self,
        position: int,
        tensors: dict[str, Tensor],
        metadata: Mapping[str, str],
        stamp: ShardStamp,
        source: str,
    ) -> None:
        """Restores a layer and its optimizer from what its shard holds.

        Args:
            source: what to call the shard in an error.

        Raises:
            RecordError: it does not fit the layer.
        """
        layer = self._layers[position]
        try:
            plain = {key: json.loads(metadata[key]) for key in ("extra", "optimizer", "options")}
            with torch.no_grad():
                self._restore_model(layer, tensors, plain["extra"], self._left_out[position])
                self._restore_optimizer(layer, tensors, plain["optimizer"], plain["options"])
                if self._outer is not None:
                    for name, momentum in _strip_prefix(tensors, OUTER_PREFIX).items():
                        self._outer.restore_momentum(layer.get_parameter(name), momentum)
        except RecordError as exc:
            raise RecordError(f"{source}: {exc.message}", hint=exc.hint) from exc
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as exc:
            raise RecordError(
                f"{source} does not fit layer {stamp.layer} ({stamp.name}): "
                f"{' '.join(str(exc).split())[:400]}"
            ) from exc

    def _model(
        self, layer: nn.Module, tensors: dict[str, Tensor], stamp: ShardStamp, left_out: Collection[str]
    ) -> dict[str, Any]:
        """Adds parameters and buffers to ``tensors``; returns the modules' extra state as JSON values."""
        masters = {n: self._master_of(p) for n, p in layer.named_parameters(remove_duplicate=False)}
        extra: dict[str, Any] = {}
        for name, value in layer.state_dict().items():
            if name in left_out:
                continue
            if isinstance(value, Tensor):
                tensors[MODEL_PREFIX + name] = masters.get(name, value).detach()
                continue
            try:
                extra[name] = encode_value(value, EXTRA_PREFIX + name, tensors)
            except TypeError as exc:
                note = f"layer {stamp.layer} ({stamp.name}): {name} is not kept: {exc}"
                if note not in self.notes:
                    self.notes.append(note)
        return extra

    def _optimizer_state(
        self, layer: nn.Module, tensors: dict[str, Tensor], stamp: ShardStamp
    ) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
        """Adds the state's tensors; returns its plain values and its changed options, both by parameter."""
        states: dict[str, Any] = {}
        options: dict[str, dict[str, str]] = {}
        if self._optimizer is None:
            return states, options
        self._check_per_parameter()
        for name, parameter in layer.named_parameters():
            master = self._master_of(parameter)
            state = self._optimizer.state.get(master)
            if state:
                try:
                    states[name] = {
                        _check_text_key(key): encode_value(value, f"{OPTIMIZER_PREFIX}{key}.{name}", tensors)
                        for key, value in state.items()
                    }
                except TypeError as exc:
                    raise WorkloadError(
                        f"layer {stamp.layer} ({stamp.name}): the state that "
                        f"{type(self._optimizer).__name__} has of {name} can't be kept: {exc}",
                        hint=_UNSUPPORTED_HINT,
                    ) from exc
            if id(master) in self._groups:
                now, fresh = self._options(self._groups[id(master)]), self._fresh[id(master)]
                changed = {key: value for key, value in now.items() if fresh.get(key) != value}
                if changed:
                    options[name] = changed
        return states, options

    def _check_per_parameter(self) -> None:
        assert self._optimizer is not None
        for key in self._optimizer.state:
            if not isinstance(key, Tensor) or id(key) not in self._groups:
                raise WorkloadError(
                    f"{type(self._optimizer).__name__} keeps state that is not of one parameter "
                    f"({key!r:.80}), so it can't be kept by layer",
                    hint=_UNSUPPORTED_HINT,
                )

    def _options(self, group: Mapping[str, Any]) -> dict[str, str]:
        """The plain options of an optimizer's group, each as JSON text."""
        found = {}
        for key, value in group.items():
            if key not in self._skip:
                try:
                    found[str(key)] = json.dumps(encode_value(value, "", {}))
                except TypeError:
                    continue  # an object of the user's: made anew with the optimizer
        return found

    def _restore_model(
        self,
        layer: nn.Module,
        tensors: dict[str, Tensor],
        extra: dict[str, Any],
        left_out: Collection[str],
    ) -> None:
        given: dict[str, Any] = _strip_prefix(tensors, MODEL_PREFIX)
        values = dict(given)
        given |= {name: decode_value(value, tensors, keep_placement) for name, value in extra.items()}
        missing, unexpected = layer.load_state_dict(given, strict=False)
        missing = [n for n in missing if not n.endswith(_EXTRA_STATE) and n not in left_out]
        if missing or unexpected:
            word, name = ("lacks", missing[0]) if missing else ("holds the unknown", unexpected[0])
            raise RecordError(f"it {word} {name!r}", hint="was model() changed since it was written?")
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            master = self._master_of(parameter)
            if master is not parameter and name not in left_out:
                master.copy_(values[name])
        for name, value in _strip_prefix(tensors, BUFFER_PREFIX).items():
            place, _, own = name.rpartition(".")
            module = layer.get_submodule(place)
            current = module._buffers[own]
            if current is not None and current.shape == value.shape and current.dtype == value.dtype:
                current.copy_(value)
            else:
                module._buffers[own] = value if current is None else value.to(current.device)

    def _restore_optimizer(
        self,
        layer: nn.Module,
        tensors: dict[str, Tensor],
        states: dict[str, Any],
        options: dict[str, dict[str, str]],
    ) -> None:
        named = dict(layer.named_parameters())
        for name, state in states.items():
            master = self._master_of(named[name])
            if self._optimizer is None or id(master) not in self._groups:
                raise RecordError(
                    f"it holds the optimizer's state of {name!r}, which this plan's optimizer does not train",
                    hint="optimizer(parameters) must treat a parameter alike, whatever others it is given",
                )
            group = self._groups[id(master)]
            self._optimizer.state[master] = {
                key: decode_value(value, tensors, placement_for(key, master, group))
                for key, value in state.items()
            }
        for name, changed in options.items():
            if id(master := self._master_of(named[name])) in self._groups:
                group = self._groups[id(master)]
                for key in changed.keys() - self._skip:
                    value = decode_value(json.loads(changed[key]), {}, keep_placement)
                    if key in group and self._options(group).get(key) not in (
                        changed[key],
                        self._fresh[id(master)].get(key),
                    ):
                        raise RecordError(
                            f"{key!r} of the optimizer's group is not the same for all its parameters",
                            hint="optimizer(parameters) must put the same parameters into one group "
                            "under every plan",
                        )
                    group[key] = value


def frozen_names(layer: nn.Module) -> frozenset[str]:
    """The names of the layer's parameters that are not trained."""
    return frozenset(n for n, p in layer.named_parameters(remove_duplicate=False) if not p.requires_grad)


def _non_persistent_buffers(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """The layer's buffers that ``state_dict()`` leaves out, by name."""
    return [
        (f"{place}.{name}" if place else name, buffer)
        for place, module in layer.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    ]


def _strip_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _check_text_key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"its key {key!r:.80} is no text")
    return key
