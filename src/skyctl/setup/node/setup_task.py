"""What ``skyctl setup`` asks of a node. Task: ``skyctl.setup.node.setup_task``; needs no torch.

By its order (``setup_orders``) it answers:

- ``FactsOrder`` → Python, a pip to run, accelerators, room on the disk, the tags of wheels that fit;
- ``LookOrder`` → what it finds, and ``had``: the requirements that an environment of ours was made with;
- ``MakeOrder`` → what was made, or ``{"offline": why}`` or ``{"unmatched": what}``;
- ``RemoveOrder`` → what was removed, or would be.

On the way it sends ``{"event": "progress", "what", "share"}``.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from skyctl.agent.task_orders import read_order
from skyctl.setup.node import environment_builder, environment_inspection, environment_store, pip_runner
from skyctl.setup.node.setup_orders import SETUP_ORDERS, FactsOrder, LookOrder, RemoveOrder

_ACCELERATOR_FILES = {
    "NVIDIA": ("/dev/nvidia0", "/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg"),
    "AMD": ("/dev/kfd",),
}


def main(message: dict[str, Any], channel: Any) -> dict[str, Any]:
    """The task (see the module).

    Raises:
        MismatchError, RecordError: it can't follow the order.
    """
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    order = read_order(SETUP_ORDERS, message)

    def say(what: str, share: float) -> None:
        channel.send({"event": "progress", "what": what, "share": share})

    if isinstance(order, FactsOrder):
        return _facts(order.pip, channel.cache)
    if isinstance(order, LookOrder):
        return _inspect(order)
    if isinstance(order, RemoveOrder):
        return environment_builder.release_environments(order.owners, order.keep, say, dry_run=order.dry_run)
    try:
        return environment_builder.build_environment(order, say)
    except environment_builder.IndexUnreachableError as exc:
        return {"offline": str(exc)}
    except environment_builder.NoMatchingPackageError as exc:
        return {"unmatched": str(exc)}


def _exit_on_sigterm(*_: object) -> NoReturn:
    """SIGTERM: what is half made goes, before the KILL that follows; a second one changes nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(143)


def _inspect(order: LookOrder) -> dict[str, Any]:
    python = order.python or sys.executable
    folder = Path(python).parent.parent
    ours = folder.parent == environment_store.environments_root()
    if ours and folder.exists():
        environment_store.require_private(folder)
    found = environment_inspection.inspect_python(python, order.requirements, order.pip)
    marker = environment_store.read_marker(folder) if ours else None
    if ours and marker is None:
        found = {**found, "torch": None, "fault": "it is gone"}
    return {**found, "had": marker["requirements"] if marker else []}


def _facts(pip_there: str | None, cache: Path) -> dict[str, Any]:
    wheel = pip_runner.bundled_pip_wheel() or pip_there
    root = environment_store.environments_root()
    found = {
        "python": sys.executable,
        "version": platform.python_version(),
        "base": f"{Path(sys.base_prefix).resolve()} {sys.version} {platform.machine()}",
        "pip": wheel,
        "root": str(root),
        "free_bytes": environment_store.free_bytes(root),
        "same_disk": environment_store.disk_id(root) == environment_store.disk_id(cache),
        "cards": [name for name, paths in _ACCELERATOR_FILES.items() if any(map(os.path.exists, paths))],
        **_wheel_tags(wheel),
    }
    if "NVIDIA" not in found["cards"] and shutil.which("nvidia-smi"):
        found["cards"].append("NVIDIA")
    return found


def _wheel_tags(wheel: str | None) -> dict[str, Any]:
    """Which wheels fit, as ``pip download`` wants to be told; best first. Empty where there is no pip yet."""
    if wheel is None:
        return {"platforms": [], "abis": [], "implementation": "cp"}
    sys.path.append(wheel)
    try:
        from pip._vendor.packaging import tags

        found = list(tags.sys_tags())
        implementation = tags.interpreter_name()
    finally:
        sys.path.remove(wheel)
    return {
        "platforms": list(dict.fromkeys(tag.platform for tag in found if tag.platform != "any")),
        "abis": list(dict.fromkeys(tag.abi for tag in found)),
        "implementation": implementation,
    }
