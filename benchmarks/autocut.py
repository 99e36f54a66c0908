"""The cost of cutting a nanoGPT automatically, against the same model written as a list of layers.

Prints one JSON line: the ratios of their steps, launched in turns on two unequal local nodes, and whether
their plans are the same. About four minutes.

    python benchmarks/autocut.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median, quantiles

from runs.labs import Bench, local_nodes

CLUSTER = """\
name: local
nodes:
  - {name: n1, transport: local, threads: 1}
  - {name: n2, transport: local, threads: 1, slowdown: 2}
"""
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

BLOCKS, WIDTH, HEADS, CONTEXT, VOCABULARY = 8, 128, 4, 64, 65


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, HEADS, C // HEADS).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), CausalSelfAttention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, idx):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x)).transpose(1, 2)


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, idx):
        return self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):
        return self.lm_head(self.ln_f(x)).transpose(1, 2)


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, VOCABULARY, (batch_size, CONTEXT + 1), generator=generator)
        yield ids[:, :-1], ids[:, 1:]
"""
FORMS = {
    "automatic": "def model():\n    return GPT()\n",
    "list": "def model():\n    return [Embedding(), *(Block() for _ in range(BLOCKS)), Head()]\n",
}
SIZES = ("--batch-size", 16, "--microbatches", 4)
STEPS, TURNS = 16, 12


def main() -> None:
    """Plans both forms, launches their plans in turns, prints the line."""
    with local_nodes(CLUSTER) as bench:
        plans = {form: _plan(bench, form, text) for form, text in FORMS.items()}
        steps: dict[str, list[float]] = {form: [] for form in FORMS}
        for turn in range(TURNS):
            for form in sorted(FORMS, reverse=bool(turn % 2)):
                run = bench.skyctl("launch", plans[form], "--steps", STEPS)
                steps[form].append(run["iteration_s"]["median"])
        found = {form: _stages(plan) for form, plan in plans.items()}
    ratios = [a / b for a, b in zip(steps["automatic"], steps["list"], strict=True)]
    print(
        json.dumps(
            {
                "benchmark": "autocut",
                "ratio": round(median(ratios), 4),
                "quartiles": [round(quarter, 4) for quarter in quantiles(ratios)],
                "ratios": [round(ratio, 4) for ratio in ratios],
                "step_s": {form: round(median(each), 5) for form, each in steps.items()},
                "same_plan": found["automatic"] == found["list"],
                "plans": found,
            }
        )
    )


def _plan(bench: Bench, form: str, text: str) -> Path:
    folder = bench.folder / form
    folder.mkdir()
    source = folder / "train.py"
    source.write_text(MODEL + "\n\n" + text)
    path = folder / "plan.json"
    bench.skyctl("probe", source, *SIZES)
    bench.skyctl("plan", source, *SIZES, "--parallel", "pipeline", "--no-learn", "-o", path)
    return path


def _stages(plan: Path) -> list[tuple[str, int, int]]:
    """(device, first layer, end) of each stage."""
    stages = json.loads(plan.read_text())["stages"]
    return [
        (replica["device"], stage["start"], stage["stop"])
        for stage in stages
        for replica in stage["replicas"]
    ]


if __name__ == "__main__":
    main()
