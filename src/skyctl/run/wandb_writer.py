"""A run's figures in a project of Weights & Biases, by its own library, where that is asked for.

The figures that go there: the project, the run's id, what is trained, on which cluster and how long, and each
step's line of ``metrics.jsonl``. The library is told to keep code, terminal, machine and packages to itself.
Their destination (``WANDB_MODE``, ``WANDB_BASE_URL``, the login) is the library's business.

The network may be slow or gone, so a thread of its own sends what a queue holds; a run never waits for it
but at its end, and never fails of it.
"""

from __future__ import annotations

import importlib
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyctl.errors import InputError
from skyctl.records.run_state import RunState

CLOSE_S = 30.0
"""How long the run's end waits until all figures are there."""
WANDB_SERVICE = "WANDB_SERVICE"
"""The variable in which the library leaves its service's address for processes that it starts itself."""
OWN_SETTINGS = {
    "console": "off",
    "silent": True,
    "disable_code": True,
    "disable_git": True,
    "save_code": False,
    "reinit": "create_new",
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""Settings of the library; those that its version does not have are left out."""


def require_wandb(project: str) -> None:
    """Checks, before anything is done, that figures could be sent to that project.

    Raises:
        InputError: it is no project's name, or the library is missing, too old, or not logged in.
    """
    if not all(project.split("/")) or project.count("/") > 1:
        raise InputError(f"--wandb {project!r} is no project", hint="give PROJECT, or ENTITY/PROJECT")
    wandb = _import()
    try:
        stays_here = wandb.setup().settings.mode in ("offline", "disabled")
        # Beside a run of the caller's own, in a notebook, login() has no effect and says no.
        has_account = stays_here or wandb.run is not None or wandb.login(prompt=False)
    except TypeError:
        raise InputError("the installed wandb is too old", hint="pip install --upgrade wandb") from None
    except Exception as exc:
        raise InputError(
            f"Weights & Biases refuses the login: {exc}",
            hint="wandb login; WANDB_MODE=offline keeps all figures here",
        ) from exc
    if not has_account:
        raise InputError(
            "Weights & Biases does not know who you are",
            hint="wandb login, or set WANDB_API_KEY; WANDB_MODE=offline keeps all figures here",
        )


def wandb_project(state: RunState) -> str | None:
    """The project that the run's figures go to, too; None: to none."""
    options = state.order.get("options")
    project = options.get("wandb") if isinstance(options, dict) else None
    return project if isinstance(project, str) else None


def _import() -> Any:
    try:
        module = importlib.import_module("wandb")
        module.init  # noqa: B018 - a folder wandb/ of its figures looks like a package without anything
    except (ImportError, AttributeError):
        raise InputError(
            "--wandb needs the library wandb, which is not here", hint="pip install wandb"
        ) from None
    return module


class WandbWriter:
    """One run of W&B, of the same id; whoever goes on with the run goes on with that, too.

    Args:
        folder: the run's; the library keeps its own files in ``wandb`` there.
        note: told the run's address, and once where figures could not be sent; by the writer's thread.
    """

    def __init__(self, project: str, state: RunState, folder: Path, note: Callable[[str], None]) -> None:
        self._note = note
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._send, args=(project, state, folder), name="wandb", daemon=True
        )
        self._thread.start()

    def step(self, line: Mapping[str, Any]) -> None:
        """Sends a step's ``metrics_line``, later."""
        self._lines.put(dict(line))

    def close(self) -> None:
        """Waits until all is sent, ``CLOSE_S`` at most. Idempotent."""
        if self._thread.is_alive():
            self._lines.put(None)
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self._note(f"W&B has not taken all figures within {CLOSE_S:.0f} s; metrics.jsonl has them")

    def _send(self, project: str, state: RunState, folder: Path) -> None:
        try:
            wandb = _import()
            entity, _, name = project.rpartition("/")
            allowed = getattr(wandb.Settings, "model_fields", OWN_SETTINGS)
            run = wandb.init(
                project=name,
                entity=entity or None,
                id=state.run_id,
                name=state.run_id,
                resume="allow",
                dir=str(folder),
                config={"workload": state.workload, "cluster": state.cluster, "steps": state.steps},
                settings=wandb.Settings(
                    **{key: setting for key, setting in OWN_SETTINGS.items() if key in allowed}
                ),
            )
            if not run.offline and run.url:
                self._note(f"W&B: {run.url}")
            # Steps that are done again come again, which the library's own count of steps would drop.
            run.define_metric("*", step_metric="step")
            while (line := self._lines.get()) is not None:
                run.log(_flat(line))
            run.finish()
        except Exception as exc:  # noqa: BLE001 - of a library, whatever it raises
            self._note(f"W&B gets no more figures of this run: {exc}; metrics.jsonl has all of them")


def _flat(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step's line; those of validations and owners as ``validation_metrics/NAME``."""
    figures: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            figures |= {f"{name}/{key}": figure for key, figure in _flat(value).items()}
        elif isinstance(value, int | float):
            figures[name] = value
    return figures
