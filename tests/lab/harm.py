"""The processes on a lab's nodes, and harm to them: for tests of what a run survives, and for benchmarks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.lab import fault_injection

from skyctl.lab import cgroup_quotas, prerequisites
from skyctl.lab.lab_setup import is_listening
from skyctl.lab.lab_state import LabState

from ..helpers.processes import command, files, parent, until

RESTART_S = 30.0


def processes(lab: LabState, node: str) -> dict[int, str]:
    """All processes of that node but its first, by their ids out here: id → command."""
    there = lab.node(node)
    first = there.process.pid if there.process is not None else None
    pids = [pid for pid in cgroup_quotas.list_processes(Path(there.cgroups[0])) if pid != first]
    return {pid: text for pid in pids if (text := command(pid))}


def strays(lab: LabState, node: str) -> dict[int, str]:
    """The processes beside sshd: one that serves a connection which went black may stay for long."""
    return {pid: c for pid, c in processes(lab, node).items() if "sshd" not in c.split(" ")[0]}


def ranks(lab: LabState, node: str) -> list[int]:
    """Ranks, and what they have forked: a DataLoader's workers call themselves the same."""
    return [pid for pid, command in processes(lab, node).items() if "skyctl.worker.rank" in command]


def agent(lab: LabState, node: str) -> int:
    """The agent: it has started the rank."""
    (rank,) = ranks(lab, node)
    return parent(rank)


def connections(lab: LabState, node: str) -> list[int]:
    """The sshd processes that serve a connection, not the one that listens."""
    by_pid = processes(lab, node)
    return [
        pid for pid, c in by_pid.items() if c.startswith(("sshd: ", "sshd-session")) and "listener" not in c
    ]


def listeners(lab: LabState, node: str) -> list[int]:
    """The sshd that listens."""
    by_pid = processes(lab, node)
    return [pid for pid, c in by_pid.items() if "sshd_config" in c and " -R" not in c]  # -R: a connection's


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def switch_off(lab: LabState, node: str) -> None:
    """sshd and all else of it ends at once, and nobody can log in; see ``switch_on``."""
    for pid in (*listeners(lab, node), *processes(lab, node)):
        kill(pid)


def switch_on(lab: LabState, node: str) -> None:
    """Its sshd listens again, where it did not."""
    config = ["-E", "/run/sshd.log", "-f", "/run/skyctl/sshd_config"]
    began = time.monotonic()
    while not is_listening(lab.node(node)):
        done = fault_injection.run_in_node(
            lab, node, ["setsid", prerequisites.find_program("sshd") or "/usr/sbin/sshd", *config]
        )
        assert done.returncode == 0, done.stderr
        assert time.monotonic() - began < RESTART_S, f"the sshd of {node} does not come back"
        time.sleep(0.2)


def stop_sshd(lab: LabState, node: str) -> None:
    """Nobody can log in any more; what runs there goes on. See ``switch_on``."""
    for pid in listeners(lab, node):
        kill(pid)
    until(lambda: not is_listening(lab.node(node)))


@contextmanager
def black(lab: LabState, node: str) -> Iterator[None]:
    """The node's link carries nothing for as long as this lasts."""
    fault_injection.disconnect(lab, node)
    try:
        yield
    finally:
        fault_injection.reconnect(lab, node)


@contextmanager
def site_cut(lab: LabState, site: int) -> Iterator[None]:
    """The site's nodes reach each other, and nobody else, for as long as this lasts."""
    fault_injection.disconnect_site(lab, site)
    try:
        yield
    finally:
        fault_injection.reconnect_site(lab, site)


@contextmanager
def launcher_cut(lab: LabState, node: str) -> Iterator[None]:
    """The launcher hears nothing of that node for as long as this lasts; its peers do."""
    fault_injection.disconnect_launcher(lab, node)
    try:
        yield
    finally:
        fault_injection.reconnect(lab, node)


def short_of_memory(lab: LabState, node: str) -> int:
    """How many processes the kernel has killed there because the node had no memory left."""
    kills = 0
    for folder in map(Path, lab.node(node).cgroups):
        for file in ("memory.events", "memory.oom_control"):
            if (folder / file).exists():
                fields = dict(line.split() for line in (folder / file).read_text().splitlines())
                kills = max(kills, int(fields.get("oom_kill", 0)))
    return kills


def leavings(lab: LabState, node: str, *, checkpoints: bool) -> list[str]:
    """Session folders, unfinished files and (``checkpoints``) runs' checkpoints in its home and its /tmp."""
    folder = lab.node_folder(node)
    paths = leavings_in_cache(folder / "home" / ".cache" / "skyctl", checkpoints=checkpoints)
    paths |= files(folder / "tmp", "skyctl*")
    return sorted(str(path.relative_to(folder)) for path in paths)


def leavings_in_cache(cache: Path, *, checkpoints: bool) -> set[Path]:
    """The leavings of runs in a node's folder of caches, but for the last checkpoint of one that is done.

    If more checkpoints may be there, what was cut off among them is the next keeper's (docs/faults.md).
    """
    half = ("**/.new-*", "**/.gone-*", "**/.*.part", "**/*.tmp")
    paths = files(cache, "sessions/s-*", "sessions/s-*/*", *half)
    paths = {path for path in paths if cache / "runs" not in path.parents}
    more = {run for run in files(cache, "runs/*") if len(files(run, "step-*")) > 1}
    return paths | more if checkpoints else paths
