"""The memory that a task's process has freed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from skyctl.agent.task_process import ALLOCATOR_ENV
from skyctl.script.script_orders import ScriptOrder, Workplace
from skyctl.script.script_task import make_environment

FREE_SEVEN = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
blocks = [libc.malloc(1000) for _ in range(2000)]
freed = blocks[-8:-1]
assert freed[-1] - freed[0] == 6 * 1008
for block in freed:
    libc.free(block)
print(libc.malloc(7000) == freed[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_small_blocks_that_are_freed_become_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FREE_SEVEN],
        env=os.environ | ALLOCATOR_ENV,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"


def test_a_script_has_the_users_settings_of_malloc_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order = ScriptOrder(0, ("true",), is_python=False, environment={}, workplace=Workplace())
    ((name, ours),) = ALLOCATOR_ENV.items()
    monkeypatch.setenv(name, ours)
    assert name not in make_environment(order, {}, tmp_path)
    monkeypatch.setenv(name, "glibc.malloc.perturb=1")
    assert make_environment(order, {}, tmp_path)[name] == "glibc.malloc.perturb=1"
