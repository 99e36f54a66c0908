"""Cuts a model of the ``transformers`` library into named layers, each of one tensor in and one tensor out.

The modules and their order are those of the library's own pipeline plan (``base_model_pp_plan`` of the
config), or of a small table here. Blocks are cut into their two halves where their parts are of a known form.
Whether the layers together compute what the library's ``forward`` does is checked by ``hub_model``.

A layer holds modules of the library's own and does what the library does between them. The library computes
the attention mask, positions, and rotary cos and sin once for all blocks. Here each attention computes them
anew from the shape of its input: cheaper than sending them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.errors import WorkloadError
from skyctl.workload.hf.transformers_models import SUPPORTED, WRITE_TRAIN_PY, HubSettings


class BlockContext(nn.Module):
    """Computes what the library's model passes to every block in addition to the hidden states.

    Positions are plain 0, 1, 2, …, so the mask is asked for without them: the library would only look in
    them for several sequences in one sample. Those of packed samples are given, and there it finds each one.
    Rotary frequencies are float32 also where layers compute in bfloat16, which cannot tell far places apart.

    Args:
        kind: of the block, where ``rotary`` has frequencies of their own for each kind (Gemma 3).

    Attributes:
        cache: the library's, of keys and values of earlier tokens; None: each call is with whole samples.
    """

    keep_float32 = True

    def __init__(
        self, config: Any, mask: Callable[..., Any], rotary: nn.Module | None, kind: str | None = None
    ) -> None:
        super().__init__()
        self.config, self.mask, self.rotary, self.kind = config, mask, rotary, kind
        self.cache: Any = None

    def forward(self, x: Tensor, packed: Tensor | None = None) -> dict[str, Any]:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0) if packed is None else packed
        if self.cache is not None:
            positions = positions + self.cache.get_seq_length()
        given: dict[str, Any] = {"position_ids": positions}
        if self.rotary is not None:
            kind = () if self.kind is None else (self.kind,)
            given["position_embeddings"] = self.rotary(x, positions, *kind)
        where = {} if packed is None else {"position_ids": packed}
        given["attention_mask"] = self.mask(
            self.config, x, attention_mask=None, past_key_values=self.cache, **where
        )
        if self.cache is not None:
            given["past_key_values"] = self.cache
        return given


class WholeBlock(nn.Module):
    """A whole block as one layer, where its parts are of no known form."""

    def __init__(self, block: nn.Module, around: BlockContext) -> None:
        super().__init__()
        self.block, self.around = block, around

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return _first_tensor(self.block(x, **self.around(x, positions)))


class AttentionHalf(nn.Module):
    """x + after(attention(before(x))), [samples, context, hidden]; norms where the family has them."""

    def __init__(
        self, before: nn.Module | None, attention: nn.Module, after: nn.Module | None, around: BlockContext
    ) -> None:
        super().__init__()
        self.before, self.attention, self.after, self.around = before, attention, after, around

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        inner = x if self.before is None else self.before(x)
        mixed = _first_tensor(self.attention(hidden_states=inner, **self.around(x, positions)))
        return x + (mixed if self.after is None else self.after(mixed))


class MlpHalf(nn.Module):
    """x + after(mlp(before(x))), [samples, context, hidden]; norms where the family has them."""

    def __init__(self, before: nn.Module | None, mlp: nn.Module, after: nn.Module | None) -> None:
        super().__init__()
        self.before, self.mlp, self.after = before, mlp, after

    def forward(self, x: Tensor) -> Tensor:
        out = _first_tensor(self.mlp(x if self.before is None else self.before(x)))
        return x + (out if self.after is None else self.after(out))


class BertAttentionHalf(nn.Module):
    """BERT's attention: the residual and the norm after it are its own (post-norm)."""

    def __init__(self, attention: nn.Module, around: BlockContext) -> None:
        super().__init__()
        self.attention, self.around = attention, around

    def forward(self, x: Tensor) -> Tensor:
        return _first_tensor(self.attention(x, self.around(x)["attention_mask"]))


class BertMlpHalf(nn.Module):
    """BERT's feed-forward: ``output`` adds the residual and norms."""

    def __init__(self, intermediate: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.intermediate, self.output = intermediate, output

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(self.intermediate(x), x)
        return out


class Gpt2Embedding(nn.Module):
    """Ids [samples, context] → [samples, context, hidden]: a learned vector per token and per place.

    Attributes:
        seen: tokens of the same samples in calls before; None: each call is with whole samples.
    """

    def __init__(self, wte: nn.Module, wpe: nn.Module, drop: nn.Module) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = wte, wpe, drop
        self.seen: int | None = None

    def forward(self, ids: Tensor, packed: Tensor | None = None) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0) if packed is None else packed
        if self.seen is not None:
            positions = positions + self.seen
            self.seen += ids.shape[1]
        out: Tensor = self.drop(self.wte(ids) + self.wpe(positions))
        return out


class ClassifierHead(nn.Module):
    """[samples, context, hidden] → [samples, classes], from the first token."""

    def __init__(self, pooler: nn.Module, dropout: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.pooler, self.dropout, self.classifier = pooler, dropout, classifier

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.dropout(self.pooler(x)))
        return out


class SoftCappedHead(nn.Module):
    """[samples, context, hidden] → scores within ±``cap``: ``cap`` · tanh(scores / ``cap``) (Gemma 2)."""

    def __init__(self, head: nn.Module, cap: float) -> None:
        super().__init__()
        self.head, self.cap = head, cap

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(x) / self.cap) * self.cap


def _first_tensor(value: Any) -> Tensor:
    out: Tensor = value[0] if isinstance(value, tuple) else value
    return out


NamedLayers = list[tuple[str, nn.Module]]

PIPELINE_PLANS: dict[str, dict[str, tuple[list[str], list[str]]]] = {
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
class BlockForm:
    """How a block's halves are made of its parts, by name: (norm before, the part itself, norm after)."""

    attention: tuple[str | None, str, str | None]
    mlp: tuple[str | None, str, str | None]

    @property
    def parts(self) -> set[str]:
        """The names of all parts of a block of this form, which has no others."""
        return {name for name in (*self.attention, *self.mlp) if name is not None}


BLOCK_FORMS = (
    BlockForm(
        ("input_layernorm", "self_attn", None), ("post_attention_layernorm", "mlp", None)
    ),  # Llama, Qwen
    BlockForm(("ln_1", "attn", None), ("ln_2", "mlp", None)),  # GPT-2
    BlockForm(
        (None, "self_attn", "post_attention_layernorm"), (None, "mlp", "post_feedforward_layernorm")
    ),  # OLMo2
    BlockForm(
        ("input_layernorm", "self_attn", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
    ),  # Gemma 2 and 3
    BlockForm(
        ("input_layernorm", "self_attn", "resid_attn_dropout"),
        ("post_attention_layernorm", "mlp", "resid_mlp_dropout"),
    ),  # Phi-3
)
BERT_PARTS = {"attention", "intermediate", "output"}


def cut_into_layers(model: Any, settings: HubSettings, *, halves: bool = True) -> NamedLayers:
    """Cuts a model into layers ``embedding``, ``block.I.attention``, ``block.I.mlp``, …, ``norm``, ``head``.

    Args:
        halves: cut blocks into their halves; False: whole blocks, ``block.I``.

    Raises:
        WorkloadError: there is no pipeline plan for the model, or it has no head of the expected name.
    """
    config = settings.config
    base = getattr(model, model.base_model_prefix)
    plan = getattr(config, "base_model_pp_plan", None) or PIPELINE_PLANS.get(config.model_type)
    names = list(plan or ())
    stacks = [n for n in names if isinstance(base.get_submodule(n), nn.ModuleList)]
    if len(stacks) != 1 or names.index(stacks[0]) != 1:
        raise WorkloadError(
            f"model_type {config.model_type!r} can't be cut: transformers gives no pipeline plan for it "
            "with one stack of blocks after one embedding",
            hint=f"supported are {SUPPORTED}; else {WRITE_TRAIN_PY}",
        )
    layers: NamedLayers = [("embedding", _make_embedding(base, names[0]))]
    rotary = getattr(base, "rotary_emb", None)
    for index, block in enumerate(base.get_submodule(stacks[0])):
        around = BlockContext(
            config, _mask_function(settings, index), rotary, _rotary_kind(config, rotary, index)
        )
        layers += _cut_block(index, block, around, halves)
    for name in names[2:]:
        if (module := base.get_submodule(name)) is not None:
            layers.append(("norm" if len(names) == 3 else name, module))
    layers.append(("head", _make_head(model, base, settings)))
    if settings.records == "packed":
        for name, layer in layers:
            _pass_positions(layer, last=name == "head")
    return layers


class _WithPositions:
    """A layer of packed rows: also called with (x, positions), it gives (what it makes of x, positions)."""

    takes_positions: bool
    is_last: bool

    def forward(self, value: Any, *more: Any, **named: Any) -> Any:
        inner: Callable[..., Any] = super().forward  # type: ignore[misc]
        if not isinstance(value, tuple):  # within the library's own model
            return inner(value, *more, **named)
        x, positions = value
        made = inner(x, positions) if self.takes_positions else inner(x)
        return made if self.is_last else (made, positions)


def _pass_positions(layer: nn.Module, *, last: bool) -> None:
    """Has a layer hand on the positions of packed rows beside its tensor.

    Its class is changed, and not the layer wrapped: so its tensors keep their names, in files of weights too.
    """
    kind = type(layer)
    taking = issubclass(kind, WholeBlock | AttentionHalf | Gpt2Embedding)
    more = {"takes_positions": taking, "is_last": last}
    layer.__class__ = type(kind.__name__, (_WithPositions, kind), more)


def library_names(model: Any, layers: NamedLayers) -> list[dict[str, str]]:
    """Per layer, the names of its parameters and persistent buffers → their names in the library's model."""
    module_names = {id(module): name for name, module in model.named_modules()}
    by_layer = []
    for _, layer in layers:
        names = {}
        for own in layer.state_dict(keep_vars=True):
            module, path = layer, own.split(".")
            while id(module) not in module_names:
                module, path = getattr(module, path[0]), path[1:]
            names[own] = ".".join([module_names[id(module)], *path])
        by_layer.append(names)
    return by_layer


def _make_embedding(base: Any, name: str) -> nn.Module:
    if name == "wte" and hasattr(base, "wpe"):
        return Gpt2Embedding(base.wte, base.wpe, base.drop)
    module: nn.Module = base.get_submodule(name)
    return module


def _cut_block(index: int, block: nn.Module, around: BlockContext, halves: bool) -> NamedLayers:
    parts = dict(block.named_children())
    name = f"block.{index}"
    if halves and parts.keys() == BERT_PARTS:
        return [
            (f"{name}.attention", BertAttentionHalf(parts["attention"], around)),
            (f"{name}.mlp", BertMlpHalf(parts["intermediate"], parts["output"])),
        ]
    form = next((form for form in BLOCK_FORMS if form.parts == parts.keys()), None) if halves else None
    if form is None:
        return [(name, WholeBlock(block, around))]
    before, attention, after = (parts[n] if n else None for n in form.attention)
    ahead, mlp, behind = (parts[n] if n else None for n in form.mlp)
    assert attention is not None
    assert mlp is not None
    return [
        (f"{name}.attention", AttentionHalf(before, attention, after, around)),
        (f"{name}.mlp", MlpHalf(ahead, mlp, behind)),
    ]


def _mask_function(settings: HubSettings, index: int) -> Callable[..., Any]:
    """The library's own function that makes the attention mask of block ``index``."""
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


def _rotary_kind(config: Any, rotary: nn.Module | None, index: int) -> str | None:
    """The kind of attention of block ``index``, for ``rotary``; None: it does not take that."""
    if rotary is None or "layer_type" not in inspect.signature(rotary.forward).parameters:
        return None
    return str(config.layer_types[index])


def _make_head(model: Any, base: Any, settings: HubSettings) -> nn.Module:
    if settings.task == "classes":
        return ClassifierHead(base.pooler, model.dropout, model.classifier)
    head: nn.Module | None = model.cls if settings.task == "masked" else getattr(model, "lm_head", None)
    if head is None:
        raise WorkloadError(
            f"model_type {settings.config.model_type!r} can't be cut: {type(model).__name__} has no lm_head",
            hint=f"supported are {SUPPORTED}; else {WRITE_TRAIN_PY}",
        )
    cap = getattr(settings.config, "final_logit_softcapping", None)
    return head if cap is None else SoftCappedHead(head, float(cap))
