"""Orders and requests of ``skyctl run`` to a node: frozen records (``agent.task_orders``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from skyctl.agent.message_fields import Index, Label, MaxLength, Port, Sha256

Word = Annotated[str, MaxLength(128 << 10)]
"""A word of a command line, or the value of a variable: Linux takes no longer one."""
PathText = Annotated[str, MaxLength(4096)]


@dataclass(frozen=True)
class Workplace:
    """The folder that a rank's process works in.

    Attributes:
        tree: the shipped files in the node's cache, copied once for a session; None: none are shipped.
        folder: a folder of the node to work in, in place of such a copy.
        output: the folder within it whose files come home; None: none do.
        name: of the copy; ranks that only try something out have one of their own.
    """

    tree: PathText | None = None
    folder: PathText | None = None
    output: PathText | None = None
    name: Label = "work"


@dataclass(frozen=True)
class ScriptTurns:
    """Steps take turns with other runs on the rank's device.

    Attributes:
        policy: as ``--turns`` has it.
        node: as all launchers call this node that share its devices.
        run_id: the run's.
    """

    policy: Label
    node: Label
    run_id: Label


@dataclass(frozen=True)
class ScriptOrder:
    """Be one rank of a script: say what is ready here, then start its process when told to.

    Attributes:
        words: the command line; after this node's own Python where ``is_python``.
        environment: variables that the process gets, whatever they are here.
        threads: for ``OMP_NUM_THREADS``, where it is not set; None: the node's processors, shared equally by
            its ranks.
        local_ranks: how many ranks of the script the node has.
        finds_port: whether to find a free port for the ranks' rendezvous.
        port: the one to find free; None: any.
        times_steps: whether to tell how long each step of an optimizer took the rank itself.
        ended: copies of the shipped files, by name, that nobody works in any more; they are removed.
        secret: that all ranks share; with it ``init_process_group("skyctl")`` works in the script. None: it
            does not, unless skyctl is installed here.
        turns: None: it computes whenever it likes.
    """

    kind: ClassVar[str] = "script"
    rank: Index
    words: tuple[Word, ...]
    is_python: bool
    environment: Mapping[str, Word]
    workplace: Workplace
    local_ranks: Index = 1
    threads: Index | None = None
    finds_port: bool = False
    port: Port | None = None
    times_steps: bool = False
    ended: Annotated[tuple[Label, ...], MaxLength(1000)] = ()
    secret: Label | None = field(default=None, repr=False)
    turns: ScriptTurns | None = None


@dataclass(frozen=True)
class BeginScript:
    """All ranks are ready: start the process. ``environment``: variables that were not known before."""

    kind: ClassVar[str] = "begin"
    environment: Mapping[str, Word]


@dataclass(frozen=True)
class AbortScript:
    """End the process by SIGABRT: Python then prints where each of its threads is."""

    kind: ClassVar[str] = "abort"


@dataclass(frozen=True)
class ListOutput:
    """Say which files there are in the output folder."""

    kind: ClassVar[str] = "list-output"
    workplace: Workplace


@dataclass(frozen=True)
class PlacedFile:
    """A file that was pushed to the node; ``path``: where it is there."""

    path: PathText
    sha256: Sha256


@dataclass(frozen=True)
class PlaceOutput:
    """Put files into the output folder, by their paths in it; those that are there are replaced."""

    kind: ClassVar[str] = "place-output"
    workplace: Workplace
    files: Mapping[PathText, PlacedFile] = field(default_factory=dict)


OUTPUT_ORDERS: tuple[type[ListOutput | PlaceOutput], ...] = (ListOutput, PlaceOutput)
