"""Scripts of one's own over the backend ``skyctl``, next to the same over Gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from skyctl.errors import RunError
from skyctl.records.cluster import Node
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions
from skyctl.remote.session_factory import open_session
from skyctl.transport.group_secret import SECRET_FILE
from skyctl.transport.mesh_process_group import MeshProcessGroup

from ..helpers.processes import PATIENCE_S

SCRIPTS = Path(__file__).parent / "user_scripts"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of all ranks, but for ``RANK`` and ``WORLD_SIZE``."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("0123456789abcdef" * 2)
    with socket.socket() as held:  # torch's store may listen there beside it, and nobody else is given it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(held.getsockname()[1]),
            "OMP_NUM_THREADS": "1",
            SECRET_FILE: str(secret),
        }


def run(
    name: str, backend: str, world: Mapping[str, str], size: int, **own: Any
) -> list[subprocess.CompletedProcess[str]]:
    """A script's ranks; ``own``: by rank what the environment says otherwise."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / f"{name}.py"), backend],
            env={
                **os.environ,
                **world,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                **own.get(f"rank{rank}", {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        ended = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(ranks, ended, strict=True)
    ]


def results_of(ended: list[subprocess.CompletedProcess[str]]) -> list[Any]:
    assert [process.returncode for process in ended] == [0] * len(ended), "\n".join(
        process.stderr for process in ended
    )
    return [json.loads(process.stdout.splitlines()[-1]) for process in ended]


def assert_alike(value: Any, other: Any) -> None:
    """Nested lists and dicts with the same numbers, but for rounding."""
    if isinstance(value, list):
        assert len(value) == len(other)
        for mine, theirs in zip(value, other, strict=True):
            assert_alike(mine, theirs)
    elif isinstance(value, dict):
        assert_alike([list(value), list(value.values())], [list(other), list(other.values())])
    else:
        assert value == (pytest.approx(other, rel=1e-6) if isinstance(other, float) else other)


@pytest.mark.parametrize(("name", "size"), [("collectives", 3), ("gpipe", 2), ("ddp", 2)])
def test_it_comes_to_the_same_as_over_gloo(name: str, size: int, world: dict[str, str]) -> None:
    ours = results_of(run(name, "skyctl", world, size))
    theirs = results_of(run(name, "gloo", world, size))
    for mine, other in zip(ours, theirs, strict=True):
        assert_alike(mine, other)


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Session]]:
    """Sessions with two agents of this machine."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ExitStack() as stack:
        nodes = [Node(name=name, transport="local") for name in ("one", "two")]
        yield [stack.enter_context(open_session(node, ConnectOptions(grace_s=0.3))) for node in nodes]


@pytest.mark.parametrize(
    "name", ["first", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("gpipe", "ddp"))]
)
def test_agents_run_it(name: str, agents: list[Session], world: dict[str, str]) -> None:
    """On nodes no entry point says that there is this backend."""
    files = {path.name: path.read_bytes() for path in SCRIPTS.glob("*.py")}
    without = {key: value for key, value in world.items() if key != SECRET_FILE}
    tasks = []
    for rank, session in enumerate(agents):
        payload = {
            "name": name,
            "backend": "skyctl",
            "secret": "s" * 32,
            "environment": {**without, "RANK": str(rank), "WORLD_SIZE": "2"},
        }
        env = {"PYTHONPATH": session.push_tree(files), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        tasks.append(session.start_task("agent_task", payload, env=env))
    results = []
    for task in tasks:
        events = []
        while not task.done:
            if came := task.recv(PATIENCE_S):
                events.append(came[0])
        results.append(json.loads(events[-1]["said"].splitlines()[-1]))
    if name == "first":
        assert results == [{"total": [3.0], "received": 1 - rank, "over": "skyctl"} for rank in (0, 1)]
    else:
        theirs = results_of(run(name, "gloo", world, 2))
        assert_alike(results, theirs)


def stderr_of(ended: list[subprocess.CompletedProcess[str]]) -> list[str]:
    assert all(process.returncode for process in ended), ended
    return [process.stderr for process in ended]


def test_a_rank_without_a_secret_is_told_how_to_make_one(world: dict[str, str]) -> None:
    del world[SECRET_FILE]
    for stderr in stderr_of(run("first", "skyctl", world, 2)):
        assert "ranks over the backend skyctl have to share a secret, and there is none" in stderr
        assert "openssl rand -hex 32 > secret" in stderr


def test_a_secret_that_others_can_read_is_none(world: dict[str, str]) -> None:
    Path(world[SECRET_FILE]).chmod(0o640)
    for stderr in stderr_of(run("first", "skyctl", world, 2)):
        assert "others than this user can read it" in stderr


def test_a_rank_with_another_secret_is_not_let_in(tmp_path: Path, world: dict[str, str]) -> None:
    other = tmp_path / "other"
    other.touch(0o600)
    other.write_text("another secret of somebody's")
    ends = run("first", "skyctl", world, 2, rank1={SECRET_FILE: str(other)})
    assert "no connection with rank 0 (127.0.0.1)" in ends[1].stderr
    assert all(end.returncode for end in ends)


def test_a_rank_that_dies_is_named_by_the_others(world: dict[str, str]) -> None:
    ends = run("dies", "skyctl", world, 3)
    assert ends[1].returncode == 9
    for end in (ends[0], ends[2]):
        assert "PeerLostError" in end.stderr
    # the first to know names it; that one's own end may reach the other sooner than the dead rank's
    assert any("rank 1 (127.0.0.1)" in end.stderr for end in (ends[0], ends[2])), ends


def test_ranks_that_call_something_else_are_named(world: dict[str, str]) -> None:
    stderrs = stderr_of(run("differs", "skyctl", world, 2))
    assert any("bytes where" in stderr and "rank " in stderr for stderr in stderrs), stderrs


def test_what_it_has_not_got_is_refused_by_name() -> None:
    group = MeshProcessGroup(0, 1, {}, timedelta(seconds=5))
    with pytest.raises(RunError, match="the backend skyctl has no allreduce_coalesced"):
        group.allreduce_coalesced([torch.zeros(1)])
    group.shutdown()
