"""Nodes over SSH, by paramiko, whose errors become skyctl's here and nowhere else.

paramiko reads no configuration, accepts or refuses host keys by policies of its own, tries every key there
is, and logs tracebacks; skyctl decides all of that itself: see ``ssh_config`` and ``ssh_authentication``.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import random
import socket
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some versions import ciphers that cryptography calls deprecated
    import paramiko
    from paramiko import ssh_exception

from skyctl.errors import HostKeyError, InputError, LoginError, NodeError, SkyctlError, UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote.base import STDERR_WAIT_S, ConnectOptions, StderrTail
from skyctl.remote.local import ProcessChannel, ShellProcess
from skyctl.remote.ssh_authentication import check_host_key, find_known_keys, load_identity, log_in
from skyctl.remote.ssh_config import SshSettings, SshTarget, resolve_ssh_target

KEEPALIVE_INTERVAL_S = 15
MAX_DIALS = 4
_log = logging.getLogger("paramiko")
_log.addHandler(logging.NullHandler())
_log.propagate = False


class SshChannel:
    """A command on a node as a channel: raw files that never wait for the 2 MiB window with output unread."""

    def __init__(self, channel: Any, name: str) -> None:
        self._channel = channel
        self.stdin: BinaryIO = cast(BinaryIO, _ChannelWriter(channel))
        self.stdout: BinaryIO = io.BufferedReader(_ChannelReader(channel.recv), 1 << 18)
        self._tail = StderrTail(cast(BinaryIO, _ChannelReader(channel.recv_stderr)), name)

    def stderr_tail(self) -> str:
        """The end of what the command wrote to standard error."""
        return self._tail.text()

    def returncode(self) -> int | None:
        """The exit status, waited for up to 2 s; None where there is none (a signal, a lost connection)."""
        self._channel.status_event.wait(2)
        self._tail.wait(STDERR_WAIT_S)
        status = int(self._channel.exit_status)
        return status if status >= 0 else None

    def close(self) -> None:
        """Closes the channel; readers and writers wake."""
        with contextlib.suppress(Exception):
            self._channel.close()  # whatever it brings up, it is closed

    def detach(self) -> None:
        """As ``close``: sshd leaves the command running."""
        self.close()


class _ChannelReader(io.RawIOBase):
    def __init__(self, receive: Any) -> None:
        self._receive = receive

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._receive(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _ChannelWriter(io.RawIOBase):
    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return int(self._channel.send(bytes(memoryview(data)[: 1 << 15]))) if len(data) else 0


class SshConnection:
    """A node over SSH: one connection, through jump hosts where there are any."""

    def __init__(self, node: Node, options: ConnectOptions) -> None:
        self.node = node
        target = resolve_ssh_target(node, options, _read_config_with_paramiko)
        self.host = target.hostname
        self._transports: list[paramiko.Transport] = []
        self._commands: list[ProcessChannel] = []
        if target.identity_file:
            with contextlib.ExitStack() as stack:
                load_identity(target, stack)  # a wrong file is bad input, whatever the network then does
        try:
            for hop in (*target.jumps, target):
                self._transports.append(self._log_in_to(hop))
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
            raise translate_ssh_error(self._target, exc) from exc
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

    def detach(self) -> None:
        """As ``close``: sshd leaves the commands running."""
        self.close()

    def _log_in_to(self, hop: SshTarget) -> paramiko.Transport:
        """Connects, checks the host's key, logs in. Tries again where sshd has hung up (MaxStartups)."""
        for dial in range(1, MAX_DIALS + 1):
            transport = None
            try:
                transport = paramiko.Transport(self._dial(hop))
                _negotiate(transport, hop)
                check_host_key(transport, hop)
                log_in(transport, hop)
                transport.set_keepalive(KEEPALIVE_INTERVAL_S)
                return transport
            except (ssh_exception.SSHException, OSError, EOFError, SkyctlError) as exc:
                hung_up = transport is not None and _is_early_hangup(transport, exc)
                if transport is not None:
                    transport.close()
                if hung_up and dial < MAX_DIALS:
                    time.sleep(random.uniform(0.2, 0.6) * dial)  # noqa: S311 - spreads dials, no secret
                    continue
                if isinstance(exc, SkyctlError):
                    raise
                raise translate_ssh_error(hop, exc) from exc
            except BaseException:
                if transport is not None:
                    transport.close()
                raise
        raise AssertionError("unreachable")

    def _dial(self, hop: SshTarget) -> Any:
        """A socket, or what serves as one."""
        if self._transports:
            return self._transports[-1].open_channel(
                "direct-tcpip", (hop.hostname, hop.port), ("127.0.0.1", 0), timeout=hop.timeout_s
            )
        if hop.proxy_command:
            command = ProcessChannel(partial(ShellProcess, f"exec {hop.proxy_command}"), hop.label)
            self._commands.append(command)
            return command.sock
        return socket.create_connection((hop.hostname, hop.port), timeout=hop.timeout_s)


def _negotiate(transport: paramiko.Transport, hop: SshTarget) -> None:
    """The SSH handshake, asking first for the kinds of host key that known_hosts has of it."""
    known_kinds = {key.kind for key in find_known_keys(hop.known_hosts, hop.key_name) if not key.marker}
    options = transport.get_security_options()
    kinds = tuple(options.key_types)
    options.key_types = sorted(kinds, key=lambda kind: _key_type_of_algorithm(kind) not in known_kinds)
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


def _key_type_of_algorithm(kind: str) -> str:
    """The type of key that a signature algorithm uses."""
    return "ssh-rsa" if kind.startswith("rsa-sha2") else kind


def _is_early_hangup(transport: paramiko.Transport, exc: Exception) -> bool:
    """Whether the server closed the connection before its banner: it has too many connections just now."""
    before = not getattr(transport, "remote_version", "")
    ended = isinstance(exc, EOFError | ConnectionResetError | BrokenPipeError) or (
        isinstance(exc, ssh_exception.SSHException) and "banner" in str(exc)
    )
    return before and ended and not isinstance(exc, TimeoutError)


def _read_config_with_paramiko(host: str, options: ConnectOptions) -> SshSettings:
    """The configuration where there is no ``ssh`` to ask: paramiko's reader, which understands less of it."""
    path = Path(options.ssh_config or "~/.ssh/config").expanduser()
    try:
        host_config = paramiko.SSHConfig.from_path(str(path)).lookup(host) if path.is_file() else {}
    except (ssh_exception.SSHException, OSError, ValueError) as exc:
        raise InputError(f"{path} can't be read: {exc}") from exc
    settings = {key: value if isinstance(value, list) else [str(value)] for key, value in host_config.items()}
    defaults = [f"~/.ssh/{name}" for name in ("id_ed25519", "id_ecdsa", "id_rsa")]
    settings.setdefault("identityfile", defaults)
    settings.setdefault("globalknownhostsfile", ["/etc/ssh/ssh_known_hosts"])
    return settings


def translate_ssh_error(hop: SshTarget, exc: BaseException) -> NodeError:
    """Any error of paramiko or of a socket as a NodeError that names the host.

    A time-out of paramiko's is a plain SSHException: only its text tells.
    """
    name, at = hop.label, hop.address
    cls: type[NodeError] = UnreachableError
    text, hint = str(exc) or type(exc).__name__, f"does `ssh {hop.hostname}` work from here?"
    for kind, (error, message, next_step) in SSH_ERROR_MAP.items():
        if isinstance(exc, kind):
            cls, text = error, message.format(exc=text)
            hint = next_step or hint
            break
    if isinstance(exc, OSError) and exc.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        text, hint = "there is no route to it", "is a VPN down, or the machine off?"
    if isinstance(exc, ssh_exception.SSHException) and "imeout" in str(exc):
        text, hint = SSH_ERROR_MAP[TimeoutError][1], SSH_ERROR_MAP[TimeoutError][2] or hint
    return cls(f"{name} ({at}): {text}", node=hop.node, hint=hint)


_KEYS_ONLY_HINT = "which login does the server allow? skyctl uses keys only"
SSH_ERROR_MAP: dict[type[BaseException], tuple[type[NodeError], str, str | None]] = {
    # the first that fits counts, so the special ones come before the general
    ssh_exception.BadHostKeyException: (HostKeyError, "it shows another host key: {exc}", "find out why"),
    ssh_exception.PartialAuthentication: (LoginError, "it asks for a second factor: {exc}", _KEYS_ONLY_HINT),
    ssh_exception.BadAuthenticationType: (LoginError, "it does not take keys: {exc}", _KEYS_ONLY_HINT),
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
        "correct `host` in cluster.yaml, or the alias in ~/.ssh/config; for this machine, `transport: local`",
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
