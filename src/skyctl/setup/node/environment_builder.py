"""Making an environment: a virtual environment, pip into it, a look at it, and only then its marker.

It is made in its place, because paths are written into what is installed, and counts as there once the marker
is. However making ends before that, the folder goes; what a SIGKILL leaves the next setup removes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyctl.agent.module_command import module_command
from skyctl.errors import UnfitError
from skyctl.setup.node import environment_inspection, environment_store, pip_runner
from skyctl.setup.node.setup_orders import MakeOrder

VENV_TIMEOUT_S = 300.0
CPU_INDEX_TIMEOUT_S = 5.0
UNNAMED_NODE = ""
"""The launcher knows which one this is, and puts its name before what is said here."""


class IndexUnreachableError(Exception):
    """The node can't reach a package index; the message is pip's."""


class NoMatchingPackageError(Exception):
    """No package was found for the requirement that is the message."""


def build_environment(order: MakeOrder, say: environment_store.ReportProgress) -> dict[str, Any]:
    """Makes the environment, unless it is there.

    Returns:
        ``{"path", "python", "made", "torch", "size_bytes"}``.

    Raises:
        IndexUnreachableError: no package index answers; nothing is left.
        NoMatchingPackageError: no index has a version that fits; nothing is left.
        UnfitError: something is missing on the node, or what was installed does not work; nothing is left.
    """
    with environment_store.lock_environments(say) as folder:
        environment_store.remove_unfinished(folder)
        path = folder / order.name
        if environment_store.read_marker(path) is not None:
            environment_store.require_private(path)
            found = environment_inspection.inspect_python(
                str(_python_path(path)), order.requirements, order.pip
            )
            if not _inspection_fault(found):
                environment_store.add_owner(path, order.owner)
                return _build_result(path, found, made=False)
            if pids := environment_store.processes_using(path):
                running = ", ".join(map(str, pids[:10]))
                raise UnfitError(
                    f"{path} is broken, and in use by processes {running}", node=UNNAMED_NODE, hint="end them"
                )
            environment_store.delete_environment(path)
        try:
            found = _build_in_place(path, order, say)
        except OSError as exc:
            if exc.errno in (28, 122):  # ENOSPC, EDQUOT
                raise _disk_full_error(path, order, environment_store.free_bytes(folder)) from exc
            raise
        return _build_result(path, found, made=True)


def _build_in_place(path: Path, order: MakeOrder, say: environment_store.ReportProgress) -> dict[str, Any]:
    free = environment_store.free_bytes(path)
    if order.need_bytes is not None and free is not None and free < order.need_bytes:
        raise _disk_full_error(path, order, free)
    temporary = path / ".tmp"
    try:
        path.mkdir(mode=0o700)
    except FileExistsError as exc:  # no environment, and not ours to remove
        raise environment_store.unusable_folder(path, exc) from exc
    try:
        say("making a virtual environment", 0.05)
        _create_venv(path, order, free)
        temporary.mkdir()
        _pip_install(path, temporary, order, free, say)
        say("trying it", 0.9)
        found = environment_inspection.inspect_python(str(_python_path(path)), order.requirements, order.pip)
        if faults := _inspection_fault(found):
            raise UnfitError(
                f"torch {order.torch} was installed, but it does not work: {faults}",
                node=UNNAMED_NODE,
                hint="does this torch support its system? --index-url takes another build",
            )
        shutil.rmtree(temporary)
        marker = {"format": 1, "torch": found["torch"], "requirements": list(order.requirements)}
        marker |= {"base": sys.executable, "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        environment_store.write_marker(path, {**marker, "owners": [order.owner]})
    except BaseException:
        _discard_unfinished(path)
        raise
    return found


def _discard_unfinished(path: Path) -> None:
    """What is half made. SIGTERM may come when its pip is dead already; that does not cut this short."""
    try:
        shutil.rmtree(path, ignore_errors=True)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def _build_result(path: Path, found: Mapping[str, Any], *, made: bool) -> dict[str, Any]:
    size = environment_store.size_bytes(path)
    python = str(_python_path(path))
    return {"path": str(path), "python": python, "made": made, "torch": found["torch"], "size_bytes": size}


def _python_path(path: Path) -> Path:
    return path / "bin" / "python"


def _inspection_fault(found: Mapping[str, Any]) -> str | None:
    if found["fault"] is not None:
        return str(found["fault"])
    if found["torch"] is None:
        return "there is no torch in it"
    if not found["distributed"]:
        return f"torch {found['torch']} was built without torch.distributed"
    return f"{', '.join(found['missing'])} is not in it" if found["missing"] else None


def _create_venv(path: Path, order: MakeOrder, free: int | None) -> None:
    """``--without-pip``: pip is run from its wheel, so ``ensurepip`` need not be there."""
    done = subprocess.run(
        module_command(sys.executable, "venv", "--without-pip", str(path)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=VENV_TIMEOUT_S,
        check=False,
    )
    if done.returncode == 0:
        return
    said = (done.stderr + done.stdout).strip()
    if pip_runner.PipResult(1, tuple(said.splitlines())).disk_full:
        raise _disk_full_error(path, order, free)
    version = ".".join(map(str, sys.version_info[:2]))
    why = "has no module venv" if "No module named" in said else "can't make a virtual environment"
    last = said.splitlines()[-1][:300] if said else f"status {done.returncode}"
    raise UnfitError(
        f"{sys.executable} {why}: {last}",
        node=UNNAMED_NODE,
        hint=f"install it there: sudo apt install python{version}-venv (Debian, Ubuntu), "
        "or name another Python in cluster.yaml: `python: /path`",
    )


def _pip_install(
    path: Path,
    temporary: Path,
    order: MakeOrder,
    free: int | None,
    say: environment_store.ReportProgress,
) -> None:
    wanted = temporary / "requirements.txt"
    offline = order.wheels is not None
    options = [] if offline else order.options
    # With hashes, pip wants one for everything: then the workload's own line for torch is the one.
    pinned = any(re.match(r"torch\b.*--hash", line) for line in order.requirements)
    torch = [] if pinned else [f"torch=={order.torch}"]
    wanted.write_text("\n".join([*options, *torch, *order.requirements, ""]))
    argv = [
        str(_python_path(path)),
        f"{order.pip}/pip",
        "--retries",
        str(pip_runner.RETRIES),
        "--timeout",
        str(pip_runner.TIMEOUT_S),
    ]
    argv += ["install", "--no-cache-dir", "-r", str(wanted)]
    if order.wheels is not None:
        argv += ["--no-index", "--find-links", str(_link_pushed_wheels(temporary, order.wheels))]
    elif order.cpu_index is not None and is_url_reachable(order.cpu_index):
        argv += ["--extra-index-url", order.cpu_index]
    done = pip_runner.run_pip(
        argv,
        pip_runner.pip_environment(temporary, order.index, offline=offline),
        _pip_progress_reporter(say),
    )
    if done.status == 0:
        return
    if done.disk_full:
        raise _disk_full_error(path, order, free)
    if not offline and done.offline is not None:
        raise IndexUnreachableError(done.offline.strip()[:300])
    if done.unmatched is not None:
        raise NoMatchingPackageError(done.unmatched)
    raise UnfitError(
        f"pip could not install: {done.why[:1000]}",
        node=UNNAMED_NODE,
        hint="does requirements.txt go with this machine's torch, and with what earlier workloads required? "
        "`skyctl setup --remove` forgets those",
    )


def _link_pushed_wheels(temporary: Path, wheels: Mapping[str, str]) -> Path:
    """What was pushed, under the names that pip reads."""
    folder = temporary / "wheels"
    folder.mkdir()
    for name, target in wheels.items():
        (folder / Path(name).name).symlink_to(target)
    return folder


def _pip_progress_reporter(say: environment_store.ReportProgress) -> Callable[[str], None]:
    """Says what pip is at; the share grows with each package it has found, towards the last part."""
    at = 0.1

    def tell(line: str) -> None:
        nonlocal at
        activity = pip_runner.parse_pip_activity(line)
        if activity is not None:
            at = 0.7 if activity.installs else min(0.65, at + (0.65 - at) * 0.06)
            say(activity.description, at)

    return tell


def is_url_reachable(url: str) -> bool:
    """Whether something answers there within a few seconds, whatever it says."""
    try:
        with urllib.request.urlopen(url, timeout=CPU_INDEX_TIMEOUT_S):  # noqa: S310 - ours, or as the user gave it
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


def _disk_full_error(path: Path, order: MakeOrder, free: int | None) -> UnfitError:
    need = f"{_mib(order.need_bytes)} are needed" if order.need_bytes is not None else "more is needed"
    had = f"it had {_mib(free)} free" if free is not None else "it is full"
    return UnfitError(
        f"there is no room for an environment with torch in {path.parent}: {had}, {need}",
        node=UNNAMED_NODE,
        hint="make room there, or name another disk: `env: {XDG_DATA_HOME: /path}` in cluster.yaml",
    )


def _mib(size_bytes: int | None) -> str:
    return f"{(size_bytes or 0) / 2**20:.0f} MiB"


def release_environments(
    owners: Sequence[str], keep: str | None, say: environment_store.ReportProgress, *, dry_run: bool = False
) -> dict[str, Any]:
    """Ends those owners' claim to every environment but ``keep``; those without an owner left are deleted.

    Returns:
        ``{"removed": [path], "shared": [path], "busy": {path: [pid]}, "freed_bytes"}``. One in use stays as
        it is, its owner too. With ``dry_run`` all of that is found, and nothing changed.
    """
    removed, shared, busy, freed_bytes = [], [], {}, 0
    if not environment_store.environments_root().is_dir():
        return {"removed": [], "shared": [], "busy": {}, "freed_bytes": 0}
    with environment_store.lock_environments(say) as folder:
        if not dry_run:
            freed_bytes += environment_store.remove_unfinished(folder)
        for path in environment_store.environments_owned_by(folder, owners):
            if str(path) == keep:
                continue
            marker = environment_store.read_marker(path) or {}
            others = [other for other in marker["owners"] if other not in owners]
            if others:
                if not dry_run:
                    environment_store.write_marker(path, {**marker, "owners": others})
                shared.append(str(path))
            elif pids := environment_store.processes_using(path):
                busy[str(path)] = pids
            elif dry_run:
                freed_bytes += environment_store.size_bytes(path)
                removed.append(str(path))
            else:
                say(f"removing {path.name}", 0.5)
                freed_bytes += environment_store.delete_environment(path)
                removed.append(str(path))
    return {"removed": removed, "shared": shared, "busy": busy, "freed_bytes": freed_bytes}
