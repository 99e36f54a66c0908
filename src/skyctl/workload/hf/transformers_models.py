"""Builds models with the ``transformers`` library, imported late: reads the config, builds without values.

A model that can't be cut or trained here is refused by its ``model_type``, with those that can.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skyctl.errors import WorkloadError
from skyctl.workload.hf.experts import EXPERTS, register_experts
from skyctl.workload.hf.hub_folder import CONFIG_NAME, DEFAULT_CONTEXT
from skyctl.workload.user_code import describe_exception

MIN_TRANSFORMERS = (5, 6)
SUPPORTED = "Llama-, Mistral-, Mixtral-, Qwen-, Gemma-, Phi-3- and GPT-2-like language models, and BERT"
WRITE_TRAIN_PY = "write a train.py whose model() gives the layers"
AUTO_CLASSES = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "classes": "AutoModelForSequenceClassification",
}


@dataclass(frozen=True)
class HubSettings:
    """A folder's config, and what it is used for.

    Attributes:
        task: ``causal`` (next token), ``masked`` (hidden tokens), ``classes`` (which class a sequence is of).
        context: tokens per sample.
        records: what a row of the data is, one of ``hub_folder.RECORD_FORMS``; empty: a piece of a text.
    """

    config: Any
    task: str
    context: int
    records: str = ""

    @property
    def vocabulary(self) -> int:
        """How many token ids the model knows."""
        return int(self.config.vocab_size)

    @property
    def positions(self) -> int | None:
        """How many tokens the model takes at once; None: any number."""
        return int(getattr(self.config, "max_position_embeddings", 0) or 0) or None


def import_transformers() -> Any:
    """Imports ``transformers`` and silences its logging.

    Raises:
        ModuleNotFoundError: it is not installed.
        WorkloadError: it is too old.
    """
    transformers: Any = importlib.import_module("transformers")
    numbers = [int(n) for n in re.findall(r"\d+", transformers.__version__)[:2]]
    if tuple(numbers) < MIN_TRANSFORMERS:
        need = ".".join(map(str, MIN_TRANSFORMERS))
        raise WorkloadError(
            f"hf: needs transformers {need} or newer, here is {transformers.__version__}",
            hint=f"pip install 'transformers>={need}' there",
        )
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def read_settings(folder: Path, context: int, untie: bool) -> HubSettings:
    """Reads and checks the folder's config.

    Args:
        context: tokens per sample; 0: the default.
        untie: train tied embeddings as two, which start from the same stored values.

    Raises:
        WorkloadError: the model can't be cut or trained here, or the context does not fit it.
    """
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as exc:
        raise WorkloadError(
            f"{folder / CONFIG_NAME} can't be read as a model's config: {describe_exception(exc)}",
            hint=f"supported are {SUPPORTED}; else {WRITE_TRAIN_PY}",
        ) from exc
    task = _find_task(config, folder)
    _check_supported(config, folder)
    if untie:
        config.tie_word_embeddings = False
    most = HubSettings(config, task, 0).positions
    wanted = context or min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT)
    if most and wanted > most:
        raise WorkloadError(f"context={wanted} is more than the {most} positions that {folder.name} has")
    least = {"causal": 2, "masked": 8, "classes": 6}[task]
    if wanted < least:
        raise WorkloadError(f"context={wanted}: {folder.name} needs at least {least} tokens a sample")
    return HubSettings(config, task, wanted)


def build_model(settings: HubSettings, folder: Path) -> Any:
    """Builds the library's own model in training mode; inside ``deferred_initialization`` it has no values.

    Raises:
        WorkloadError: the library can't build it.
    """
    auto = getattr(import_transformers(), AUTO_CLASSES[settings.task])
    own = {"experts_implementation": EXPERTS} if register_experts() else {}
    try:
        model = auto.from_config(settings.config, dtype=torch.float32, **own)  # sdpa where the model has it
    except Exception as exc:
        raise WorkloadError(
            f"transformers can't build {folder.name} (model_type {settings.config.model_type!r}): "
            f"{describe_exception(exc)}",
            hint=f"supported are {SUPPORTED}; else {WRITE_TRAIN_PY}",
        ) from exc
    return model.train()


def tied_parameters(model: Any) -> dict[str, str]:
    """By name in the library's model, parameter → the one it is tied to if the config says so."""
    keys = getattr(type(model), "_tied_weights_keys", None)
    return dict(keys) if isinstance(keys, dict) else {}


def _find_task(config: Any, folder: Path) -> str:
    """The task, by the first of ``architectures``; without one, or with the base model's, the usual task."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    kind = str(config.model_type)
    body = auto.MODEL_MAPPING_NAMES.get(kind)
    wanted = (getattr(config, "architectures", None) or [None])[0]
    if kind == "bert":
        tasks = {"BertForMaskedLM": "masked", "BertForSequenceClassification": "classes", None: "masked"}
        tasks[body] = "masked"
    else:
        causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
        tasks = {causal: "causal", None: "causal", body: "causal"} if causal else {}
    if wanted not in tasks:
        has = f"; of {kind} there are {', '.join(sorted(k for k in tasks if k))}" if tasks else ""
        raise _unsupported(config, folder, f"its architecture {wanted} is not one of them{has}")
    return tasks[wanted]


def _check_supported(config: Any, folder: Path) -> None:
    if config.is_encoder_decoder or (getattr(config, "is_decoder", False) and config.model_type == "bert"):
        raise _unsupported(config, folder, "models with cross-attention can't be cut in a chain")
    for name in ("vision_config", "audio_config", "text_config"):
        if getattr(config, name, None) is not None:
            raise _unsupported(config, folder, f"it is made of several models ({name})")
    if getattr(config, "output_router_logits", False):
        raise _unsupported(
            config, folder, "its loss has a term of all routers together (output_router_logits)"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise _unsupported(config, folder, "its weights are quantised, and can't be trained")
    ropes = getattr(config, "rope_parameters", None) or {}
    rope = str(ropes.get("rope_type", "default"))
    if "dynamic" in rope or rope == "longrope":
        raise _unsupported(config, folder, f"its positions ({rope}) change with what was seen before")
    if config.model_type == "bert" and (config.num_labels < 2 or config.problem_type not in _ONE_CLASS):
        raise _unsupported(config, folder, "its labels are not one class of two or more")


_ONE_CLASS = (None, "single_label_classification")


def _unsupported(config: Any, folder: Path, why: str) -> WorkloadError:
    return WorkloadError(
        f"{folder.name}: model_type {config.model_type!r} can't be trained here: {why}",
        hint=f"supported are {SUPPORTED}; else {WRITE_TRAIN_PY}",
    )
