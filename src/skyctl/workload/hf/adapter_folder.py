"""Finds folders of ``peft`` with adapters alone, and reads what they are for. No torch, no ``peft``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyctl.errors import WorkloadError
from skyctl.workload.hf import hub_folder
from skyctl.workload.hf.lora_options import LORA_DEFAULTS, check_lora
from skyctl.workload.user_code import read_file

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_WEIGHT_NAMES = (ADAPTER_WEIGHTS, "adapter_model.bin")
_NO_MATTER = (
    *("auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "peft_type"),
    *("peft_version", "task_type"),
    *("eva_config", "megatron_core", "qalora_group_size"),  # of first values, or of what is switched off
)
"""Keys of the config that change nothing about what stored adapters compute, or are looked at alone."""
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""The ``init_lora_weights`` that leave the base model's weights as they are."""
_MERGE = "merge it with peft, PeftModel.merge_and_unload(), and generate with the folder that it saves"


@dataclass(frozen=True)
class AdapterFolder:
    """Low-rank adapters in a folder as ``PeftModel.save_pretrained`` writes it.

    Attributes:
        base: the folder of the model that they are for.
        lora: by the names of ``peft.LoraConfig`` (``lora_options``).
        weights: the file with their values.
    """

    folder: Path
    base: Path
    lora: Mapping[str, Any]
    weights: Path

    @property
    def tokenizer(self) -> Path:
        """The folder whose tokenizer counts: this one where it has one, else the base model's."""
        return self.folder if hub_folder.tokenizer_files(self.folder) else self.base


def find_adapters(text: str) -> AdapterFolder | None:
    """The adapters that ``[hf:]DIR`` or ``hf:ORG/NAME`` names; None if it names a model, or no folder.

    Raises:
        WorkloadError: the base model is not on this machine, or the adapters are of a kind that skyctl
            can't use.
    """
    named = hub_folder.parse_hub_source(text)[0]
    folder = named if named.is_dir() or not text.startswith("hf:") else hub_folder.cached_model(str(named))
    if folder is None or not (folder / ADAPTER_CONFIG).is_file() or _has_model(folder):
        return None
    try:
        config = json.loads(read_file(folder / ADAPTER_CONFIG))
    except ValueError as exc:
        raise WorkloadError(f"{folder / ADAPTER_CONFIG} is no JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise WorkloadError(f"{folder / ADAPTER_CONFIG} holds no object")
    weights = next((folder / name for name in _WEIGHT_NAMES if (folder / name).is_file()), None)
    if weights is None:
        raise WorkloadError(f"{folder} has an {ADAPTER_CONFIG} and no {ADAPTER_WEIGHTS}")
    return AdapterFolder(folder, _find_base(folder, config), _read_lora(folder, config), weights)


def _has_model(folder: Path) -> bool:
    """Whether a folder holds a whole model, too."""
    names = ("model.safetensors", "pytorch_model.bin")
    held = any((folder / f"{name}{end}").is_file() for name in names for end in ("", ".index.json"))
    return held and (folder / hub_folder.CONFIG_NAME).is_file()


def _find_base(folder: Path, config: Mapping[str, Any]) -> Path:
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise WorkloadError(
            f"{folder / ADAPTER_CONFIG} does not say of which model the adapters are",
            hint='name its folder, or ORG/NAME, there: "base_model_name_or_path": "…"',
        )
    try:
        return hub_folder.check_folder(f"the base model of {folder}", Path(name).expanduser())
    except WorkloadError as exc:
        hint = exc.hint or (
            f"bring it back, or name where it is now in {folder / ADAPTER_CONFIG}: base_model_name_or_path"
        )
        raise WorkloadError(exc.message, hint=hint) from exc


def _read_lora(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The options that ``check_lora`` knows; WorkloadError where the config says more than these can."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise WorkloadError(f"{folder}: adapters of the kind {kind!r}; skyctl uses LORA alone", hint=_MERGE)
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise WorkloadError(
            f"{folder}: init_lora_weights {start!r} has changed the base model's weights", hint=_MERGE
        )
    if config.get("revision") not in (None, "main"):
        raise WorkloadError(
            f"{folder}: the adapters are of revision {config['revision']!r} of the base model",
            hint="download that revision to a folder, and name the folder as base_model_name_or_path",
        )
    known = {*LORA_DEFAULTS, *_NO_MATTER, "init_lora_weights", "revision"}
    if more := sorted(name for name, value in config.items() if value and name not in known):
        raise WorkloadError(f"{folder}: skyctl's adapters have no {', '.join(more)}", hint=_MERGE)
    values = {name: config.get(name, default) for name, default in LORA_DEFAULTS.items()}
    if isinstance(values["target_modules"], str) and values["target_modules"] != "all-linear":
        raise WorkloadError(
            f"{folder}: target_modules is the pattern {values['target_modules']!r}; skyctl takes names",
            hint=_MERGE,
        )
    alpha = values["lora_alpha"]
    values["lora_alpha"] = int(alpha) if isinstance(alpha, float) and alpha.is_integer() else alpha
    return check_lora({**values, "modules_to_save": values["modules_to_save"] or None})
