"""A rank's part of the trained weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from skyctl.checkpoint.node import safetensors
from skyctl.worker.checkpointer import save_weights
from skyctl.workload.deferred_init import OperationTape
from skyctl.workload.layered_model import LayeredModel


class Remembering(nn.Linear):
    """Has a state beside its tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_what_is_no_tensor_is_left_out(tmp_path: Path) -> None:
    layer = Remembering(2, 3)
    path = tmp_path / "weights.safetensors"
    layers = [*(nn.Identity() for _ in range(4)), nn.GELU(), layer]
    model = LayeredModel("train.py", ["a", "b", "c", "d", "gelu", "remembering"], layers, OperationTape(0))
    assert save_weights(path, layers[4:], 4, model) == str(path)
    names = list(safetensors.read_header(path).tensors)
    assert sorted(names) == ["5.bias", "5.weight"]
    assert torch.equal(safetensors.load(path, names)["5.weight"], layer.weight)
