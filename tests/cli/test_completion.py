"""The shell completes commands, options, and the names of nodes and runs, without loading anything heavy."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from skyctl.files import RunPaths

from ..helpers.commands import COMMAND_S

PROGRAM = """\
import sys
sys.argv = ["skyctl", *sys.argv[1:]]
from skyctl.cli.app import main
try:
    main()
finally:
    heavy = ("torch", "ortools", "paramiko", "numpy")
    print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""


def complete(line: str) -> list[str]:
    """The words that the shell would offer for the last word of ``line``."""
    words = line.split(" ")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={
            **os.environ,
            "_SKYCTL_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
        },
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
    return done.stdout.split()


@pytest.fixture(autouse=True)
def _cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text("nodes: [tower, oldbox, laptop]\ngroups: {old: [oldbox]}\n")
    (tmp_path / "other.yaml").write_text("nodes: [elsewhere]\n")


def test_commands_and_options() -> None:
    assert complete("skyctl che") == ["check", "checkpoint"]
    assert complete("skyctl checkpoint e") == ["export"]
    assert complete("skyctl plan --strat") == ["--strategy"]
    assert complete("skyctl plan --strategy o") == ["optimal"]
    assert complete("skyctl plan --help-") == ["--help-all"]
    assert complete("skyctl config la") == ["launch", "lab"]
    assert complete("skyctl config lab d") == ["down"]


def test_nodes() -> None:
    assert complete("skyctl join 2026 t") == ["tower"]
    assert complete("skyctl check --limit old") == ["oldbox", "old"]
    assert complete("skyctl check --limit tower,!o") == ["tower,!oldbox", "tower,!old"]
    assert complete("skyctl check -c other.yaml --limit e") == ["elsewhere"]


def test_nodes_of_the_cluster_that_the_file_of_defaults_names() -> None:
    Path("skyctl.toml").write_text('[defaults]\ncluster = "other.yaml"\n')
    assert complete("skyctl check --limit e") == ["elsewhere"]
    Path("skyctl.toml").write_text("nothing = [")
    assert complete("skyctl check --limit t") == ["tower"]


def test_a_broken_cluster_file_completes_to_nothing() -> None:
    Path("cluster.yaml").write_text("nodes: {")
    assert complete("skyctl join x t") == []


def test_runs() -> None:
    run = RunPaths.new().run_id
    for command in ("logs", "attach", "stop", "join", "checkpoint ls", "bug-report", "launch --resume"):
        assert complete(f"skyctl {command} {run[:6]}") == [run]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_it_is_installed_where_it_is_asked_for() -> None:
    # The shell is found by looking at who started it: so bash must, and must wait for it.
    call = f"{sys.executable} -c {shlex.quote(PROGRAM)} --install-completion; exit $?"
    done = subprocess.run(
        ["bash", "-c", call], capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    assert done.returncode == 0, done.stderr
    home = Path(os.environ["HOME"])
    assert "_skyctl_completion" in (home / ".bash_completions" / "skyctl.sh").read_text()
    assert "skyctl.sh" in (home / ".bashrc").read_text()
