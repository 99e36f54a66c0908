"""The node's part of ``skyctl setup``. Task: ``skyctl.setup.node.setup_task``; needs no torch.

By its order (``setup_orders``) it answers with a record of ``setup_events``. On the way it sends
``{"event": "progress", "what", "share"}``.
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
from skyctl.setup.node import environment_builder, environment_inspection, environment_store
from skyctl.setup.node.setup_orders import SETUP_ORDERS, LookOrder, RemoveOrder

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
        channel.send({"event": "progress", "what": what[:1000], "share": share})

    if isinstance(order, LookOrder):
        return _look(order)
    if isinstance(order, RemoveOrder):
        return environment_builder.release_environments(order.owners, order.keep, say, dry_run=order.dry_run)
    return environment_builder.build_environment(order, say)


def _exit_on_sigterm(*_: object) -> NoReturn:
    """SIGTERM: what is half made goes, before the KILL that follows; a second one changes nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(143)


def _look(order: LookOrder) -> dict[str, Any]:
    root = environment_store.environments_root()
    cards = [name for name, paths in _ACCELERATOR_FILES.items() if any(map(os.path.exists, paths))]
    if "NVIDIA" not in cards and shutil.which("nvidia-smi"):
        cards.append("NVIDIA")
    libc, libc_version = platform.libc_ver()
    return {
        "python": sys.executable,
        "version": platform.python_version(),
        "base": f"{Path(sys.base_prefix).resolve()} {sys.version} {platform.machine()}",
        "system": platform.system(),
        "machine": platform.machine(),
        "glibc": libc_version if libc == "glibc" else None,
        "root": str(root),
        "free_bytes": environment_store.free_bytes(root),
        "cards": cards,
        **_inspect(order),
    }


def _inspect(order: LookOrder) -> dict[str, Any]:
    python = order.python or sys.executable
    folder = Path(python).parent.parent
    ours = folder.parent == environment_store.environments_root()
    if ours and folder.exists():
        environment_store.require_private(folder)
    found = environment_inspection.inspect_python(python, order.packages)
    marker = environment_store.read_marker(folder) if ours else None
    if ours and marker is None:
        found = {**found, "torch": None, "fault": "it is gone"}
    return {**found, "had": marker["requirements"] if marker else []}
