"""Messages of a script's rank, and its node's answers on output files: frozen records (``task_events``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from skyctl.agent.message_fields import ByteCount, Index, Label, MaxLength, Port, Seconds, Sha256, Within

MAX_TRACEBACK_CHARS = 64 << 10
MOST_OUTPUT_FILES = 100_000
ExitStatus = Annotated[int, Within(-255, 255)]


@dataclass(frozen=True)
class ScriptReady:
    """The rank's process can be started. ``port``: free on the node, where one was asked for."""

    kind: ClassVar[str] = "ready"
    port: Port | None = None


@dataclass(frozen=True)
class ScriptStarted:
    """The rank's process runs."""

    kind: ClassVar[str] = "started"


@dataclass(frozen=True)
class ScriptIdle:
    """For so long the rank's processes have hardly used a processor; 0: they do again."""

    kind: ClassVar[str] = "idle"
    idle_s: Seconds


@dataclass(frozen=True)
class ScriptStep:
    """A step of the rank's optimizer: its number, from 1, and the seconds that it took the rank itself.

    ``batch``: the samples over all ranks that the script has asked its share of; None: it has not.
    """

    kind: ClassVar[str] = "step"
    step: Index
    compute_s: Seconds
    batch: Index | None = None


@dataclass(frozen=True)
class ScriptTraceback:
    """The exception that a script's ``@record`` has written down (``TORCHELASTIC_ERROR_FILE``)."""

    message: Annotated[str, MaxLength(MAX_TRACEBACK_CHARS)]
    traceback: Annotated[str, MaxLength(MAX_TRACEBACK_CHARS)] = ""


@dataclass(frozen=True)
class ScriptResult:
    """The rank's process has ended.

    Attributes:
        returncode: its exit status; negative: the signal that ended it.
        recorded: the exception that it has written down.
        took_turns: whether it has had any turn of its device; None: it was to take none.
    """

    kind: ClassVar[str] = "result"
    returncode: ExitStatus
    recorded: ScriptTraceback | None = None
    took_turns: bool | None = None


SCRIPT_EVENTS: tuple[type[ScriptReady | ScriptStarted | ScriptIdle | ScriptStep | ScriptResult], ...] = (
    ScriptReady,
    ScriptStarted,
    ScriptIdle,
    ScriptStep,
    ScriptResult,
)


@dataclass(frozen=True)
class OutputFile:
    """A file in a node's output folder. ``name``: its path there; ``path``: the whole one on the node."""

    name: Annotated[str, MaxLength(4096)]
    path: Annotated[str, MaxLength(4096)]
    bytes: ByteCount
    sha256: Sha256


@dataclass(frozen=True)
class OutputListing:
    """The files of a node's output folder. ``skipped``: what is no regular file in it."""

    kind: ClassVar[str] = "result"
    files: Annotated[tuple[OutputFile, ...], MaxLength(MOST_OUTPUT_FILES)]
    skipped: Annotated[tuple[Label, ...], MaxLength(MOST_OUTPUT_FILES)] = ()
