"""The runs that are kept, and what is true of each: its written state, and whether its supervisor lives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from skyctl.agent.message_fields import Index
from skyctl.checkpoint.launcher.stored_run import StoredRun
from skyctl.errors import InputError, ProtocolError, RunError, SkyctlError, UndecidedError
from skyctl.files import RunPaths, read_record, run_folder, run_ids
from skyctl.records.clock import age_s
from skyctl.records.plan import Plan
from skyctl.records.run_state import ENDED, RunState, Supervisor
from skyctl.run.run_lock import SupervisorStatus, supervisor_status

if TYPE_CHECKING:
    from skyctl.remote.base import ConnectOptions

RANK_MODULE = "skyctl.worker.rank"
SCRIPT_MODULE = "skyctl.script.script_task"
"""The modules that a rank of a plan, and of a script, run on their nodes."""
RECENT_S = 86_400.0
"""Runs that ended longer ago are listed only when asked for."""
LOOK_S = 8.0
"""How long a node may take to say what runs there."""


@dataclass(frozen=True)
class SessionProcesses:
    """How many processes a session has on its node, and how many of them are ranks."""

    processes: Index
    running: Index


@dataclass(frozen=True)
class ProcessCounts:
    """A node's answer when it is asked for its processes, by session."""

    kind: ClassVar[str] = "result"
    sessions: Mapping[str, SessionProcesses]


@dataclass(frozen=True)
class NodeProcesses:
    """One node's answer about a run: how many processes it has there, how many of them ranks; or why not."""

    node: str
    processes: int = 0
    ranks: int = 0
    error: str | None = None


@dataclass(frozen=True)
class InspectedRun:
    """A run and its supervisor. ``looks``: what its nodes say of it, where they were asked."""

    paths: RunPaths
    state: RunState
    supervisor_state: SupervisorStatus
    supervisor: Supervisor | None = None
    looks: tuple[NodeProcesses, ...] | None = None

    @property
    def ended(self) -> bool:
        """Whether the run is over, and nothing of it is left on any node."""
        return self.state.status in ENDED

    @property
    def status(self) -> str:
        """One word: the state's own, or ``unsupervised``, or ``supervised`` on another machine that can't be
        looked at."""
        if self.ended or self.supervisor_state == "alive":
            return self.state.status
        return "unsupervised" if self.supervisor_state == "gone" else self.state.status

    @property
    def detail(self) -> str | None:
        """The text that explains the status; None: there is none."""
        if self.ended:
            return self.state.detail
        if self.supervisor_state == "elsewhere" and self.supervisor is not None:
            return f"supervised on {self.supervisor.host}"
        if self.supervisor_state == "alive":
            return f"node {', '.join(self.state.away)} away" if self.state.away else self.state.detail
        return None if self.looks is None else describe_nodes(self.looks)


def describe_nodes(looks: Sequence[NodeProcesses]) -> str:
    """The answers of nodes about a run without a supervisor, as one sentence."""
    said = [look for look in looks if look.error is None]
    going = sum(1 for look in said if look.ranks)
    parts = []
    if going:
        parts.append(f"ranks on {going} of {len(looks)} nodes go on")
    elif any(look.processes for look in said):
        parts.append("its agents hold, no rank runs")
    elif said:
        parts.append("nothing of it is left on its nodes")
    silent = [look.node for look in looks if look.error is not None]
    if silent:
        parts.append(f"node {', '.join(silent)} did not answer")
    return "; ".join(parts) or "it had no session on any node"


def resolve_run(folder_or_id: str | None) -> InspectedRun:
    """The run that the user named by id or folder; None: the newest that has a state.

    Raises:
        InputError: there is none, or it is not clear which.
    """
    if folder_or_id is None:
        for run_id in reversed(run_ids()):
            if RunPaths(run_id).state.is_file():
                return inspect_run(run_id)
        raise InputError("there is no run yet", hint="start one: skyctl launch PLAN")
    return inspect_run(run_folder(folder_or_id).name)


def inspect_run(run_id: str) -> InspectedRun:
    """The run of exactly that id; InputError where it has no state that can be read."""
    paths = RunPaths(run_id)
    if not paths.state.is_file():
        raise InputError(
            f"run {run_id} has no state.json: it was a part of a comparison",
            hint=f"what it has lies in {paths.folder}",
        )
    state = read_record(RunState, paths.state)
    how, who = supervisor_status(paths)
    if how == "gone" and state.status not in ENDED:
        # It may have ended between the two looks.
        state = read_record(RunState, paths.state)
    number = state.attempts[-1].number if state.attempts else 1
    return InspectedRun(RunPaths(run_id, number), state, how, who)


def load_run(run: str | None) -> StoredRun:
    """The run that the user named, read from its folder; None: the newest.

    Raises:
        InputError: there is none, or it was never begun.
    """
    inspected = resolve_run(run)
    if inspected.state.is_script:
        raise InputError(
            f"run {inspected.paths.run_id} is of the script {inspected.state.workload}, which keeps its own "
            "checkpoints",
            hint="begin it anew: skyctl run; what its ranks write to --output comes home",
        )
    if not inspected.paths.newest_plan.is_file():
        raise InputError(
            f"run {inspected.paths.run_id} has no plan: it ended before it was begun, and nothing of it is "
            "kept",
            hint="launch it again",
        )
    return StoredRun(inspected.paths, inspected.state, read_record(Plan, inspected.paths.newest_plan))


def refuse_running(run: StoredRun, what: str) -> None:
    """Raises InputError where the run has not ended.

    Args:
        what: what can't be done meanwhile, for the message.
    """
    if run.state.status not in ENDED:
        raise InputError(
            f"run {run.paths.run_id} is {run.state.status}: {what} only once it has ended",
            hint=f"stop it first: skyctl stop {run.paths.run_id}",
        )


def counted_unit(paths: RunPaths) -> str:
    """The word for a step of the run (``Rhythm.unit``), by its newest plan.

    "step" where it has none, or none that can be read: nobody is to be kept from stopping it by a word.
    """
    try:
        return read_record(Plan, paths.newest_plan).problem.rhythm.unit
    except SkyctlError:
        return "step"


def list_runs(*, every: bool) -> tuple[list[InspectedRun], list[str]]:
    """The runs, newest first, and complaints about those that can't be read.

    Args:
        every: also those that ended more than a day ago.
    """
    runs, faults = [], []
    for run_id in reversed(run_ids()):
        if not RunPaths(run_id).state.exists():
            continue
        try:
            run = inspect_run(run_id)
        except InputError as exc:
            faults.append(exc.message)
            continue
        if every or not run.ended or age_s(run.state.written) < RECENT_S:
            runs.append(run)
    return runs, faults


def with_node_processes(runs: Iterable[InspectedRun]) -> list[InspectedRun]:
    """The same runs; those without a supervisor with what their nodes say. Takes a few seconds in all."""
    runs = list(runs)
    wanted = [run for run in runs if not run.ended and run.supervisor_state == "gone"]
    if not wanted:
        return runs
    with ThreadPoolExecutor(max_workers=8) as pool:
        looks = dict(
            zip((run.paths.run_id for run in wanted), pool.map(_node_processes, wanted), strict=True)
        )
    return [replace(run, looks=looks.get(run.paths.run_id)) for run in runs]


def look_options(state: RunState) -> ConnectOptions:
    """How the run's nodes are reached by who only asks them something."""
    from skyctl.supervision.run_settings import connect_of

    return replace(
        connect_of(state), hold_s=0.0, redial_s=0.0, manual_ack=False, timeout_s=LOOK_S / 2,
        start_timeout_s=LOOK_S,
    )  # fmt: skip


def _node_processes(run: InspectedRun) -> tuple[NodeProcesses, ...]:
    from skyctl.remote.session_factory import close_sessions, connect_node, open_sessions
    from skyctl.supervision.run_settings import cluster_of

    ids = {noted.node: noted.session for noted in run.state.sessions}
    if not ids:
        return ()
    try:
        cluster = cluster_of(run.state)
    except SkyctlError as exc:
        return tuple(NodeProcesses(name, error=exc.message) for name in ids)
    nodes = [node for node in cluster.nodes if node.name in ids]
    looks = {
        name: NodeProcesses(name, error="it is not in the cluster file any more")
        for name in ids
        if name not in {node.name for node in nodes}
    }
    opened = open_sessions(
        nodes, look_options(run.state), connector=connect_node
    )  # no fork server, which imports torch
    try:
        for name, session in opened.items():
            if isinstance(session, SkyctlError):
                looks[name] = NodeProcesses(name, error=session.message)
                continue
            try:
                module = SCRIPT_MODULE if run.state.is_script else RANK_MODULE
                order = {"sessions": [ids[name]], "module": module}
                said = session.run_task("skyctl.agent.process_tree", order, LOOK_S, answer=ProcessCounts)
                counts = said["sessions"].get(ids[name])
                if counts is None:
                    raise ProtocolError(f"node {name} did not say what it was asked", node=name)
                looks[name] = NodeProcesses(name, counts["processes"], counts["running"])
            except SkyctlError as exc:
                looks[name] = NodeProcesses(name, error=exc.message)
    finally:
        close_sessions(s for s in opened.values() if not isinstance(s, SkyctlError))
    return tuple(looks[name] for name in ids)


def refuse_failed(run: InspectedRun) -> None:
    """Raises RunError where a run has failed, which says why."""
    if run.state.status == "failed":
        why = run.state.detail or "it does not say why"
        raise RunError(f"run {run.paths.run_id} failed: {why}", log=str(run.paths.folder))


def refuse_other_machine(run: InspectedRun) -> None:
    """Raises UndecidedError where another machine's supervisor can't be looked at from here."""
    if run.supervisor_state == "elsewhere" and run.supervisor is not None:
        raise UndecidedError(
            f"run {run.paths.run_id} is supervised on {run.supervisor.host} (process {run.supervisor.pid}), "
            "which can't be asked from here",
            hint=f"go there; if that machine is gone for good, remove {run.paths.lock}",
        )
