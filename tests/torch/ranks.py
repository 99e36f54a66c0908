"""Starting a script's ranks as ``torchrun`` would, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SCRIPTS = Path(__file__).parent / "user_scripts"
LIMIT_S = 300


def run_ranks(
    script: Path, size: int, folder: Path, *arguments: str, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    """All ranks' ends. They meet over a file in ``folder``, which the script gets as ``RENDEZVOUS``."""
    shared = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "RENDEZVOUS": f"file://{folder / 'rendezvous'}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    command = [sys.executable, "-W", "error::UserWarning:skyctl", str(script), *arguments]
    ranks = [
        subprocess.Popen(
            command,
            env={**shared, **own_environment(rank, shared)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        ends = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    return [
        subprocess.CompletedProcess(command, rank.returncode, *end)
        for rank, end in zip(ranks, ends, strict=True)
    ]


def own_environment(rank: int, shared: Mapping[str, str]) -> dict[str, str]:
    """One rank's own: its numbers, and a file of step times where one is named."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if "SKYCTL_STEP_TIMES" in shared:
        own["SKYCTL_STEP_TIMES"] = f"{shared['SKYCTL_STEP_TIMES']}.{rank}"
    return own
