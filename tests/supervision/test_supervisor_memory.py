"""A process that only watches a run holds little: torch alone would be 220 MiB."""

import subprocess
import sys

IMPORTS = """
import sys
from skyctl.cli import attach_command
from skyctl.files import RunPaths
from skyctl.run import journal, plan_runner
from skyctl.supervision import background_supervisor, plan_supervision
journal.TensorBoardWriter(RunPaths("1"), lambda _text: None)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "ortools", "sympy"}))
"""


def test_a_run_is_taken_over_and_supervised_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
