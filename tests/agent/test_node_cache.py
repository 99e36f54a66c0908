"""The node's cache."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from skyctl.agent.node_cache import (
    BYTECODE_LIST,
    MANIFEST,
    NodeCache,
    check_relative_path,
    default_cache_root,
    pack_archive,
    unpack_archive,
)

FILES = {"a.py": b"1", "sub/b.py": b"", "sub/c d'.py": b"\0" * 1000}


def test_pack_and_unpack() -> None:
    digest, archive = pack_archive(FILES)
    assert unpack_archive(archive, digest)[1] == FILES
    assert pack_archive(dict(reversed(FILES.items())))[0] == digest
    assert pack_archive({**FILES, "a.py": b"2"})[0] != digest
    with pytest.raises(ValueError, match="is not"):
        unpack_archive(archive, "0" * 64)


def test_damage_is_noticed() -> None:
    digest, archive = pack_archive({"a": b"content"})
    raw = zlib.decompress(archive)
    with pytest.raises(ValueError, match="damaged"):
        unpack_archive(zlib.compress(raw[:-1] + b"T"), digest)


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../../x", MANIFEST, BYTECODE_LIST, "a\0b"])
def test_paths_stay_within(name: str) -> None:
    with pytest.raises(ValueError, match="not a path within"):
        check_relative_path(name)


def test_tree(tmp_path: Path) -> None:
    store = NodeCache(tmp_path / "ca che")
    digest, archive = pack_archive(FILES)
    assert store.tree("trees", digest) is None
    path = store.add_tree("trees", digest, archive)
    assert store.tree("trees", digest) == path
    assert store.add_tree("trees", digest, archive) == path
    damages = (
        lambda: (path / "a.py").write_bytes(b"2"),
        (path / "sub/b.py").unlink,
        (path / "sub/sitecustomize.py").touch,
        (path / "empty").mkdir,
        lambda: (path / "link").symlink_to("a.py"),
        lambda: (path / "folder").symlink_to("sub"),
        lambda: os.mkfifo(path / "pipe"),
        lambda: (path / "a.py").chmod(0o664),
        lambda: (path / "sub").chmod(0o775),
        lambda: ((path / "a.py").rename(path / "b"), (path / "a.py").symlink_to("b")),
    )
    for damage in damages:
        damage()
        assert store.tree("trees", digest) is None
        store.add_tree("trees", digest, archive)
        assert store.tree("trees", digest) == path
    (path / MANIFEST).write_text("{}")
    assert store.tree("trees", digest) is None
    assert [p.name for p in (tmp_path / "ca che/trees").iterdir()] == [digest]


def test_a_packages_bytecode_is_made_with_it_and_stays_as_it_is(tmp_path: Path) -> None:
    """Bytecode that Python kept there later would not be what is listed."""
    store = NodeCache(tmp_path)
    files = {"room/__init__.py": b"", "room/a.py": b"print('ran', __file__)\nraise SystemExit(3)"}
    digest, archive = pack_archive(files)
    path = store.add_tree("packages", digest, archive)
    kept = path / "room" / "__pycache__" / f"a.{sys.implementation.cache_tag}.pyc"
    code = kept.read_bytes()
    os.utime(path / "room/a.py", (0, 0))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-v", "-c", f"import sys; sys.path.insert(0, {str(path)!r}); import room.a"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, f"ran {path}/room/a.py\n")
    assert f"code object from '{kept}'" in done.stderr
    assert kept.read_bytes() == code
    assert store.tree("packages", digest) == path
    listed = path / BYTECODE_LIST
    planted = json.dumps({**json.loads(listed.read_text()), "torch.py": hashlib.sha256(b"").hexdigest()})
    for damage in (
        lambda: kept.write_bytes(code[:-1] + b"x"),
        kept.unlink,
        lambda: shutil.copy(kept, kept.with_name("b.cpython-399.pyc")),
        lambda: ((path / "torch.py").touch(0o600), listed.write_text(planted)),
        listed.unlink,
        lambda: listed.write_text("no JSON"),
        lambda: kept.parent.chmod(0o777),
    ):
        damage()
        assert store.tree("packages", digest) is None
        assert store.add_tree("packages", digest, archive) == path
        assert kept.read_bytes() == code


def test_what_is_in_use_is_locked(tmp_path: Path) -> None:
    store = NodeCache(tmp_path)
    path = store.add_tree("trees", *pack_archive(FILES))
    blob = tmp_path / "blobs" / hashlib.sha256(b"abc").hexdigest()
    blob.write_bytes(b"abc")
    assert store.blob(blob.name, 3) == blob
    for locked in (path / MANIFEST, blob):
        with locked.open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    store.close()
    for free in (path / MANIFEST, blob):
        with free.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as what removes it does
            assert store.tree("trees", path.name) == (None if free.name == MANIFEST else path)
            store.close()


def test_bad_archive_leaves_nothing(tmp_path: Path) -> None:
    store = NodeCache(tmp_path)
    manifest = b'{"../x": "%s"}' % hashlib.sha256(b"").hexdigest().encode()
    raw = struct.pack(">II", len(manifest), 3) + manifest + b"[0]"
    with pytest.raises(ValueError, match="not a path within"):
        store.add_tree("trees", hashlib.sha256(manifest).hexdigest(), zlib.compress(raw))
    assert list((tmp_path / "trees").iterdir()) == []


def test_blob(tmp_path: Path) -> None:
    store = NodeCache(tmp_path)
    digest = hashlib.sha256(b"abc").hexdigest()
    assert store.blob(digest, 3) is None
    (tmp_path / "blobs" / digest).write_bytes(b"abc")
    assert store.blob(digest, 3) == tmp_path / "blobs" / digest
    assert store.blob(digest, 4) is None
    (tmp_path / "blobs" / digest).write_bytes(b"abd")
    assert store.blob(digest, 3) is None


def test_cache_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/a b")
    assert default_cache_root() == Path("/a b/skyctl")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the XDG specification
    monkeypatch.setenv("HOME", "/h")
    assert default_cache_root() == Path("/h/.cache/skyctl")
