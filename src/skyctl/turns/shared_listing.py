"""The task that tells which of a node's devices are shared by turns now, and what each job has had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from skyctl.agent.message_fields import MaxLength, write_fields
from skyctl.turns.turn_client import list_shared_devices
from skyctl.turns.turn_messages import ListedMessage

if TYPE_CHECKING:
    from skyctl.agent.task_runner import TaskChannel


@dataclass(frozen=True)
class SharedDevices:
    """A node's answer: each of its devices that jobs share by turns, with these jobs."""

    kind: ClassVar[str] = "result"
    devices: Annotated[tuple[ListedMessage, ...], MaxLength(1000)]


def main(_payload: dict[str, Any], channel: TaskChannel) -> dict[str, Any]:
    """A task: the fields of ``SharedDevices``. Raises OSError."""
    return write_fields(SharedDevices(tuple(list_shared_devices(channel.cache))))
