"""Which processes may start anew, and what becomes of signals where one can't."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyctl.supervision.fresh_start import find_left_run, repeatable_command

LAUNCH = ("launch", "plan.json", "--steps", "3")


def test_code_that_calls_skyctl_never_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["skyctl", *LAUNCH])
    assert repeatable_command() is None


@pytest.mark.parametrize("program", ["-c", "-m"])
def test_the_command_itself_is_repeated_word_by_word(program: str, tmp_path: Path) -> None:
    asked = "from skyctl.supervision.fresh_start import repeatable_command as f; print(f())"
    script = tmp_path / "skyctl"
    script.write_text(f"{asked}\n")
    start = ["-X", "dev", "-W", "ignore", *(["-c", asked] if program == "-c" else [str(script)])]
    argv = [sys.executable, *start, *LAUNCH]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(None if program == "-c" else argv)


def test_another_process_obeys_no_order_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "SKYCTL_LEFT_RUN",
        '{"run_id": "x", "yes": false, "as_json": false, "quiet": false, '
        f'"verbose": false, "pid": {os.getppid()}}}',
    )
    assert find_left_run() is None
    assert "SKYCTL_LEFT_RUN" not in os.environ


REFUSED = """\
import os, signal
from types import SimpleNamespace
from skyctl.supervision.fresh_start import END_SIGNALS, FreshStart, LeftRun

came = []
for number in END_SIGNALS:
    signal.signal(number, lambda number, _: came.append(number))

def leave(*, for_itself):
    assert for_itself
    for number in END_SIGNALS:
        os.kill(os.getpid(), number)
    assert came == []

fd = os.open(os.devnull, os.O_RDONLY)
lock = SimpleNamespace(inherit=lambda: fd, release=lambda: os.close(fd))
journal = SimpleNamespace(state=SimpleNamespace(attempts=(), order={}))
run = SimpleNamespace(journal=journal, lock=lock, leave=leave)
left = LeftRun("x", yes=False, as_json=False, quiet=False, verbose=False)
with FreshStart(run, ["/nowhere/python"], left) as anew:
    anew.execute(lambda: None)
assert set(came) == set(END_SIGNALS), came
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(END_SIGNALS)
"""


def test_a_refused_start_acts_on_the_signals_that_came_meanwhile() -> None:
    subprocess.run([sys.executable, "-c", REFUSED], check=True)
