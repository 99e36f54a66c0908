"""The messages of a node's agent to the launcher, frame by frame, checked where they arrive.

If the session can be resumed, events, task ends and replies are numbered (otherwise ``number`` is 0). Events
and task ends are in one sequence, replies and file parts in another. Unknown fields are ignored: the agent
of a session that is taken over may be another version's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError

from skyctl.agent.frames import FrameError, Message
from skyctl.records.base import Index, Seq, describe

EVENTS, REPLIES = "n", "r"
"""The keys of a frame's number, and the names of the two sequences."""


MAX_ADDRESSES = 10_000
MAX_TEXT_CHARS = 128 << 10
IPv4 = Annotated[str, AfterValidator(lambda text: str(IPv4Address(text)))]


class AgentMessage(BaseModel):
    """Base of all that an agent says: immutable, with the field types taken literally."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", populate_by_name=True, str_max_length=MAX_TEXT_CHARS
    )


class NumberedMessage(AgentMessage):
    """A message that is sent again until it was acknowledged. ``sequence``: where its number counts."""

    sequence: ClassVar[str]
    number: int


class KnownTask(AgentMessage):
    """A task that the agent has started. ``gone``: the number of its ``TaskGone``, None while it runs."""

    task: int
    name: Annotated[str, Field(max_length=200)]
    gone: int | None = None
    returncode: int | None = None
    signal: str | None = None


class AgentHello(AgentMessage):
    """The first message of a connection: the node, its session, and how far both sides have got.

    ``addresses``: pairs of interface and IPv4. ``highest``: the highest task or request number so far.
    ``received``: how many of the launcher's messages have arrived. ``event_number``, ``reply_number``: what
    comes next is numbered from these on.
    """

    op: Literal["hello"]
    session: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")]
    folder: str
    cache: str
    home: str
    cwd: str
    hostname: str
    platform: str
    python: str
    version: str
    pid: int
    guardian: int | None
    addresses: Annotated[
        Seq[Annotated[tuple[str, IPv4], Field(strict=False)]], Field(max_length=MAX_ADDRESSES)
    ]
    lease_s: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    hold_s: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = None
    tasks: Seq[KnownTask] = ()
    highest: int = 0
    received: int = 0
    event_number: int = Field(0, alias=EVENTS)
    reply_number: int = Field(0, alias=REPLIES)


class AgentFault(AgentMessage):
    """The agent could not start, or does not accept this launcher.

    ``gone``: the session is ending. ``taken``: it belongs to another launcher.
    """

    op: Literal["fault"]
    error: str | None = None
    path: str | None = None
    hint: str | None = None
    gone: bool = False
    taken: bool = False


class CleanedKind(AgentMessage):
    """The outcome for one kind of things on a node: how many went and stayed, and their bytes on its disk.

    ``environments`` are those of setup, which are not in the cache.
    """

    what: Literal["packages", "trees", "blobs", "runs", "sessions", "trials", "turns", "environments"]
    removed: Index
    freed_bytes: Index
    kept: Index
    kept_bytes: Index


class CacheCleaned(AgentMessage):
    """The answer of a node that was told to clean its cache. ``cleaned``: where there was something."""

    cleaned: Seq[CleanedKind]


class AgentEnding(AgentMessage):
    """The agent begins to end everything, for this reason."""

    op: Literal["ending"]
    why: str


class AgentBye(AgentMessage):
    """The agent's last message. ``left``: processes that it could not end."""

    op: Literal["bye"]
    left: Seq[int]


class Pong(AgentMessage):
    """The agent's answer to a ping."""

    op: Literal["pong"]


class SessionTaken(AgentMessage):
    """Another launcher has taken the session over."""

    op: Literal["taken"]


class Acknowledgement(AgentMessage):
    """The agent has every message of the launcher up to that number."""

    op: Literal["ack"]
    number: int = Field(alias=EVENTS)


class TaskEvent(NumberedMessage):
    """An event that a task has sent, or a line that it has printed (``{"event": "log", "text": …}``)."""

    sequence = EVENTS
    op: Literal["event"]
    task: int
    message: InstanceOf[dict[str, Any]]
    number: int = Field(0, alias=EVENTS)


class TaskGone(NumberedMessage):
    """A task has ended with all it had started. ``returncode``: negative for a signal; None: not started."""

    sequence = EVENTS
    op: Literal["gone"]
    task: int
    returncode: int | None
    signal: str | None
    number: int = Field(0, alias=EVENTS)


class FileReply(NumberedMessage):
    """The answer to a request for a file, or what it failed of (``error``, with the path)."""

    sequence = REPLIES
    op: Literal["reply"]
    id: int
    path: str | None = None
    error: str | None = None
    sha256: str | None = None
    number: int = Field(0, alias=REPLIES)


class FileSize(NumberedMessage):
    """A file that is fetched was opened, and is that large."""

    sequence = REPLIES
    op: Literal["size"]
    id: int
    bytes: int
    number: int = Field(0, alias=REPLIES)


class FileChunk(NumberedMessage):
    """The frame's body is the next piece of a fetched file."""

    sequence = REPLIES
    op: Literal["chunk"]
    id: int
    number: int = Field(0, alias=REPLIES)


FileMessage = FileReply | FileSize | FileChunk
_ANY: TypeAdapter[AgentMessage] = TypeAdapter(
    Annotated[
        AgentHello
        | AgentFault
        | AgentEnding
        | AgentBye
        | Pong
        | SessionTaken
        | Acknowledgement
        | TaskEvent
        | TaskGone
        | FileMessage,
        Field(discriminator="op"),
    ]
)
M = TypeVar("M", bound=AgentMessage)


def parse_agent_message(message: Message) -> AgentMessage:
    """A frame's header as the record that it is.

    Raises:
        FrameError: no agent says that; the field and its value are named.
    """
    try:
        return _ANY.validate_python(message)
    except ValidationError as exc:
        raise FrameError(describe(exc, limit=1)) from exc


class SequenceSet:
    """The numbers of one sequence that were handled, in whatever order: 1 … ``upto``, and few beyond it."""

    def __init__(self, upto: int = 0, beyond: Iterable[Sequence[int]] = ()) -> None:
        self.upto = upto
        self._beyond = {number for first, last in beyond for number in range(first, last + 1)}

    @property
    def beyond(self) -> list[tuple[int, int]]:
        """First and last of each range after the first number that is missing."""
        ranges: list[tuple[int, int]] = []
        for number in sorted(self._beyond):
            first = ranges.pop()[0] if ranges and ranges[-1][1] == number - 1 else number
            ranges.append((first, number))
        return ranges

    def __contains__(self, number: int) -> bool:
        return number <= self.upto or number in self._beyond

    def add(self, number: int) -> bool:
        """Adds a number; False where it was in there already."""
        if number in self:
            return False
        self._beyond.add(number)
        self.settle(self.upto)
        return True

    def settle(self, upto: int) -> None:
        """Adds every number up to that one."""
        if upto > self.upto:
            self.upto = upto
            self._beyond = {number for number in self._beyond if number > upto}
        while self.upto + 1 in self._beyond:
            self.upto += 1
            self._beyond.remove(self.upto)
