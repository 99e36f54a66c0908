"""``skyctl clean`` on local nodes, and beside one that can't be reached."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyctl.agent.node_cache import default_cache_root
from skyctl.cli.app import main
from skyctl.records.cluster import Node
from skyctl.remote.base import ConnectOptions
from skyctl.remote.session_factory import open_session
from skyctl.supervision.run_status import ProcessCounts

Run = Callable[..., tuple[int, str, str]]
OWN = Node(name="own", transport="local")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs skyctl in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["skyctl", *words])
        code: Any = 0
        try:
            main()
        except SystemExit as exc:
            code = exc.code or 0
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def use_cache(node: Node) -> None:
    with open_session(node, ConnectOptions(grace_s=0.3)) as session:
        session.push_tree({"train.py": b"pass\n"})


def cluster(folder: Path, *lines: str) -> None:
    (folder / "cluster.yaml").write_text("name: home\nnodes:\n" + "".join(f"  - {line}\n" for line in lines))


def test_this_machine_is_cleaned_without_a_cluster(run: Run) -> None:
    use_cache(OWN)
    code, out, err = run("clean", "--json")
    assert code == 0
    report = json.loads(out)
    assert [node["node"] for node in report["nodes"]] == ["this machine"]
    removed = {kind["what"]: kind["removed"] for kind in report["nodes"][0]["cleaned"]}
    assert (removed["packages"], removed["trees"]) == (1, 1)
    assert report["freed_bytes"] > 100_000
    assert "this machine only" in err
    assert not default_cache_root().exists()
    assert run("clean")[1].endswith("freed 0 KiB on 0 nodes\n")


def test_nodes_are_named_by_patterns_and_one_that_does_not_answer_is_named(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other cache"
    cluster(
        tmp_path,
        "{name: a, transport: local}",
        "{name: b, transport: local}",
        f"{{name: c, transport: local, env: {{XDG_CACHE_HOME: '{other}'}}}}",
        "{name: gone, host: 127.0.0.1, port: 1}",
    )
    use_cache(OWN)
    use_cache(OWN.model_copy(update={"env": {"XDG_CACHE_HOME": str(other)}}))
    code, out, _ = run("clean", "a,b", "--dry-run")
    assert code == 0
    assert "a, b  skyctl's code  1: " in out
    assert "would be freed" in out
    assert "on 2 nodes" in out
    assert default_cache_root().exists()
    code, out, err = run("clean", "c,gone")
    assert code == 4
    assert "gone  see below" in out
    assert "warning: node gone" in err
    assert not (other / "skyctl").exists()
    assert default_cache_root().exists()
    code, _, err = run("clean", "d")
    assert code == 2
    assert "no node matches 'd'" in err


def test_what_is_in_use_stays_and_is_counted(run: Run, tmp_path: Path) -> None:
    cluster(tmp_path, "{name: a, transport: local}")
    use_cache(OWN)
    with open_session(OWN, ConnectOptions(grace_s=0.3)) as session:
        path = Path(session.push_tree({"train.py": b"pass\n"}))
        session.push_tree({"train.py": b"other\n"})
        code, out, _ = run("clean")
        assert code == 0
        assert "skyctl's code" in out
        assert "1 in use" in out
        assert (path / "train.py").exists()
        session.run_task(
            "skyctl.agent.process_tree", {"sessions": [], "module": "x"}, 30, answer=ProcessCounts
        )
    assert run("clean")[0] == 0
    assert not default_cache_root().exists()


def test_an_unsafe_cache_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    cluster(tmp_path, "{name: a, transport: local}")
    use_cache(OWN)
    default_cache_root().chmod(0o777)
    code, _, err = run("clean")
    assert code == 4
    assert f"node a can't keep skyctl's files in {default_cache_root()}: anybody may write to it" in err
