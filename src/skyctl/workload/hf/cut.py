"""A library's model → named layers.

Which modules come in which order is the library's own pipeline plan (``base_model_pp_plan`` of the config)
where it has one, and a small table here where it has none. Blocks are cut into their two halves where their
parts are of a known form. Whether the layers together compute what the library's ``forward`` does is not
taken for granted: ``same`` compares the two.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from skyctl.errors import WorkloadError
from skyctl.workload.hf.layers import (
    Around,
    AttentionHalf,
    BertAttentionHalf,
    BertMlpHalf,
    Block,
    Classifier,
    Gpt2Embedding,
    MlpHalf,
)
from skyctl.workload.hf.library import SUPPORTED, WRITE, Settings

Named = list[tuple[str, nn.Module]]

PLANS: dict[str, dict[str, tuple[list[str], list[str]]]] = {
    "gpt2": {
        "wte": (["input_ids"], ["inputs_embeds"]),
        "h": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "ln_f": (["hidden_states"], ["hidden_states"]),
    },
    "bert": {
        "embeddings": (["input_ids"], ["inputs_embeds"]),
        "encoder.layer": (["hidden_states", "attention_mask"], ["hidden_states"]),
    },
}


@dataclass(frozen=True)
class Form:
    """How a block's halves are made of its parts: (norm before, the part itself, norm after), by name."""

    attention: tuple[str | None, str, str | None]
    mlp: tuple[str | None, str, str | None]

    @property
    def parts(self) -> set[str]:
        """The names of all its parts; a block of this form has these and no others."""
        return {name for name in (*self.attention, *self.mlp) if name is not None}


FORMS = (
    Form(("input_layernorm", "self_attn", None), ("post_attention_layernorm", "mlp", None)),  # Llama, Qwen
    Form(("ln_1", "attn", None), ("ln_2", "mlp", None)),  # GPT-2
    Form(
        (None, "self_attn", "post_attention_layernorm"), (None, "mlp", "post_feedforward_layernorm")
    ),  # OLMo2
    Form(
        ("input_layernorm", "self_attn", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
    ),  # Gemma
)
BERT_PARTS = {"attention", "intermediate", "output"}


def cut(model: Any, settings: Settings, *, halves: bool = True) -> Named:
    """The layers, named ``embedding``, ``block.I.attention``, ``block.I.mlp``, …, ``norm``, ``head``.

    Args:
        halves: False: whole blocks, ``block.I``.

    Raises:
        WorkloadError: the library says too little of how the model is put together.
    """
    config = settings.config
    base = getattr(model, model.base_model_prefix)
    plan = getattr(config, "base_model_pp_plan", None) or PLANS.get(config.model_type)
    names = list(plan or ())
    stacks = [n for n in names if isinstance(base.get_submodule(n), nn.ModuleList)]
    if len(stacks) != 1 or names.index(stacks[0]) != 1:
        raise WorkloadError(
            f"model_type {config.model_type!r} can't be cut: transformers gives no pipeline plan for it "
            "with one stack of blocks after one embedding",
            hint=f"supported are {SUPPORTED}; else {WRITE}",
        )
    found: Named = [("embedding", _embedding(base, names[0]))]
    rotary = getattr(base, "rotary_emb", None)
    for index, block in enumerate(base.get_submodule(stacks[0])):
        around = Around(config, _mask(settings, index), rotary)
        found += _block(index, block, around, halves)
    for name in names[2:]:
        if (module := base.get_submodule(name)) is not None:
            found.append(("norm" if len(names) == 3 else name, module))
    found.append(("head", _head(model, base, settings)))
    return found


def hub_names(model: Any, layers: Named) -> list[dict[str, str]]:
    """Per layer, the names of its parameters and kept buffers → their names in the library's model."""
    known = {id(module): name for name, module in model.named_modules()}
    found = []
    for _, layer in layers:
        names = {}
        for own in layer.state_dict(keep_vars=True):
            module, path = layer, own.split(".")
            while id(module) not in known:
                module, path = getattr(module, path[0]), path[1:]
            names[own] = ".".join([known[id(module)], *path])
        found.append(names)
    return found


def _embedding(base: Any, name: str) -> nn.Module:
    if name == "wte" and hasattr(base, "wpe"):
        return Gpt2Embedding(base.wte, base.wpe, base.drop)
    module: nn.Module = base.get_submodule(name)
    return module


def _block(index: int, block: nn.Module, around: Around, halves: bool) -> Named:
    parts = dict(block.named_children())
    name = f"block.{index}"
    if halves and parts.keys() == BERT_PARTS:
        return [
            (f"{name}.attention", BertAttentionHalf(parts["attention"], around)),
            (f"{name}.mlp", BertMlpHalf(parts["intermediate"], parts["output"])),
        ]
    form = next((form for form in FORMS if form.parts == parts.keys()), None) if halves else None
    if form is None:
        return [(name, Block(block, around))]
    before, attention, after = (parts[n] if n else None for n in form.attention)
    ahead, mlp, behind = (parts[n] if n else None for n in form.mlp)
    assert attention is not None
    assert mlp is not None
    return [
        (f"{name}.attention", AttentionHalf(before, attention, after, around)),
        (f"{name}.mlp", MlpHalf(ahead, mlp, behind)),
    ]


def _mask(settings: Settings, index: int) -> Callable[..., Any]:
    """The library's own function for the mask of that block."""
    masks = importlib.import_module("transformers.masking_utils")
    config = settings.config
    if settings.task != "causal":
        both_ways: Callable[..., Any] = masks.create_bidirectional_mask
        return both_ways
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        sliding = kinds[index] == "sliding_attention"
    else:
        sliding = getattr(config, "sliding_window", None) is not None
    function: Callable[..., Any] = (
        masks.create_sliding_window_causal_mask if sliding else masks.create_causal_mask
    )
    return function


def _head(model: Any, base: Any, settings: Settings) -> nn.Module:
    if settings.task == "classes":
        return Classifier(base.pooler, model.dropout, model.classifier)
    head: nn.Module | None = model.cls if settings.task == "masked" else getattr(model, "lm_head", None)
    if head is None:
        raise WorkloadError(
            f"model_type {settings.config.model_type!r} can't be cut: {type(model).__name__} has no lm_head",
            hint=f"supported are {SUPPORTED}; else {WRITE}",
        )
    return head
