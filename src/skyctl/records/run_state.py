"""A run's state: who supervises it, how far it is, how it ended. Rewritten whole at each change.

It says what was true when it was written. Whether its supervisor still lives is for the reader to see
(``Supervisor``: host, boot, process and that process's start), and nodes are asked, not believed.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from skyctl.records.base import Count, FileRecord, Index, Name, Record, Seconds, Seq
from skyctl.records.interval import Interval

RunStatus = Literal["starting", "running", "restarting", "stopping", "done", "failed", "stopped"]
SCRIPT = "script"
"""The key under which ``order`` has the ``ScriptRequest`` of a script's run."""
ENDED: tuple[RunStatus, ...] = ("done", "failed", "stopped")
"""Nothing of such a run is left on any node, but for its checkpoints (of one that is done: the last)."""


class Supervisor(Record):
    """A process on the launcher's machine. ``started``: its start time in /proc, in clock ticks."""

    host: Name
    boot: str
    pid: Count
    started: Index
    attached: bool


class NodeSession(Record):
    """A node's session, as a process needs it to take over from a dead supervisor.

    ``session``: the agent's session id. ``handled``: the last event of it that was written down here.
    """

    node: Name
    session: Name
    cache: str
    handled: Index = 0


class DeviatingPart(Record):
    """The part of a step that most makes it slower, or faster, than predicted.

    ``kind``: ``computing`` (``device``'s layers, seconds a step), ``link`` (one message from ``device`` to
    ``target``), ``sum`` (of gradients, from the last backward on), ``waiting`` (the rest of a step beside the
    layers of ``device``, which computes the longest, and the sum). ``kept``: it was added to the cluster's
    profile, which has figures of devices and links only.
    """

    kind: Literal["computing", "link", "sum", "waiting"]
    device: Name | None = None
    target: Name | None = None
    seen_s: Seconds
    predicted_s: Seconds
    kept: bool = False


class FirstSteps(Record):
    """An attempt's first steps beside its plan's prediction.

    ``steps``: how many, without the first, a warm-up. ``measured_s``: their median. ``part``: None where that
    lies within the ``interval``.
    """

    steps: Count
    measured_s: Seconds
    predicted_s: Seconds
    interval: Interval
    part: DeviatingPart | None


class RunAttempt(Record):
    """One set of ranks, from their start to their end.

    ``why``: what it was begun for, as in "node b was lost". ``from_step``: steps that were done before it.
    ``planned``: it is no restart: it replaced a healthy one (a node joined, a better plan), or a
    script goes on without a lost node.
    ``trial``: it only timed a script's first steps. ``error``: what ended it, where something did.
    ``expert_hosts``: the devices that host experts, beside the ranks' ``devices``.
    ``first_steps``: None until they have ended, and where their times tell nothing.
    """

    number: Count
    began: Name
    ended: str | None = None
    why: Name
    from_step: Index
    planned: bool = False
    trial: bool = False
    devices: Seq[Name] = ()
    expert_hosts: Seq[Name] = ()
    predicted_iteration_s: float | None = None
    error: str | None = None
    first_steps: FirstSteps | None = None


class InitialWeights(Record):
    """The weights that a run has started from (``launch --init-from``).

    ``path``: a file, or a folder as of ``save_pretrained``; ``sha256``: of the file, of a folder that of its
    files' digests. ``run``, ``step``: the run that they were taken from, and after how many of its steps.
    """

    path: Name
    sha256: Name
    run: Name | None = None
    step: Index | None = None

    def spec_fields(self) -> dict[str, str]:
        """The fields of a ``WorkloadSpec`` that say the same."""
        return {"init_from": self.path, "init_sha256": self.sha256}


class BestCheckpoint(Record):
    """The checkpoint with the lowest validation loss of those that every rank has written.

    ``step``: steps that were done. ``loss``: of the validation after them.
    """

    step: Index
    loss: float


class RunState(FileRecord):
    """``state.json`` of a run's folder.

    ``workload``: its source; ``cluster_file``: the inventory, read again by whoever takes the run over.
    ``order``: what else is needed to go on (``supervision.run_settings``; JSON values, no secrets).
    ``step``: steps that every rank has finished; ``checkpoint``: the newest complete one's.
    ``best``: null if no checkpoint was written after a validation. ``stopped_early``: it has ended before its
    last step, as validations were no better (``launch --patience``).
    ``away``: nodes that can't be reached at the moment; ``lost``: nodes given up, with the reason;
    ``untrusted``: those of them that sent what skyctl never sends, so they are not taken back by themselves.
    ``init_from``: the weights it began with; null: random ones, or those in the folder of ``hf:``.
    ``steps``: null for a script (``skyctl run``), which counts its own.
    """

    kind: Literal["skyctl/run"] = "skyctl/run"
    version: Literal[1] = 1
    run_id: Name
    created: Name
    written: Name
    workload: Name
    cluster: Name
    cluster_file: str | None = None
    order: dict[str, object] = Field(default_factory=dict)
    status: RunStatus = "starting"
    detail: str | None = None
    steps: Count | None
    step: Index = 0
    loss: float | None = None
    iteration_s: float | None = None
    checkpoint: Index | None = None
    best: BestCheckpoint | None = None
    stopped_early: bool = False
    supervisor: Supervisor | None = None
    sessions: Seq[NodeSession] = ()
    away: Seq[Name] = ()
    lost: dict[str, str] = Field(default_factory=dict)
    untrusted: Seq[Name] = ()
    init_from: InitialWeights | None = None
    attempts: Seq[RunAttempt] = ()

    @property
    def is_script(self) -> bool:
        """Whether it is a run of ``skyctl run``: no plan, and no steps that skyctl counts."""
        return SCRIPT in self.order
