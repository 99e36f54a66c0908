"""The layers a library's model is cut into: each holds modules of the library's own and does what the
library's ``forward`` does between them. One tensor in, one tensor out.

What the library computes once for all blocks (attention mask, positions, rotary cos and sin) is made anew in
each attention from the shape of its input: cheaper than sending it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Around(nn.Module):
    """What the library's model hands to every block beside the hidden states.

    Positions are plain 0, 1, 2, …, so the mask is asked for without them: the library would only look in
    them for several sequences in one sample. Rotary frequencies are float32 also where layers compute in
    bfloat16, which cannot tell far places apart.
    """

    keep_float32 = True

    def __init__(self, config: Any, mask: Callable[..., Any], rotary: nn.Module | None) -> None:
        super().__init__()
        self.config, self.mask, self.rotary = config, mask, rotary

    def forward(self, x: Tensor) -> dict[str, Any]:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        given: dict[str, Any] = {"position_ids": positions}
        if self.rotary is not None:
            given["position_embeddings"] = self.rotary(x, positions)
        given["attention_mask"] = self.mask(self.config, x, attention_mask=None, past_key_values=None)
        return given


class Block(nn.Module):
    """A whole block, where its parts are of no known form."""

    def __init__(self, block: nn.Module, around: Around) -> None:
        super().__init__()
        self.block, self.around = block, around

    def forward(self, x: Tensor) -> Tensor:
        return _first(self.block(x, **self.around(x)))


class AttentionHalf(nn.Module):
    """x + after(attention(before(x))), the norms where the family has them."""

    def __init__(
        self, before: nn.Module | None, attention: nn.Module, after: nn.Module | None, around: Around
    ) -> None:
        super().__init__()
        self.before, self.attention, self.after, self.around = before, attention, after, around

    def forward(self, x: Tensor) -> Tensor:
        inner = x if self.before is None else self.before(x)
        mixed = _first(self.attention(hidden_states=inner, **self.around(x)))
        return x + (mixed if self.after is None else self.after(mixed))


class MlpHalf(nn.Module):
    """x + after(mlp(before(x)))."""

    def __init__(self, before: nn.Module | None, mlp: nn.Module, after: nn.Module | None) -> None:
        super().__init__()
        self.before, self.mlp, self.after = before, mlp, after

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(x if self.before is None else self.before(x))
        return x + (out if self.after is None else self.after(out))


class BertAttentionHalf(nn.Module):
    """BERT's attention: the residual and the norm after it are its own (post-norm)."""

    def __init__(self, attention: nn.Module, around: Around) -> None:
        super().__init__()
        self.attention, self.around = attention, around

    def forward(self, x: Tensor) -> Tensor:
        return _first(self.attention(x, self.around(x)["attention_mask"]))


class BertMlpHalf(nn.Module):
    """BERT's feed-forward: ``output`` adds the residual and norms."""

    def __init__(self, intermediate: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.intermediate, self.output = intermediate, output

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(self.intermediate(x), x)
        return out


class Gpt2Embedding(nn.Module):
    """Ids [samples, context] → [samples, context, hidden]: a learned vector per token and per place."""

    def __init__(self, wte: nn.Module, wpe: nn.Module, drop: nn.Module) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = wte, wpe, drop

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        out: Tensor = self.drop(self.wte(ids) + self.wpe(positions))
        return out


class Classifier(nn.Module):
    """[samples, context, hidden] → [samples, classes], from the first token."""

    def __init__(self, pooler: nn.Module, dropout: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.pooler, self.dropout, self.classifier = pooler, dropout, classifier

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.dropout(self.pooler(x)))
        return out


def _first(value: Any) -> Tensor:
    out: Tensor = value[0] if isinstance(value, tuple) else value
    return out
