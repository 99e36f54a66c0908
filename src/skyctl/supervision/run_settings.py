"""The settings of a run that its state keeps, so that another process can go on: JSON values, no secrets.

Paths in it are absolute: whoever goes on with the run may do so from another folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from skyctl.errors import InputError, RecordError
from skyctl.inventory.cluster_file import read_cluster
from skyctl.inventory.environment_registry import with_prepared_environments
from skyctl.inventory.node_patterns import select_nodes
from skyctl.records.cluster import Cluster
from skyctl.records.run_state import SCRIPT, RunState
from skyctl.remote.base import ConnectOptions

if TYPE_CHECKING:
    from skyctl.jobs.training_request import TrainingRequest
    from skyctl.records.script_request import ScriptRequest
    from skyctl.run.run_options import RunOptions

T = TypeVar("T")


def saved_settings(
    request: TrainingRequest,
    options: RunOptions,
    connect: ConnectOptions,
    *,
    digest: str,
    own_lr_scheduler: bool,
    surveyed: Mapping[str, int | bool] | None = None,
    limit: str | None = None,
    output: Path | None = None,
    first_attempt: int = 1,
) -> dict[str, Any]:
    """The settings as JSON values, from which ``request_of`` and the others here restore them.

    Args:
        digest: the workload's own (``Workload.digest``).
        own_lr_scheduler: its file defines ``lr_scheduler()``.
        surveyed: what its records are (``Survey.to_dict``); None: it has none.
        limit: which nodes of the cluster file are used (``--limit``).
        output: where a copy of the measurement is to go.
        first_attempt: the newest attempt that began with a plan of the user's own.
    """
    return {
        "request": {
            "spec": request.spec.to_dict(),
            "microbatches": request.microbatches,
            "recipe": request.recipe.to_dict(),
        },
        "options": asdict(options),
        "connect": _connect_settings(connect),
        "digest": digest,
        "own_lr_scheduler": own_lr_scheduler,
        "surveyed": surveyed,
        "limit": limit,
        "output": _absolute(output),
        "first_attempt": first_attempt,
    }


def script_settings(
    request: ScriptRequest, connect: ConnectOptions, *, limit: str | None = None
) -> dict[str, Any]:
    """The settings of a script's run as JSON values; ``script_of`` and ``connect_of`` restore them.

    Args:
        limit: which nodes of the cluster file are used (``--limit``).
    """
    return {SCRIPT: request.model_dump(mode="json"), "connect": _connect_settings(connect), "limit": limit}


def script_of(state: RunState) -> ScriptRequest:
    """The script that the user asked to run; RecordError where the state does not say."""
    from skyctl.records.script_request import ScriptRequest

    return _rebuilt(state, lambda: ScriptRequest(**_part(state, SCRIPT)))


def request_of(state: RunState) -> TrainingRequest:
    """The training that the user asked for; RecordError where the state does not say."""
    from skyctl.jobs.training_request import TrainingRequest
    from skyctl.workload.recipe import Recipe
    from skyctl.workload.workload_spec import WorkloadSpec

    asked = _part(state, "request")
    return _rebuilt(
        state,
        lambda: TrainingRequest(
            WorkloadSpec.from_dict(asked["spec"]), asked["microbatches"], Recipe(**asked["recipe"])
        ),
    )


def surveyed_of(state: RunState) -> dict[str, int | bool] | None:
    """The survey of the run's records (``Survey.to_dict``); None: it has none, or the state does not say."""
    surveyed = state.order.get("surveyed")
    return surveyed if isinstance(surveyed, dict) else None


def options_of(state: RunState) -> RunOptions:
    """How the run is played; RecordError where the state does not say."""
    from skyctl.run.expert_spec import ExpertSetting
    from skyctl.run.health_monitor import Deadlines
    from skyctl.run.run_options import RunOptions

    asked = dict(_part(state, "options"))

    def rebuilt() -> RunOptions:
        experts = asked.get("experts")
        return RunOptions(
            **{
                **asked,
                "deadlines": Deadlines(**asked["deadlines"]),
                "experts": None if experts is None else ExpertSetting.from_dict(experts),
            }
        )

    return _rebuilt(state, rebuilt)


def connect_of(state: RunState) -> ConnectOptions:
    """How the run's nodes are reached; RecordError where the state does not say."""
    return _rebuilt(state, lambda: ConnectOptions(**_part(state, "connect")))


def cluster_of(state: RunState) -> Cluster:
    """The run's cluster, read again from its file; InputError where that is gone or wrong."""
    if state.cluster_file is None:
        raise InputError(
            f"run {state.run_id} does not say which cluster file it was made with",
            hint="its nodes end what is left of it by themselves",
        )
    limit = state.order.get("limit")
    return select_nodes(
        with_prepared_environments(read_cluster(state.cluster_file)), str(limit) if limit else None
    )


def _connect_settings(connect: ConnectOptions) -> dict[str, Any]:
    return asdict(
        replace(connect, known_hosts=_absolute(connect.known_hosts), ssh_config=_absolute(connect.ssh_config))
    )


def _part(state: RunState, name: str) -> dict[str, Any]:
    part = state.order.get(name)
    if not isinstance(part, dict):
        raise RecordError(f"state.json of run {state.run_id} does not say its {name}")
    return part


def _rebuilt(state: RunState, make: Callable[[], T]) -> T:
    try:
        return make()
    except (TypeError, KeyError, ValueError) as exc:
        raise RecordError(
            f"state.json of run {state.run_id} is of another version of skyctl: {exc}",
            hint="go on with it with the skyctl that started it",
        ) from exc


def _absolute(path: str | Path | None) -> str | None:
    return None if path is None else str(Path(path).absolute())
