"""Every path for a device that is not the CPU, on the toy accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = sorted((Path(__file__).parent / "cases").glob("test_*.py"))


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem.removeprefix("test_"))
def test_on_the_toy_accelerator(cases: Path, pytestconfig: pytest.Config) -> None:
    shared = {name: value for name, value in os.environ.items() if name != "SKYCTL_REQUIRE_LAB"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-q", str(cases)],
        cwd=pytestconfig.rootpath,
        env=shared,  # it is not alone: what other tests leave meanwhile is not its own
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
