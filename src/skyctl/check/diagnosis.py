"""From what was found on a node to outcomes of checks, each problem with its next step. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from skyctl.check.check_report import DtypeReport, PairReport, Tick, failed, failed_with, ok, skipped, warning
from skyctl.compare.number_format import format_span
from skyctl.errors import HostKeyError, LoginError, SkyctlError, UnfitError, UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote.bootstrap import MIN_PYTHON_TEXT

CHECK_NAMES = (
    "reach",
    "host key",
    "login",
    "python",
    "torch",
    "devices",
    "address",
    "port",
    "limits",
    "clock",
)
MIN_TORCH = (2, 6)
LOW_NOFILE = 1024
LOW_SHM_BYTES = 128 << 20
LOW_DISK_BYTES = 1 << 30
NO_DISK_BYTES = 64 << 20
LOW_MEMORY_BYTES = 512 << 20
LOW_CLOCK_S = 2.0
SETUP_FOLDER = "/skyctl/env/"
"""A part of the path of any environment of ``skyctl setup`` (``setup/node/environment_store.py``)."""
VPN_INTERFACE = re.compile(r"^(tailscale|wg|zt|utun|tun|nebula|netbird|wt)\w*$")
"""Interfaces that are most likely a VPN's: Tailscale, WireGuard, ZeroTier, OpenVPN, Nebula, NetBird."""

_SKIP_REASONS = {
    "reach": "not reached",
    "host key": "not trusted",
    "login": "not let in",
    "python": "no Python",
}


def check_names(node: Node) -> tuple[str, ...]:
    """The names of the checks of that node: a local one has no host key and no login."""
    return (
        CHECK_NAMES
        if node.transport == "ssh"
        else tuple(n for n in CHECK_NAMES if n not in ("host key", "login"))
    )


def connection_ticks(node: Node, error: SkyctlError) -> list[Tick]:
    """The ticks of a node that no session could be opened on: what worked, the problem, the rest skipped."""
    name = f"node {node.name!r}"
    at = "reach"
    target = node.host or node.name
    if isinstance(error, UnreachableError):
        hint = f"is it on, and does `ssh {target}` work here? host, port, proxy_jump: in cluster.yaml"
    elif isinstance(error, HostKeyError):
        at, hint = "host key", f"connect once with `ssh {target}`, or give --accept-new-host-keys"
    elif isinstance(error, LoginError):
        at, hint = "login", f"make `ssh {target}` work without a password: ssh-copy-id, user, identity_file"
    elif isinstance(error, UnfitError):
        at = "python"
        hint = f"install Python {MIN_PYTHON_TEXT} or newer there, and name it with `python:` in {name}"
    else:
        hint = f"correct {name} in cluster.yaml"
    all_names = check_names(node)
    index = all_names.index(at) if at in all_names else 0
    before = [ok(tick) for tick in all_names[:index]]
    return [
        *before,
        failed_with(all_names[index], error, hint),
        *skipped(all_names[index + 1 :], _SKIP_REASONS[at]),
    ]


def torch_ticks(node: Node, answer: Mapping[str, Any] | SkyctlError) -> list[Tick]:
    """``torch`` and ``devices``, from the torch task's answer."""
    if isinstance(answer, SkyctlError):
        hint = f"`skyctl setup --limit {node.name}` brings it; or name another `python:` in cluster.yaml"
        if isinstance(answer, UnfitError):  # it is missing, not broken
            answer = SkyctlError(answer.message)
        return [failed_with("torch", answer, hint), *skipped(["devices"], "no torch")]
    ticks = []
    version = str(answer["torch"])
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers < MIN_TORCH:
        need = ".".join(map(str, MIN_TORCH))
        hint = f"`skyctl setup --limit {node.name}` brings a newer one; or upgrade it there"
        ticks.append(failed("torch", f"{version}; at least {need} is needed", hint))
    elif not answer["distributed"]:
        ticks.append(
            failed("torch", f"{version}, built without torch.distributed", "install a torch from pytorch.org")
        )
    else:
        ticks.append(ok("torch", version))
    there = ", ".join(_device_text(device) for device in answer["devices"])
    if answer["missing"]:
        missing = ", ".join(answer["missing"])
        hint = f"correct `devices` of node {node.name!r} in cluster.yaml, or install a torch that sees them"
        ticks.append(failed("devices", f"{missing} is not there; there is {there}", hint))
    elif answer["faults"]:
        text = "; ".join(f"{device}: {fault}" for device, fault in answer["faults"].items())
        hint = f"use a torch that fits its driver, or leave the device out of `devices` of node {node.name!r}"
        ticks.append(failed("devices", text, hint))
    else:
        ticks.append(ok("devices", there))
    return ticks


def dtype_ticks(node: Node, dtypes: Sequence[DtypeReport]) -> list[Tick]:
    """``dtypes``, for each that does not simply work; its own processor is to blame, not torch."""
    ticks = []
    for report in dtypes:
        if not report.works:
            finding = f"{report.dtype} can't be computed in: a trial died by {report.died_by}"
            hint = f"train in float32 (--dtype float32), or leave node {node.name!r} out (--limit)"
            ticks.append(warning("dtypes", finding, hint))
        elif report.max_cpu_isa is not None:
            why = f"{report.died_by} without: the processor advertises more than it can do"
            ticks.append(ok("dtypes", f"{report.dtype} with ONEDNN_MAX_CPU_ISA={report.max_cpu_isa} ({why})"))
    return ticks


def _device_text(device: Mapping[str, Any]) -> str:
    size = f", {_size_text(device['memory_bytes'])}" if device.get("memory_bytes") else ""
    name = f" ({device['name']}{size})" if device["name"] not in ("cpu", "") else ""
    return f"{device['id']}{name}"


def python_tick(environment: Mapping[str, Any]) -> Tick:
    """``python``: a session would not be open were it too old."""
    origin = ", set up by skyctl" if SETUP_FOLDER in environment["executable"] else ""
    return ok("python", f"{environment['python']} ({environment['executable']}{origin})")


def limits_ticks(node: Node, environment: Mapping[str, Any]) -> list[Tick]:
    """``limits``: one tick where all is well, else one for each that is short."""
    ticks = [*_disk_ticks(environment), *_file_limit_ticks(environment), *_memory_ticks(node, environment)]
    if node.threads is not None and node.threads > environment["cpus"]:
        finding = f"threads: {node.threads}, but there are {environment['cpus']} processors"
        ticks.append(warning("limits", finding, f"lower `threads` of node {node.name!r} in cluster.yaml"))
    if ticks:
        return ticks
    parts = [
        f"{environment['cpus']} cpus"
        + (f" (quota {environment['cpu_quota']:g})" if environment["cpu_quota"] else "")
    ]
    parts.append(_memory_text(node, environment))
    if environment["cache"]["free_bytes"] is not None:
        parts.append(f"{_size_text(environment['cache']['free_bytes'])} disk free")
    return [ok("limits", ", ".join(parts))]


def _memory_text(node: Node, environment: Mapping[str, Any]) -> str:
    """``3.0 GiB of 24.0 GiB memory (cgroup limit)``: what training may use now, of what, and what caps it."""
    free, total = environment["memory_available_bytes"], environment["memory_total_bytes"]
    cap = "cgroup limit" if environment["memory_limit_bytes"] is not None else "free"
    if node.memory_gib is not None and node.memory_gib * 2**30 < free and not _has_cards(node):
        free, cap = node.memory_gib * 2**30, "memory_gib"
    return f"{_size_text(free)} of {_size_text(total)} memory ({cap})"


def _has_cards(node: Node) -> bool:
    """Whether accelerators are named for it, whose memory ``memory_gib`` is then."""
    return any(device.partition(":")[0] != "cpu" for device in node.devices or ())


def _disk_ticks(environment: Mapping[str, Any]) -> list[Tick]:
    ticks = []
    for place in ("cache", "tmp"):
        path, free = environment[place]["path"], environment[place]["free_bytes"]
        if free is not None and free < LOW_DISK_BYTES:
            make = failed if free < NO_DISK_BYTES else warning
            ticks.append(make("limits", f"{_size_text(free)} free in {path}", "free some space there"))
    return ticks


def _file_limit_ticks(environment: Mapping[str, Any]) -> list[Tick]:
    ticks = []
    if environment["nofile"] is not None and environment["nofile"][1] < LOW_NOFILE:
        finding = f"at most {environment['nofile'][1]} open files"
        hint = (
            f"raise the hard limit to {LOW_NOFILE} or more (limits.conf, or the container's --ulimit nofile)"
        )
        ticks.append(warning("limits", finding, hint))
    if environment["shm_bytes"] is not None and environment["shm_bytes"] < LOW_SHM_BYTES:
        finding = f"/dev/shm holds {_size_text(environment['shm_bytes'])}"  # noqa: S108
        hint = "DataLoader workers need more: a container takes --shm-size=1g"
        ticks.append(warning("limits", finding, hint))
    return ticks


def _memory_ticks(node: Node, environment: Mapping[str, Any]) -> list[Tick]:
    free, limit = environment["memory_available_bytes"], environment["memory_limit_bytes"]
    total = environment["memory_total_bytes"] if limit is None else limit
    ticks = []
    if free < LOW_MEMORY_BYTES:
        what = "free" if limit is None else "left under its cgroup limit"
        ticks.append(warning("limits", f"{_size_text(free)} memory {what}", "end what else runs there"))
    if node.memory_gib is not None and node.memory_gib * 2**30 > total and not _has_cards(node):
        finding = f"memory_gib: {node.memory_gib:g}, but it has {_size_text(total)}"
        ticks.append(warning("limits", finding, f"lower `memory_gib` of node {node.name!r} in cluster.yaml"))
    return ticks


def clock_tick(offset_s: float, round_trip_s: float) -> Tick:
    """``clock``: ahead of this machine's (positive) or behind, known to half the round trip."""
    sure_s = max(0.0, abs(offset_s) - round_trip_s / 2)
    way = "ahead of" if offset_s > 0 else "behind"
    if sure_s > LOW_CLOCK_S:
        hint = "set the one that is wrong (timedatectl set-ntp true): times in logs will not match"
        by = f"{abs(offset_s):.1f} s" if abs(offset_s) < 60 else format_span(abs(offset_s))
        return warning("clock", f"{by} {way} this machine", hint)
    return ok("clock", f"within {max(abs(offset_s), round_trip_s / 2) * 1000:.0f} ms")


def torch_version_warnings(versions: Mapping[str, str]) -> dict[str, Tick]:
    """A warning for each node whose torch differs in major or minor number from most nodes'."""
    minor = {node: ".".join(re.findall(r"\d+", version)[:2]) for node, version in versions.items()}
    minors = list(minor.values())
    most = max(minors, key=minors.count, default="")
    hint = "different ones may not understand each other; `skyctl setup` brings this machine's"
    return {
        node: warning("torch", f"{versions[node]}, while others have {most}", hint)
        for node, number in minor.items()
        if number != most
    }


def pair_hint(
    pair: PairReport, nodes: Mapping[str, Node], interfaces: Mapping[str, Mapping[str, str]]
) -> str:
    """The advice for a pair that can't talk; ``interfaces``: by node, its addresses by interface name."""
    source, target = pair.source, pair.target
    ways = f"let TCP through from {source} to {target} (a firewall, NAT)"
    vpn = {n: [i for i in interfaces.get(n, {}) if VPN_INTERFACE.match(i)] for n in (source, target)}
    unnamed = [n for n in (source, target) if vpn[n] and nodes[n].interface not in vpn[n]]
    if vpn[source] and vpn[target] and unnamed:
        named = " and ".join(f"`interface: {vpn[n][0]}` for node {n!r}" for n in unnamed)
        return f"{ways}, or use the VPN that both have: {named} in cluster.yaml"
    return (
        f"{ways}, or put both into a VPN (Tailscale, WireGuard) and name its interface for both "
        "in cluster.yaml, as in `interface: tailscale0`"
    )


def _size_text(size_bytes: float) -> str:
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes / 2**10:.0f} KiB"
