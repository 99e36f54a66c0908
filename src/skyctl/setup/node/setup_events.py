"""A node's answers to ``skyctl setup``: one frozen record for each kind of event and question.

``agent.task_events`` reads them. Needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from skyctl.agent.message_fields import ByteCount, Label, Matches, MaxLength, Within

MOST_REQUIREMENTS = 10_000
Word = Annotated[str, Matches(r"[A-Za-z0-9_.]{1,100}")]
PythonVersion = Annotated[str, Matches(r"[0-9]{1,3}(\.[0-9]{1,5}){1,2}[A-Za-z0-9+.]{0,20}")]
PathText = Annotated[str, Matches(r"/[^\x00-\x1f]{0,4095}")]
Paths = Annotated[tuple[PathText, ...], MaxLength(1000)]


@dataclass(frozen=True)
class SetupProgress:
    """The work that is under way, and the part of it that is done."""

    kind: ClassVar[str] = "progress"
    what: Label
    share: Annotated[float, Within(-1.0, 1.0)]


@dataclass(frozen=True)
class FoundPython:
    """The answer to ``look``: the node, the Python that runs there, and what the one asked of has.

    ``had``: what an environment of ours was made with; ``glibc``: as in ``2.35``, None where it has another.
    """

    kind: ClassVar[str] = "result"
    python: PathText
    version: PythonVersion
    base: Annotated[str, MaxLength(4096)]
    system: Word
    machine: Word
    glibc: Annotated[str, Matches(r"[0-9]{1,3}\.[0-9]{1,3}")] | None
    root: PathText
    free_bytes: ByteCount | None
    cards: Annotated[tuple[Label, ...], MaxLength(100)]
    torch: Label | None
    distributed: bool
    fault: str | None
    versions: Annotated[Mapping[str, Label | None], MaxLength(MOST_REQUIREMENTS)]
    had: Annotated[tuple[str, ...], MaxLength(MOST_REQUIREMENTS)]


@dataclass(frozen=True)
class MadeEnvironment:
    """The answer to ``make``: what was made, or uv's words for why not.

    ``offline``: uv did not get the packages there; ``refused``: none fit the requirements.
    """

    kind: ClassVar[str] = "result"
    path: PathText | None = None
    python: PathText | None = None
    made: bool | None = None
    torch: Label | None = None
    size_bytes: ByteCount | None = None
    offline: str | None = None
    refused: str | None = None


@dataclass(frozen=True)
class RemovedEnvironments:
    """The answer to ``remove``. ``busy``: by path, the processes that use it."""

    kind: ClassVar[str] = "result"
    removed: Paths
    shared: Paths
    busy: Annotated[Mapping[str, tuple[int, ...]], MaxLength(1000)]
    freed_bytes: ByteCount


ANSWERS: Mapping[str, type] = {"look": FoundPython, "make": MadeEnvironment, "remove": RemovedEnvironments}
"""By the kind of order, the record of its answer."""
