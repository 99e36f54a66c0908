"""The launcher's side of a task on a node, and its failures as skyctl's errors."""

from __future__ import annotations

import errno
import shlex
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from skyctl import errors
from skyctl.agent.frames import Message
from skyctl.agent.message_fields import clean_text
from skyctl.agent.task_events import read_event, to_message, unknown_event
from skyctl.errors import NodeError, ProtocolError, RunError, SkyctlError, UnfitError
from skyctl.records.base import Seq, describe
from skyctl.records.cluster import Node
from skyctl.remote.agent_connection import AgentConnection
from skyctl.remote.agent_messages import AgentMessage

MAX_UNREAD_LOG_EVENTS = 10_000
NOTE_TAIL_LINES = 20
MAX_TAIL_LINES = 1000
MAX_WORDS_CHARS = 64 << 10
"""Of what an exception says of itself, and of its traceback, the first and the last are kept."""


def _shorten(value: object) -> object:
    """A text that can be written everywhere, its middle left out where it is too long."""
    if not isinstance(value, str):
        return value
    text, half = clean_text(value), MAX_WORDS_CHARS // 2
    return text if len(text) <= MAX_WORDS_CHARS else f"{text[:half]}\n[…]\n{text[-half:]}"


Words = Annotated[str, BeforeValidator(_shorten)]
SmallInt = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class RemoteTask:
    """One process on a node: messages both ways. Made by ``Session.task``.

    Args:
        manual_ack: every event carries its ``seq``, and no line of output is left out;
            ``Session.acknowledge`` says when one was handled.
    """

    def __init__(
        self, connection: AgentConnection, number: int, name: str, *, manual_ack: bool = False
    ) -> None:
        self.name = name
        self.number = number
        self.node = connection.node
        self.returncode: int | None = None
        self.signal: str | None = None
        self._connection = connection
        self._manual_ack = manual_ack
        self._events: deque[tuple[Message, bytes]] = deque()
        self._unread_logs = 0
        self._dropped_lines = 0
        self._has_ended = False
        self._is_discarded = False

    @property
    def ended(self) -> bool:
        """Whether the process has ended, with all it had started."""
        return self._has_ended

    @property
    def done(self) -> bool:
        """Whether it has ended and every event of it was received."""
        with self._connection.changed:
            return self._has_ended and not self._events

    def send(self, message: Message, body: bytes = b"") -> None:
        """Sends the task a message, dropped if it has ended. Raises UnreachableError: the node is lost."""
        self._connection.send({"op": "send", "task": self.number, "message": message}, body)

    def recv(
        self, timeout_s: float | None = None, *, for_answer: bool = False
    ) -> tuple[Message, bytes] | None:
        """The next event; None when the time is over, the task is ``done``, or it was discarded.

        Args:
            for_answer: a node that has been silent for long is not waited for.

        Raises:
            UnreachableError: the node is lost (after the events that had arrived before).
        """
        with self._connection.changed:
            self._connection.wait(self._has_news, timeout_s, for_answer=for_answer)
            if not self._events:
                return None
            event = self._events.popleft()
            self._unread_logs -= event[0].get("event") == "log"
            return event

    def _has_news(self) -> bool | None:
        return True if self._events or self._has_ended or self._is_discarded else None

    def kill(self) -> None:
        """Ends the process and all it has started: TERM, and KILL after a grace. Does not wait."""
        if not self._has_ended:
            self._connection.send({"op": "kill", "task": self.number})

    def add_event(self, message: Message, body: bytes, seq: int = 0) -> bool:
        """An event has arrived; whether it will be acknowledged. The connection's condition is held."""
        if self._manual_ack:
            self._events.append(({**message, "seq": seq}, body))
            return True
        message.pop("seq", None)  # where it counts it is the agent's
        if message.get("event") == "log":
            if self._unread_logs >= MAX_UNREAD_LOG_EVENTS:
                self._dropped_lines += 1
                return False
            if self._dropped_lines:
                count = self._dropped_lines
                note = f"[skyctl: {count} lines left out here, they came faster than they were read]"
                self._dropped_lines = 0
                self._events.append(({"event": "log", "text": note}, b""))
                self._unread_logs += 1
            self._unread_logs += 1
        self._events.append((message, body))
        return False

    def discard_events(self) -> list[int]:
        """Forgets the events that nobody will read; the numbers of those that wait to be acknowledged."""
        self._is_discarded = True
        unread = [message["seq"] for message, _ in self._events if "seq" in message]
        self._events.clear()
        return unread

    def mark_ended(self, returncode: int | None, signal: str | None) -> None:
        """The process is gone. The connection's condition is held."""
        self._has_ended = True
        self.returncode, self.signal = returncode, signal


class TaskError(AgentMessage):
    """The exception that ended a task, as ``agent/task_runner.py`` sends it.

    ``peer_rank``: of a rank's, the peer that has sent it what skyctl never sends, or that it could not
    connect with (``type`` is ``PeerUnreachableError`` then).
    """

    event: Literal["error"]
    type: Words
    message: Words
    traceback: Words | None = None
    skyctl: bool = False
    exit_code: SmallInt = 1
    hint: Words | None = None
    python: Words | None = None
    module: Words | None = None
    errno: SmallInt | None = None
    out_of_memory: bool = False
    peer_rank: SmallInt | None = None


class TaskExit(AgentMessage):
    """How a task ended that gave neither a result nor an error: by a signal, or with a status of its own.

    ``agent_ended``: why the agent was ending it.
    """

    event: Literal["exit"]
    returncode: SmallInt | None = None
    signal: Words | None = None
    tail: Annotated[Seq[Words], Field(max_length=MAX_TAIL_LINES)] = ()
    agent_ended: Words | None = None


TaskFailure = TaskError | TaskExit
_FAILURE: TypeAdapter[TaskFailure] = TypeAdapter(Annotated[TaskFailure, Field(discriminator="event")])


def read_task_failure(node: Node, event: Mapping[str, Any]) -> TaskFailure | None:
    """The failure that a task's event tells of; None if it tells of something else.

    Raises:
        ProtocolError: it does not say how the task failed.
    """
    if event.get("event") not in ("error", "exit"):
        return None
    try:
        return _FAILURE.validate_python(event)
    except ValidationError as exc:
        raise ProtocolError(
            f"a process on node {node.name} failed, and does not say how: {describe(exc, limit=1)}",
            node=node.name,
        ) from None


@dataclass(frozen=True)
class TaskMessage:
    """A message that was read. ``plain``: it as a JSON object, without anything that nobody knows.

    ``event``: its record; a ``TaskFailure`` where the task has failed.
    """

    event: Any
    plain: Mapping[str, Any]


def read_task_message(kinds: Mapping[str, type], node: Node, message: Mapping[str, Any]) -> TaskMessage:
    """The record of a message that a task on that node has sent.

    Args:
        kinds: by ``event``, the records of what such a task sends, failures left out.

    Raises:
        ProtocolError: no such task sends that.
    """
    number = {"seq": message["seq"]} if "seq" in message else {}
    cls = kinds.get(str(message.get("event")))
    if cls is not None:
        event: Any = read_event(cls, message, node.name)
        return TaskMessage(event, to_message(event) | number)
    failure = read_task_failure(node, message)
    if failure is None:
        raise unknown_event(message, node.name)
    return TaskMessage(failure, failure.model_dump(exclude_none=True) | number)


def translate_task_failure(node: Node, event: Mapping[str, Any], workload: str | None = None) -> SkyctlError:
    """An ``error`` or ``exit`` event of a task on that node → the error to raise."""
    try:
        failure = read_task_failure(node, event)
    except ProtocolError as exc:
        return exc
    assert failure is not None
    return task_failure_error(node, failure, workload=workload)


def task_failure_error(
    node: Node, failure: TaskFailure, place: str | None = None, workload: str | None = None
) -> SkyctlError:
    """The error to raise for the failure that ended a task on that node.

    The task's traceback, or the last lines it printed, are the error's notes.

    Args:
        place: what goes before the message of an exception (None: the node; empty: the caller names it).
        workload: what the task had to load, as typed, for what to do where a package is missing.
    """
    place = f"on node {node.name}: " if place is None else place
    if isinstance(failure, TaskExit):
        error, detail = _exit_failure(node, failure), "\n".join(failure.tail[-NOTE_TAIL_LINES:])
    else:
        error, detail = _exception_failure(node, failure, place, workload), failure.traceback or ""
    if detail:
        error.add_note(f"on node {node.name}:\n{detail.rstrip()}")
    return error


_SIGNAL_HINTS = {
    "SIGKILL": "SIGKILL often is the system short of memory",
    "SIGILL": "its processor lacks an instruction that torch expects: `skyctl check --limit {node}`",
}
"""By the signal that ended a task, what its usual cause is."""


def _exit_failure(node: Node, event: TaskExit) -> SkyctlError:
    last = next((line for line in reversed(event.tail) if line.strip()), None)
    printed = f"; its last line: {last.strip()[:300]}" if last else ""
    if event.agent_ended:
        why = f"its agent there was ending: {event.agent_ended}"
        return RunError(f"a process on node {node.name} was ended, {why}{printed}")
    if event.signal:
        hint = _SIGNAL_HINTS.get(event.signal)
        return RunError(
            f"a process on node {node.name} was ended by {event.signal}{printed}",
            hint=hint and hint.format(node=node.name),
        )
    return RunError(
        f"a process on node {node.name} ended with status {event.returncode} and gave no result{printed}"
    )


def _exception_failure(node: Node, event: TaskError, place: str, workload: str | None) -> SkyctlError:
    module = (event.module or "").partition(".")[0]
    if event.skyctl:
        error = _skyctl_failure(node, event, place)
        if module and isinstance(error, errors.WorkloadError):
            error.hint = _missing_module_hint(node, module, workload)
        return error
    if event.type == "ModuleNotFoundError" and module and module != "skyctl":
        return UnfitError(
            f"node {node.name} has no {module} in {event.python or node.python}",
            node=node.name,
            hint=_missing_module_hint(node, module, workload),
        )
    if event.errno in (errno.ENOSPC, errno.EDQUOT):
        return UnfitError(
            f"a disk of node {node.name} is full: {event.message}", node=node.name, hint="make room there"
        )
    if event.out_of_memory:
        return UnfitError(
            f"node {node.name} has too little memory: {event.message or event.type}",
            node=node.name,
            hint="end what else runs there, or lower `memory_gib` in cluster.yaml and plan again",
        )
    what = f"{event.type}: {event.message}" if event.message else event.type
    return RunError(f"{place}{what}")


def _missing_module_hint(node: Node, module: str, workload: str | None) -> str:
    """The advice for a package that is missing; ``workload``: as typed, None if it is not known."""
    other = "or name a Python that has it in cluster.yaml: `python: /path`"
    if module == "torch":
        return f"`skyctl setup --limit {node.name}` brings it; {other}"
    named = f"`skyctl setup {shlex.quote(workload or 'WORKLOAD')} --limit {node.name}`"
    if workload is not None and workload.startswith("hf:"):
        return f"{named} brings it; {other}"
    return f"{named} brings it, once the requirements.txt beside the file names it; {other}"


def _skyctl_failure(node: Node, event: TaskError, place: str) -> SkyctlError:
    """One of skyctl's own errors, raised again here as what it was there."""
    by_exit_code: dict[int, type[SkyctlError]] = {
        2: errors.InputError,
        4: UnfitError,
        5: errors.MismatchError,
    }
    cls = by_exit_code.get(event.exit_code, RunError)
    named = getattr(errors, event.type, None)
    if isinstance(named, type) and issubclass(named, SkyctlError):
        cls = named
    text = f"{place}{event.message}"
    if issubclass(cls, NodeError):
        return cls(text, node=node.name, hint=event.hint)
    return cls(text, hint=event.hint)
