"""Finds what a Python on the node has: torch, and versions of packages.

``inspect_python`` asks that Python itself, in another process: a torch that crashes takes nothing along::

    PYTHON -m skyctl.setup.node.environment_inspection
    (names of packages as JSON on stdin → one JSON line on stdout)
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from skyctl.agent.module_command import module_command

INSPECTION_TIMEOUT_S = 300.0
RESULT_PREFIX = "skyctl-look:"


def inspect_python(python: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Asks one Python.

    Returns:
        ``{"torch": version or None, "distributed": whether it has that, "fault": why torch can't be used,
        "versions": version or None by package}``; of a Python that can't be run at all, the fault alone.
    """
    try:
        done = subprocess.run(
            module_command(python, "skyctl.setup.node.environment_inspection"),
            input=json.dumps(list(packages)),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=INSPECTION_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _unusable(f"it had not imported torch after {INSPECTION_TIMEOUT_S:g} s")
    except OSError as exc:
        return _unusable(exc.strerror or str(exc))
    for line in done.stdout.splitlines():
        if line.startswith(RESULT_PREFIX):
            return dict(json.loads(line[len(RESULT_PREFIX) :]))
    said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    return _unusable(said[-1].strip()[:300] if said else f"it ended with {ended}")


def _unusable(fault: str) -> dict[str, Any]:
    return {"torch": None, "distributed": False, "fault": fault, "versions": {}}


def torch_fault(found: dict[str, Any]) -> str | None:
    """Why a Python can't train, by what ``_inspect_torch`` found of its torch; None: it can."""
    if found["fault"] is not None:
        return str(found["fault"])
    if found["torch"] is None:
        return "there is no torch in it"
    return None if found["distributed"] else f"torch {found['torch']} was built without torch.distributed"


def _inspect_torch() -> dict[str, Any]:
    import warnings

    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        import torch
        import torch.distributed as dist

        distributed = bool(dist.is_available())
        return {"torch": str(torch.__version__), "distributed": distributed, "fault": None}
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] == "torch":
            return {"torch": None, "distributed": False, "fault": None}
        return {"torch": None, "distributed": False, "fault": f"torch needs {exc.name}, which is not there"}
    except Exception as exc:  # noqa: BLE001 - whatever its libraries raise is the finding
        first, *_ = str(exc).splitlines() or [""]
        return {"torch": None, "distributed": False, "fault": f"{type(exc).__name__}: {first}"[:300]}


def _find_versions(packages: Sequence[str]) -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = dict.fromkeys(packages)
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main() -> None:
    """Runs within the Python to inspect: names of packages on stdin, what was found on stdout."""
    packages = json.load(sys.stdin)
    found = {**_inspect_torch(), "versions": _find_versions(packages)}
    print(f"\n{RESULT_PREFIX}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
