"""A nursery's work before it forks must leave the accelerators to those that it forks."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.commands import COMMAND_S

from skyctl.remote.forkserver_client import PRELOADED_MODULES

ASKED = """
import importlib, sys, torch

def asked(*_, **__):
    sys.exit("an accelerator was asked for")

for module in (torch.accelerator, torch.cuda, torch.xpu, torch._C):
    for name in ("is_available", "device_count", "current_accelerator", "init", "_lazy_init"):
        if hasattr(module, name):
            setattr(module, name, asked)
for name in sys.argv[1:]:
    getattr(importlib.import_module(name), "warm", lambda: None)()
"""


def test_warming_asks_for_no_accelerator() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKED, *PRELOADED_MODULES],
        check=False,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert done.returncode == 0, done.stderr
