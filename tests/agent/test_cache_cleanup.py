"""The parts of a node's cache that ``skyctl clean`` removes, and those that it leaves."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyctl.agent import cache_cleanup, node_cache
from skyctl.agent.cache_cleanup import LEFTOVER_AGE_S, clean_cache
from skyctl.agent.file_server import Upload
from skyctl.agent.node_cache import NodeCache, pack_archive
from skyctl.agent.process_tree import SESSION_TAG
from skyctl.agent.session_folder import SessionFolder
from skyctl.device.dtype_support import FILE_NAME
from skyctl.private_folder import UnsafeFolderError

BLOB = "a" * 64
YEAR_S = 365 * 86400.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache with two packages, a workload, a file, an outcome of a trial and a session that is over."""
    root = tmp_path / "cache"
    store = NodeCache(root)
    for kind, text in (("packages", b"1"), ("packages", b"2"), ("trees", b"3")):
        store.add_tree(kind, *pack_archive({"a/b.py": text}))
    (root / "blobs" / BLOB).write_bytes(b"x" * 5000)
    (root / FILE_NAME).write_text("{}")
    (root / FILE_NAME).with_suffix(".lock").touch()
    store.close()
    over = root / "sessions" / "s-over"
    over.mkdir()
    (over / "owner.json").write_text(json.dumps({"host": socket.gethostname()}))
    (over / "lock").touch()
    (root / "sessions" / ".lock").touch()
    return root


def counts(root: Path, *, dry_run: bool = False) -> dict[str, tuple[int, int]]:
    """By kind, how many were removed and kept; the bytes are there where anything is."""
    kinds = clean_cache(root, dry_run=dry_run)
    for kind in kinds:
        assert bool(kind["freed_bytes"]) == bool(kind["removed"]), kind
        assert bool(kind["kept_bytes"]) == bool(kind["kept"]), kind
    return {kind["what"]: (kind["removed"], kind["kept"]) for kind in kinds}


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_all_of_it_goes_and_the_folder_too(root: Path) -> None:
    (root / FILE_NAME).write_text("{}")
    (root / FILE_NAME).with_suffix(".lock").write_text("x")
    before = files(root)
    expected = {"packages": (2, 0), "trees": (1, 0), "blobs": (1, 0), "sessions": (1, 0), "trials": (1, 0)}
    assert counts(root, dry_run=True) == expected
    assert files(root) == before
    assert counts(root) == expected
    assert not root.exists()
    assert counts(root) == {}


def test_what_a_process_uses_stays(root: Path) -> None:
    """Also where that was started by another launcher: what was given to it is locked."""
    store = NodeCache(root)
    digest, _ = pack_archive({"a/b.py": b"2"})
    assert store.tree("packages", digest) is not None
    assert store.tree("trees", pack_archive({"a/b.py": b"3"})[0]) is not None
    session = SessionFolder.create(root / "sessions")
    counted = counts(root)
    assert counted["packages"] == (1, 1)
    assert counted["trees"] == (0, 1)
    assert counted["sessions"] == (1, 1)
    assert store.tree("packages", digest) is not None
    session.remove()
    store.close()
    assert counts(root) == {"packages": (1, 0), "trees": (1, 0)}
    assert not root.exists()


def test_a_trial_that_is_being_made_stays(root: Path) -> None:
    with (root / FILE_NAME).with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (root / FILE_NAME).write_text("{}")
        assert counts(root)["trials"] == (0, 1)
    assert (root / FILE_NAME).exists()


def test_a_session_of_another_host_and_one_with_processes_left_stay(root: Path) -> None:
    over = root / "sessions" / "s-over"
    (over / "owner.json").write_text('{"host": "elsewhere"}')
    assert counts(root, dry_run=True)["sessions"] == (0, 1)
    (over / "owner.json").write_text(json.dumps({"host": socket.gethostname()}))
    left = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={SESSION_TAG: "s-over"}
    )
    try:
        assert counts(root)["sessions"] == (0, 1)
    finally:
        left.communicate(b"\n")
    assert counts(root) == {"sessions": (1, 0)}


def test_checkpoints_stay_and_leftovers_go_once_they_are_old(root: Path) -> None:
    run = root / "runs" / "20261121-063012-ab12@elm" / "step-00000010"
    run.mkdir(parents=True)
    (run / "layer-00000.safetensors").write_bytes(b"x" * 5000)
    for name in ("trees/.new-x", "packages/.old-x", "blobs/.new-y"):
        (root / name).mkdir()
        (root / name / "a").write_bytes(b"x" * 5000)
    assert counts(root, dry_run=True)["runs"] == (0, 1)
    old = (root / "trees/.new-x").stat().st_mtime - LEFTOVER_AGE_S - 60
    for name in ("trees/.new-x", "blobs/.new-y"):
        os.utime(root / name, (old, old))
    counted = counts(root)
    assert counted["trees"] == (2, 0)
    assert counted["runs"] == (0, 1)
    assert run.exists()
    assert files(root) == {
        "runs", "runs/20261121-063012-ab12@elm", "runs/20261121-063012-ab12@elm/step-00000010",
        "runs/20261121-063012-ab12@elm/step-00000010/layer-00000.safetensors",
        "packages", "packages/.old-x", "packages/.old-x/a",
    }  # fmt: skip


def test_a_damaged_tree_and_what_is_no_folder_go(root: Path) -> None:
    shutil.rmtree(root / "trees")
    (root / "trees").mkdir()
    (root / "trees" / ("b" * 64)).symlink_to(root / "packages")
    (root / "packages" / ("c" * 64)).mkdir()
    counted = counts(root)
    assert counted["packages"] == (3, 0)
    assert counted["trees"] == (1, 0)


def test_a_folder_that_others_may_write_to_is_left_alone(root: Path) -> None:
    root.chmod(0o777)
    before = files(root)
    with pytest.raises(UnsafeFolderError, match="anybody may write to it"):
        clean_cache(root, dry_run=False)
    assert files(root) == before


@pytest.mark.parametrize("shift_s", [-10 * YEAR_S, YEAR_S, 10 * YEAR_S])
def test_what_is_being_written_stays_whatever_the_clock_says(
    root: Path, shift_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what nobody writes any more goes, also where its date is ahead of the clock."""
    store = NodeCache(root)
    data = b"4" * (1 << 16)
    upload = Upload(store, root, "blobs", hashlib.sha256(data).hexdigest())
    upload.write(data)
    (root / "trees" / ".new-cut-off").mkdir()
    real, write = time.time, node_cache._write_own_file
    monkeypatch.setattr(cache_cleanup.time, "time", lambda: real() + shift_s)
    meanwhile: list[dict[str, tuple[int, int]]] = []

    def write_and_clean(path: Path, content: bytes) -> None:
        write(path, content)
        if path.name == "c.py":
            meanwhile.append(counts(root))

    monkeypatch.setattr(node_cache, "_write_own_file", write_and_clean)
    try:
        store.add_tree("trees", *pack_archive({"c.py": b"5"}))
        upload.finish()
    finally:
        upload.close()
        store.close()
    assert [(counted["trees"], counted["blobs"]) for counted in meanwhile] == [((2, 1), (1, 1))]
    assert files(root / "trees" / pack_archive({"c.py": b"5"})[0]) == {".manifest.json", "c.py"}
