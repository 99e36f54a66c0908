"""One step's shards as one file of weights."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from skyctl.checkpoint.node import safetensors
from skyctl.checkpoint.node.layout import layer_name
from skyctl.checkpoint.node.shards import ShardStamp, StageState
from skyctl.checkpoint.node.weights_export import export_weights
from skyctl.errors import RecordError
from skyctl.worker.checkpointer import save_weights
from skyctl.workload.mixed_precision import master_of
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import WorkloadSpec


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_file_as_a_run_ends_with(dtype: str, tmp_path: Path) -> None:
    spec = WorkloadSpec("gpt:layers=1,hidden=16,heads=2,context=8", dtype=dtype, random_inputs=True)
    workload = load_workload(spec)
    layers = workload.build(0, workload.layers)
    optimizer = workload.optimizer([p for layer in layers for p in layer.parameters()])
    state = StageState(layers, optimizer, master_of)
    for layer, name in enumerate(workload.names):
        stamp = ShardStamp("r", 3, layer, name, workload.layers, workload.digest, dtype, 0)
        state.write(layer, tmp_path / layer_name(layer), stamp)
    assert export_weights(tmp_path, tmp_path / "out") == 3
    save_weights(tmp_path / "expected", layers, 0, workload.model)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "expected").read_bytes()


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    stamp = ShardStamp("r", 3, 0, "a", 3, "w", "float32", 0)
    state = StageState([layer], None, master_of)
    with pytest.raises(RecordError, match="holds no layers of a checkpoint"):
        export_weights(tmp_path, tmp_path / "out")
    state.write(0, tmp_path / layer_name(0), stamp)
    state.write(0, tmp_path / layer_name(2), replace(stamp, layer=2))
    with pytest.raises(RecordError, match="lacks layer 1: it holds 2 of 3"):
        export_weights(tmp_path, tmp_path / "out")
    state.write(0, tmp_path / layer_name(1), replace(stamp, layer=1, step=4))
    with pytest.raises(RecordError, match=r"layer-00001\.safetensors is of step '4', layer-00000"):
        export_weights(tmp_path, tmp_path / "out")
    safetensors.save(tmp_path / layer_name(1), {"x": torch.zeros(1)})
    with pytest.raises(RecordError, match="is no shard"):
        export_weights(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shutil.rmtree(tmp_path)
