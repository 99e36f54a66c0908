"""``hf:`` models in bfloat16, and the part of their text that is held out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.workload.hf import hub_folders

from skyctl.workload.mixed_precision import master_of
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import make_spec


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "bert-classes", "gemma3", "mixtral"])
def test_trains_in_bfloat16_near_float32(kind: str, tmp_path: Path) -> None:
    hub = hub_folders.write(tmp_path / kind, hub_folders.CONFIGS[kind])
    losses = {}
    for dtype in ("float32", "bfloat16"):
        workload = load_workload(make_spec(f"hf:{hub},context=16", batch_size=4, dtype=dtype))
        layers = workload.build(0, workload.layers)
        optimizer = workload.optimizer(p for layer in layers for p in layer.parameters())
        inputs, targets = next(workload.batches())
        values = []
        for _ in range(5):
            value = inputs
            for layer in layers:
                value = layer(value)
            loss = workload.loss(value, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        losses[dtype] = values
        assert loss.dtype == torch.float32
        assert {t.dtype for t in workload.boundary(2, 4)} == {dtype}
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["bfloat16"][-1] < losses["bfloat16"][0]
    for layer in layers:
        assert {p.dtype for p in layer.parameters()} <= {torch.bfloat16}
        assert {master_of(p).dtype for p in layer.parameters()} <= {torch.float32}
        for name, buffer in layer.named_buffers():
            if "inv_freq" in name:
                assert buffer.dtype == torch.float32


def test_the_end_of_the_tokens_is_held_out(tmp_path: Path) -> None:
    hub = hub_folders.write(tmp_path / "llama", hub_folders.CONFIGS["llama"])
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(1, 96)) * 20 + bytes([120]) * 100)
    spec = make_spec(f"hf:{hub},context=8", batch_size=50, data_path=str(text), validated=True)
    workload = load_workload(spec)
    workload.check_validation()
    assert next(workload.batches())[0].max() < 96
    assert next(workload.validation())[0].unique().tolist() == [120]
