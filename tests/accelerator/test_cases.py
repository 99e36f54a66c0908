"""Every path for a device that is not the CPU, on the toy accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "cases"


@pytest.mark.usefixtures("toy")
def test_on_the_toy_accelerator(pytestconfig: pytest.Config) -> None:
    """In one process of their own, which has the toy from its start."""
    shared = {name: value for name, value in os.environ.items() if name != "SKYCTL_REQUIRE_LAB"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-q", str(CASES)],
        cwd=pytestconfig.rootpath,
        env=shared,  # it is not alone: what other tests leave meanwhile is not its own
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
