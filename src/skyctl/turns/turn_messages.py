"""The messages between a job and a device's arbiter: frozen records, checked where they arrive.

::

    job → OpenRequest                           first; EOF where the job has died or closed
    arbiter → OpenedMessage | RefusedMessage
    job → RoomRequest
    arbiter → RoomMessage                       whenever that has changed
    job → AskRequest, GiveRequest, UseRequest, TellRequest
    arbiter → GrantMessage                      the turn is the job's
    arbiter → WantedMessage                     somebody else waits for it
    anybody → ListJobsRequest                   → ListedMessage

Each is a frame's header whose ``op`` says its kind (``agent.task_orders``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from skyctl.agent.message_fields import Bytes, Label, MaxLength, Seconds, Within

TurnCount = Annotated[int, Within(0, 1 << 53)]
Part = Annotated[float, Within(0.0, 1.0)]


@dataclass(frozen=True)
class OpenRequest:
    """A job comes, or comes back after its arbiter died.

    Attributes:
        device: as both name it.
        turns: the policy, as the option's text.
        used_s, waited_s, count: the device seconds, waiting seconds and turns that it had so far.
        returns: it was with an arbiter of this device that has died.
        holds: and had a turn.
    """

    kind: ClassVar[str] = "open"
    device: Label
    job: Label
    turns: Label
    used_s: Seconds = 0.0
    waited_s: Seconds = 0.0
    count: TurnCount = 0
    returns: bool = False
    holds: bool = False


@dataclass(frozen=True)
class AskRequest:
    """The job waits for a turn."""

    kind: ClassVar[str] = "ask"


@dataclass(frozen=True)
class GiveRequest:
    """The job gives its turn back, and ``asks`` for another. Figures are of all its turns so far."""

    kind: ClassVar[str] = "give"
    used_s: Seconds
    count: TurnCount
    asks: bool = False


@dataclass(frozen=True)
class UseRequest:
    """The use that a job that keeps its turn has made of the device since its beginning."""

    kind: ClassVar[str] = "use"
    used_s: Seconds
    count: TurnCount


@dataclass(frozen=True)
class TellRequest:
    """Device seconds that the job needs yet, and the part of the device that it uses; None: as before."""

    kind: ClassVar[str] = "tell"
    remaining_s: Seconds | None = None
    demand: Part | None = None


@dataclass(frozen=True)
class RoomRequest:
    """The job wants its memory on the device.

    Attributes:
        persistent_bytes, ephemeral_bytes: what it keeps, and what it has in a turn besides.
        capacity_bytes: what the device has for all jobs, as far as this one knows.
        holds: it has that memory, as an arbiter that has died let it.
    """

    kind: ClassVar[str] = "room"
    persistent_bytes: Bytes
    ephemeral_bytes: Bytes
    capacity_bytes: Bytes
    holds: bool = False


@dataclass(frozen=True)
class ListJobsRequest:
    """Asks who shares the device."""

    kind: ClassVar[str] = "list"


@dataclass(frozen=True)
class OpenedMessage:
    """The job is known."""

    kind: ClassVar[str] = "opened"


@dataclass(frozen=True)
class RefusedMessage:
    """The device's jobs take turns by another policy: ``turns``, which ``job`` has brought."""

    kind: ClassVar[str] = "refused"
    turns: Label
    job: Label


@dataclass(frozen=True)
class GrantMessage:
    """The turn is the job's; ``wanted``: somebody else waits."""

    kind: ClassVar[str] = "grant"
    wanted: bool = False


@dataclass(frozen=True)
class WantedMessage:
    """Somebody else waits for the job's turn."""

    kind: ClassVar[str] = "wanted"


@dataclass(frozen=True)
class RoomMessage:
    """The job's place among those that wait for memory.

    Attributes:
        place: from 1; 0: it may have what it asked for.
        is_tight: there is room for no job's ephemeral bytes but those of whoever has the turn.
    """

    kind: ClassVar[str] = "place"
    place: Annotated[int, Within(0, 1 << 20)]
    is_tight: bool


@dataclass(frozen=True)
class ListedJob:
    """A job on a shared device.

    Attributes:
        longest_wait_s: for a turn, of the waits that have ended under this arbiter.
        waits_s: of the wait for a turn under way; None: it does not wait.
        place: among those that wait for memory, from 1; 0: it does not.
        is_late: it keeps a turn that others want for longer than is usual.
    """

    job: Label
    holds: bool
    used_s: Seconds
    waited_s: Seconds
    turns: TurnCount
    longest_wait_s: Seconds
    waits_s: Seconds | None = None
    place: Annotated[int, Within(0, 1 << 20)] = 0
    is_late: bool = False


@dataclass(frozen=True)
class ListedMessage:
    """The jobs that share the device, and by which policy."""

    kind: ClassVar[str] = "listed"
    device: Label
    turns: Label
    jobs: Annotated[tuple[ListedJob, ...], MaxLength(1000)]


Request = OpenRequest | AskRequest | GiveRequest | UseRequest | TellRequest | RoomRequest | ListJobsRequest
Answer = OpenedMessage | RefusedMessage | GrantMessage | WantedMessage | RoomMessage | ListedMessage
Signal = GrantMessage | WantedMessage | RoomMessage
REQUESTS: tuple[type[Request], ...] = (
    OpenRequest,
    AskRequest,
    GiveRequest,
    UseRequest,
    TellRequest,
    RoomRequest,
    ListJobsRequest,
)
ANSWERS: tuple[type[Answer], ...] = (
    OpenedMessage,
    RefusedMessage,
    GrantMessage,
    WantedMessage,
    RoomMessage,
    ListedMessage,
)
SIGNALS: tuple[type[Signal], ...] = (GrantMessage, WantedMessage, RoomMessage)
"""All that an arbiter sends to a job that it knows."""
