"""Nodes over SSH. The only module that imports paramiko, and the one seam where its errors become ours.

paramiko reads no configuration, accepts or refuses host keys by policies of its own, tries every key there
is, and logs tracebacks; here all of that is decided by us: see also ``sshconfig`` and ``knownhosts``.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import logging
import random
import socket
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some versions import ciphers that cryptography calls deprecated
    import paramiko
    from paramiko import ssh_exception

from skyctl.errors import HostKeyError, InputError, LoginError, NodeError, SkyctlError, UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote import knownhosts
from skyctl.remote.base import ConnectOptions
from skyctl.remote.local import ProcessChannel, Shell
from skyctl.remote.sshchannel import SshChannel
from skyctl.remote.sshconfig import Settings, Target, resolve

KEEPALIVE_S = 15
DIALS = 4
MAX_TRIES = 5
_log = logging.getLogger("paramiko")
_log.addHandler(logging.NullHandler())
_log.propagate = False


class SshRemote:
    """A node over SSH: one connection, through jump hosts where there are any."""

    def __init__(self, node: Node, options: ConnectOptions) -> None:
        self.node = node
        target = resolve(node, options, _without_openssh)
        self.host = target.hostname
        self._transports: list[paramiko.Transport] = []
        self._commands: list[ProcessChannel] = []
        if target.identity_file:
            with contextlib.ExitStack() as stack:
                load_identity(target, stack)  # a wrong file is bad input, whatever the network then does
        try:
            for hop in (*target.jumps, target):
                self._transports.append(self._enter(hop))
        except BaseException:
            self.close()
            raise
        self._target = target

    def open(self, command: str) -> SshChannel:
        """Starts a command in the login shell there."""
        try:
            channel = self._transports[-1].open_session(timeout=self._target.timeout_s)
            try:
                channel.exec_command(command)
            except BaseException:
                channel.close()
                raise
        except (ssh_exception.SSHException, OSError, EOFError) as exc:
            raise translate(self._target, exc) from exc
        return SshChannel(channel, self.node.name)

    def close(self) -> None:
        """Disconnects, the node first and the jump hosts after it."""
        while self._transports:
            transport = self._transports.pop()
            with contextlib.suppress(Exception):  # whatever closing brings up, it is closed
                transport.close()
        while self._commands:
            command = self._commands.pop()
            command.close()
            command.release()

    def hang_up(self) -> None:
        """The same: sshd leaves the commands to themselves."""
        self.close()

    def _enter(self, hop: Target) -> paramiko.Transport:
        """Connects, checks the host's key, logs in. Tries again where sshd has hung up (MaxStartups)."""
        for dial in range(1, DIALS + 1):
            transport = None
            try:
                transport = paramiko.Transport(self._dial(hop))
                _negotiate(transport, hop)
                check_host_key(transport, hop)
                log_in(transport, hop)
                transport.set_keepalive(KEEPALIVE_S)
                return transport
            except (ssh_exception.SSHException, OSError, EOFError, SkyctlError) as exc:
                hung_up = transport is not None and _hung_up(transport, exc)
                if transport is not None:
                    transport.close()
                if hung_up and dial < DIALS:
                    time.sleep(random.uniform(0.2, 0.6) * dial)  # noqa: S311 - spreads dials, no secret
                    continue
                if isinstance(exc, SkyctlError):
                    raise
                raise translate(hop, exc) from exc
            except BaseException:
                if transport is not None:
                    transport.close()
                raise
        raise AssertionError("unreachable")

    def _dial(self, hop: Target) -> Any:
        """A socket, or what serves as one."""
        if self._transports:
            return self._transports[-1].open_channel(
                "direct-tcpip", (hop.hostname, hop.port), ("127.0.0.1", 0), timeout=hop.timeout_s
            )
        if hop.proxy_command:
            command = ProcessChannel(partial(Shell, f"exec {hop.proxy_command}"), hop.label)
            self._commands.append(command)
            return command.sock
        return socket.create_connection((hop.hostname, hop.port), timeout=hop.timeout_s)


def _negotiate(transport: paramiko.Transport, hop: Target) -> None:
    """The SSH handshake, asking first for the kinds of host key that we know of it."""
    known = {key.kind for key in knownhosts.lookup(hop.known_hosts, hop.key_name) if not key.marker}
    options = transport.get_security_options()
    kinds = tuple(options.key_types)
    options.key_types = sorted(kinds, key=lambda kind: _family(kind) not in known)
    transport.banner_timeout = hop.timeout_s + 5
    transport.auth_timeout = max(hop.timeout_s, 15)
    done = threading.Event()
    transport.start_client(event=done)
    deadline = time.monotonic() + hop.timeout_s
    while not done.wait(0.05) and transport.is_active():
        if time.monotonic() > deadline:
            raise TimeoutError("no SSH handshake")
    if not transport.is_active():
        raise transport.get_exception() or EOFError("it hung up")


def _family(kind: str) -> str:
    """The kind of key that a signature algorithm uses."""
    return "ssh-rsa" if kind.startswith("rsa-sha2") else kind


def _hung_up(transport: paramiko.Transport, exc: Exception) -> bool:
    """Whether the server closed the connection before it had said its name: it has too many just now."""
    before = not getattr(transport, "remote_version", "")
    ended = isinstance(exc, EOFError | ConnectionResetError | BrokenPipeError) or (
        isinstance(exc, ssh_exception.SSHException) and "banner" in str(exc)
    )
    return before and ended and not isinstance(exc, TimeoutError)


def check_host_key(transport: paramiko.Transport, hop: Target) -> None:
    """Raises HostKeyError unless known_hosts has the key (or new ones are accepted, and it has none)."""
    key = transport.get_remote_server_key()
    shown, kind = key.asbytes(), key.get_name()
    entries = knownhosts.lookup(hop.known_hosts, hop.key_name)
    known = [entry for entry in entries if not entry.marker]
    what = f"{hop.label}: the host key of {hop.key_name}"
    mark = knownhosts.fingerprint(shown)
    for entry in entries:
        if entry.marker == "@revoked" and entry.blob == shown:
            raise HostKeyError(
                f"{what} ({kind} {mark}) is revoked in {entry.path}:{entry.line}", node=hop.node
            )
    if any(entry.blob == shown for entry in known):
        return
    if known:
        old = next((entry for entry in known if entry.kind == kind), known[0])
        raise HostKeyError(
            f"{what} has changed: it shows {kind} {mark}, "
            f"but {old.path}:{old.line} has {old.kind} {knownhosts.fingerprint(old.blob)}",
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
        knownhosts.append(hop.new_keys_file, hop.key_name, kind, shown)
    except OSError as exc:
        raise InputError(f"can't keep the host key in {hop.new_keys_file}: {exc.strerror or exc}") from exc


def log_in(transport: paramiko.Transport, hop: Target) -> None:
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
            for name, key in [*keys, *others][:MAX_TRIES]:
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


def load_identity(hop: Target, stack: contextlib.ExitStack) -> tuple[str, Any]:
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
            if key.asbytes() == _public_half(path):
                return path, key
        raise InputError(
            f"{where} is protected by a passphrase, and no ssh agent holds it", hint=f"ssh-add '{path}'"
        ) from exc
    except Exception as exc:  # whatever the parsers raise for a file that is no key
        hint = "name the private key, without .pub" if path.endswith(".pub") else "correct it in cluster.yaml"
        raise InputError(f"{where} is not a private key that can be used", hint=hint) from exc


def _other_keys(hop: Target, stack: contextlib.ExitStack) -> list[tuple[str, Any]]:
    """The agent's keys, the configured first, then key files that need no passphrase."""
    named = {_public_half(path): path for path in hop.identity_files}
    agent = [(named.get(key.asbytes()), key) for key in _agent_keys(hop, stack)]
    found = [(f"{path} (agent)", key) for path, key in agent if path]
    if not hop.identities_only:
        found += [
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
    return found[: max(1, MAX_TRIES - len(files))] + files


def _agent_keys(hop: Target, stack: contextlib.ExitStack) -> list[Any]:
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


def _public_half(path: str) -> bytes | None:
    try:
        return base64.b64decode(Path(path + ".pub").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _without_openssh(host: str, options: ConnectOptions) -> Settings:
    """The configuration where there is no ``ssh`` to ask: paramiko's reader, which knows less of it."""
    path = Path(options.ssh_config or "~/.ssh/config").expanduser()
    try:
        found = paramiko.SSHConfig.from_path(str(path)).lookup(host) if path.is_file() else {}
    except (ssh_exception.SSHException, OSError, ValueError) as exc:
        raise InputError(f"{path} can't be read: {exc}") from exc
    settings = {key: value if isinstance(value, list) else [str(value)] for key, value in found.items()}
    defaults = [f"~/.ssh/{name}" for name in ("id_ed25519", "id_ecdsa", "id_rsa")]
    settings.setdefault("identityfile", defaults)
    settings.setdefault("globalknownhostsfile", ["/etc/ssh/ssh_known_hosts"])
    return settings


def translate(hop: Target, exc: BaseException) -> NodeError:
    """Any error of paramiko or of a socket as ours, in words for a person."""
    name, at = hop.label, hop.address
    cls: type[NodeError] = UnreachableError
    text, hint = str(exc) or type(exc).__name__, f"does `ssh {hop.hostname}` work from here?"
    for kind, (error, words, next_step) in MAPPED.items():
        if isinstance(exc, kind):
            cls, text = error, words.format(exc=text)
            hint = next_step or hint
            break
    if isinstance(exc, OSError) and exc.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        text, hint = "there is no route to it", "is a VPN down, or the machine off?"
    if isinstance(exc, ssh_exception.SSHException) and "imeout" in str(exc):
        text, hint = MAPPED[TimeoutError][1], MAPPED[TimeoutError][2] or hint
    return cls(f"{name} ({at}): {text}", node=hop.node, hint=hint)


_ALLOW = "which login does the server allow? skyctl uses keys only"
MAPPED: dict[type[BaseException], tuple[type[NodeError], str, str | None]] = {
    # the first that fits counts, so the special ones stand before the general
    ssh_exception.BadHostKeyException: (HostKeyError, "it shows another host key: {exc}", "find out why"),
    ssh_exception.PartialAuthentication: (LoginError, "it asks for a second factor: {exc}", _ALLOW),
    ssh_exception.BadAuthenticationType: (LoginError, "it does not take keys: {exc}", _ALLOW),
    ssh_exception.PasswordRequiredException: (
        LoginError,
        "the key is protected by a passphrase",
        "use ssh-add",
    ),
    ssh_exception.UnableToAuthenticate: (LoginError, "it let us in with no key", "use ssh-copy-id"),
    ssh_exception.AuthenticationException: (LoginError, "the login failed: {exc}", "use ssh-copy-id"),
    ssh_exception.ChannelException: (
        UnreachableError,
        "the way there was refused: {exc}",
        "does the jump host reach it, and allow forwarding (AllowTcpForwarding)? MaxSessions?",
    ),
    ssh_exception.IncompatiblePeer: (
        UnreachableError,
        "its sshd has no algorithm in common with ours: {exc}",
        "is its OpenSSH very old?",
    ),
    ssh_exception.ProxyCommandFailure: (UnreachableError, "the ProxyCommand failed: {exc}", None),
    ssh_exception.CouldNotCanonicalize: (UnreachableError, "its name can't be canonicalised: {exc}", None),
    ssh_exception.ConfigParseError: (UnreachableError, "the ssh configuration can't be read: {exc}", None),
    ssh_exception.MessageOrderError: (
        UnreachableError,
        "the connection was tampered with or is broken: {exc}",
        None,
    ),
    ssh_exception.NoValidConnectionsError: (UnreachableError, "no connection: {exc}", None),
    ssh_exception.SSHException: (
        UnreachableError,
        "the connection failed: {exc}",
        "does an sshd listen there, and has it too many connections just now (MaxStartups)?",
    ),
    socket.gaierror: (
        UnreachableError,
        "its name is unknown ({exc})",
        "correct `host` in cluster.yaml, or the alias in ~/.ssh/config",
    ),
    ConnectionRefusedError: (
        UnreachableError,
        "it refused the connection",
        "does sshd run there, and is the port right?",
    ),
    TimeoutError: (
        UnreachableError,
        "it did not answer in time",
        "is it switched on? A firewall that drops packets looks like this, too",
    ),
    OSError: (UnreachableError, "no connection: {exc}", None),
    EOFError: (
        UnreachableError,
        "it ended the connection",
        "sshd's MaxStartups or PerSourcePenalties may do this",
    ),
}
