"""Keepers as processes of their own: they list, verify, prune and pull."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from pathlib import Path

import pytest
from tests.checkpoint.replicator_process import PATIENCE_S, Nodes, put, request, whole

from skyctl.checkpoint.node import layout
from skyctl.remote.credentials import make_tls_certificate


def test_list_verify_prune_pin_forget(nodes: Nodes, tmp_path: Path) -> None:
    node = nodes("n1")
    assert node.ask("list")["steps"] == {}
    shas = put(node.folder, 60, range(3))
    for step in (20, 40, 80):
        put(node.folder, step, range(1))
    steps = node.ask("list")["steps"]
    assert steps["60"]["1"] == {"sha256": shas["1"], "bytes": 100_001, "attempt": 0, "own": True}
    layout.layer_path(node.folder, 60, 1).write_bytes(b"short")
    data = bytearray(layout.layer_path(node.folder, 60, 2).read_bytes())
    data[777] ^= 1
    layout.layer_path(node.folder, 60, 2).write_bytes(data)
    answer = node.ask("verify", step=60, layers={**shas, "7": None})
    assert answer["whole"] == [0]
    assert sorted(answer["damaged"]) == ["1", "2", "7"]
    assert "layer-00001.safetensors is truncated" in answer["damaged"]["1"]
    assert "layer-00002.safetensors is damaged" in answer["damaged"]["2"]
    assert "layer-00007.safetensors is missing" in answer["damaged"]["7"]
    assert node.ask("pin", steps=[20])["pinned"] == [20]
    assert layout.prune_steps(node.folder, 2) == [40]
    assert node.ask("prune", keep_steps=[60])["removed"] == [20, 80]
    assert "the request 'prune' can't be followed: no keep_steps" in node.ask("prune")["error"]
    assert "the request is 'dance'; this task takes 'list' or" in node.ask("dance")["error"]
    assert node.ask("forget")["removed"] == [60]
    assert not node.folder.exists()
    node.send({"op": "stop"})
    assert node.wait("result")["torch"] is False


@pytest.mark.parametrize("encrypted", [False, True])
def test_one_pulls_from_another(encrypted: bool, nodes: Nodes, tmp_path: Path) -> None:
    tls = make_tls_certificate() if encrypted else None
    one, two = nodes("n1", tls=tls), nodes("n2", tls=tls)
    shas = put(one.folder, 60, range(4), size=3_000_000)
    wanted = {**shas, "9": "0" * 64, "1": "0" * 64}
    answer = two.ask("pull", step=60, layers=wanted, attempt=3, **one.address)
    assert answer["done"] == [0, 2, 3]
    assert "its SHA-256 is" in answer["failed"]["1"]
    assert "does not have step-00000060/layer-00009" in answer["failed"]["9"]
    del shas["1"]
    assert whole(two.folder, 60, shas)
    held = two.ask("list")["steps"]["60"]
    assert sorted(held) == ["0", "2", "3"]
    assert held["0"] == {"sha256": shas["0"], "bytes": 3_000_000, "attempt": 3, "own": False}
    for path in two.folder.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    assert two.ask("pull", step=60, layers=shas, attempt=3, **one.address)["done"] == [0, 2, 3]
    data = bytearray(layout.layer_path(two.folder, 60, 2).read_bytes())
    data[777] ^= 1
    layout.layer_path(two.folder, 60, 2).write_bytes(data)  # its manifest still says what it was
    assert two.ask("pull", step=60, layers=shas, attempt=3, **one.address)["done"] == [0, 2, 3]
    assert whole(two.folder, 60, shas)
    one.close()
    gone = two.ask("pull", step=60, layers={**shas, "1": "0" * 64}, attempt=3, **one.address)
    assert gone["done"] == [0, 2, 3]
    assert "no connection with the checkpoint replicator of n1 (127.0.0.1:" in gone["failed"]["1"]


def test_a_file_that_came_another_way(nodes: Nodes, tmp_path: Path) -> None:
    node = nodes("n1")
    (tmp_path / "pushed").write_bytes(b"over the launcher")
    sha = hashlib.sha256(b"over the launcher").hexdigest()
    files = {
        "2": {"path": str(tmp_path / "pushed"), "sha256": sha},
        "3": {"path": str(tmp_path / "no"), "sha256": sha},
    }
    answer = node.ask("adopt", step=60, layers=files)
    assert answer["done"] == [2]
    assert "can't be read" in answer["failed"]["3"]
    assert answer["unwritable"] is None
    assert whole(node.folder, 60, {"2": sha})
    assert not (tmp_path / "pushed").exists()


def test_pruned_in_the_middle_of_a_pull(nodes: Nodes, tmp_path: Path) -> None:
    """Layers that are being sent arrive whole; those not yet asked for are told to be missing."""
    one, two = nodes("n1"), nodes("n2")
    shas = put(one.folder, 60, range(6), size=20_000_000)
    two.send(request("pull", id=1, step=60, layers=shas, **one.address))
    deadline = time.monotonic() + PATIENCE_S
    while not list(two.folder.rglob("*.part")) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert one.ask("prune", keep_steps=[])["removed"] == [60]
    answer = two.wait("answer", lambda event: event["id"] == 1)
    assert sorted(answer["done"] + [int(layer) for layer in answer["failed"]]) == list(range(6))
    assert whole(two.folder, 60, {str(layer): shas[str(layer)] for layer in answer["done"]})
    assert not list(two.folder.rglob("*.part"))
    assert all("does not have" in why for why in answer["failed"].values())


def test_pruned_where_it_is_pulled_to(nodes: Nodes, tmp_path: Path) -> None:
    one, two = nodes("n1"), nodes("n2")
    shas = put(one.folder, 60, range(6), size=20_000_000)
    two.send(request("pull", id=1, step=60, layers=shas, **one.address))
    deadline = time.monotonic() + PATIENCE_S
    while not list(two.folder.rglob("*.part")) and time.monotonic() < deadline:
        time.sleep(0.001)
    two.ask("prune", keep_steps=[])
    answer = two.wait("answer", lambda event: event["id"] == 1)
    assert sorted(answer["done"] + [int(layer) for layer in answer["failed"]]) == list(range(6))
    assert answer["unwritable"] is None, "the disk is not full: what was to be kept was removed"
    assert not two.folder.exists() or not list(two.folder.rglob("*.part"))


def test_a_full_disk_where_it_is_pulled_to_is_told(nodes: Nodes, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a full disk is a small one that root mounts")
    one = nodes("n1")
    (tmp_path / "n2").mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(tmp_path / "n2")]
    subprocess.run(small, check=True)
    try:
        two = nodes("n2")
        shas = put(one.folder, 60, range(4))
        answer = two.ask("pull", step=60, layers=shas, **one.address)
        assert "No space left" in next(iter(answer["failed"].values()))
        assert "No space left" in answer["unwritable"]
        assert answer["done"]
        done = {str(layer): shas[str(layer)] for layer in answer["done"]}
        assert whole(two.folder, 60, done)
        assert not list(two.folder.rglob("*.part"))
        two.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "n2")], check=True)
