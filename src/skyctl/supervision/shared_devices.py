"""The devices that runs share by turns, as the nodes tell, and what a step is predicted to take there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from skyctl.agent.message_fields import FieldError, read_fields
from skyctl.errors import RecordError, SkyctlError
from skyctl.files import read_record
from skyctl.planning.shared_runs import shared_run
from skyctl.records.cluster import node_of
from skyctl.records.plan import Plan
from skyctl.remote.session_factory import close_sessions, connect_node, open_sessions
from skyctl.supervision.run_settings import cluster_of, options_of, script_of
from skyctl.supervision.run_status import LOOK_S, InspectedRun, look_options
from skyctl.turns.shared_listing import SharedDevices
from skyctl.turns.turn_messages import ListedMessage
from skyctl.turns.turn_policy import parse_turns
from skyctl.turns.turn_simulation import SharedRun, brief, shared_step_s


def sharing_runs(runs: Iterable[InspectedRun]) -> list[InspectedRun]:
    """Those that are under way and share devices by turns."""
    return [run for run in runs if not run.ended and _turns(run) is not None]


def _turns(run: InspectedRun) -> str | None:
    """The policy that a run takes turns by; None: it takes none, or its state does not say so."""
    try:
        return script_of(run.state).turns if run.state.is_script else options_of(run.state).turns
    except RecordError:
        return None


@dataclass(frozen=True)
class SharedStep:
    """The predicted time of a step of a run next to others, by the turns that they take.

    Attributes:
        turns: the policy that it was predicted with.
        beside: the ids of the runs that are under way on the same devices.
        step_s: predicted seconds of a step next to them; None: updates of one of them are not synchronous,
            one is a script, or their policies do not agree.
        alone_s: predicted seconds of a step alone.
    """

    turns: str
    beside: tuple[str, ...]
    step_s: float | None
    alone_s: float


def step_beside(
    plan: Plan, steps: int, turns: str | None, cluster_file: str, runs: Iterable[InspectedRun]
) -> SharedStep | None:
    """Predicts a run next to those that share its devices; None: there are none.

    Args:
        steps: how many it is to make.
        turns: its policy, as the option has it; None: as that of the newest of the others.
        cluster_file: runs of other cluster files may mean other machines by the same names.
        runs: those that share devices.
    """
    devices = {stage.device for stage in plan.placed_stages}
    others: dict[str, SharedRun | None] = {}
    policies: list[str] = [] if turns is None else [turns]
    for run in runs:
        paths, state = run.paths, run.state
        if state.cluster_file != cluster_file:
            continue
        if state.is_script:
            if set(map(node_of, devices)) & script_of(state).ranks.keys():
                policies.append(str(_turns(run)))
                others[paths.run_id] = None
            continue
        if not paths.newest_plan.is_file():
            continue
        played = read_record(Plan, paths.newest_plan)
        if devices & {stage.device for stage in played.placed_stages}:
            policies.append(str(_turns(run)))
            steps_left = max(1, (state.steps or 1) - state.step)
            others[paths.run_id] = shared_run(played, steps_left, priority=parse_turns(policies[-1]).priority)
    if not others:
        return None
    policy = parse_turns(policies[0])
    own = shared_run(plan, steps, priority=policy.priority)
    in_order = [run for run in (*others.values(), own) if run is not None]  # it comes last
    step_s = None
    if len(in_order) > len(others) and {parse_turns(other).kind for other in policies} == {policy.kind}:
        *_, step_s = shared_step_s(brief(in_order), policy.kind)
    return SharedStep(policies[0], tuple(others), step_s, plan.predicted.iteration_s)


def shared_devices(runs: Iterable[InspectedRun]) -> tuple[list[ListedMessage], list[str]]:
    """The devices that these runs share, by name, with all jobs there; why nodes could not be asked.

    Takes a few seconds. Several local nodes have one cache: each node is believed about its own devices only.
    """
    found: dict[str, ListedMessage] = {}
    faults: dict[str, str] = {}
    asked: set[tuple[str | None, str]] = set()
    for run in runs:
        names = {noted.node for noted in run.state.sessions}
        names = {name for name in names if (run.state.cluster_file, name) not in asked}
        asked |= {(run.state.cluster_file, name) for name in names}
        try:
            nodes = [node for node in cluster_of(run.state).nodes if node.name in names]
            opened = open_sessions(nodes, look_options(run.state), connector=connect_node)
        except SkyctlError as exc:
            faults[run.paths.run_id] = exc.message
            continue
        try:
            for name, session in opened.items():
                try:
                    if isinstance(session, SkyctlError):
                        raise session
                    said = session.run_task("skyctl.turns.shared_listing", {}, LOOK_S, answer=SharedDevices)
                    devices = SharedDevices(**read_fields(SharedDevices, said)).devices
                    found |= {one.device: one for one in devices if one.device.startswith(f"{name}/")}
                except FieldError as exc:
                    faults[name] = str(exc)
                except SkyctlError as exc:
                    faults[name] = exc.message
        finally:
            close_sessions(session for session in opened.values() if not isinstance(session, SkyctlError))
    messages = [f"shared devices of {name} are not known: {why}" for name, why in sorted(faults.items())]
    return [found[device] for device in sorted(found)], messages
