"""``hf:DIR`` as a model cut into layers: without values, with their names, stored values and loss.

A cut counts only if the layers compute what the library's own ``forward`` computes. Both are run without
values while every operation is written down (``deferred_init``); their results are the same function of the
weights and the ids where they come from the same operations on the same things. That holds at the model's
full size, costs no memory, and needs no knowledge of the family.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from skyctl.errors import WorkloadError
from skyctl.workload import builtin, stored_weights, weight_files
from skyctl.workload.deferred_init import (
    OperationTape,
    TapedOperation,
    TensorRef,
    deferred_initialization,
    ref_of,
)
from skyctl.workload.hf import hub_folder, hub_layers, token_data, transformers_models
from skyctl.workload.hf.lora import LoraAdapters, add_adapters
from skyctl.workload.hf.mixtures import fuse_experts
from skyctl.workload.hf.transformers_models import HubSettings
from skyctl.workload.hf.weight_conversion import WeightConversion
from skyctl.workload.loss_functions import learnt_token_loss, loss_for_task
from skyctl.workload.user_code import describe_exception

FINE_TUNING_LEARNING_RATE = 5e-5
"""AdamW's default for stored weights, as in the library's ``Trainer``."""

_COMMUTATIVE = ("aten.add.Tensor", "aten.mul.Tensor")


@dataclass(frozen=True)
class HubModel:
    """The model of a folder, cut into layers.

    Attributes:
        architecture: the name of the library's class.
        names: per layer, the layer's own name of a tensor → its name in the library's model.
        naming: what the layers' tensors are called in files of ``--init-from``; ties count with ``untie``,
            and adapters are not among them.
        stored: on the launcher, the folder's weights, where those are wanted and there are any; else None.
        notes: for the user, on how the model was cut and initialised.
        conversion: how files hold the library's tensors.
        adapters: those of ``--lora``, which alone are trained; None: the model is.
        unfused: why its experts can't be on other machines; None: they can, or there are none.
    """

    folder: Path
    architecture: str
    settings: HubSettings
    layers: hub_layers.NamedLayers
    tape: OperationTape
    names: list[dict[str, str]]
    naming: stored_weights.WeightNaming
    stored: stored_weights.StoredWeights | None
    notes: list[str]
    conversion: WeightConversion
    adapters: LoraAdapters | None = None
    unfused: str | None = None

    def learning_rate(self, *, stored: bool) -> float:
        """AdamW's default learning rate: for stored weights the library's, else that of built-in models."""
        if stored:
            return FINE_TUNING_LEARNING_RATE
        return builtin.default_learning_rate(int(self.settings.config.hidden_size))

    def match_weights(
        self, path: Path, layers: Sequence[Mapping[str, Tensor]], model: str
    ) -> stored_weights.StoredWeights:
        """The weights of ``--init-from`` for a model with adapters: theirs, or those of the model without.

        Args:
            layers, model: as ``stored_weights.match_weights`` takes them.

        Raises:
            WorkloadError: the weights are neither.
        """
        assert self.adapters is not None
        own_name = self.adapters.own_name
        files = weight_files.weight_names(path)
        if any(".lora_" in name for name in files):
            known = self.adapters.file_names()
            theirs = [{own: known.get(name, name) for own, name in names.items()} for names in self.names]
            own = [{name: f"{index}.{name}" for name in names} for index, names in enumerate(self.names)]
            wanted = [{n: t for n, t in layer.items() if t.requires_grad} for layer in layers]
        else:
            theirs = list(map(dict, self.naming.names))
            own = [{n: f"{index}.{own_name(n)}" for n in names} for index, names in enumerate(theirs)]
            pairs = zip(layers, theirs, strict=True)
            wanted = [{n: t for n, t in layer.items() if n in names} for layer, names in pairs]
        namings = [stored_weights.WeightNaming(own), replace(self.naming, names=theirs)]
        return stored_weights.match_weights(path, namings, wanted, model)

    def loss_fn(self) -> Callable[[Any, Any], Tensor]:
        """The loss of the model's task, from (scores, targets)."""
        return learnt_token_loss if self.settings.records else loss_for_task(self.settings.task)


def make_hub_model(
    folder: Path,
    options: Mapping[str, int],
    seed: int,
    *,
    lora: Mapping[str, Any] | None = None,
    count: int | None,
    own_weights: bool = True,
) -> HubModel:
    """Reads the config, builds the model without values and cuts it into layers.

    Args:
        lora: the adapters to train (``lora_options``); None: all weights are trained.
        count: on a node, the number of layers that the launcher found and checked; None on the launcher.
        own_weights: whether the folder's weights are wanted, where it has any; never on a node.

    Raises:
        WorkloadError: the folder's model or weights can't be used, or layers would not compute what the
            library's model computes.
    """
    try:
        settings = transformers_models.read_settings(folder, options["context"], bool(options["untie"]))
        with deferred_initialization(seed) as tape:
            model = transformers_models.build_model(settings, folder)
            adapters = None if lora is None else add_adapters(model, lora, settings, folder)
    except ModuleNotFoundError as exc:
        if count is not None:
            raise  # the launcher names the node
        raise WorkloadError(
            f"{'--lora' if exc.name == 'peft' else 'hf:'} needs the Python package {exc.name!r}, which is "
            "not installed here",
            hint=f"pip install 'skyctl[{'finetune' if exc.name == 'peft' else 'hf'}]' here, and `pip install "
            f"{exc.name}` on every node",
        ) from exc
    if form := hub_folder.RECORD_FORMS[options.get("records", 0)]:
        settings = replace(settings, records=form)
        _check_records(settings, folder)
    unfused = fuse_experts(model)
    layers, notes = _find_cut(model, settings, folder, count)
    notes += [] if adapters is None else adapters.notes
    names = hub_layers.library_names(model, layers)
    base = names if adapters is None else _without_adapters(names, layers, adapters)
    prefix = f"{model.base_model_prefix}."
    conversion = WeightConversion(model)
    ties = transformers_models.tied_parameters(model)
    pieces = conversion.pieces(_base_tensors(model, adapters))
    naming = stored_weights.WeightNaming(base, prefix, ties, pieces, conversion.merge)
    kept = None
    if count is None:
        token_data.check_vocabulary(settings, folder)
        if own_weights and weight_files.weight_files(folder) is not None:
            shapes = [{n: tuple(t.shape) for n, t in layer.state_dict().items()} for _, layer in layers]
            kept = stored_weights.match_hub_weights(folder, naming, shapes)
            if kept.fresh:
                notes.append(f"{folder.name}: no weights for {', '.join(kept.fresh)}: they start at random")
    strict = naming if options["untie"] else replace(naming, ties={})
    kind = type(model).__name__
    return HubModel(
        folder, kind, settings, layers, tape, names, strict, kept, notes, conversion, adapters, unfused
    )


def _check_records(settings: HubSettings, folder: Path) -> None:
    """Refuses records for a model that they can't train."""
    if settings.task != "causal":
        raise WorkloadError(
            f"--data with records trains models that say the next token; {folder.name} is "
            f"{settings.config.model_type!r} for {settings.task}",
            hint="give it a text: --data FILE.txt",
        )


def _base_tensors(model: Any, adapters: LoraAdapters | None) -> dict[str, Tensor]:
    """The tensors of the library's model as it is without adapters, by the names that they have there."""
    tensors = model.state_dict(keep_vars=True)
    if adapters is None:
        return dict(tensors)
    return {adapters.own_name(name): t for name, t in tensors.items() if id(t) not in adapters.added}


def _without_adapters(
    names: Sequence[Mapping[str, str]], layers: hub_layers.NamedLayers, adapters: LoraAdapters
) -> list[dict[str, str]]:
    """Per layer, own name → name in the library's model without adapters, of what that model has."""
    found = []
    for (_, layer), named in zip(layers, names, strict=True):
        held = layer.state_dict(keep_vars=True)
        base = {own: name for own, name in named.items() if id(held[own]) not in adapters.added}
        found.append({own: adapters.own_name(name) for own, name in base.items()})
    return found


def _find_cut(
    model: Any, settings: HubSettings, folder: Path, count: int | None
) -> tuple[hub_layers.NamedLayers, list[str]]:
    """The finest cut that computes the same as the whole model, and a note where it is a coarse one."""
    kind = settings.config.model_type
    why = "another result"
    for finer in (True, False):
        layers = hub_layers.cut_into_layers(model, settings, halves=finer)
        whole = not any(name.endswith(".mlp") for name, _ in layers)
        try:
            modules = [layer for _, layer in layers]
            fits = computes_same(model, modules, settings) if count is None else len(layers) == count
        except Exception as exc:  # noqa: BLE001 - the library's own code; it is told below
            fits, why = False, describe_exception(exc)
        if fits:
            note = (
                f"{folder.name}: blocks of model_type {kind!r} are of no known form: cut between blocks only"
            )
            return layers, [note] if whole else []
    raise WorkloadError(
        f"{folder.name}: model_type {kind!r} does more between its layers than is known of it: cut into "
        f"layers it gives {why}",
        hint="with --no-packing a row is one record, which more models can take"
        if settings.records == "packed"
        else f"supported are {transformers_models.SUPPORTED}; else {transformers_models.WRITE_TRAIN_PY}",
    )


def computes_same(model: Any, layers: Sequence[nn.Module], settings: HubSettings) -> bool:
    """Whether the layers, one after another, compute the scores that ``model(input_ids)`` computes.

    Raises:
        Exception: whatever the library raises where it can't run without values.
    """
    with torch.no_grad(), deferred_initialization(0) as tape:
        ids = torch.zeros(2, settings.context, dtype=torch.int64)
        value: Any = ids
        more = {}
        if settings.records == "packed":
            more["position_ids"] = torch.zeros(2, settings.context, dtype=torch.int64)
            value = ids, more["position_ids"]
        whole: Tensor = model(input_ids=ids, use_cache=False, **more).logits
        for layer in layers:
            value = layer(value)
    hashes: dict[int, str] = {}
    for op in tape.operations():
        if _changes_nothing(op):
            hashes[op.outputs[0][1].storage] = hashes.get(op.args[0].storage, str(op.args[0].storage))
            continue
        words = [_describe_argument(leaf, hashes) for leaf in tree_leaves((op.args, op.kwargs))]
        if str(op.func) in _COMMUTATIVE and not op.kwargs:
            words.sort()
        op_hash = _hash_lines(str(op.func), *words)
        for storage in op.writes:
            hashes[storage] = _hash_lines(op_hash, hashes.get(storage, ""))
        for place, ref in op.outputs:
            hashes[ref.storage] = _hash_lines(op_hash, str(place))
    return _describe_argument(ref_of(whole), hashes) == _describe_argument(ref_of(value), hashes)


def _changes_nothing(op: TapedOperation) -> bool:
    """Whether an operation keeps all values: ``positions + 0`` (an empty cache), ``x.to(device)``."""
    name = str(op.func)
    if name not in ("aten.add.Tensor", "aten._to_copy.default") or not isinstance(op.args[0], TensorRef):
        return False
    if name == "aten.add.Tensor" and (op.args[1:] != (0,) or op.kwargs):
        return False
    return replace(op.outputs[0][1], storage=op.args[0].storage) == op.args[0]


def _describe_argument(value: Any, hashes: dict[int, str]) -> str:
    if isinstance(value, TensorRef):
        window = f"{value.dtype}{value.size}{value.stride}{value.offset}"
        return f"{window} {hashes.get(value.storage, str(value.storage))}"
    if isinstance(value, Tensor):
        return f"{value.dtype}{value.tolist()}"
    return repr(value)


def _hash_lines(*words: str) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()
