"""Keepers that follow others: what ranks write elsewhere is copied here."""

from __future__ import annotations

import resource
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.replicator_process import SECRET, Nodes, credentials, put, whole

from skyctl.checkpoint.node import layout
from skyctl.checkpoint.node.shard_client import ReplicatorAddress, ShardClient
from skyctl.checkpoint.node.shard_follower import ShardFollower
from skyctl.checkpoint.node.shard_server import ShardServer


def test_a_follower_takes_what_a_source_goes_on_writing(nodes: Nodes, tmp_path: Path) -> None:
    one, two = nodes("n1"), nodes("n2")
    wrote: dict[int, dict[str, str]] = {20: put(one.folder, 20, range(3))}
    two.ask("follow", peers=[one.address], keep=2)
    first = two.wait("replicated")
    assert (first["step"], first["from"]) == (20, "n1")
    assert first["bytes"] == 300_003
    for step in range(40, 400, 20):
        wrote[step] = put(one.folder, step, range(2))
        wrote[step] |= put(one.folder, step, range(2, 3), rank=1)
        layout.prune_steps(one.folder, 2)
        time.sleep(0.01)
    two.wait("replicated", lambda event: event["step"] == 380 and "2" in event["layers"])
    held = layout.held_shards(two.folder)
    assert len(held) == 2, "older ones are pruned"
    assert sorted(held[380]) == [0, 1, 2]
    assert whole(two.folder, 380, wrote[380])
    # copies are not copied on, or two that follow each other would never end
    one.ask("follow", peers=[two.address], keep=2)
    put(two.folder, 380, range(5, 6), rank=5)
    assert list(one.wait("replicated")["layers"]) == ["5"]


def test_a_pinned_step_is_taken_to_its_end_before_newer_ones(nodes: Nodes, tmp_path: Path) -> None:
    one, two = nodes("n1"), nodes("n2")
    for step in (20, 40, 60):
        put(one.folder, step, range(2))
    put(one.folder, 20, range(2, 3), rank=1)
    two.ask("pin", steps=[20])
    two.ask("follow", peers=[one.address], keep=2)
    assert [two.wait("replicated")["step"] for _ in range(2)] == [20, 60]
    assert sorted(layout.held_shards(two.folder)[20]) == [0, 1, 2]


def test_the_best_step_of_ranks_here_is_copied_and_kept_without_a_launcher(
    nodes: Nodes, tmp_path: Path
) -> None:
    one, two = nodes("n1"), nodes("n2")
    for step in (20, 40, 60, 80):
        put(one.folder, step, range(2))
        put(two.folder, step, range(2, 4), rank=1)
    layout.pin_best_steps(two.folder, [20])
    two.ask("follow", peers=[one.address], keep=2)
    assert [two.wait("replicated")["step"] for _ in range(2)] == [20, 80]
    assert sorted(layout.held_shards(two.folder)) == [20, 60, 80]
    assert sorted(layout.held_shards(two.folder)[20]) == [0, 1, 2, 3]


def test_a_peer_that_comes_and_goes(nodes: Nodes, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    two = nodes("n2")
    two.ask("follow", peers=[{"host": "127.0.0.1", "port": port, "node": "later"}], keep=2)
    assert "no connection with the checkpoint replicator of later" in two.wait("unreplicated")["error"]
    one = nodes("n1")
    put(one.folder, 20, range(1))
    two.ask("follow", peers=[one.address], keep=2)
    two.wait("replicated")
    one.popen.kill()
    assert "n1" in two.wait("unreplicated")["error"]
    assert two.ask("follow", peers=[], keep=2)["following"] == []


def test_a_full_disk_here_is_not_said_of_the_node_that_is_copied(nodes: Nodes, tmp_path: Path) -> None:
    one, two = nodes("n1"), nodes("n2")
    for step in (20, 40):
        put(one.folder, step, range(2))
    two.ask("pin", steps=[20, 40])
    whole_disk = resource.prlimit(two.popen.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    two.ask("follow", peers=[one.address], keep=2)
    said = two.wait("unreplicated")["error"]
    assert str(two.folder) in said
    assert "can't be written" in said
    resource.prlimit(two.popen.pid, resource.RLIMIT_FSIZE, whole_disk)
    two.wait("replicated", lambda event: event["step"] == 40)
    assert {event["error"] for event in two.events if event["event"] == "unreplicated"} == {said}


@pytest.mark.parametrize("where", ["there", "here"])
def test_a_step_that_is_removed_while_it_is_copied_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """After a node is lost, nodes remove what is newer than the checkpoint that the run goes on from."""
    folders = {"there": tmp_path / "n1", "here": tmp_path / "n2"}
    put(folders["there"], 20, range(2))
    said: list[dict[str, Any]] = []
    heard = threading.Event()
    get = ShardClient.get

    def get_what_goes(client: ShardClient, folder: Path, step: int, *rest: Any) -> Any:
        if step == 20:
            shutil.rmtree(layout.step_folder(folders[where], step), ignore_errors=True)
        try:
            return get(client, folder, step, *rest)
        finally:
            layout.retain_steps(folders["there"], {40})
            put(folders["there"], 40, range(2))

    def hear(event: dict[str, Any]) -> None:
        said.append(event)
        heard.set()

    monkeypatch.setattr(ShardClient, "get", get_what_goes)
    server = ShardServer(folders["there"], run_id="r", node="n1", secret=SECRET, address="127.0.0.1")
    try:
        follower = ShardFollower(
            folders["here"],
            ReplicatorAddress("127.0.0.1", server.port, "n1"),
            credentials(),
            keep=2,
            limits=dict.fromkeys(range(2), 1 << 30),
            slots=threading.Semaphore(1),
            send=hear,
            poll_s=0.05,
        )
        assert heard.wait(30)
        follower.close()
    finally:
        server.close()
    assert [(event["event"], event.get("step")) for event in said] == [("replicated", 40)]
