"""Folders as ``save_pretrained`` writes them, made without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import make_spec

pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
GQA = {**SMALL, "num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **GQA},
    "llama-biases": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
    "llama-yarn": {
        "model_type": "llama",
        **GQA,
        "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4},
    },
    "mistral-sliding": {"model_type": "mistral", **GQA, "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", **GQA, "tie_word_embeddings": False},
    "qwen2-some-sliding": {
        "model_type": "qwen2",
        **GQA,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **GQA, "head_dim": 16, "tie_word_embeddings": False},
    "olmo2": {"model_type": "olmo2", **GQA, "tie_word_embeddings": False},
    "gemma2": {
        "model_type": "gemma2",
        **GQA,
        "head_dim": 16,
        "sliding_window": 5,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **GQA,
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
    },
    "smollm3": {"model_type": "smollm3", **GQA, "tie_word_embeddings": False},
    "mixtral": {"model_type": "mixtral", **GQA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        **GQA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        **GQA,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "phi3": {"model_type": "phi3", **GQA, "pad_token_id": 2, "tie_word_embeddings": False},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 300,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "scale_attn_by_inverse_layer_idx": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    },
    "bert-masked": {"model_type": "bert", **SMALL, **NO_DROPOUT, "tie_word_embeddings": False},
    "bert-classes": {
        "model_type": "bert",
        **SMALL,
        **NO_DROPOUT,
        "architectures": ["BertForSequenceClassification"],
        "num_labels": 3,
        "id2label": {"0": "a", "1": "b", "2": "c"},
    },
}


def write(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with that config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def uncut(folder: Path, seed: int = 0) -> Any:
    """The library's own model of the folder, with random weights of every kind (norms too), training mode."""
    from skyctl.workload.hf import transformers_models

    settings = transformers_models.read_settings(folder, 16, untie=False)
    torch.manual_seed(seed)
    auto = getattr(transformers_models.import_transformers(), transformers_models.AUTO_CLASSES[settings.task])
    model = auto.from_config(settings.config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def tokenizer(folder: Path) -> list[str]:
    """A word-level tokenizer.json in the folder; its words, the ids in order."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    marks = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **marks}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return words


def load(folder: Path, options: str = "context=16", **more: Any) -> Workload:
    """The workload ``hf:FOLDER,OPTIONS``, with batches of 4 unless told."""
    return load_workload(make_spec(f"hf:{folder},{options}", **{"batch_size": 4, **more}))
