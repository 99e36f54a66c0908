"""Exit codes, the one JSON document, signals: tried on a command made for that, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import command

from ..helpers.commands import COMMAND_S

SCRIPT = """
import sys, time
from typing import Annotated
import typer
from skyctl import errors
from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import command, confirm
from skyctl.cli.options import YesOption

app = typer.Typer(pretty_exceptions_enable=False)

@app.command()
@command
def main(out: Output, what: str, *, yes: YesOption = False) -> int | None:
    "Does what it is told."
    out.note("a note")
    if what == "ok":
        with out.progress("work") as say:
            say("half way", 1, 2)
            out.line("a line")
            out.table(["name", "n"], [["x [red]", 1], ["\\x1b[31mevil\\x1b[0m", None]])
            out.warn("careful")
        out.json({"x": 1})
    elif what == "code":
        return 3
    elif what == "bug":
        raise ValueError("surprise")
    elif what == "interrupt":
        raise KeyboardInterrupt
    elif what == "wait":
        try:
            print("ready", file=sys.stderr, flush=True)
            time.sleep(60)
        finally:
            time.sleep(0.2)
            out.line("cleaned up")
    elif what == "much":
        for i in range(100000):
            out.line("x" * 100)
    elif what == "confirm":
        out.line(str(confirm(out, "sure?", yes=yes)))
    elif what == "node":
        raise errors.LoginError("no key fits", node="tower", hint="ssh-copy-id", log="/x.log")
    else:
        raise getattr(errors, what)("it failed", hint="do this")
    return None

app()
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return [sys.executable, str(path)]


def run(script: list[str], *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*script, *arguments], check=False, capture_output=True, text=True, timeout=COMMAND_S, **options
    )


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("SkyctlError", 1),
        ("RunError", 1),
        ("UndecidedError", 1),
        ("InputError", 2),
        ("InventoryError", 2),
        ("WorkloadError", 2),
        ("InfeasibleError", 3),
        ("MismatchError", 5),
    ],
)
def test_errors_end_with_their_code(script: list[str], what: str, code: int) -> None:
    done = run(script, what)
    assert done.returncode == code
    assert done.stderr == "a note\nerror: it failed\n  next: do this\n"
    assert done.stdout == ""


def test_codes_and_interrupts(script: list[str]) -> None:
    assert run(script, "code").returncode == 3
    done = run(script, "interrupt", "-q")
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_error_as_json(script: list[str]) -> None:
    done = run(script, "node", "--json")
    assert done.returncode == 4
    error = {
        "message": "no key fits",
        "hint": "ssh-copy-id",
        "log": "/x.log",
        "node": "tower",
        "exit_code": 4,
    }
    assert json.loads(done.stdout) == {"error": error}
    assert "error: no key fits" in done.stderr


def test_bug_is_one_line_and_a_traceback_with_v(script: list[str]) -> None:
    done = run(script, "bug")
    assert done.returncode == 1
    assert "error: ValueError: surprise\n  next: this is a bug in skyctl" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in run(script, "bug", "-v").stderr


def test_usage_errors(script: list[str]) -> None:
    for arguments in ([], ["ok", "--nope"], ["ok", "extra"]):
        done = run(script, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Usage" in done.stderr


def test_plain_output(script: list[str]) -> None:
    done = run(script, "ok")
    assert done.returncode == 0
    assert done.stdout == "a line\nname     n\nx [red]  1\nevil\n"
    assert done.stderr == "a note\nwork: half way (1/2)\nwarning: careful\n"
    assert run(script, "ok", "-q").stderr == "warning: careful\n"


def test_json_output(script: list[str]) -> None:
    done = run(script, "ok", "--json")
    assert json.loads(done.stdout) == {"x": 1}
    assert "a line" in done.stderr


@pytest.mark.parametrize(
    ("signum", "what", "code"),
    [
        (signal.SIGTERM, "wait", 143),
        (signal.SIGINT, "wait", 130),
        (signal.SIGHUP, "wait", 129),
    ],
)
def test_signals_clean_up_first(script: list[str], signum: int, what: str, code: int) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, by children too
    try:
        process = subprocess.Popen(
            [*script, what, "-q"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signum)
    if signum == signal.SIGTERM:
        time.sleep(0.05)
        process.send_signal(signum)  # a second one does not cut the clean-up short
    out, err = process.communicate(timeout=COMMAND_S)
    assert process.returncode == code
    assert out == ("cleaned up\n" if what == "wait" else "")
    assert "Traceback" not in err


def test_reader_gone(script: list[str]) -> None:
    process = subprocess.Popen([*script, "much"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == "a note\n"
    assert process.wait(30) == 1
    process.stderr.close()


def test_no_prompt_without_a_terminal(script: list[str]) -> None:
    assert run(script, "confirm", stdin=subprocess.DEVNULL).stdout == "False\n"
    assert run(script, "confirm", "-y", stdin=subprocess.DEVNULL).stdout == "True\n"


def on_terminal(script: list[str], *arguments: str, typed: str = "", **env: str) -> str:
    """The text that the command shows on a pseudo-terminal."""
    import pty

    parent, child = pty.openpty()
    process = subprocess.Popen(
        [*script, *arguments],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**os.environ, "TERM": "xterm-256color", **env},
    )
    os.close(child)
    os.write(parent, typed.encode())
    shown = b""
    try:
        while data := os.read(parent, 4096):
            shown += data
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(parent)
    assert process.wait(30) == 0
    return shown.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")
def test_terminal(script: list[str]) -> None:
    assert "sure? [y/N]" in on_terminal(script, "confirm", typed="y\n")
    shown = on_terminal(script, "ok")
    assert "\x1b[33m" in shown  # the warning's yellow
    assert "x [red]" in shown
    assert "\x1b[31mevil" not in shown
    assert "\x1b[33m" not in on_terminal(script, "ok", NO_COLOR="1")


def test_help_is_wrapped_by_the_terminal_alone() -> None:
    """A docstring's own line breaks, at another width, would make ragged lines."""

    def build(out: Output) -> None:
        """Build it.

        A second paragraph that
        has two lines.
        """

    assert command(build).__doc__ == "Build it.\n\nA second paragraph that has two lines."
