"""known_hosts: which keys a host may show, and where each of them is written."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_WRITING = threading.Lock()


@dataclass(frozen=True)
class KnownKey:
    """One line that names the host. ``marker``: "", "@revoked" or "@cert-authority"."""

    path: str
    line: int
    kind: str
    blob: bytes
    marker: str


def lookup(paths: Iterable[str], name: str) -> list[KnownKey]:
    """Every key that the files hold for ``name`` (HOST or [HOST]:PORT); unreadable files hold none."""
    return [key for path in paths for key in _read(path, name)]


def fingerprint(blob: bytes) -> str:
    """As OpenSSH shows it: ``SHA256:…``."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def append(path: str, name: str, kind: str, blob: bytes) -> None:
    """Adds a key, as a line of its own (file 0600, folder 0700 where they are new). Raises OSError."""
    if path == os.devnull:
        return
    with _WRITING:
        file = Path(path)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "r+b", buffering=0) as out:
            size = out.seek(0, os.SEEK_END)
            out.seek(max(0, size - 1))
            start = b"" if out.read(1) in (b"", b"\n") else b"\n"
            out.write(start + f"{name} {kind} {base64.b64encode(blob).decode()}\n".encode())


def _read(path: str, name: str) -> Iterator[KnownKey]:
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        if len(fields) < 3 or not _matches(fields[0], name):
            continue
        try:
            blob = base64.b64decode(fields[2], validate=True)
        except (binascii.Error, ValueError):
            continue
        yield KnownKey(path, number, fields[1], blob, marker)


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        try:
            _, _, salt, digest = patterns.split("|")
            expected = base64.b64decode(digest)
            found = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        except (ValueError, binascii.Error):
            return False
        return hmac.compare_digest(found, expected)
    matched = False
    for pattern in patterns.lower().split(","):
        # "[" is no special character in known_hosts
        if fnmatch.fnmatchcase(name.lower(), pattern.lstrip("!").replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            matched = True
    return matched
