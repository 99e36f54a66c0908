"""A rank's part of the trained weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from skyctl.checkpoint import safetensors
from skyctl.worker.checkpointer import save_weights


class Remembering(nn.Linear):
    """Has a state beside its tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_what_is_no_tensor_is_left_out(tmp_path: Path) -> None:
    layer = Remembering(2, 3)
    path = tmp_path / "weights.safetensors"
    assert save_weights(path, [nn.GELU(), layer], 4, ["a", "b", "c", "d", "gelu", "remembering"]) == str(path)
    names = list(safetensors.read_header(path).tensors)
    assert sorted(names) == ["5.bias", "5.weight"]
    assert torch.equal(safetensors.load(path, names)["5.weight"], layer.weight)
