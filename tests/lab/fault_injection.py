"""Injects faults into a lab's nodes and runs commands in them without SSH, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

from skyctl.errors import SkyctlError
from skyctl.lab import cgroup_quotas, prerequisites, traffic_shaping
from skyctl.lab.lab_state import LabState, NodeState, is_running

_ENTER = 'for folder in {0}; do echo $$ > "$folder"/cgroup.procs || exit 125; done; exec "$@"'
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def command_in_node(state: LabState, node: str, command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` in a node, with its namespaces, cgroups and HOME alone."""
    there = state.node(node)
    folders = " ".join(f"'{folder}'" for folder in there.cgroups)
    environment = ["env", "-i", f"PATH={_PATH}", f"HOME={prerequisites.root_home()}", "LC_ALL=C.UTF-8"]
    enter = [
        "nsenter",
        "-t",
        str(_pid(there)),
        "-m",
        "-n",
        "-u",
        "-i",
        "-p",
        f"--wdns={prerequisites.root_home()}",
    ]
    return ["sh", "-c", _ENTER.format(folders), "sh", *enter, "--", *environment, *command]


def run_in_node(
    state: LabState, node: str, command: Sequence[str], timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a node to its end; stdin is empty, output is captured."""
    return subprocess.run(
        command_in_node(state, node, command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _pid(node: NodeState) -> int:
    if node.process is None or not is_running(node.process):
        raise SkyctlError(f"lab node {node.name!r} is gone")
    return node.process.pid


def _network_pid(state: LabState) -> int:
    if state.fabric is None or not is_running(state.fabric):
        raise SkyctlError(f"the network of lab {state.name!r} is gone")
    return state.fabric.pid


def kill_node(state: LabState, node: str) -> None:
    """Kills everything in the node at once, as a power cut would; the node does not come back."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(_pid(state.node(node)), signal.SIGKILL)


def disconnect(state: LabState, node: str) -> None:
    """Takes the node's link down silently; what runs there continues. ``reconnect`` undoes it."""
    traffic_shaping.run_batch("ip", [f"link set {state.node(node).port} nomaster"], pid=_network_pid(state))


def reconnect(state: LabState, node: str) -> None:
    """Undoes ``disconnect`` and ``disconnect_launcher``."""
    there = state.node(node)
    site = there.address.split(".")[2]
    traffic_shaping.run_batch("ip", [f"link set {there.port} master site{site}"], pid=_network_pid(state))
    traffic_shaping.run_batch("ip", [_neighbour(there, int(site), traffic_shaping.LAUNCHER)], pid=_pid(there))


def disconnect_launcher(state: LabState, node: str) -> None:
    """Keeps what the node sends from the launcher, not from its peers. ``reconnect`` undoes it."""
    there = state.node(node)
    traffic_shaping.run_batch("ip", [_neighbour(there, int(there.address.split(".")[2]), 0)], pid=_pid(there))


def disconnect_site(state: LabState, site: int) -> None:
    """Cuts a site off from all others and from the launcher; its nodes reach each other still."""
    _set_site_ports(state, site, "nomaster")


def reconnect_site(state: LabState, site: int) -> None:
    """Undoes ``disconnect_site``."""
    _set_site_ports(state, site, f"master site{site}")


def _set_site_ports(state: LabState, site: int, where: str) -> None:
    between = {"netem": "edge", "user": "tap"}[state.switch]
    ports = [f"link set {port}{site} {where}" for port in ("up", between)]
    traffic_shaping.run_batch("ip", ports, pid=_network_pid(state))


def _neighbour(node: NodeState, site: int, number: int) -> str:
    subnet = int(node.address.split(".")[1])
    launcher = traffic_shaping.node_address(subnet, site, traffic_shaping.LAUNCHER)
    mac = traffic_shaping.node_mac(subnet, site, number)
    return f"neigh replace {launcher} lladdr {mac} dev eth0 nud permanent"


def set_cpus(state: LabState, node: str, cpus: float) -> None:
    """Changes the node's CPU quota from now on; lab.json keeps that of lab.yaml."""
    spec = state.spec
    cgroup_quotas.set_quota(state.node(node).cgroups, cpus, spec.cpu_slice_ms, spec.cpu_period_ms)


def set_rate(state: LabState, node: str, rate_mbit: float) -> None:
    """Changes the rate of the node's link from now on, in both directions."""
    there = state.node(node)
    bucket = traffic_shaping.token_bucket(rate_mbit, traffic_shaping.queue_s(state.spec.sites.latency_ms))
    traffic_shaping.run_batch(
        "tc", [f"qdisc replace dev {there.port} root {bucket}"], pid=_network_pid(state)
    )
    traffic_shaping.run_batch("tc", [f"qdisc replace dev eth0 root {bucket}"], pid=_pid(there))
