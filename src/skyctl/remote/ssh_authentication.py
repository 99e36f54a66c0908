"""Mutual authentication over SSH: host keys checked against known_hosts, user keys tried as ``ssh`` would."""

from __future__ import annotations

import base64
import binascii
import contextlib
import fnmatch
import hashlib
import hmac
import os
import socket
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some versions import ciphers that cryptography calls deprecated
    import paramiko
    from paramiko import ssh_exception

from skyctl.errors import HostKeyError, InputError, LoginError
from skyctl.remote.ssh_config import SshTarget

MAX_KEYS_TRIED = 5
_WRITE_LOCK = threading.Lock()


@dataclass(frozen=True)
class KnownKey:
    """One line that names the host. ``marker``: "", "@revoked" or "@cert-authority"."""

    path: str
    line: int
    kind: str
    blob: bytes
    marker: str


def find_known_keys(paths: Iterable[str], name: str) -> list[KnownKey]:
    """Every key that the files hold for ``name`` (HOST or [HOST]:PORT); unreadable files hold none."""
    return [key for path in paths for key in _read_known_keys(path, name)]


def key_fingerprint(blob: bytes) -> str:
    """As OpenSSH shows it: ``SHA256:…``."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def append_known_key(path: str, name: str, kind: str, blob: bytes) -> None:
    """Adds a key, as a line of its own (file 0600, folder 0700 where they are new). Raises OSError."""
    if path == os.devnull:
        return
    with _WRITE_LOCK:
        file = Path(path)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "r+b", buffering=0) as out:
            size = out.seek(0, os.SEEK_END)
            out.seek(max(0, size - 1))
            start = b"" if out.read(1) in (b"", b"\n") else b"\n"
            out.write(start + f"{name} {kind} {base64.b64encode(blob).decode()}\n".encode())


def _read_known_keys(path: str, name: str) -> Iterator[KnownKey]:
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        if len(fields) < 3 or not _matches_host_patterns(fields[0], name):
            continue
        try:
            blob = base64.b64decode(fields[2], validate=True)
        except (binascii.Error, ValueError):
            continue
        yield KnownKey(path, number, fields[1], blob, marker)


def _matches_host_patterns(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        try:
            _, _, salt, digest = patterns.split("|")
            expected = base64.b64decode(digest)
            actual = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        except (ValueError, binascii.Error):
            return False
        return hmac.compare_digest(actual, expected)
    matched = False
    for pattern in patterns.lower().split(","):
        # "[" is no special character in known_hosts
        if fnmatch.fnmatchcase(name.lower(), pattern.lstrip("!").replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            matched = True
    return matched


def check_host_key(transport: paramiko.Transport, hop: SshTarget) -> None:
    """Raises HostKeyError unless known_hosts has the key (or new ones are accepted, and it has none)."""
    key = transport.get_remote_server_key()
    shown, kind = key.asbytes(), key.get_name()
    entries = find_known_keys(hop.known_hosts, hop.key_name)
    known_keys = [entry for entry in entries if not entry.marker]
    what = f"{hop.label}: the host key of {hop.key_name}"
    mark = key_fingerprint(shown)
    for entry in entries:
        if entry.marker == "@revoked" and entry.blob == shown:
            raise HostKeyError(
                f"{what} ({kind} {mark}) is revoked in {entry.path}:{entry.line}", node=hop.node
            )
    if any(entry.blob == shown for entry in known_keys):
        return
    if known_keys:
        old = next((entry for entry in known_keys if entry.kind == kind), known_keys[0])
        raise HostKeyError(
            f"{what} has changed: it shows {kind} {mark}, "
            f"but {old.path}:{old.line} has {old.kind} {key_fingerprint(old.blob)}",
            node=hop.node,
            hint=f"find out why; if the host was set up anew: ssh-keygen -f '{old.path}' -R '{hop.key_name}'",
        )
    if not hop.accept_new:
        raise HostKeyError(
            f"{what} is unknown: {kind} {mark}",
            node=hop.node,
            hint="compare the fingerprint, then pass --accept-new-host-keys, or log in once with ssh",
        )
    try:
        append_known_key(hop.new_keys_file, hop.key_name, kind, shown)
    except OSError as exc:
        raise InputError(f"can't keep the host key in {hop.new_keys_file}: {exc.strerror or exc}") from exc


def log_in(transport: paramiko.Transport, hop: SshTarget) -> None:
    """Logs in with what ssh would try, but at most five keys (sshd's MaxAuthTries is 6)."""
    with contextlib.ExitStack() as stack:
        explicit = load_identity(hop, stack) if hop.identity_file else None
        try:
            transport.auth_none(hop.user)
        except ssh_exception.BadAuthenticationType as exc:
            allowed = list(exc.allowed_types)
        else:
            return
        tried: list[str] = []
        if "publickey" in allowed:
            keys = [explicit] if explicit else []
            others = [] if explicit and hop.identities_only else _other_keys(hop, stack)
            for name, key in [*keys, *others][:MAX_KEYS_TRIED]:
                tried.append(name)
                try:
                    more = transport.auth_publickey(hop.user, key)
                except ssh_exception.BadAuthenticationType:
                    break
                except ssh_exception.AuthenticationException:
                    if not transport.is_active():
                        break  # it has had enough of us
                    continue
                if more:
                    raise ssh_exception.PartialAuthentication(more)
                return
    offered = f"the keys tried: {', '.join(tried)}" if tried else "there was no key to try"
    raise LoginError(
        f"{hop.label}: {hop.user}@{hop.address} let us in with no key "
        f"({offered}; it takes {', '.join(allowed)})",
        node=hop.node,
        hint=f"`ssh -p {hop.port} {hop.user}@{hop.hostname}` must work without a password: "
        "ssh-copy-id, ssh-add, or name the key in cluster.yaml: `identity_file: PATH`",
    )


def load_identity(hop: SshTarget, stack: contextlib.ExitStack) -> tuple[str, Any]:
    """The key file that cluster.yaml names; InputError where it can't be used."""
    path = hop.identity_file or ""
    where = f"identity_file {path} of node {hop.node}"
    try:
        return path, paramiko.PKey.from_path(path)
    except FileNotFoundError as exc:
        raise InputError(f"{where} does not exist", hint="correct it in cluster.yaml") from exc
    except OSError as exc:
        raise InputError(f"{where} can't be read: {exc.strerror or exc}") from exc
    except (ssh_exception.PasswordRequiredException, TypeError) as exc:
        for key in _agent_keys(hop, stack):
            if key.asbytes() == _read_public_key(path):
                return path, key
        raise InputError(
            f"{where} is protected by a passphrase, and no ssh agent holds it", hint=f"ssh-add '{path}'"
        ) from exc
    except Exception as exc:  # whatever the parsers raise for a file that is no key
        hint = "name the private key, without .pub" if path.endswith(".pub") else "correct it in cluster.yaml"
        raise InputError(f"{where} is not a private key that can be used", hint=hint) from exc


def _other_keys(hop: SshTarget, stack: contextlib.ExitStack) -> list[tuple[str, Any]]:
    """The agent's keys, the configured first, then key files that need no passphrase."""
    named = {_read_public_key(path): path for path in hop.identity_files}
    agent = [(named.get(key.asbytes()), key) for key in _agent_keys(hop, stack)]
    keys = [(f"{path} (agent)", key) for path, key in agent if path]
    if not hop.identities_only:
        keys += [
            (f"{getattr(key, 'comment', '') or key.get_name()} (agent)", key)
            for path, key in agent
            if not path
        ]
    held = {path for path, _ in agent}
    files = []
    for path in hop.identity_files:
        if path not in held and Path(path).is_file():
            with contextlib.suppress(Exception):  # ssh passes over default keys that it can't use, too
                files.append((path, paramiko.PKey.from_path(path)))
    return keys[: max(1, MAX_KEYS_TRIED - len(files))] + files


def _agent_keys(hop: SshTarget, stack: contextlib.ExitStack) -> list[Any]:
    if hop.identity_agent == "none":
        return []
    try:
        if hop.identity_agent in (None, "SSH_AUTH_SOCK"):
            agent = paramiko.Agent()
            stack.callback(agent.close)
            return list(agent.get_keys())
        sock = socket.socket(socket.AF_UNIX)
        stack.callback(sock.close)
        sock.settimeout(hop.timeout_s)
        sock.connect(hop.identity_agent)
        other: Any = paramiko.agent.AgentSSH()
        other._connect(sock)
        return list(other.get_keys())
    except (ssh_exception.SSHException, OSError):
        return []


def _read_public_key(path: str) -> bytes | None:
    try:
        return base64.b64decode(Path(path + ".pub").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
