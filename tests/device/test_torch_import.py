"""Torch without its compiler: nothing of it is imported until something is compiled."""

from __future__ import annotations

import subprocess
import sys

EAGER = """
import gc, sys
from skyctl.device.torch_import import import_torch
import_torch()
assert gc.isenabled()
import torch

def imported():
    return [name for name in ("sympy", "torch._dynamo.eval_frame") if name in sys.modules]

def step(weight, gradient):
    torch.autograd.backward([weight * 1.0], [gradient])
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = kind([weight])
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()

step(torch.nn.Parameter(torch.zeros(3)), torch.zeros(3))
print(imported())
try:
    step(torch.nn.Parameter(torch.zeros(3)), torch.zeros(4))
except RuntimeError as exc:
    print("Mismatch in shape" in str(exc))
"""
FAKE = """
import torch.distributed
from torch._subclasses.fake_tensor import FakeTensorMode
print(tuple(torch.bmm(torch.empty(2, 3, 4, device="meta"), torch.empty(2, 4, 5, device="meta")).shape))
with FakeTensorMode():
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 32))
    attended, _ = torch.nn.MultiheadAttention(32, 2)(*[layers(torch.empty(5, 3, 8, 8))] * 3)
    print(tuple(torch.nn.functional.layer_norm(attended, (32,)).shape))
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.distributed.destroy_process_group()
print(imported())
"""
COMPILED = """
@torch.compiler.disable
def left_out(x):
    return x + 1

compiled = torch.compile(lambda x: left_out(x) * 2, backend="eager")
print(compiled(torch.ones(1)).item(), len(imported()))
import torch._dynamo.config
step(torch.nn.Parameter(torch.zeros(3)), torch.zeros(3))

def asked_again():
    function = torch.optim.Optimizer.load_state_dict.__wrapped__
    return getattr(function, "__dynamo_disable") is not function

print(torch._dynamo.__spec__ is not None, asked_again())
"""
SETTINGS = """
import torch._dynamo.config
torch._dynamo.config.recompile_limit = 3
from torch._dynamo import config, exc
from torch._dynamo.utils import counters
print(config.recompile_limit, config is sys.modules["torch._dynamo.config"], exc.counters is counters)
"""


def _output(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_backwards_and_optimizers_import_no_compiler_and_compiling_does() -> None:
    assert _output(EAGER + COMPILED) == ["[]", "True", "4.0 2", "True True"]


def test_fake_tensors_and_process_groups_import_no_compiler() -> None:
    printed = _output(EAGER + FAKE + COMPILED)[2:]
    assert printed == ["(2, 3, 5)", "(5, 32)", "['sympy']", "4.0 2", "True True"]


def test_a_setting_reaches_the_compiler_and_each_of_its_modules_is_there_once() -> None:
    assert _output(EAGER + SETTINGS)[-1] == "3 True True"


def test_what_looks_at_every_module_while_it_is_imported_finds_no_compiler() -> None:
    assert _output(EAGER + "import torch.distributed.tensor\nprint('there')")[-1] == "there"
