"""The output of the driver's own program on a node's NVIDIA GPUs. Needs no torch."""

from __future__ import annotations

import shutil
import subprocess

TIMEOUT_S = 30.0
"""It wakes drivers that sleep."""


def run_nvidia_smi(*arguments: str) -> list[str]:
    """The lines that ``nvidia-smi`` prints; none where it is not installed, fails or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
