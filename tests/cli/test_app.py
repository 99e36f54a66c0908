"""``skyctl`` itself: help, version, what is imported, and that a mistake ends with 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import skyctl
from skyctl.cli.examples import EXAMPLES

from ..helpers.commands import run_here

HEAVY = ("torch", "ortools", "paramiko", "numpy", "matplotlib", "yaml")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skyctl", *arguments]
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"skyctl {skyctl.__version__}\n", "")


def test_an_interrupt_in_executed_text_ends_with_130() -> None:
    """As dataclasses do while modules are imported: Python would end itself by the signal afterwards."""
    code = (
        "import os, signal, sys\nfrom skyctl.cli import app\n"
        "def work():\n    exec('os.kill(os.getpid(), signal.SIGINT)\\nfor _ in range(10**7): pass')\n"
        "app.app = work\napp.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_help_lists_the_commands() -> None:
    from skyctl.cli.app import COMMANDS

    done = run("--help")
    assert done.returncode == 0
    for name in (*COMMANDS, "lab"):
        assert f" {name} " in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["check", "--help"], ["launch", "-h"]])
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    code = (
        "import sys; from skyctl.cli.app import main; sys.argv = ['skyctl', *sys.argv[1:]]\n"
        "try: main()\n"
        f"except SystemExit as exc: print(exc.code, [m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["bogus"], ["check", "--limt", "x"], ["check", "--timeout", "soon"]]
)
def test_usage_errors_end_with_2(arguments: list[str]) -> None:
    assert run(*arguments).returncode == 2


@pytest.mark.parametrize("command", EXAMPLES)
def test_every_command_has_help_with_its_examples(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = run_here(capsys, *command.split(), "--help")
    assert done.returncode == 0
    assert "--json" in done.stdout
    shown = done.stdout.partition("Examples:")[2]
    for example in EXAMPLES[command]:
        assert f"$ {example}" in shown


@pytest.mark.parametrize(
    ("arguments", "guess"),
    [
        (["chekc"], "check"),
        (["plan", "--startegy", "even"], "--strategy"),
        (["plan", "--problem", "p.json", "--strategy", "optimum"], "'optimal'"),
        (["check", "--limit", "twoer"], "'tower'"),
        (["plan", "gtp:layers=2"], "'gpt'"),
        (["lab", "dwon"], "down"),
    ],
)
def test_a_mistake_gets_a_guess(
    arguments: list[str],
    guess: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text("nodes: [tower]\n")
    Path("p.json").write_text("{}")
    done = run_here(capsys, *arguments)
    assert done.returncode == 2
    assert guess in done.stderr
