"""Low-rank adapters (LoRA) of ``peft``, put into the library's whole model before it is cut into layers.

Targets are found as ``peft`` finds them in a whole model, so they do not depend on the cut. The adapters'
first values come from the model's tape like all others: they depend on the seed and the model alone.

Source: Hu et al. 2021, LoRA: Low-Rank Adaptation of Large Language Models, section 4.
"""

from __future__ import annotations

import copy
import importlib
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from skyctl.checkpoint.node import safetensors
from skyctl.errors import WorkloadError
from skyctl.workload.hf.adapter_folder import ADAPTER_WEIGHTS
from skyctl.workload.hf.lora_options import ALL_LINEAR, suggest_module
from skyctl.workload.hf.transformers_models import HubSettings
from skyctl.workload.user_code import describe_exception

MIN_PEFT = (0, 18)
_FILE_PREFIX = "base_model.model."
"""The prefix before the names of the library's model in a folder of ``peft``."""
_TASKS = {"causal": "CAUSAL_LM", "masked": None, "classes": "SEQ_CLS"}
_TRAINED_HEADS = {"classes": ["classifier"]}
"""By task, the modules that ``peft`` trains in any case, because no stored weights have them."""


def import_peft() -> Any:
    """Imports ``peft``.

    Raises:
        ModuleNotFoundError: it is not installed.
        WorkloadError: it is too old.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Any = importlib.import_module("peft")
    numbers = [int(n) for n in re.findall(r"\d+", made.__version__)[:2]]
    if tuple(numbers) < MIN_PEFT:
        need = ".".join(map(str, MIN_PEFT))
        raise WorkloadError(
            f"--lora needs peft {need} or newer, here is {made.__version__}",
            hint=f"pip install 'peft>={need}' there",
        )
    return made


@dataclass(frozen=True)
class LoraAdapters:
    """A model with adapters in it.

    Attributes:
        model: the library's, changed in place.
        config: the ``LoraConfig``, its targets found.
        added: the ids of the parameters that the model had not before: the adapters, and copies of modules.
        notes: for the user, on what gets no adapters.
    """

    model: Any
    config: Any
    added: frozenset[int]
    notes: Sequence[str] = ()

    def file_names(self) -> dict[str, str]:
        """By name in the library's model, what a folder of ``peft`` calls what is trained."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        named = import_peft().get_peft_model_state_dict(
            self.model, state_dict=dict(trained), save_embedding_layers=False
        )
        by_id = {id(tensor): _FILE_PREFIX + name for name, tensor in named.items()}
        return {name: by_id[id(p)] for name, p in trained.items() if id(p) in by_id}

    def own_name(self, name: str) -> str:
        """The name that a tensor of the model had before it was given adapters."""
        return name.replace(".base_layer.", ".").replace(".original_module.", ".")

    def write(self, trained: Mapping[str, Tensor], base: Path, out: Path) -> Path:
        """Writes a folder that ``PeftModel.from_pretrained`` reads; returns the path of its weights.

        Args:
            trained: by name in the library's model, all that is trained.
            base: the folder of the model that was given adapters.
        """
        names = self.file_names()
        config = copy.copy(self.config)
        config.base_model_name_or_path, config.inference_mode = str(base), True
        config.target_modules = sorted(config.target_modules)
        config.save_pretrained(str(out))
        path = out / ADAPTER_WEIGHTS
        held = {names[name]: tensor for name, tensor in trained.items() if name in names}
        safetensors.save(path, held, {"format": "pt"})
        return path


def add_adapters(model: Any, lora: Mapping[str, Any], settings: HubSettings, folder: Path) -> LoraAdapters:
    """Puts adapters into the library's model, and freezes the rest; call it where the model is built.

    Args:
        lora: as ``lora_options.check_lora`` gives it.

    Raises:
        ModuleNotFoundError: ``peft`` is not installed.
        WorkloadError: no module has a name that is asked for, or ``peft`` can't adapt it.
    """
    peft = import_peft()
    modules = [name for name, _ in model.named_modules() if name]
    for wanted in (lora["target_modules"], lora["modules_to_save"]):
        for name in () if wanted in (None, ALL_LINEAR) else wanted:
            _check_module(name, modules, folder)
    before = {id(parameter) for parameter in model.parameters()}
    linear = _linear_names(model)
    targets, notes = lora["target_modules"], []
    if targets == ALL_LINEAR and any(parameter.ndim == 3 for parameter in model.parameters()):
        targets = linear
        notes = [f"{folder.name}: the experts' weights are no linear layers, and get no adapters"]
    kept = [*(lora["modules_to_save"] or ()), *_TRAINED_HEADS.get(settings.task, ())]
    config = peft.LoraConfig(
        **{**lora, "target_modules": targets, "modules_to_save": list(dict.fromkeys(kept)) or None},
        task_type=_TASKS[settings.task],
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is refused or decided here
            peft.inject_adapter_in_model(config, model)
    except Exception as exc:
        raise WorkloadError(
            f"{folder.name} can't be given these adapters: {describe_exception(exc)}",
            hint="name linear layers or embeddings: --lora targets=q_proj,v_proj; or targets=all-linear",
        ) from exc
    _refuse_tied(model, settings, folder)
    if fused := sorted(getattr(config, "target_parameters", None) or ()):
        raise WorkloadError(
            f"--lora: peft takes {', '.join(lora['target_modules'])} of {folder.name} for "
            f"{', '.join(fused)}, which are no linear layers",
            hint=f"linear are {', '.join(linear)}",
        )
    for module in model.modules():
        for name in module.adapter_layer_names if hasattr(module, "lora_A") else ():
            getattr(module, name).keep_float32 = True  # of mixed_precision; peft casts what goes in and out
    added = frozenset(id(p) for p in model.parameters() if id(p) not in before)
    return LoraAdapters(model, config, added, notes)


def _linear_names(model: Any) -> list[str]:
    """The names of the model's linear layers in their blocks, without its head.

    Of experts that are one tensor together ``peft`` would adapt that tensor, under "all-linear".
    """
    head = model.get_output_embeddings()
    linear = (n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head)
    return sorted({name.rpartition(".")[2] for name in linear})


def _check_module(name: str, modules: Sequence[str], folder: Path) -> None:
    if any(module == name or module.endswith(f".{name}") for module in modules):
        return
    known = sorted({module.rpartition(".")[2] for module in modules} - set("0123456789"))
    known = [one for one in known if not one.isdecimal()]
    raise WorkloadError(
        f"--lora: no module of {folder.name} is called {name!r}{suggest_module(name, known)}",
        hint=f"its modules: {', '.join(known)}",
    )


def _refuse_tied(model: Any, settings: HubSettings, folder: Path) -> None:
    """Refuses adapters on one end of tied embeddings: merged, the two ends would no longer be one table."""
    if not getattr(settings.config, "tie_word_embeddings", False):
        return
    ends = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    for end, module in ends.items():
        if module is not None and type(module).__module__.partition(".")[0] == "peft":
            raise WorkloadError(
                f"--lora: the embedding and the head of {folder.name} are one table, and it is to train the "
                f"{end} alone",
                hint=f"train them as two: hf:{folder.name},untie",
            )


def merge_adapters(layer: nn.Module) -> dict[str, Tensor]:
    """Adds each adapter to the weight that it adapts, in place.

    Returns:
        The layer's tensors by the names that they have with adapters, without those of the adapters.
    """
    dropped: list[str] = []
    copies: dict[str, str] = {}
    for place, module in layer.named_modules():
        start = f"{place}." if place else ""
        if hasattr(module, "lora_A"):
            module.merge()
            dropped += [f"{start}{name}." for name in module.adapter_layer_names]
        elif hasattr(module, "modules_to_save"):
            copies[f"{start}modules_to_save.default."] = f"{start}original_module."
    merged = {n: t for n, t in layer.state_dict().items() if not n.startswith(tuple(dropped))}
    for copied, original in copies.items():
        for name in [name for name in merged if name.startswith(copied)]:
            merged[original + name.removeprefix(copied)] = merged.pop(name)
    return merged
