"""The probe's processes on all nodes: started, kept in step; a lost one is its own node's failure."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyctl.errors import SkyctlError, UnfitError
from skyctl.records.cluster import Node
from skyctl.records.profile import NodeFailure
from skyctl.remote.session import translate

MODULE = "skyctl.probe.node.serve"
TAIL_LINES = 5
TURN_S = 0.5
"""A wait looks at deadlines so often; where it takes far longer, the launcher itself did not run (Ctrl-Z)."""
SILENCE_S = 45.0
"""A process that has spoken says at least that it is alive; one silent for so long is stopped or lost."""


class TaskLike(Protocol):
    """What is used of ``remote.session.Task``."""

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """To the task."""

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes] | None:
        """From the task; EOFError when its connection is gone."""

    def kill(self) -> None:
        """Ends it."""


class SessionLike(Protocol):
    """What is used of ``remote.session.Session``."""

    @property
    def node(self) -> Node:
        """The node it leads to."""

    @property
    def host(self) -> str:
        """The address that the launcher dialled."""

    def task(
        self,
        module: str,
        payload: dict[str, Any],
        *,
        name: str | None = None,
        env: dict[str, str] | None = None,
        reported: bool = True,
    ) -> TaskLike:
        """Starts a task."""


Handler = Callable[["Member", dict[str, Any]], None]


@dataclass
class Member:
    """One device's process. ``facts`` and ``measured`` are what it sent; ``heard``: when it last spoke.

    ``done``: it has measured its layers, and only keeps its device busy.
    """

    node: Node
    host: str
    task: TaskLike
    facts: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    phase: str = "starting"
    done: bool = False
    heard: float | None = None
    tail: list[str] = field(default_factory=list)

    @property
    def local(self) -> str:
        """The device's name on its node, as in ``cuda:1``."""
        device = str(self.facts["device"])
        return device if ":" in device else f"{device}:0"

    @property
    def affinity(self) -> frozenset[int]:
        """The processors it may use; empty where that is not told."""
        return frozenset(self.facts.get("affinity") or ())

    def shares(self, other: Member) -> bool:
        """Whether it and the other may use the same processors; with itself it does."""
        scopes = [member.facts.get("cpu_scope") or member.node.name for member in (self, other)]
        if scopes[0] == scopes[1]:
            return True
        if self.facts.get("boot_id") != other.facts.get("boot_id"):
            return False
        bound = self.facts.get("bound") or other.facts.get("bound")  # a quota is not shared
        return not bound and bool(self.affinity & other.affinity)


class Fleet:
    """All devices' processes. ``failures`` by node; a failed node's members are out from then on."""

    def __init__(self, on_failure: Callable[[str, NodeFailure], None] = lambda _node, _failure: None) -> None:
        self._on_failure = on_failure
        self.members: list[Member] = []
        self.failures: dict[str, NodeFailure] = {}
        self._news: queue.Queue[tuple[Member, dict[str, Any] | SkyctlError]] = queue.Queue()
        self.began = self._turned = time.monotonic()

    def start(self, session: SessionLike, payload: dict[str, Any], name: str) -> None:
        """Starts one device's process; a failure is the node's."""
        try:
            task = session.task(MODULE, payload, name=name, reported=False)
        except (SkyctlError, OSError, EOFError) as exc:
            self.fail(session.node.name, exc)
            return
        member = Member(session.node, session.host, task)
        self.members.append(member)
        threading.Thread(target=self._pump, args=(member,), daemon=True, name=f"probe {name}").start()

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

    def alive(self) -> list[Member]:
        """The members whose nodes have not failed, in the order they were started."""
        return [member for member in self.members if member.node.name not in self.failures]

    def send(self, member: Member, message: dict[str, Any]) -> None:
        """Sends; a failure is the node's."""
        try:
            member.task.send(message)
        except (SkyctlError, OSError, EOFError) as exc:
            self.fail(member.node.name, exc)

    def wait(
        self,
        members: Iterable[Member],
        kind: str | Collection[str],
        deadline_s: float,
        handler: Handler,
        *,
        fatal: bool = True,
    ) -> None:
        """Until each of them has sent an event of that kind; who has not by then or falls silent has failed.

        Args:
            fatal: False: who has not is only waited for no longer.
            handler: called with every event of every member, except log lines and endings.
        """
        kinds = {kind} if isinstance(kind, str) else set(kind)
        waiting = {id(member): member for member in members}
        self._away_s()
        end = time.monotonic() + deadline_s

        def pending() -> list[Member]:
            return [m for m in waiting.values() if m.node.name not in self.failures]

        while pending():
            for member, event in self._come(min(TURN_S, max(0.0, end - time.monotonic()))):
                if self._take(member, event):
                    assert isinstance(event, dict)
                    handler(member, event)
                    if event.get("event") in kinds:
                        waiting.pop(id(member), None)
                if not pending():
                    return  # what else is there is for those who wait next
            end += self._away_s()
            now = time.monotonic()
            for member in pending() if fatal else ():
                if now > end:
                    self.fail(member.node.name, _late(member, deadline_s))
                elif member.heard is not None and now - member.heard > SILENCE_S:
                    self.fail(member.node.name, _silent(member))
            if now > end:
                return

    def _away_s(self) -> float:
        """For how long since the last time we did not listen; nobody counts as silent for that."""
        now = time.monotonic()
        away_s = max(0.0, now - self._turned - 2 * TURN_S)
        self._turned = now
        for member in self.members:
            if member.heard is not None:
                member.heard = min(now, member.heard + away_s)
        return away_s

    def _come(self, timeout_s: float) -> Iterator[tuple[Member, dict[str, Any] | SkyctlError]]:
        """All that is there, waited for until there is something; who sent it has spoken."""
        with suppress(queue.Empty):
            for _ in range(max(1, self._news.qsize())):
                member, event = self._news.get(timeout=timeout_s)
                timeout_s = 0.0
                member.heard = time.monotonic()
                yield member, event

    def _take(self, member: Member, event: dict[str, Any] | SkyctlError) -> bool:
        """Whether that is an event for the handler."""
        if isinstance(event, SkyctlError):
            self.fail(member.node.name, event)
            return False
        kind = event.get("event")
        if kind == "log":
            member.tail = (member.tail + str(event.get("text", "")).splitlines())[-TAIL_LINES:]
            return False
        if kind in ("error", "exit"):
            if member.node.name not in self.failures:
                self.fail(member.node.name, translate(member.node, event))
            return False
        return kind not in ("result", "alive")

    def _pump(self, member: Member) -> None:
        while True:
            try:
                got = member.task.recv(None)
            except EOFError:
                self._news.put((member, _gone(member)))
                return
            except SkyctlError as exc:
                self._news.put((member, exc))
                return
            if got is None:  # without a time limit this means that it has ended
                self._news.put((member, _gone(member)))
                return
            self._news.put((member, got[0]))
            if got[0].get("event") in ("result", "error", "exit"):
                return

    def close(self) -> None:
        """Tells every process to end, then kills what still runs. Errors don't matter here."""
        for member in self.alive():
            with suppress(SkyctlError, OSError, EOFError):
                member.task.send({"op": "quit"})
        for member in self.members:
            with suppress(SkyctlError, OSError, EOFError):
                member.task.kill()


def _gone(member: Member) -> SkyctlError:
    return UnfitError(
        f"the connection to node {member.node.name!r} ended while it was probed ({member.phase})",
        node=member.node.name,
        hint="see whether the node sleeps or has lost its network, then probe again",
    )


def _silent(member: Member) -> SkyctlError:
    return UnfitError(
        f"the probe on node {member.node.name!r} has said nothing for {SILENCE_S:.0f} s ({member.phase})",
        node=member.node.name,
        hint="see whether somebody has stopped it, or the node swaps; then probe again",
    )


def _late(member: Member, seconds: float) -> SkyctlError:
    tail = "".join(f"\n    {line}" for line in member.tail)
    return UnfitError(
        f"node {member.node.name!r} gave no result within {seconds:.0f} s ({member.phase}){tail}",
        node=member.node.name,
        hint="see whether the node is overloaded, then probe again",
    )
