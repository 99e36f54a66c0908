import os
import subprocess
import sys

import pytest
from tests.helpers.commands import COMMAND_S

SPEAKER = """\
import sys
import time

from skyctl.cli.command_output import Output

out = Output()
with out.progress("working") as progress:
    progress("at it")
    out.note("begun")
    sys.stdin.readline()
    for number in range(5):
        progress(f"step {number}")
        progress.node("a", "measured", 0.5)
        out.note(f"note {number}")
        out.line(f"line {number}")
        time.sleep(0.15)
    progress.pause()
    progress("after a question")
out.warn("last")
out.finish()
open(sys.argv[1], "w").write("all said")
"""


def test_what_is_said_after_the_terminal_is_closed_ends_nothing(tmp_path):
    here, there = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", SPEAKER, str(tmp_path / "end")],
        stdin=subprocess.PIPE,
        stdout=there,
        stderr=there,
        env={**os.environ, "TERM": "xterm"},
        text=True,
    )
    os.close(there)
    try:
        printed = b""
        while b"begun" not in printed:
            printed += os.read(here, 4096)
        os.close(here)
        child.communicate("\n", timeout=COMMAND_S)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    assert child.returncode == 0
    assert (tmp_path / "end").read_text() == "all said"


def test_other_errors_of_writing_come_out():
    from skyctl.terminal import ignoring_closed_terminal

    with pytest.raises(FileNotFoundError), ignoring_closed_terminal():
        raise FileNotFoundError
