"""Taking a lab down, whole or half made, and finding what might be left of one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

from skyctl.agent import process_tree
from skyctl.errors import SkyctlError
from skyctl.files import lab_folder, unfinished_writes
from skyctl.lab import cgroup_quotas, lab_state, traffic_shaping
from skyctl.lab.lab_state import LabState

_WITHIN_S = 30.0
_OWN = ("lab.json", "id_ed25519", "id_ed25519.pub", "fabric.log", *lab_state.NAMES)


def down(name: str) -> bool:
    """Takes the lab of that name down; True where there was anything of it.

    Works without a state file too (by the lab's token), may be called twice, and touches nothing else.

    Raises:
        SkyctlError: something of it could not be removed; the message says what.
    """
    lab_state.check_name(name)
    there = leftovers(name)
    state = None
    with contextlib.suppress(SkyctlError):  # a state file that can't be read must not keep a lab up
        state = lab_state.load_state(name)
    _stop(name, state)
    _remove_files(name, state)
    if left := leftovers(name):
        raise SkyctlError(f"of lab {name!r} could not be removed: {'; '.join(left)}")
    return bool(there)


def _stop(name: str, state: LabState | None) -> None:
    token = lab_state.token_of(name)
    recorded = [node.process for node in state.nodes] + [state.fabric] if state else []
    deadline = time.monotonic() + _WITHIN_S
    while True:
        pids = {process.pid for process in recorded if process is not None and lab_state.is_running(process)}
        pids |= _processes(token)
        process_tree.send_signal(pids, signal.SIGKILL)
        if not pids or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    for interface in _interfaces(token):
        # The namespace at its other end takes it along, but a little later.
        with contextlib.suppress(SkyctlError):
            traffic_shaping.run_tool(["ip", "link", "del", interface])
    for folder in _cgroups(token):
        cgroup_quotas.remove_cgroups(folder)
    while _interfaces(token) and time.monotonic() < deadline:
        time.sleep(0.01)


def _processes(token: str) -> set[int]:
    """Those that carry the token in the environment they were started with, or are in the lab's cgroups."""
    pids = process_tree.find_tagged(process_tree.process_table(), lab_state.TAG, token)
    for folder in _cgroups(token):
        pids |= cgroup_quotas.list_processes(folder)
    return {pid for pid in pids if process_tree.process_start_ticks(pid) is not None}


def _cgroups(token: str) -> list[Path]:
    """The lab's cgroups, wherever the process was that made them."""
    points = [mount.point for mount in cgroup_quotas.list_mounts() if mount.kind in ("cgroup", "cgroup2")]
    folders: list[Path] = []
    for point in points:
        for root, names, _ in os.walk(point):
            if f"skyctl-lab-{token}" in names:
                folders.append(Path(root) / f"skyctl-lab-{token}")
            names[:] = [name for name in names if not name.startswith("skyctl-lab-")]
    return sorted(set(folders))


def _interfaces(token: str) -> list[str]:
    """The launcher's interfaces into the lab."""
    prefix = traffic_shaping.launcher_interface(token, 0)[:-1]
    folder = Path("/sys/class/net")
    return sorted(p.name for p in folder.iterdir() if p.name.startswith(prefix)) if folder.is_dir() else []


def _remove_files(name: str, state: LabState | None) -> None:
    own = lab_folder(name)
    if _mounts_in(own):
        return  # never delete through a mount; leftovers() names it
    if state is not None and state.folder != str(own):
        folder = Path(state.folder)
        for file in lab_state.NAMES:
            _remove_file(folder / file)
        with contextlib.suppress(OSError):
            folder.rmdir()  # only where nothing else is in it
    shutil.rmtree(own / "nodes", ignore_errors=True)
    for file in (*_OWN[1:], _OWN[0]):  # lab.json last
        _remove_file(own / file)
    with contextlib.suppress(OSError):
        own.rmdir()
        own.parent.rmdir()


def _remove_file(path: Path) -> None:
    """Removes the file, and what a process killed while writing it left (nobody writes it any more)."""
    for file in (*unfinished_writes(path), path):
        with contextlib.suppress(OSError):
            file.unlink()


def _mounts_in(folder: Path) -> list[Path]:
    return [mount.point for mount in cgroup_quotas.list_mounts() if mount.point.is_relative_to(folder)]


def leftovers(name: str) -> list[str]:
    """All that there is of a lab of that name, in words; empty after ``down``."""
    token = lab_state.token_of(name)
    own = lab_folder(name)
    left = [f"process {pid}" for pid in sorted(_processes(token))]
    left += [f"interface {interface}" for interface in _interfaces(token)]
    left += [f"cgroup {folder}" for folder in _cgroups(token)]
    left += [f"mount {point}" for point in _mounts_in(own)]
    left += [f"file {path}" for path in (sorted(own.iterdir()) if own.is_dir() else [])]
    return left
