"""Running something in a lab's node without SSH, and doing harm to nodes: for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

from skyctl.errors import SkyctlError
from skyctl.lab import cgroups, links, needs
from skyctl.lab.state import LabState, NodeState, alive

_ENTER = 'for folder in {0}; do echo $$ > "$folder"/cgroup.procs || exit 125; done; exec "$@"'
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def argv(state: LabState, node: str, command: Sequence[str]) -> list[str]:
    """The command as run in that node: its namespaces, its cgroups, a clean environment, its own HOME."""
    there = state.node(node)
    folders = " ".join(f"'{folder}'" for folder in there.cgroups)
    environment = ["env", "-i", f"PATH={_PATH}", f"HOME={needs.root_home()}", "LC_ALL=C.UTF-8"]
    enter = ["nsenter", "-t", str(_pid(there)), "-m", "-n", "-u", "-i", "-p", f"--wdns={needs.root_home()}"]
    return ["sh", "-c", _ENTER.format(folders), "sh", *enter, "--", *environment, *command]


def run(
    state: LabState, node: str, command: Sequence[str], timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a node to its end; stdin is empty, output is captured."""
    return subprocess.run(
        argv(state, node, command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _pid(node: NodeState) -> int:
    if node.process is None or not alive(node.process):
        raise SkyctlError(f"lab node {node.name!r} is gone")
    return node.process.pid


def _fabric(state: LabState) -> int:
    if state.fabric is None or not alive(state.fabric):
        raise SkyctlError(f"the network of lab {state.name!r} is gone")
    return state.fabric.pid


def kill_node(state: LabState, node: str) -> None:
    """Ends all that runs in the node at once, as a power cut would. It does not come back."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(_pid(state.node(node)), signal.SIGKILL)


def cut_off(state: LabState, node: str) -> None:
    """The node's link goes black, without a word to either side; what runs there goes on. See ``rejoin``."""
    links.batch("ip", [f"link set {state.node(node).port} nomaster"], pid=_fabric(state))


def rejoin(state: LabState, node: str) -> None:
    """Undoes ``cut_off`` and ``cut_launcher``."""
    there = state.node(node)
    site = there.address.split(".")[2]
    links.batch("ip", [f"link set {there.port} master site{site}"], pid=_fabric(state))
    links.batch("ip", [_neighbour(there, int(site), links.LAUNCHER)], pid=_pid(there))


def cut_launcher(state: LabState, node: str) -> None:
    """Nothing the node sends reaches the launcher any more; its peers still hear it. See ``rejoin``."""
    there = state.node(node)
    links.batch("ip", [_neighbour(there, int(there.address.split(".")[2]), 0)], pid=_pid(there))


def _neighbour(node: NodeState, site: int, number: int) -> str:
    subnet = int(node.address.split(".")[1])
    launcher = links.address(subnet, site, links.LAUNCHER)
    return f"neigh replace {launcher} lladdr {links.mac(subnet, site, number)} dev eth0 nud permanent"


def set_cpus(state: LabState, node: str, cpus: float) -> None:
    """Makes the node slower or faster from now on (lab.json keeps what lab.yaml said)."""
    cgroups.set_quota(state.node(node).cgroups, cpus, state.spec.cpu_slice_ms)


def set_rate(state: LabState, node: str, rate_mbit: float) -> None:
    """Makes the node's link slower or faster from now on, both ways."""
    there = state.node(node)
    bucket = links.bucket(rate_mbit, links.queue_s(state.spec))
    links.batch("tc", [f"qdisc replace dev {there.port} root {bucket}"], pid=_fabric(state))
    links.batch("tc", [f"qdisc replace dev eth0 root {bucket}"], pid=_pid(there))
