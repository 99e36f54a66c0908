"""``skyctl init`` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyctl.inventory.cluster_file import read_cluster

from ..helpers.commands import COMMAND_S


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    monkeypatch.chdir(folder)


def init(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skyctl", "init", *arguments]
    options = {"stdin": subprocess.DEVNULL, "timeout": COMMAND_S}
    return subprocess.run(command, check=False, capture_output=True, text=True, **options)


def aliases(text: str) -> None:
    ssh = Path(os.environ["HOME"]) / ".ssh"
    ssh.mkdir()
    (ssh / "config").write_text(text)


def test_hosts_and_no_overwriting() -> None:
    done = init("tower", "ada@192.0.2.10:2222", "--local", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "wrote cluster.yaml with 3 nodes\n"
    cluster = read_cluster("cluster.yaml")
    assert cluster.name == "two words"
    assert [(n.name, n.port, n.transport) for n in cluster.nodes] == [
        ("tower", None, "ssh"),
        ("192.0.2.10", 2222, "ssh"),
        ("local", None, "local"),
    ]
    again = init("other")
    assert (again.returncode, again.stdout) == (2, "")
    assert "cluster.yaml is there already" in again.stderr
    assert len(read_cluster("cluster.yaml").nodes) == 3
    assert init("other", "--force").returncode == 0
    assert init("another", "-y").returncode == 0
    assert [n.name for n in read_cluster("cluster.yaml").nodes] == ["another"]


def test_ssh_aliases_without_a_terminal() -> None:
    aliases("Host a b *.x\nHost github.com\n User git\n")
    refused = init("-o", "my file.yaml")
    assert refused.returncode == 2
    assert "~/.ssh/config names 2: a, b" in refused.stderr
    assert "-y takes all 2" in refused.stderr
    assert os.listdir() == []
    done = init("-o", "my file.yaml", "--json", "-y")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["path"], answer["nodes"]) == ("my file.yaml", ["a", "b"])
    assert "skyctl check -c 'my file.yaml'" in done.stderr
    assert os.listdir() == ["my file.yaml"]


def test_nothing_to_write() -> None:
    done = init()
    assert done.returncode == 2
    assert "skyctl init tower" in done.stderr
    assert os.listdir() == []


def test_dry_run_and_bad_input_write_nothing() -> None:
    assert "- tower" in init("tower", "--dry-run").stdout
    assert init("a/b").returncode == 2
    assert init("a", "a").returncode == 2
    assert init("a", "-o", "no/such/folder.yaml").returncode == 2
    assert os.listdir() == []


def on_a_terminal(answers: bytes) -> int:
    import pty

    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "skyctl", "init"], stdin=child, stdout=child, stderr=child
    )
    os.close(child)
    os.write(parent, answers)
    try:
        while os.read(parent, 4096):
            pass
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(parent)
    return process.wait(30)


def test_choosing_on_a_terminal() -> None:
    aliases("Host a b c\n")
    assert on_a_terminal(b"1, c ada@192.0.2.1 n[1-2,4]\ny\n") == 0
    nodes = read_cluster("cluster.yaml").nodes
    assert [(n.name, n.transport) for n in nodes] == [
        ("a", "ssh"),
        ("c", "ssh"),
        ("192.0.2.1", "ssh"),
        *((f"n{i}", "ssh") for i in (1, 2, 4)),
        ("local", "local"),
    ]


def test_naming_nothing_on_a_terminal() -> None:
    assert on_a_terminal(b"\n\n") == 2
    assert os.listdir() == []


def test_another_tools_inventory() -> None:
    Path("hostfile").write_text("worker-1 slots=2\nworker-2 slots=4\n")
    done = init("--from", "hostfile", "--local", "1")
    assert done.returncode == 0, done.stderr
    assert "hostfile: a hostfile, 2 nodes" in done.stderr
    assert "slots are not taken (worker-1 has 2)" in done.stderr
    assert [n.name for n in read_cluster("cluster.yaml").nodes] == ["worker-1", "worker-2", "local"]
    assert init("--from", "hostfile", "--slots", "cuda", "--force").returncode == 0
    assert read_cluster("cluster.yaml").nodes[1].devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    done = init("--from", "hostfile", "--slots", "cudda")
    assert done.returncode == 2
    assert "did you mean 'cuda'" in done.stderr
