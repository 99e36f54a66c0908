"""The node's cache: files and folders named by what they hold, so that they are sent once and never stale.

::

    $XDG_CACHE_HOME/skyctl or ~/.cache/skyctl
    ├── packages/DIGEST/   skyctl's node side, as it was shipped
    ├── trees/DIGEST/      the user's workload with the modules next to it
    ├── blobs/DIGEST       single files, such as the text to train on
    └── sessions/ID/       one running agent's private folder, removed at its end

A tree's digest is the SHA-256 of its manifest: a JSON object, relative path to SHA-256. The manifest is kept
in the tree. Everything is written under a temporary name and renamed. This module must import nothing of
skyctl: the bootstrap sends its source, before there is a package on the node.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
import zlib
from pathlib import Path, PurePosixPath

MANIFEST = ".manifest.json"
VERIFY_BLOB_BYTES = 64 << 20


def default_cache_root() -> Path:
    """Where this user's cache is; made by ``NodeCache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path("~/.cache").expanduser()
    return root / "skyctl"


def pack_archive(files: dict[str, bytes]) -> tuple[str, bytes]:
    """A folder as (digest, archive). Paths are relative, with ``/``."""
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    sizes = [len(files[name]) for name in hashes]
    manifest = json.dumps(hashes, sort_keys=True).encode()
    head = json.dumps(sizes).encode()
    raw = struct.pack(">II", len(manifest), len(head)) + manifest + head + b"".join(files[n] for n in hashes)
    return hashlib.sha256(manifest).hexdigest(), zlib.compress(raw, 6)


def unpack_archive(archive: bytes, digest: str) -> tuple[bytes, dict[str, bytes]]:
    """The manifest and the files of an archive; ValueError where the digest or a path is not right."""
    raw = zlib.decompress(archive)
    manifest_bytes, head_bytes = struct.unpack_from(">II", raw)
    start = 8 + manifest_bytes
    manifest = raw[8:start]
    if hashlib.sha256(manifest).hexdigest() != digest:
        raise ValueError(f"the archive is not {digest[:12]}")
    hashes = json.loads(manifest)
    at = start + head_bytes
    files = {}
    for name, size in zip(hashes, json.loads(raw[start:at]), strict=True):
        files[name] = raw[at : at + size]
        at += size
        if hashlib.sha256(files[name]).hexdigest() != hashes[name]:
            raise ValueError(f"{name} in archive {digest[:12]} was damaged on the way")
        check_relative_path(name)
    return manifest, files


def check_relative_path(name: str) -> None:
    """ValueError unless ``name`` is a relative path that stays within its folder."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name or name == MANIFEST:
        raise ValueError(f"{name!r} is not a path within a folder")


class NodeCache:
    """A node's cache folder, made (0700) where it is missing. Errors are OSErrors that name the path."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("packages", "trees", "blobs", "sessions"):
            (root / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    def tree(self, kind: str, digest: str) -> Path | None:
        """The folder of that digest, None where it is missing or a file in it has changed."""
        path = self.root / kind / digest
        try:
            manifest = (path / MANIFEST).read_bytes()
            if hashlib.sha256(manifest).hexdigest() != digest:
                return None
            for name, expected in json.loads(manifest).items():
                if hashlib.sha256((path / name).read_bytes()).hexdigest() != expected:
                    return None
        except OSError:
            return None
        return path

    def add_tree(self, kind: str, digest: str, archive: bytes) -> Path:
        """Unpacks an archive of ``pack_archive`` and puts it in its place in one step."""
        manifest, files = unpack_archive(archive, digest)
        path = self.root / kind / digest
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))
        try:
            for name, data in files.items():
                target = fresh / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
            (fresh / MANIFEST).write_bytes(manifest)
            self._place(fresh, path)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        if self.tree(kind, digest) is None:
            raise OSError(f"what was written to {path} is not what was sent; is the disk full or failing?")
        return path

    def _place(self, fresh: Path, path: Path) -> None:
        try:
            fresh.rename(path)
        except OSError:
            if self.tree(path.parent.name, path.name) is not None:
                return  # somebody else was quicker
            damaged = Path(tempfile.mkdtemp(prefix=".old-", dir=path.parent))
            try:
                path.rename(damaged)
                fresh.rename(path)
            finally:
                shutil.rmtree(damaged, ignore_errors=True)

    def blob(self, digest: str, size_bytes: int) -> Path | None:
        """The file of that digest, None where it is missing (large ones are checked by size alone)."""
        path = self.root / "blobs" / digest
        try:
            if path.stat().st_size != size_bytes:
                return None
            if size_bytes <= VERIFY_BLOB_BYTES and file_digest(path) != digest:
                return None
        except OSError:
            return None
        return path


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
