"""A file given in another one's place: every command names it, and what to do next, before it connects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fuzz import samples

from skyctl.cli.command_output import Output
from skyctl.cli.show_profile import warn_unmeasured
from skyctl.records.cluster import Cluster, Node
from skyctl.records.profile import Profile

from ..helpers.commands import run_here

GPT = "gpt:layers=1,hidden=16,heads=2,context=16"
SCRIPT = """from pathlib import Path

Path("ran").touch()
for step in range(3):
    model = None
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster of a node that nobody can reach, a script that trains by itself, and a problem file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "home"))
    node = {"name": "a", "transport": "local", "python": "/nowhere/python"}
    Path("cluster.yaml").write_text(json.dumps({"name": "home", "nodes": [node]}))
    Path("script.py").write_text(SCRIPT.replace("model = ", "net = "))
    Path("train.py").write_text(SCRIPT)
    Path("weights.pt").touch()
    Path("notes.txt").touch()
    Path("problem.json").write_text(json.dumps({"kind": "skyctl/problem", "version": 1}))
    return tmp_path


@pytest.mark.parametrize("command", ["plan", "probe", "probe --dry-run", "launch", "compare", "check"])
def test_a_script_without_model_is_neither_run_nor_measured(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_here(capsys, *command.split(), "script.py")
    assert done.returncode == 2, done.stderr
    assert "error: script.py defines no model()" in done.stderr
    assert "connecting" not in done.stderr
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("plan trian.py", "there is no workload file trian.py (did you mean 'train.py'?)"),
        ("probe ./trian.py", "did you mean 'train.py'?"),
        ("plan problem.json", "skyctl plan --problem problem.json"),
        ("compare problem.json", "skyctl plan --problem problem.json"),
        ("launch problem.json", "skyctl plan --problem problem.json"),
        ("plan --problem plan.json", "skyctl launch plan.json"),
        ("plan .", "give the file in it that defines model()"),
        ("plan cluster.yaml", "a workload is the path of a python file"),
        (f"launch {GPT} --init-from weigths.pt", "did you mean weights.pt?"),
        (f"launch {GPT} --init-from nosuch.pt", "next: give a file that ends in .safetensors, .pt"),
        (f"launch {GPT} --data .", "--data . is a folder; it takes one text file\n  next: put its texts"),
        (f"launch {GPT} --data note.txt", "there is no such file (did you mean 'notes.txt'?)"),
    ],
)
def test_what_may_be_meant_comes_first(typed: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("plan.json").write_text(json.dumps({"kind": "skyctl/plan", "version": 15}))
    done = run_here(capsys, *typed.split())
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "next: " in done.stderr
    assert "connecting" not in done.stderr


def test_a_node_that_was_not_measured_is_left_out_with_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    failure = {"node": "b", "error": "node b has no torch", "hint": "`skyctl setup` brings it"}
    document = samples.profile("d", nodes=("a", "b"))
    document["devices"] = document["devices"][:1]
    document["failures"] = [failure]
    nodes = [Node(name=name) for name in ("a", "b", "c")]
    profile = Profile.model_validate_json(json.dumps(document))
    warn_unmeasured(Output(), profile, Cluster(name="home", nodes=tuple(nodes)))
    printed = " ".join(capsys.readouterr().err.split())
    assert "b was not measured, so it is left out: node b has no torch (`skyctl setup` brings it)" in printed
    assert "not measured, so left out: c (skyctl check shows why)" in printed
