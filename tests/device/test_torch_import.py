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
COMPILED = """
@torch.compiler.disable
def left_out(x):
    return x + 1

compiled = torch.compile(lambda x: left_out(x) * 2, backend="eager")
print(compiled(torch.ones(1)).item(), len(imported()))
import torch._dynamo.config
step(torch.nn.Parameter(torch.zeros(3)), torch.zeros(3))
print(torch._dynamo.__spec__ is not None)
"""


def _output(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_backwards_and_optimizers_import_no_compiler_and_compiling_does() -> None:
    assert _output(EAGER + COMPILED) == ["[]", "True", "4.0 2", "True"]


def test_what_looks_at_every_module_while_it_is_imported_finds_no_compiler() -> None:
    assert _output(EAGER + "import torch.distributed.tensor\nprint('there')")[-1] == "there"
