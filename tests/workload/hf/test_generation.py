"""Tokens one at a time, by layers that remember those before, are the library's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.workload.hf import hub_folders

from skyctl.workload.hf.generation import remember_tokens
from skyctl.workload.workload import Workload

CAUSAL = sorted(name for name in hub_folders.CONFIGS if not name.startswith("bert"))
NEW_TOKENS = 20
PROMPT = torch.tensor([[5, 17, 250, 3, 42, 8, 99]])


@pytest.mark.parametrize("name", CAUSAL)
def test_greedy_tokens_are_the_librarys(name: str, tmp_path: Path) -> None:
    folder = hub_folders.write(tmp_path, hub_folders.CONFIGS[name])
    model = hub_folders.uncut(folder).eval()
    model.save_pretrained(str(folder))
    assert greedy(hub_folders.load(folder)) == librarys(model)


def librarys(model: Any) -> list[int]:
    """The tokens that the library generates."""
    asked = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    return list(model.generate(input_ids=PROMPT, **asked)[0].tolist())


def greedy(workload: Workload) -> list[int]:
    """The tokens that the workload's layers generate, one after another."""
    layers = workload.build(0, workload.layers)
    remember_tokens(layers)
    ids, new = PROMPT, PROMPT
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            value: Any = new
            for layer in layers:
                value = layer(value)
            new = value[:, -1:].argmax(dim=-1)
            ids = torch.cat([ids, new], dim=1)
    return list(ids[0].tolist())
