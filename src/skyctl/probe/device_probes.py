"""The probe's processes on all nodes: started, kept in step; a lost one is its own node's failure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyctl.agent.message_fields import with_index
from skyctl.agent.task_orders import write_order, write_request
from skyctl.errors import ProtocolError, SkyctlError, UnfitError
from skyctl.probe.node.probe_order import ProbeOrder
from skyctl.probe.node.probe_requests import ProbeRequest, QuitRequest
from skyctl.probe.probe_messages import read_probe_message
from skyctl.records.cluster import Node, device_id
from skyctl.records.profile import NodeFailure
from skyctl.remote.awake_clock import awake_s
from skyctl.remote.task_group import GroupEvent, TaskGroup

PROBE_TASK = "skyctl.probe.node.probe_task"
TAIL_LINES = 5
POLL_S = 0.5
"""A wait looks at deadlines so often; where it takes far longer, the launcher itself did not run (Ctrl-Z)."""
SILENCE_S = 45.0
"""A process that has spoken says at least that it is alive; one silent for so long is stopped or lost."""


class TaskLike(Protocol):
    """The part of ``remote.remote_task.RemoteTask`` that is used here."""

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """Sends a message to the task."""

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes] | None:
        """From the task; EOFError when its connection is gone."""

    def kill(self) -> None:
        """Ends the task's process at once."""


class SessionLike(Protocol):
    """The part of ``remote.agent_session.Session`` that is used here."""

    @property
    def node(self) -> Node:
        """The node that the session leads to."""

    @property
    def host(self) -> str:
        """The address that the launcher dialled."""

    def start_task(
        self,
        module: str,
        payload: dict[str, Any],
        *,
        name: str | None = None,
        env: dict[str, str] | None = None,
        needs_ack: bool = True,
    ) -> TaskLike:
        """Starts a task on the node."""


EventHandler = Callable[["DeviceProbe", dict[str, Any]], None]


@dataclass
class DeviceProbe:
    """One device's process. ``facts`` and ``measured`` are what it sent; ``heard_at``: when it last
    spoke, by ``remote.awake_clock``; ``returned``: it has ended well.

    ``done``: it has measured its layers, and only keeps its device busy. ``asked``: the device it was started
    for; None: the node's first. ``workload``: what it times, as typed.
    """

    node: Node
    host: str
    task: TaskLike
    facts: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    phase: str = "starting"
    done: bool = False
    heard_at: float | None = None
    returned: bool = False
    asked: str | None = None
    workload: str | None = None
    tail: list[str] = field(default_factory=list)

    @property
    def local(self) -> str:
        """The device's name on its node, as in ``cuda:1``."""
        return with_index(str(self.facts["device"]))

    @property
    def id(self) -> str:
        """The device's id in the cluster, as in ``tower/cuda:1``."""
        return device_id(self.node.name, self.local)

    @property
    def on_cpu(self) -> bool:
        """Whether the device is the node's processor."""
        return self.local.startswith("cpu")

    @property
    def affinity(self) -> frozenset[int]:
        """The processors it may use; empty where that is not told."""
        return frozenset(self.facts.get("affinity") or ())

    def shares(self, other: DeviceProbe) -> bool:
        """Whether it and the other may use the same processors; with itself it does."""
        scopes = [member.facts.get("cpu_scope") or member.node.name for member in (self, other)]
        if scopes[0] == scopes[1]:
            return True
        if self.facts.get("boot_id") != other.facts.get("boot_id"):
            return False
        bound = self.facts.get("bound") or other.facts.get("bound")  # a quota is not shared
        return not bound and bool(self.affinity & other.affinity)


class DeviceProbes:
    """All devices' processes. ``failures`` by node; a failed node's members are out from then on."""

    def __init__(self, on_failure: Callable[[str, NodeFailure], None] = lambda _node, _failure: None) -> None:
        self._on_failure = on_failure
        self.members: list[DeviceProbe] = []
        self.failures: dict[str, NodeFailure] = {}
        self._events: TaskGroup[DeviceProbe] = TaskGroup("probe")

    def start(self, session: SessionLike, order: ProbeOrder, name: str) -> None:
        """Starts one device's process; a failure is the node's."""
        try:
            task = session.start_task(PROBE_TASK, write_order(order), name=name, needs_ack=False)
        except (SkyctlError, OSError, EOFError) as exc:
            self.fail(session.node.name, exc)
            return
        source = None if order.workload is None else order.workload.source
        self.add(DeviceProbe(session.node, session.host, task, asked=order.device, workload=source))

    def add(self, member: DeviceProbe) -> None:
        """Takes in a device whose process was started already."""
        self.members.append(member)
        self._events.follow(member, member.task)

    def fail(self, node: str, cause: BaseException | str) -> None:
        """Takes a node out; its first cause stays."""
        if node not in self.failures:
            message = cause.message if isinstance(cause, SkyctlError) else str(cause) or repr(cause)
            hint = cause.hint if isinstance(cause, SkyctlError) else None
            self.failures[node] = NodeFailure(node=node, error=message, hint=hint)
            self._on_failure(node, self.failures[node])
        for member in self.members:
            if member.node.name == node:
                with suppress(SkyctlError, OSError, EOFError):
                    member.task.kill()

    def alive(self) -> list[DeviceProbe]:
        """The members whose nodes have not failed, in the order they were started."""
        return [member for member in self.members if member.node.name not in self.failures]

    def first_of_nodes(self) -> dict[str, DeviceProbe]:
        """By node that has not failed, the first of its members."""
        first: dict[str, DeviceProbe] = {}
        for member in self.alive():
            first.setdefault(member.node.name, member)
        return first

    def send(self, member: DeviceProbe, request: ProbeRequest) -> None:
        """Asks a process for something; a failure is its node's."""
        try:
            member.task.send(write_request(request))
        except (SkyctlError, OSError, EOFError) as exc:
            self.fail(member.node.name, exc)

    def wait(
        self,
        members: Iterable[DeviceProbe],
        kind: str | Collection[str],
        deadline_s: float,
        handler: EventHandler,
        *,
        fatal: bool = True,
    ) -> None:
        """Until each of them has sent an event of that kind; who has not by then or falls silent has failed.

        Args:
            fatal: False: who has not is only waited for no longer.
            handler: called with every event of every member, except log lines and endings. An event that
                it refuses (ProtocolError) is a failure of the member's node.
        """
        kinds = {kind} if isinstance(kind, str) else set(kind)
        waiting = {id(member): member for member in members}
        end_at = awake_s() + deadline_s

        def pending() -> list[DeviceProbe]:
            return [m for m in waiting.values() if m.node.name not in self.failures]

        while pending():
            for came in self._events.receive_all(min(POLL_S, max(0.0, end_at - awake_s()))):
                member, event = came.key, self._take(came)
                if event is not None and self._handle(member, event, handler) and event["event"] in kinds:
                    waiting.pop(id(member), None)
                if not pending():
                    return  # what else is there is for those who wait next
            now = awake_s()
            for member in pending() if fatal else ():
                if now > end_at:
                    self.fail(member.node.name, _late_error(member, deadline_s))
                elif member.heard_at is not None and now - member.heard_at > SILENCE_S:
                    self.fail(member.node.name, _silent_error(member))
            if now > end_at:
                return

    def _take(self, came: GroupEvent[DeviceProbe]) -> dict[str, Any] | None:
        """The event that has come, if it is one for the handler."""
        member = came.key
        member.heard_at = awake_s()
        if came.ended:
            if not member.returned:
                lost = came.error if isinstance(came.error, SkyctlError) else _lost_error(member)
                self.fail(member.node.name, lost)
            return None
        try:
            event = read_probe_message(member, came.value)
        except SkyctlError as exc:
            self.fail(member.node.name, exc)
            return None
        kind = event["event"]
        if kind == "log":
            member.tail = (member.tail + event["text"].splitlines())[-TAIL_LINES:]
        elif kind == "result":
            member.returned = True
        elif kind != "alive" and member.node.name not in self.failures:
            return event
        return None

    def _handle(self, member: DeviceProbe, event: dict[str, Any], handler: EventHandler) -> bool:
        """Hands an event out; False where the handler has refused it, which is the node's failure."""
        try:
            handler(member, event)
        except ProtocolError as exc:
            self.fail(member.node.name, exc)
            return False
        return True

    def close(self) -> None:
        """Tells every process to end, then kills what still runs. Errors don't matter here."""
        for member in self.alive():
            with suppress(SkyctlError, OSError, EOFError):
                member.task.send(write_request(QuitRequest()))
        self._events.kill_all()


def _lost_error(member: DeviceProbe) -> SkyctlError:
    return UnfitError(
        f"the connection to node {member.node.name!r} ended while it was probed ({member.phase})",
        node=member.node.name,
        hint="see whether the node sleeps or has lost its network, then probe again",
    )


def _silent_error(member: DeviceProbe) -> SkyctlError:
    return UnfitError(
        f"the probe on node {member.node.name!r} has said nothing for {SILENCE_S:.0f} s ({member.phase})",
        node=member.node.name,
        hint="see whether somebody has stopped it, or the node swaps; then probe again",
    )


def _late_error(member: DeviceProbe, seconds: float) -> SkyctlError:
    tail = "".join(f"\n    {line}" for line in member.tail)
    return UnfitError(
        f"node {member.node.name!r} gave no result within {seconds:.0f} s ({member.phase}){tail}",
        node=member.node.name,
        hint="see whether the node is overloaded, then probe again",
    )
