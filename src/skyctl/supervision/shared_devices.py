"""The devices that runs share by turns, as the runs' nodes tell."""

from __future__ import annotations

from collections.abc import Iterable

from skyctl.agent.message_fields import FieldError, read_fields
from skyctl.errors import SkyctlError
from skyctl.remote.session_factory import close_sessions, connect_node, open_sessions
from skyctl.supervision.run_settings import cluster_of, options_of
from skyctl.supervision.run_status import LOOK_S, InspectedRun, look_options
from skyctl.turns.turn_listing import SharedDevices
from skyctl.turns.turn_messages import ListedMessage


def sharing_runs(runs: Iterable[InspectedRun]) -> list[InspectedRun]:
    """Those that are under way and share devices by turns."""
    return [
        run
        for run in runs
        if not run.ended and not run.state.is_script and options_of(run.state).turns is not None
    ]


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
                    said = session.run_task("skyctl.turns.turn_listing", {}, LOOK_S, answer=SharedDevices)
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
