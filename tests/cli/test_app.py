"""``skyctl`` itself: help, version, what is imported, and that a mistake ends with 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.fuzz import samples

import skyctl
from skyctl.cli.examples import EXAMPLES

from ..helpers.commands import COMMAND_S, run_here

HEAVY = ("torch", "ortools", "paramiko", "numpy", "jinja2", "yaml")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skyctl", *arguments]
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
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
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=COMMAND_S
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
        [sys.executable, "-c", code, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def run_without(unwanted: Sequence[str], folder: Path, *arguments: str, code: int = 0) -> None:
    """Runs the command in that folder, which is skyctl's home, too; none of those modules may be imported."""
    program = (
        "import sys; from skyctl.cli.app import main; sys.argv = ['skyctl', *sys.argv[1:]]\n"
        f"try: main()\nfinally: print([m for m in {unwanted} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env={**os.environ, "SKYCTL_HOME": str(folder / "home")},
        check=False,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (code, "[]"), done.stderr


def test_a_measured_workload_is_planned_without_torch_and_without_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyctl.files import RunPaths, save_profile, write_atomic
    from skyctl.records.profile import Profile
    from skyctl.records.run_state import RunState
    from skyctl.workload.shipped_files import digest_workload
    from skyctl.workload.workload_spec import make_spec

    (tmp_path / "train.py").write_text(
        "import torch\nfrom layers import make as model\nraise SystemExit('it was run')\n"
    )
    (tmp_path / "layers.py").write_text("import transformers\n")
    (tmp_path / "cluster.yaml").write_text(
        "name: home\nnodes:\n  - {name: a, transport: local}\n  - {name: b, transport: local}\n"
    )
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "home"))
    digest = digest_workload(make_spec(str(tmp_path / "train.py"), batch_size=8))
    profile = samples.profile(digest)
    profile["workload"]["source"] = "train.py"
    save_profile(Profile.model_validate_json(json.dumps(profile)))
    slow = ("torch", "transformers", "ortools", "paramiko")
    settings = ("--batch-size", "8", "--microbatches", "4", "--time-limit", "1")
    run_without(slow, tmp_path, "plan", "train.py", *settings, "-o", "plan.json")
    paths = RunPaths.new()
    now = "2026-01-01T00:00:00Z"
    state = RunState(run_id=paths.run_id, created=now, written=now, workload="w", cluster="home", steps=3)
    write_atomic(paths.state, state.to_json())
    write_atomic(paths.folder / "plan.json", (tmp_path / "plan.json").read_text())
    for words in (["verify", "plan.json"], ["ps"]):
        run_without(slow, tmp_path, *words)
    run_without(slow, tmp_path, "checkpoint", "ls", paths.run_id, code=1)  # it has none
    (tmp_path / "layers.py").write_text("import transformers  # changed\n")
    changed = subprocess.run(
        [sys.executable, "-m", "skyctl", "plan", "train.py", *settings],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert changed.returncode == 2
    assert "train.py has changed since it was measured" in changed.stderr


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


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("stop -y", "skyctl stop has no option -y\n  next: -y is an option of "),
        ("run --ouput out x.py", "skyctl run has no option --ouput; did you mean '--output'?"),
        ("run --batch-size 8 x.py", "skyctl run has no option --batch-size\n  next: options of the script"),
        ("launch x.py --lr 0.1", "skyctl launch has no option --lr; did you mean '--learning-rate'?"),
        (
            "launch x.py --epochs=3",
            "did you mean '--steps'?\n  next: a step takes one batch: steps = epochs ×",
        ),
        ("launch x.py --detahc", "did you mean '--detach'?"),
        (
            "plan x.py --steps 3",
            "plan has no option --steps\n  next: --steps is an option of launch, compare",
        ),
        (
            "compare x.py --dtype --measure",
            "--dtype needs a NAME, and --measure is an option\n  next: --dtype float",
        ),
        ("launch x.py -o", "-o needs a FILE"),
        ("status", "skyctl has no command 'status'; did you mean 'ps' or 'check' or 'lab status'?"),
        ("statsu", "did you mean 'ps' or 'check' or 'lab status'?"),
        ("export", "skyctl has no command 'export'; did you mean 'checkpoint export'?"),
        ("runs", "did you mean 'ps'?"),
        ("lanuch x.py", "did you mean 'launch'?"),
        ("checkpoint exprot", "skyctl checkpoint has no command 'exprot'; did you mean 'export'?"),
    ],
)
def test_a_word_that_skyctl_has_not_is_guessed(
    typed: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_here(capsys, *typed.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_a_mistyped_word_is_the_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    done = run_here(capsys, "launch", "x.py", "--json", "--lr", "1")
    assert json.loads(done.stdout)["error"]["exit_code"] == 2


def test_resume_without_run_names_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))
    for run_id in ("20260101-000000-aaaa", "20260102-000000-bbbb"):
        (tmp_path / "runs" / run_id).mkdir(parents=True)
    for typed in ("--resume --steps 50", "--steps 50 --resume", "--resume --steps=50"):
        done = run_here(capsys, "launch", *typed.split())
        assert done.returncode == 2
        assert "--resume needs a RUN" in done.stderr
        assert "next: the newest run: --resume 20260102-000000-bbbb" in done.stderr


def test_values_may_look_like_anything_else(capsys: pytest.CaptureFixture[str]) -> None:
    done = run_here(capsys, "plan", "--limit", "--", "gpt", "--", "--lr")
    assert "needs a" not in done.stderr
    assert "no option" not in done.stderr
