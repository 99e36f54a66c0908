"""Fixtures of the worker's tests: processes that play ranks, and workloads to train."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

WORKLOAD = """
import torch
from torch import nn

class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
    def forward(self, ids):
        return self.table(ids), ids

class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, given):
        x, ids = given
        return self.linear(x), ids, x

class Relu(nn.Module):
    def forward(self, given):
        x, ids, skip = given
        return x.relu(), ids, skip

class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
    def forward(self, given):
        x, ids, skip = given
        return self.norm(x + skip) * (ids > 2).unsqueeze(-1)

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 11)
    def forward(self, x):
        return self.linear(x.mean(1))

def model():
    return nn.Sequential(Embed(), Mix(), Relu(), Join(), nn.Linear(8, 8), nn.GELU(), Head())

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 11, (batch_size, 5), generator=generator)
        yield ids, ids[:, 0]

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)

def optimizer(parameters):
    return OPTIMIZER
"""
LAYERS = 7
OPTIMIZERS = {
    "sgd": "torch.optim.SGD(parameters, lr=0.1, momentum=0.9)",
    "adamw": "torch.optim.AdamW(parameters, lr=0.01)",
}


@pytest.fixture(scope="session")
def driver() -> ModuleType:
    """``driver.py`` beside this file."""
    spec = importlib.util.spec_from_file_location("worker_driver", Path(__file__).with_name("driver.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["worker_driver"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def pool(driver: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Three processes, for all tests."""
    pool = driver.Pool(3, tmp_path_factory.mktemp("ranks"))
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture
def workload(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Writes a workload file, the one above with parts replaced, and gives its spec as a dict."""
    from skyctl.workload.spec import WorkloadSpec

    def make(
        optimizer: str = "adamw", batch_size: int = 7, replace: tuple[str, str] = ("", "")
    ) -> dict[str, Any]:
        path = tmp_path / "train.py"
        path.write_text(WORKLOAD.replace("OPTIMIZER", OPTIMIZERS[optimizer]).replace(*replace))
        return WorkloadSpec(source=str(path), path=str(path), batch_size=batch_size, seed=3).to_dict()

    return make
