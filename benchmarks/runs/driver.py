"""The real worker without a launcher: the tests' way to play it, and a workload whose layers sleep."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WORKLOAD = """
import time
import torch
from torch import nn

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, forward_s, backward_s, real):
        ctx.seconds = backward_s if real else 0.0
        if real:
            time.sleep(forward_s)
        return x * weight
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, gradient.sum(), None, None, None

class Layer(nn.Module):
    def __init__(self, forward_s, backward_s):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seconds = forward_s, backward_s
    def forward(self, x):
        return Sleep.apply(x, self.weight, *self.seconds, not hasattr(x, "fake_mode"))

def model():
    return [Layer(f, b) for f, b in TIMES]

def data(batch_size, seed):
    while True:
        yield torch.ones(batch_size, WIDTH), torch.zeros(batch_size)

def loss(outputs, targets):
    return (outputs.mean(1) - targets).square().mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.0)
"""


def sleeping_workload(path: Path, times: Sequence[tuple[float, float]], width: int) -> None:
    """Writes a train.py with a layer for each (forward, backward) seconds; messages are ``width`` floats."""
    path.write_text(_WORKLOAD.replace("TIMES", repr(tuple(times))).replace("WIDTH", str(width)))


def worker_driver() -> Any:
    """``tests/worker/driver.py``."""
    path = Path(__file__).parents[2] / "tests" / "worker" / "driver.py"
    spec = importlib.util.spec_from_file_location("worker_driver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["worker_driver"] = module
    spec.loader.exec_module(module)
    return module
