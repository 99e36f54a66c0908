"""``hf:`` models in bfloat16, and the part of their text that is held out."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from skyctl.workload.mixed import master_of
from skyctl.workload.workload import load, make_spec

pytest.importorskip("transformers")


def _hubs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hubs", Path(__file__).with_name("hubs.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hubs"] = module
    spec.loader.exec_module(module)
    return module


hubs = _hubs()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "bert-classes"])
def test_trains_in_bfloat16_near_float32(kind: str, tmp_path: Path) -> None:
    hub = hubs.write(tmp_path / kind, hubs.CONFIGS[kind])
    losses = {}
    for dtype in ("float32", "bfloat16"):
        workload = load(make_spec(f"hf:{hub},context=16", batch_size=4, dtype=dtype))
        layers = workload.build(0, workload.layers)
        optimizer = workload.optimizer(p for layer in layers for p in layer.parameters())
        inputs, targets = next(workload.batches())
        found = []
        for _ in range(5):
            value = inputs
            for layer in layers:
                value = layer(value)
            loss = workload.loss(value, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses[dtype] = found
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
    hub = hubs.write(tmp_path / "llama", hubs.CONFIGS["llama"])
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(95)) * 20 + bytes([200]) * 100)
    spec = make_spec(f"hf:{hub},context=8", batch_size=50, data_path=str(text), validated=True)
    workload = load(spec)
    workload.check_validation()
    assert next(workload.batches())[0].max() < 95
    assert next(workload.validation())[0].unique().tolist() == [200]
