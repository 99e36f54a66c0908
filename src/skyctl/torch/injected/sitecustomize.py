"""The additions of ``skyctl run`` to a script unaware of it: Python imports this module when it starts.

It does so if this folder is on ``PYTHONPATH`` and neither ``-S`` nor ``-I`` nor ``-E`` is given. As soon as
the script has imported torch, if it ever does, the step clock is started if ``SKYCTL_STEP_TIMES`` is set,
steps take turns if ``SKYCTL_TURNS`` is, and the backend ``skyctl`` of torch.distributed is registered if
``SKYCTL_SECRET_FD`` is. A ``sitecustomize`` that
this one hides is run as well.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  (pathlib would be loaded for it)
PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(FOLDER)))  # noqa: PTH120


class AfterTorch:
    """A finder of modules that finds ``torch``, and adds what is asked for when it has been imported.

    Programs may ask whether there is a torch before they import it, so it goes on finding until then.
    """

    def __init__(self) -> None:
        self._asks_others = False

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        """The spec of ``torch`` with a loader that starts the clock afterwards; None for all other names."""
        if name != "torch" or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asks_others = False
        loader: Any = spec and spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_add(module: ModuleType) -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                load(module)
                add_to_torch()

            loader.exec_module = load_and_add
        return spec


def add_to_torch() -> None:
    """Starts the step clock, takes turns and registers the backend, each if it is asked for."""
    if importlib.util.find_spec("skyctl") is None:
        sys.path.append(PACKAGE_ROOT)
    if path := os.environ.get("SKYCTL_STEP_TIMES"):
        try:
            from skyctl.torch.step_clock import write_step_times

            write_step_times(path)
        except Exception as error:  # noqa: BLE001  (the script is not to end by its clock)
            print(f"skyctl: steps are not timed: {type(error).__name__}: {error}", file=sys.stderr)
    if asked := os.environ.get("SKYCTL_TURNS"):
        from skyctl.torch.step_turns import take_turns

        take_turns(asked)  # raises: the script is not to compute beside others as if it took turns
    if os.environ.get("SKYCTL_SECRET_FD"):
        try:
            from skyctl.transport.torch_backend import register

            register()
        except Exception as error:  # noqa: BLE001  (it may not be used at all)
            print(f"skyctl: no backend skyctl: {type(error).__name__}: {error}", file=sys.stderr)


def run_hidden_sitecustomize() -> None:
    """Runs the ``sitecustomize`` that Python would have imported without this folder on its path."""
    path = [entry for entry in sys.path if os.path.abspath(entry) != FOLDER]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if any(os.environ.get(name) for name in ("SKYCTL_STEP_TIMES", "SKYCTL_TURNS", "SKYCTL_SECRET_FD")):
    sys.meta_path.insert(0, AfterTorch())
run_hidden_sitecustomize()
