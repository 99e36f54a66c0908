"""Who only watches a run holds little: torch alone would be 220 MiB."""

import subprocess
import sys

IMPORTS = """
import sys
from skyctl.cli import attach_command
from skyctl.run import plan_runner
from skyctl.supervision import background_supervisor, resume
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "ortools", "sympy"}))
"""


def test_a_run_is_taken_over_and_supervised_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
