"""The built-in models: a byte-level decoder (gpt) and encoder (bert), cut at attention and MLP.

Every layer maps one tensor to one tensor: residual connections stay inside a layer. GPT after Radford
et al. 2019 (pre-norm, learned positions, GELU); projections back to the residual path start at zero and byte
embeddings wider than usual, so that a deep model learns from its first steps on, at one learning rate.
This module does not know about stages, microbatches or devices.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name

from skyctl.errors import WorkloadError

VOCABULARY_SIZE = 256
CLASSES = 2
CLASS_TOKEN = 0
STD = 0.02
BYTE_STD = 0.2
POSITION_STD = 0.1
BETAS = (0.9, 0.99)


def _linear(fan_in: int, fan_out: int, std: float = STD) -> nn.Linear:
    linear = nn.Linear(fan_in, fan_out)
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return linear


class Embedding(nn.Module):
    """Bytes [samples, context] → [samples, context, hidden]: a learned vector per byte and per position."""

    def __init__(self, hidden: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY_SIZE, hidden)
        self.position = nn.Parameter(torch.empty(context, hidden))
        nn.init.normal_(self.byte.weight, std=BYTE_STD)
        nn.init.normal_(self.position, std=POSITION_STD)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.byte(ids) + self.position[: ids.shape[1]]
        return out


class Attention(nn.Module):
    """x + attention(norm(x)), [samples, context, hidden] both ways."""

    def __init__(self, hidden: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm = nn.LayerNorm(hidden)
        self.qkv = _linear(hidden, 3 * hidden)
        self.out = _linear(hidden, hidden, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        samples, context, hidden = x.shape
        qkv = self.qkv(self.norm(x)).view(samples, context, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [samples, heads, context, hidden/heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = x + self.out(mixed.transpose(1, 2).reshape(samples, context, hidden))
        return out


class Mlp(nn.Module):
    """x + mlp(norm(x)), four times as wide inside."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = _linear(hidden, 4 * hidden)
        self.down = _linear(4 * hidden, hidden, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Head(nn.Module):
    """Final norm, then scores: of the next byte everywhere (gpt), or of a class at the first place (bert)."""

    def __init__(self, hidden: int, classes: int, pool: bool) -> None:
        super().__init__()
        self.pool = pool
        self.norm = nn.LayerNorm(hidden)
        self.scores = _linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scores(self.norm(x[:, 0] if self.pool else x))
        return out


def build_layers(kind: str, sizes: Mapping[str, int]) -> list[tuple[str, nn.Module]]:
    """The layers, named ``embedding``, ``block.I.attention``, ``block.I.mlp``, …, ``head``."""
    hidden, heads, count = sizes["hidden"], sizes["heads"], sizes["layers"]
    causal = kind == "gpt"
    layers: list[tuple[str, nn.Module]] = [("embedding", Embedding(hidden, sizes["context"]))]
    for block in range(count):
        layers.append((f"block.{block}.attention", Attention(hidden, heads, causal)))
        layers.append((f"block.{block}.mlp", Mlp(hidden)))
    head = Head(hidden, VOCABULARY_SIZE, pool=False) if causal else Head(hidden, CLASSES, pool=True)
    layers.append(("head", head))
    return layers


def default_learning_rate(hidden: int) -> float:
    """AdamW's default: 1e-3 up to 128 wide, less in proportion beyond (wide layers move further a step)."""
    return min(1e-3, 0.128 / hidden)


def _tensor(rows: list[bytes]) -> Tensor:
    """Bytes, one row per sample → int64 [rows, row length]; ``torch.frombuffer`` needs no numpy."""
    flat = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
    return flat.view(len(rows), -1).long()


def check_text(kind: str, sizes: Mapping[str, int], text: bytes, name: str) -> None:
    """Checks that the text is long enough for one sample; WorkloadError where it is not."""
    need = sizes["context"] + 1 if kind == "gpt" else 2 * sizes["context"]
    if len(text) < need:
        raise WorkloadError(
            f"the text {name} has {len(text)} bytes; "
            f"{kind} with context={sizes['context']} needs at least {need}",
            hint="a longer text, or a smaller context",
        )


def draw_samples(
    kind: str,
    sizes: Mapping[str, int],
    text: bytes,
    batch_size: int,
    seed: int,
    step: int,
    start: int,
    stop: int,
) -> tuple[Tensor, Tensor]:
    """Samples [start, stop) of one step's batch. Offsets (``random.Random``) are the same on every torch.

    gpt: inputs and targets int64 [samples, context], the targets one byte ahead. bert: inputs int64
    [samples, context], a class token and two halves; targets int64 [samples], 1 where the second half follows
    the first in the text, 0 where it is from elsewhere (next-sentence style, Devlin et al. 2018).
    """
    rng = random.Random(f"skyctl {kind} {seed} {step}")  # noqa: S311 - reproducible, not secret
    context = sizes["context"]
    rows: list[bytes] = []
    labels: list[int] = []
    if kind == "gpt":
        at = [rng.randrange(len(text) - context) for _ in range(batch_size)]
        rows = [text[a : a + context + 1] for a in at[start:stop]]
        both = _tensor(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()
    first = (context - 1) // 2
    second = context - 1 - first
    for _ in range(batch_size):
        a = rng.randrange(len(text) - context)
        b = rng.randrange(len(text) - context)
        follows = rng.randrange(2)
        labels.append(follows)
        b = a + first if follows else b
        rows.append(bytes([CLASS_TOKEN]) + text[a : a + first] + text[b : b + second])
    return _tensor(rows[start:stop]), torch.tensor(labels[start:stop], dtype=torch.int64)
