"""The files in a run's folder on a node: named, whole or not there, pruned, pinned."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyctl.checkpoint.node import layout
from skyctl.checkpoint.node.atomic_file import FileDigest, atomic_writer
from skyctl.errors import RecordError, SkyctlError


def put(folder: Path, step: int, layers: dict[int, bytes], *, rank: int = 0, attempt: int = 0) -> None:
    layout.make_step_folder(folder, step)
    files = {}
    for layer, data in layers.items():
        layout.layer_path(folder, step, layer).write_bytes(data)
        files[layer] = FileDigest(len(data), hashlib.sha256(data).hexdigest())
    part = layout.ShardManifest("r", rank, step, attempt, min(layers), max(layers) + 1, "w", files)
    layout.write_manifest(folder, part)


def test_what_is_there_is_what_manifests_name(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert layout.held_shards(folder) == {}
    put(folder, 60, {0: b"zero", 1: b"one"})
    put(folder, 60, {2: b"two"}, rank=1)
    layout.layer_path(folder, 60, 3).write_bytes(b"without a manifest")
    put(folder, 80, {0: b"zero again"})
    held = layout.held_shards(folder)
    assert {step: sorted(layers) for step, layers in held.items()} == {60: [0, 1, 2], 80: [0]}
    assert held[60][1] == layout.HeldShard(hashlib.sha256(b"one").hexdigest(), 3)
    assert layout.HeldShard.from_dict(held[60][1].to_dict()) == held[60][1]
    assert [path.name for path in sorted(layout.step_folder(folder, 60).iterdir())] == [
        *(f"layer-0000{n}.safetensors" for n in range(4)),
        "part-0000.json",
        "part-0001.json",
    ]
    assert folder.stat().st_mode & 0o777 == 0o700
    layout.layer_path(folder, 60, 1).unlink()
    layout.layer_path(folder, 60, 2).write_bytes(b"tw")
    assert sorted(layout.held_shards(folder)[60]) == [0]


def test_faults_are_named(tmp_path: Path) -> None:
    put(tmp_path, 60, {0: b"zero", 1: b"one", 2: b"two", 3: b"three"})
    layout.layer_path(tmp_path, 60, 1).write_bytes(b"onE")
    layout.layer_path(tmp_path, 60, 2).write_bytes(b"tw")
    layout.layer_path(tmp_path, 60, 3).write_bytes(b"three more")
    layout.layer_path(tmp_path, 60, 5).write_bytes(b"five")
    name = "step-00000060/layer-0000{}.safetensors".format
    assert layout.find_fault(tmp_path, 60, 0) is None
    assert layout.find_fault(tmp_path, 60, 0, hashlib.sha256(b"zero").hexdigest()) is None
    for layer, words in (
        (1, f"{name(1)} is damaged: its SHA-256 is"),
        (2, f"{name(2)} is truncated: it has 2 bytes, its manifest says 3"),
        (3, f"{name(3)} is damaged: it has 10 bytes, its manifest says 5"),
        (4, f"{name(4)} is missing"),
        (5, f"{name(5)} has no manifest: it was not written to its end"),
    ):
        assert words in (layout.find_fault(tmp_path, 60, layer) or ""), layer
    assert "must be 000000000000…" in (layout.find_fault(tmp_path, 60, 0, "0" * 64) or "")


def test_a_later_attempt_counts_and_a_damaged_manifest_does_not(tmp_path: Path) -> None:
    put(tmp_path, 60, {0: b"new"}, rank=4, attempt=1)
    first = layout.ShardManifest(
        "r", 0, 60, 0, 0, 1, "w", {0: FileDigest(3, hashlib.sha256(b"old").hexdigest())}
    )
    layout.write_manifest(tmp_path, first)
    assert layout.held_shards(tmp_path)[60][0].attempt == 1
    layout.manifest_path(tmp_path, 60, 7).write_text("{")
    layout.manifest_path(tmp_path, 60, 8).write_text(first.to_json().replace('"step": 60', '"step": 61'))
    assert len(layout.read_manifests(tmp_path, 60)) == 2
    newer = first.to_json().replace('"version": 1', '"version": 2')
    with pytest.raises(RecordError, match="it is of version 2, this skyctl reads 1"):
        layout.ShardManifest.from_json(newer, "there")
    assert layout.ShardManifest.from_json(first.to_json(), "there") == first
    for text in ("", "[]", "{}", '{"kind": "skyctl/part"}', newer.replace('"0": {', '"../x": {')):
        with pytest.raises(RecordError, match="there is no manifest"):
            layout.ShardManifest.from_json(text, "there")


def test_the_newest_are_kept_and_the_pinned(tmp_path: Path) -> None:
    for step in range(10, 80, 10):
        put(tmp_path, step, {0: b"x"})
    layout.pin_steps(tmp_path, [20])
    layout.make_step_folder(tmp_path, 80)  # begun, not written
    assert layout.prune_steps(tmp_path, 0) == []
    assert layout.prune_steps(tmp_path, 4) == [10, 30]
    assert layout.prune_steps(tmp_path, 1) == [40, 50], "never the newest alone"
    assert layout.list_steps(tmp_path) == [20, 60, 70, 80]
    layout.pin_steps(tmp_path, [])
    assert layout.prune_steps(tmp_path, 2) == [20]
    assert layout.retain_steps(tmp_path, [70]) == [60, 80]
    (tmp_path / "pinned.json").write_text("oh")
    assert layout.pinned_steps(tmp_path) == set()
    layout.remove_run_folder(tmp_path)
    assert not tmp_path.exists()


def test_what_a_later_attempt_has_left_behind_goes(tmp_path: Path) -> None:
    for step in (40, 60, 80, 100, 120):
        put(tmp_path, step, {0: b"x"})
    put(tmp_path, 80, {0: b"y"}, attempt=1)
    assert layout.prune_steps(tmp_path, 3) == [100, 120]
    put(tmp_path, 100, {0: b"y"}, attempt=1)
    assert layout.prune_steps(tmp_path, 3) == [40]


def test_numbers_alone_name_files(tmp_path: Path) -> None:
    for odd in (-1, 10**8, True, "1", 1.0, None, "../x"):
        with pytest.raises(ValueError, match="not a number"):
            layout.layer_path(tmp_path, odd, 0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not a number"):
            layout.layer_path(tmp_path, 0, odd)  # type: ignore[arg-type]


def test_a_folder_that_cant_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SkyctlError, match="can't make folder"):
        layout.make_step_folder(tmp_path / "file" / "r", 1)
    with pytest.raises(SkyctlError, match="can't be written"), atomic_writer(tmp_path / "no" / "x") as out:
        out.write(b"x")


WRITER = """
import sys
from pathlib import Path
from skyctl.checkpoint.node import layout
from skyctl.checkpoint.node.atomic_file import atomic_writer
folder = Path(sys.argv[1])
step = 0
while True:
    step += 1
    layout.make_step_folder(folder, step)
    files = {}
    for layer in range(3):
        with atomic_writer(layout.layer_path(folder, step, layer), 0o600) as out:
            for _ in range(64):
                out.write(bytes([step % 256]) * 65536)
        files[layer] = out.digest
    layout.write_manifest(folder, layout.ShardManifest("r", 0, step, 0, 0, 3, "w", files))
    layout.prune_steps(folder, 2)
"""


def test_a_kill_while_writing_leaves_nothing_half_under_a_name(tmp_path: Path) -> None:
    for number in range(8):
        folder = tmp_path / str(number)
        with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)]) as writer:
            deadline = time.monotonic() + 30
            while len(layout.held_shards(folder)) < 2 and time.monotonic() < deadline:
                time.sleep(0.005 * number)
            writer.send_signal(signal.SIGKILL)
        held = layout.held_shards(folder)
        assert held
        for step, layers in held.items():
            assert sorted(layers) == [0, 1, 2]
            assert not any(layout.find_fault(folder, step, layer) for layer in layers)
        for path in folder.rglob("layer-*"):
            assert path.stat().st_size == 64 * 65536
        layout.remove_leftovers(folder)
        assert not list(folder.rglob(".*"))
        layout.prune_steps(folder, 2)
        assert len(layout.list_steps(folder)) <= 3


def test_what_others_are_writing_is_left(tmp_path: Path) -> None:
    with atomic_writer(tmp_path / "x") as out:
        layout.remove_leftovers(tmp_path)
        out.write(b"y")
    assert (tmp_path / "x").read_bytes() == b"y"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / f".x.{gone.pid}-0.part").write_text("half")
    (tmp_path / f".x.{os.getppid()}-0.part").write_text("half")
    layout.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".x.{os.getppid()}-0.part", "x"]


def test_a_step_that_another_rank_begins_meanwhile_is_not_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of several pipelines may share a node's folder, and only some of them write."""
    pinned = layout.pinned_steps

    def while_another_begins(folder: Path) -> set[int]:
        layout.make_step_folder(folder, 5)
        return pinned(folder)

    monkeypatch.setattr(layout, "pinned_steps", while_another_begins)
    assert layout.prune_steps(tmp_path, 2) == []
    assert layout.list_steps(tmp_path) == [5]
