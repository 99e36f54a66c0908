"""When a script that knows nothing of turns has its device's, and that it computes the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.processes import after_a_moment

from skyctl.torch import step_clock
from skyctl.turns.turn_client import list_shared_devices

INJECTED = Path(step_clock.__file__).parent / "injected"
TOLD = """
import threading
import torch
from torch import nn
from skyctl.torch.step_clock import running_clock

def told(where):
    print(where, getattr(running_clock().turn._turns, "_computes", False))

class Told(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
    def forward(self, x):
        told("forward")
        return self.linear(x)

torch.manual_seed(0)
model = Told()
"""
STEPS = (
    TOLD
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
engine = torch.autograd.Variable._execution_engine

def as_ddp(_parameter):
    told("gradient")
    engine.queue_callback(lambda: told("sums"))

for step in range(2):
    told("data")
    loss = nn.MSELoss()(model(torch.ones(3, 2)), torch.zeros(3, 2))
    if step == 0:
        model.linear.weight.register_post_accumulate_grad_hook(as_ddp)
    told("loss")
    with running_clock().waiting():
        told("wait")
    loss.backward()
    told("backward")
    optimizer.step()
told("after")
with torch.no_grad():
    model(torch.ones(1, 2))
told("validated")
try:
    with torch.no_grad():
        model("no tensor")
except TypeError:
    told("failed")
thread = threading.Thread(target=model, args=(torch.ones(1, 2),))
thread.start()
thread.join()
torch.distributed.destroy_process_group()
"""
)
IN_BACKWARD = (
    TOLD
    + """
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()
    told("updated")

for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
for _ in range(2):
    model(torch.ones(3, 2)).sum().backward()
    told("after")
"""
)
TRAIN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
COMPILE
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 4)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
"""
RAW = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.square().sum().backward()
optimizer.step()
"""


def run(folder, code, *, turns="fair", fails=False):
    """The code's standard output, or of one that fails its standard error."""
    environment = {name: text for name, text in os.environ.items() if name != "SKYCTL_TURNS"}
    if turns is not None:
        mark = str(folder / "mark")
        asked = {"turns": turns, "node": "here", "job": "run", "cache": str(folder), "mark": mark}
        environment |= {"SKYCTL_TURNS": json.dumps(asked)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment | {"PYTHONPATH": str(INJECTED)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stderr
    assert not after_a_moment(lambda: list_shared_devices(folder))
    return done.stderr if fails else done.stdout


def test_a_step_has_the_turn_while_it_computes_and_not_while_it_waits(tmp_path):
    step = ["forward True", "loss True", "wait False", "gradient True", "sums False", "backward True"]
    told = run(tmp_path, STEPS).splitlines()
    assert told[:7] == ["data False", *step]
    assert told[7:14] == ["data False", *step]
    assert told[14:] == [
        "after False",
        "forward True",
        "validated False",
        "forward True",
        "failed False",
        "forward False",
    ]
    assert (tmp_path / "mark").exists()


def test_optimizers_that_step_within_the_backward(tmp_path):
    step = ["forward True", "updated True", "updated True", "after False"]
    assert run(tmp_path, IN_BACKWARD).splitlines() == step * 2


@pytest.mark.parametrize(
    "compiled",
    [
        "",
        pytest.param("model = torch.compile(model, backend='eager', fullgraph=True)", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_without_turns(tmp_path, compiled):
    code = TRAIN.replace("COMPILE", compiled)
    assert run(tmp_path, code) == run(tmp_path, code, turns=None)
    assert (tmp_path / "mark").exists()


def test_steps_that_call_no_module_are_refused(tmp_path):
    assert "this optimizer steps before any" in run(tmp_path, RAW, fails=True)


def test_a_script_without_torch_takes_none(tmp_path):
    assert run(tmp_path, "import sys; print('torch' in sys.modules)") == "False\n"
    assert not (tmp_path / "mark").exists()
