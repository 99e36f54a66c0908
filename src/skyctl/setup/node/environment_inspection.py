"""What a Python on the node has: torch, and what a workload requires.

``inspect_python`` asks that Python itself, in another process: a torch that crashes takes nothing along::

    PYTHON -m skyctl.setup.node.environment_inspection
    ({"requirements", "pip"} on stdin → one JSON line on stdout)
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from skyctl.agent.module_command import module_command

INSPECTION_TIMEOUT_S = 300.0
RESULT_PREFIX = "skyctl-look:"


def inspect_python(python: str, requirements: Sequence[str], pip: str | None) -> dict[str, Any]:
    """Asks one Python.

    Args:
        requirements: as ``requirements.txt`` has them.
        pip: the file of a pip wheel, whose own parser reads them; None only where there are none.

    Returns:
        ``{"torch": version or None, "distributed": whether it has that, "missing": [requirement],
        "fault": why torch can't be used}``; of a Python that can't be run at all, the fault alone.
    """
    order = json.dumps({"requirements": list(requirements), "pip": pip})
    try:
        done = subprocess.run(
            module_command(python, "skyctl.setup.node.environment_inspection"),
            input=order,
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
    return {"torch": None, "distributed": False, "missing": [], "fault": fault}


def unmet_requirements(requirements: Sequence[str], pip: str | None) -> list[str]:
    """The requirements that this very Python does not fulfil; what those require is not looked at."""
    if not requirements:
        return []
    if pip is not None:
        sys.path.append(pip)  # last: what pip ships with itself must hide nothing
    from importlib.metadata import PackageNotFoundError, version

    from pip._vendor.packaging.requirements import InvalidRequirement, Requirement

    lacking = []
    for text in requirements:
        try:
            wanted = Requirement(text.partition(" --")[0])
            if wanted.marker is not None and not wanted.marker.evaluate():
                continue
            fits = wanted.specifier.contains(version(wanted.name), prereleases=True)
        except (PackageNotFoundError, InvalidRequirement):
            fits = False
        if not fits:
            lacking.append(text)
    return lacking


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


def main() -> None:
    """The process (see the module)."""
    order = json.load(sys.stdin)
    found = {**_inspect_torch(), "missing": unmet_requirements(order["requirements"], order["pip"])}
    print(f"\n{RESULT_PREFIX}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
