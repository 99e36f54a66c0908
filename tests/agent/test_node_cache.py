"""The node's cache."""

from __future__ import annotations

import hashlib
import struct
import zlib
from pathlib import Path

import pytest

from skyctl.agent.node_cache import (
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


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../../x", MANIFEST, "a\0b"])
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
    (path / "__pycache__").mkdir()
    assert store.tree("trees", digest) == path
    for damage in (lambda: (path / "a.py").write_bytes(b"2"), (path / "sub/b.py").unlink):
        damage()
        assert store.tree("trees", digest) is None
        store.add_tree("trees", digest, archive)
        assert store.tree("trees", digest) == path
    (path / MANIFEST).write_text("{}")
    assert store.tree("trees", digest) is None
    assert [p.name for p in (tmp_path / "ca che/trees").iterdir()] == [digest]


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
