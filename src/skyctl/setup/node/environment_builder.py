"""Making an environment: a virtual environment, packages into it, a look at it, and only then its marker.

It is made in its place, because paths are written into what is installed, and counts as there once the marker
is. However making ends before that, the folder goes; what a SIGKILL leaves the next setup removes.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyctl.errors import UnfitError
from skyctl.setup.node import environment_inspection, environment_store, uv_runner
from skyctl.setup.node.setup_orders import MakeOrder

UNNAMED_NODE = ""
"""The launcher knows which one this is, and puts its name before what is said here."""


class _UvFailedError(Exception):
    """uv could not install; the answer to the launcher."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer


def build_environment(order: MakeOrder, say: environment_store.ReportProgress) -> dict[str, Any]:
    """Makes the environment, unless it is there.

    Returns:
        ``{"path", "python", "made", "torch", "size_bytes"}``, or where uv can't install ``{"offline"}`` or
        ``{"refused"}``, its words; then nothing is left.

    Raises:
        UnfitError: there is no room, or what was installed does not work; nothing is left.
    """
    with environment_store.lock_environments(say) as folder:
        environment_store.remove_unfinished(folder)
        path = folder / order.name
        if environment_store.read_marker(path) is not None:
            environment_store.require_private(path)
            found = environment_inspection.inspect_python(str(_python_path(path)))
            if not order.anew and environment_inspection.torch_fault(found) is None:
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
        except _UvFailedError as exc:
            return exc.answer
        except OSError as exc:
            if exc.errno in uv_runner.DISK_FULL_ERRORS:
                raise _disk_full_error(path, environment_store.free_bytes(folder)) from exc
            raise
        return _build_result(path, found, made=True)


def _build_in_place(path: Path, order: MakeOrder, say: environment_store.ReportProgress) -> dict[str, Any]:
    free = environment_store.free_bytes(path)
    temporary = path / ".tmp"
    try:
        path.mkdir(mode=0o700)
    except FileExistsError as exc:  # no environment, and not ours to remove
        raise environment_store.unusable_folder(path, exc) from exc
    try:
        _install(path, temporary, order, free, say)
        say("trying it", 0.9)
        found = environment_inspection.inspect_python(str(_python_path(path)))
        if fault := environment_inspection.torch_fault(found):
            raise UnfitError(
                f"torch {order.torch} was installed, but it does not work: {fault}",
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
    """Removes what is half made.

    SIGTERM may come when its uv is dead already; that does not cut this short.
    """
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


def _install(
    path: Path,
    temporary: Path,
    order: MakeOrder,
    free: int | None,
    say: environment_store.ReportProgress,
) -> None:
    temporary.mkdir()
    Path(order.uv).chmod(0o700)  # as it was pushed, nobody may run it
    lines, arguments = uv_runner.split_options(order.options)
    index: Mapping[str, str | None] | None = order.index
    if order.wheels is not None:
        index, lines = None, []
        arguments += ["--no-index", "--find-links", str(_link_pushed_wheels(temporary, order.wheels))]
    # With hashes, one is wanted for everything: then the workload's own line for torch is the one.
    hashed = [line for line in order.requirements if " --hash" in line]
    torch = [] if any(re.match(r"torch\b", line) for line in hashed) else [f"torch=={order.torch}"]
    wanted = temporary / "requirements.txt"
    wanted.write_text("\n".join([*lines, *torch, *order.requirements, ""]))
    arguments += ["--require-hashes"] if hashed else []
    python = ["--python", str(_python_path(path))]
    at = 0.1

    def tell(line: str) -> None:
        nonlocal at
        at += (0.85 - at) * 0.06  # with each package; how many there are it does not say
        say(line, at)

    environment = uv_runner.uv_environment(temporary, index, order.cpu_index)
    # Of a folder that is there, and empty but for ours; "venv" and "ensurepip" need not be.
    for argv in (
        ["venv", "--quiet", "--no-project", "--allow-existing", "--python", sys.executable, str(path)],
        ["pip", "install", *python, *arguments, "-r", str(wanted)],
    ):
        done = uv_runner.run_uv([order.uv, *argv], environment, tell)
        if done.status == 0:
            continue
        if done.is_disk_full:
            raise _disk_full_error(path, free)
        asked = argv[0] == "pip" and index is not None and done.status != uv_runner.NO_SOLUTION
        raise _UvFailedError({"offline" if asked else "refused": done.words})


def _link_pushed_wheels(temporary: Path, wheels: Mapping[str, str]) -> Path:
    """Links the pushed wheels, under the names that uv reads, in a folder, and returns that."""
    folder = temporary / "wheels"
    folder.mkdir()
    for name, target in wheels.items():
        (folder / Path(name).name).symlink_to(target)
    return folder


def _disk_full_error(path: Path, free: int | None) -> UnfitError:
    had = f"it had {free / 2**20:.0f} MiB free, more is needed" if free is not None else "it is full"
    return UnfitError(
        f"there is no room for an environment with torch in {path.parent}: {had}",
        node=UNNAMED_NODE,
        hint="make room there, or name another disk: `env: {XDG_DATA_HOME: /path}` in cluster.yaml",
    )


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
        freed_bytes = 0 if dry_run else environment_store.remove_unused_pythons()
        return {"removed": [], "shared": [], "busy": {}, "freed_bytes": freed_bytes}
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
    if not dry_run:
        freed_bytes += environment_store.remove_unused_pythons()
    return {"removed": removed, "shared": shared, "busy": busy, "freed_bytes": freed_bytes}
