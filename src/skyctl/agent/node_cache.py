"""The node's cache: files and folders named by what they hold, so that they are sent once and never stale.

::

    $XDG_CACHE_HOME/skyctl or ~/.cache/skyctl
    ├── packages/DIGEST.TAG/   skyctl's node side, as it was shipped, with bytecode for one kind of Python
    ├── trees/DIGEST/          the user's workload with the modules next to it
    ├── blobs/DIGEST           single files, such as the text to train on
    ├── runs/RUN@NODE/         a run's checkpoints, see ``checkpoint.node.layout``
    └── sessions/ID/           one running agent's private folder, removed at its end

All of it is this user's alone (``private_folder``), so what was checked once stays as it was. A tree's digest
is the SHA-256 of its manifest: a JSON object, relative path to SHA-256. The manifest is kept in the tree, and
the tree holds what it names and nothing else: what is planted beside it would be imported, too. A package's
bytecode is made with it and listed in the same way. Everything is written under a temporary name and renamed,
and locked (shared) by each process that was given it, until that ends: what can be locked alone is not in use
(``cache_cleanup``). But for ``private_folder`` this module must import nothing of skyctl: the bootstrap sends
its source, before there is a package on the node.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import struct
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import NoReturn

from skyctl.private_folder import make_private_folder

MANIFEST = ".manifest.json"
BYTECODE_LIST = ".bytecode.json"
BYTECODE_FOLDER = "__pycache__"
ENVIRONMENT_MARKER = "skyctl.json"
"""In a virtual environment that ``skyctl setup`` has made; see ``setup.node.environment_store``."""
VERIFY_BLOB_BYTES = 64 << 20
DIGEST_BLOCK_BYTES = 1 << 18


def default_cache_root() -> Path:
    """The path of this user's cache; made by ``NodeCache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path("~/.cache").expanduser()
    return root / "skyctl"


def tree_digest(files: Mapping[str, bytes]) -> str:
    """The digest of a folder with these files, by relative path with ``/``."""
    return hashlib.sha256(_make_manifest(files)).hexdigest()


def _make_manifest(files: Mapping[str, bytes]) -> bytes:
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    return json.dumps(hashes, sort_keys=True).encode()


def pack_archive(files: Mapping[str, bytes]) -> tuple[str, bytes]:
    """A folder as (digest, archive). Paths are relative, with ``/``."""
    manifest = _make_manifest(files)
    names = list(json.loads(manifest))
    head = json.dumps([len(files[name]) for name in names]).encode()
    raw = struct.pack(">II", len(manifest), len(head)) + manifest + head + b"".join(files[n] for n in names)
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
    inside = bool(name) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
    if not inside or name in (MANIFEST, BYTECODE_LIST):
        raise ValueError(f"{name!r} is not a path within a folder")


class NodeCache:
    """A node's cache folder, made (0700) where it is missing. Errors are OSErrors that name the path.

    Raises:
        UnsafeFolderError: somebody else could put things into it.
    """

    def __init__(self, root: Path) -> None:
        self.root = make_private_folder(root)
        self._locks: dict[tuple[int, int], int] = {}  # device and inode → descriptor
        for name in ("packages", "trees", "blobs", "sessions"):
            make_private_folder(root / name)

    def tree(self, kind: str, digest: str) -> Path | None:
        """The folder of that digest, None where it is missing, or holds anything but what it should."""
        path = self._tree_path(kind, digest)
        try:
            with _open_own_file(path / MANIFEST) as file:
                manifest = file.read()
                if hashlib.sha256(manifest).hexdigest() != digest or not self._lock(file.fileno()):
                    return None
            listed = {**json.loads(manifest), MANIFEST: digest}
            if kind == "packages":
                listed |= _read_bytecode_list(path)
            return path if _hash_files(path) == listed else None
        except (OSError, ValueError):
            return None

    def _tree_path(self, kind: str, digest: str) -> Path:
        name = f"{digest}.{sys.implementation.cache_tag}" if kind == "packages" else digest
        return self.root / kind / name

    def add_tree(self, kind: str, digest: str, archive: bytes) -> Path:
        """Unpacks an archive of ``pack_archive`` and puts it in its place in one step."""
        manifest, files = unpack_archive(archive, digest)
        path = self._tree_path(kind, digest)
        make_private_folder(path.parent)  # `skyctl clean` may have removed it meanwhile
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))
        try:
            _write_own_file(fresh / MANIFEST, manifest)
            with (fresh / MANIFEST).open("rb") as file:
                self._lock(file.fileno())  # in use from now on, however old a wrong clock makes it
            for name, data in files.items():
                _write_own_file(fresh / name, data)
            if kind == "packages":
                _compile_modules(fresh, path, sorted(files))
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
            if self.tree(path.parent.name, path.name.partition(".")[0]) is not None:
                return  # somebody else was quicker
            damaged = Path(tempfile.mkdtemp(prefix=".old-", dir=path.parent))
            try:
                path.rename(damaged / path.name)
                fresh.rename(path)
            finally:
                shutil.rmtree(damaged, ignore_errors=True)

    def blob(self, digest: str, size_bytes: int) -> Path | None:
        """The file of that digest, None where it is missing (large ones are checked by size alone)."""
        path = self.root / "blobs" / digest
        try:
            with _open_own_file(path) as file:
                if os.fstat(file.fileno()).st_size != size_bytes or not self._lock(file.fileno()):
                    return None
                if size_bytes <= VERIFY_BLOB_BYTES:
                    return path if _digest_of(file) == digest else None
        except OSError:
            return None
        return path

    def _lock(self, fd: int) -> bool:
        """Marks an open file as in use until ``close``; False where it is just being removed."""
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        if key not in self._locks:
            held = os.dup(fd)
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(held)
                return False
            self._locks[key] = held
        return status.st_nlink > 0

    def close(self) -> None:
        """Gives back all that is locked. At its end a process does so by itself."""
        while self._locks:
            os.close(self._locks.popitem()[1])


@contextlib.contextmanager
def _open_own_file(path: str | Path) -> Iterator[BufferedReader]:
    """Opens a file to read it. OSError where it is none, a link, or others may write to it."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _require_own(os.fstat(file.fileno()), stat.S_IFREG, path)
        yield file


def _require_own(status: os.stat_result, kind: int, path: str | Path) -> None:
    """OSError where it is of another kind, another user's, or others may write to it."""
    if stat.S_IFMT(status.st_mode) != kind or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise OSError(errno.EPERM, "it is not ours alone", str(path))


def _write_own_file(path: Path, data: bytes) -> None:
    """Writes a new file (0600), in folders (0700) that are made where they are missing."""
    _make_folders(path.parent)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _make_folders(folder: Path) -> None:
    if not folder.is_dir():
        _make_folders(folder.parent)
        folder.mkdir(mode=0o700)


def _compile_modules(folder: Path, place: Path, names: list[str]) -> None:
    """Makes the bytecode of a package that will be at ``place``, and lists it.

    It holds without a look at its source, whose digest is checked: Python never writes it again.
    """
    import py_compile

    listed = {}
    for name in names:
        if name.endswith(".py"):
            source = folder / name
            _make_folders(source.parent / BYTECODE_FOLDER)
            compiled = py_compile.compile(
                str(source),
                dfile=str(place / name),
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )
            if compiled is not None:
                listed[Path(compiled).relative_to(folder).as_posix()] = file_digest(Path(compiled))
    _write_own_file(folder / BYTECODE_LIST, json.dumps(listed, sort_keys=True).encode())


def _read_bytecode_list(folder: Path) -> dict[str, str]:
    """Relative path → SHA-256 of a package's bytecode, and of the list itself. Raises OSError, ValueError."""
    with _open_own_file(folder / BYTECODE_LIST) as file:
        text = file.read()
    listed: dict[str, str] = json.loads(text)
    if any(PurePosixPath(name).parent.name != BYTECODE_FOLDER for name in listed):
        raise ValueError("something else than bytecode is listed")
    return {**listed, BYTECODE_LIST: hashlib.sha256(text).hexdigest()}


def _hash_files(folder: Path) -> dict[str, str]:
    """Relative path → SHA-256 of every file in a folder. OSError where anything in it is not ours alone."""
    digests = {}
    for place, folders, names in os.walk(folder, onerror=_raise):
        _require_own(os.lstat(place), stat.S_IFDIR, place)
        if not folders and not names:
            raise OSError(errno.EPERM, "it is empty", place)
        inside = os.path.relpath(place, folder)
        for name in (*names, *(name for name in folders if Path(place, name).is_symlink())):
            with _open_own_file(f"{place}/{name}") as file:
                digests[name if inside == "." else f"{inside}/{name}"] = _digest_of(file)
    return digests


def _raise(error: OSError) -> NoReturn:
    raise error


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return _digest_of(file)


def _digest_of(file: BufferedReader) -> str:
    digest = hashlib.sha256()  # hashlib.file_digest is there from Python 3.11 on
    while block := file.read(DIGEST_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()
