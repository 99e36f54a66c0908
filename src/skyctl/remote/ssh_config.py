"""Which server a node's name means: OpenSSH's own configuration, with what cluster.yaml says over it.

``ssh -G`` reads the configuration (Include, Match and all) where OpenSSH is there; else a fallback is asked.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from skyctl.errors import InputError
from skyctl.records.cluster import Node
from skyctl.remote.base import ConnectOptions

SshSettings = dict[str, list[str]]
ReadConfigFallback = Callable[[str, ConnectOptions], SshSettings]
"""(host, options) → lower-case keyword to its values, as ``ssh -G`` prints them."""

MAX_HOPS = 8


@dataclass(frozen=True)
class SshTarget:
    """One server to log in to, and everything that decides how.

    Args:
        label: what to call it in a message, such as "node n2" or "jump host bastion of node n2".
        key_name: its name in known_hosts.
        identity_file: from cluster.yaml; it must be usable.
        identity_files: from the configuration; they may be missing.
        jumps: servers to go through, the first one first.
    """

    node: str
    label: str
    hostname: str
    port: int
    user: str
    key_name: str
    identity_file: str | None
    identity_files: tuple[str, ...]
    identities_only: bool
    identity_agent: str | None
    known_hosts: tuple[str, ...]
    new_keys_file: str
    accept_new: bool
    timeout_s: float
    proxy_command: str | None = None
    jumps: tuple[SshTarget, ...] = ()

    @property
    def address(self) -> str:
        """The server as HOST:PORT, with brackets around an IPv6 address."""
        return f"[{self.hostname}]:{self.port}" if ":" in self.hostname else f"{self.hostname}:{self.port}"


def resolve_ssh_target(node: Node, options: ConnectOptions, fallback: ReadConfigFallback) -> SshTarget:
    """The node's target with its jumps. InputError where the configuration is faulty or circular."""
    host = node.host or node.name
    settings = _read_settings(node.name, host, node.user, node.port, options, fallback)
    target = _make_target(node.name, f"node {node.name}", host, settings, options)
    target = replace(
        target,
        port=node.port or target.port,
        user=node.user or target.user,
        identity_file=node.identity_file and str(Path(node.identity_file).expanduser()),
    )
    if node.port and "hostkeyalias" not in settings:
        target = replace(target, key_name=_known_hosts_name(target.hostname, node.port))
    if node.proxy_jump is not None:
        jump = node.proxy_jump
        target = replace(target, proxy_command=None)
    else:
        jump = _first_value(settings, "proxyjump") or "none"
    jumps = _resolve_jumps(node.name, jump, options, fallback, 0)
    if target.identity_file:  # the jump hosts may know that key, too
        jumps = tuple(
            hop
            if hop.identities_only
            else replace(hop, identity_files=(target.identity_file, *hop.identity_files))
            for hop in jumps
        )
    return replace(target, jumps=jumps)


def _resolve_jumps(
    node: str, spec: str, options: ConnectOptions, fallback: ReadConfigFallback, depth: int
) -> tuple[SshTarget, ...]:
    """``user@host:port,…``; the first may itself need a jump."""
    if spec.strip().lower() in ("", "none"):
        return ()
    if depth >= MAX_HOPS:
        raise InputError(f"node {node}: its jump hosts go in a circle ({spec})", hint="look at ProxyJump")
    jumps: list[SshTarget] = []
    for index, hop in enumerate(part.strip() for part in spec.split(",")):
        user, host, port = _parse_jump_host(node, hop)
        settings = _read_settings(node, host, user, port, options, fallback)
        target = _make_target(node, f"jump host {hop} of node {node}", host, settings, options)
        target = replace(target, port=port or target.port, user=user or target.user)
        if port and "hostkeyalias" not in settings:
            target = replace(target, key_name=_known_hosts_name(target.hostname, port))
        if index == 0:
            jumps += _resolve_jumps(
                node, _first_value(settings, "proxyjump") or "none", options, fallback, depth + 1
            )
        else:
            target = replace(target, proxy_command=None)
        jumps.append(target)
    return tuple(jumps)


def _parse_jump_host(node: str, hop: str) -> tuple[str | None, str, int | None]:
    match = re.fullmatch(
        r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:@\[\]]+))(?::(?P<port>\d+))?/?",
        hop,
    )
    if not match or not 0 < int(match["port"] or 22) < 65536:
        raise InputError(
            f"node {node}: {hop!r} is not a jump host", hint="write it as host, user@host or host:port"
        )
    return match["user"], match["six"] or match["host"], int(match["port"]) if match["port"] else None


def _read_settings(
    node: str,
    host: str,
    user: str | None,
    port: int | None,
    options: ConnectOptions,
    fallback: ReadConfigFallback,
) -> SshSettings:
    if not host or host.startswith("-") or re.search(r"[\s\0]", host):
        raise InputError(
            f"node {node}: {host!r} is not a host", hint="give a name, an address or an ssh alias"
        )
    if options.ssh_config and not Path(options.ssh_config).is_file():
        raise InputError(f"the ssh configuration {options.ssh_config} does not exist")
    ssh = shutil.which("ssh")
    if ssh is None:
        return fallback(host, options)
    argv = [ssh, "-G"]
    argv += ["-F", options.ssh_config] if options.ssh_config else []
    argv += ["-p", str(port)] if port else []
    argv += ["-l", user] if user else []
    try:
        done = subprocess.run(
            [*argv, "--", host],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise InputError(f"node {node}: `ssh -G {host}` does not end", hint="a `Match exec` there?") from exc
    except OSError:
        return fallback(host, options)
    if done.returncode:
        raise InputError(f"node {node}: `ssh -G {host}` failed: {done.stderr.strip()[-500:]}")
    settings: SshSettings = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        settings.setdefault(key.lower(), []).append(value.strip())
    return settings


def _make_target(
    node: str, label: str, host: str, settings: SshSettings, options: ConnectOptions
) -> SshTarget:
    hostname = _first_value(settings, "hostname") or host
    port = int(_first_value(settings, "port") or 22)
    user = _first_value(settings, "user") or getpass.getuser()

    def path(text: str) -> str:
        return _expand_tokens(text, {"h": hostname, "r": user, "p": str(port), "n": host})

    user_files = [path(p) for p in _path_values(settings, "userknownhostsfile")] or [
        path("~/.ssh/known_hosts")
    ]
    global_files = [path(p) for p in _path_values(settings, "globalknownhostsfile")]
    extra = [str(Path(options.known_hosts).expanduser())] if options.known_hosts else []
    strict = (_first_value(settings, "stricthostkeychecking") or "ask").lower()
    command = _first_value(settings, "proxycommand")
    seconds = _first_value(settings, "connecttimeout") or ""
    agent = _first_value(settings, "identityagent")
    return SshTarget(
        node=node,
        label=label,
        hostname=hostname,
        port=port,
        user=user,
        key_name=_first_value(settings, "hostkeyalias") or _known_hosts_name(hostname, port),
        identity_file=None,
        identity_files=tuple(path(p) for p in settings.get("identityfile", []) if p.lower() != "none"),
        identities_only=_first_value(settings, "identitiesonly") == "yes",
        identity_agent=_expand_tokens(agent, {})
        if agent and agent not in ("SSH_AUTH_SOCK", "none")
        else agent,
        known_hosts=tuple(dict.fromkeys([*extra, *user_files, *global_files])),
        new_keys_file=user_files[0],
        accept_new=options.accept_new_host_keys or strict in ("accept-new", "no", "off", "false"),
        timeout_s=min(options.timeout_s, float(seconds)) if seconds.isdigit() else options.timeout_s,
        proxy_command=path(command) if command and command.lower() != "none" else None,
    )


def _first_value(settings: SshSettings, key: str) -> str | None:
    values = settings.get(key)
    return values[0] if values and values[0] else None


def _path_values(settings: SshSettings, key: str) -> list[str]:
    text = " ".join(settings.get(key, []))
    try:
        paths = shlex.split(text)
    except ValueError:
        paths = text.split()
    return [path for path in paths if path.lower() != "none"]


def _known_hosts_name(hostname: str, port: int) -> str:
    """A server's name as known_hosts has it."""
    return hostname if port == 22 else f"[{hostname}]:{port}"


def _expand_tokens(text: str, tokens: dict[str, str]) -> str:
    """OpenSSH's ``~``, ``%h %p %r %n %u %d %%`` and ``${NAME}``."""
    replacements = {**tokens, "%": "%", "d": str(Path("~").expanduser()), "u": getpass.getuser()}
    text = re.sub(r"%(.)", lambda m: replacements.get(m[1], m[0]), text)
    text = re.sub(r"\$\{(\w+)\}", lambda m: os.environ.get(m[1], m[0]), text)
    return str(Path(text).expanduser()) if text.startswith("~") else text
