"""The events that a task on a node tells the launcher: frozen records, checked where they arrive.

On the wire an event is a JSON object whose ``event`` says its kind. Each kind has one dataclass: a rank's
in ``worker.rank_events``, a replicator's in ``checkpoint.node.replicator_events``, a probe's in
``probe.node.probe_events``, those of ``check`` in ``check.check_events``, of ``setup`` in
``setup.node.setup_events``, what every task prints here. (How a task failed is read by
``remote.remote_task``.) The launcher reads an event with ``read_event``; what does not fit its dataclass, in
type, range or length (``agent.message_fields``), is refused with the node's name. Needs the standard library
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from skyctl.agent.message_fields import FieldError, MaxLength, read_fields, write_fields
from skyctl.errors import ProtocolError

T = TypeVar("T")
LOG_EVENT_CHARS = 64 << 10
"""An agent sends a line of output at a time, in pieces of 16 KiB."""


@dataclass(frozen=True)
class LogEvent:
    """Lines that the task printed."""

    kind: ClassVar[str] = "log"
    text: Annotated[str, MaxLength(LOG_EVENT_CHARS)]


@dataclass(frozen=True)
class AliveEvent:
    """The task is alive."""

    kind: ClassVar[str] = "alive"


@dataclass(frozen=True)
class DoneEvent:
    """The task has ended well, and has nothing to say."""

    kind: ClassVar[str] = "result"


def read_event(cls: type[T], message: Mapping[str, Any], node: str) -> T:
    """The message as a record; keys that the record does not have are left out.

    Raises:
        ProtocolError: a key is missing or has a value that it can't have; it names the node, the event and
            the field.
    """
    try:
        return cls(**read_fields(cls, message))
    except FieldError as exc:
        raise ProtocolError(f"node {node} sent {_kind(message)} with {exc}", node=node) from None


def read_as_json(cls: type[T], message: Mapping[str, Any], node: str) -> dict[str, Any]:
    """The message as ``to_message`` of its record: nothing in it that the record does not have.

    Raises:
        ProtocolError: as ``read_event``.
    """
    return to_message(read_event(cls, message, node))


def unknown_event(message: Mapping[str, Any], node: str) -> ProtocolError:
    """The error for an event of a kind that no such task sends."""
    return ProtocolError(f"node {node} sent {_kind(message)}, which is nothing that is expected", node=node)


def to_message(event: Any) -> dict[str, Any]:
    """The record as the JSON object that is sent; what has its default value is left out."""
    return {"event": event.kind} | write_fields(event)


def _kind(message: Mapping[str, Any]) -> str:
    kind = message.get("event")
    return repr(kind)[:60] if isinstance(kind, str) else "an event without a kind"
