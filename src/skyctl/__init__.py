"""skyctl: train one model over unequal machines.

``from skyctl import Problem, Plan, plan, predict, verify, launch, attach``. Loaded lazily: importing this
package imports no pydantic, no torch and no solver, because nodes import it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyctl.errors import InfeasibleError, SkyctlError
    from skyctl.experts.layer import Experts
    from skyctl.library import Run, attach, launch
    from skyctl.planner.api import Verdict, plan, predict, verify
    from skyctl.records.plan import Plan, Prediction
    from skyctl.records.problem import Problem
    from skyctl.worker.replicas import replicas

__version__ = "0.1.0"
__all__ = [
    "Experts",
    "InfeasibleError",
    "Plan",
    "Prediction",
    "Problem",
    "Run",
    "SkyctlError",
    "Verdict",
    "attach",
    "launch",
    "plan",
    "predict",
    "replicas",
    "verify",
]

_HOME = {
    "Experts": "skyctl.experts.layer",
    "InfeasibleError": "skyctl.errors",
    "SkyctlError": "skyctl.errors",
    "Problem": "skyctl.records.problem",
    "Plan": "skyctl.records.plan",
    "Prediction": "skyctl.records.plan",
    "plan": "skyctl.planner.api",
    "predict": "skyctl.planner.api",
    "verify": "skyctl.planner.api",
    "Verdict": "skyctl.planner.api",
    "replicas": "skyctl.worker.replicas",
    "Run": "skyctl.library",
    "attach": "skyctl.library",
    "launch": "skyctl.library",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'skyctl' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
