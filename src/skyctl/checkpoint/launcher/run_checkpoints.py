"""The checkpoints of a run that is played: who copies them, which are kept, from which it goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from skyctl.checkpoint.launcher.mirror import CheckpointMirror, MirrorRequest
from skyctl.checkpoint.launcher.policy import CheckpointRules, RetentionPolicy, shard_limits
from skyctl.checkpoint.launcher.replicator_group import ReplicatorGroup
from skyctl.checkpoint.launcher.replicator_messages import ReplicatorEnded, ReplicatorNews
from skyctl.checkpoint.launcher.restore import restore_newest
from skyctl.checkpoint.node.recovery import RestorePoint, whole_steps
from skyctl.checkpoint.node.replicator_events import ReplicationFailed, ShardDigest
from skyctl.errors import ProtocolError, SkyctlError
from skyctl.files import RunPaths
from skyctl.records.plan import Plan
from skyctl.records.plan_nodes import nodes_in, writers_in
from skyctl.records.problem import Problem
from skyctl.records.run_state import BestCheckpoint
from skyctl.remote.agent_session import Session
from skyctl.remote.credentials import make_tls_certificate

REPLICATION_WAIT_S = 15.0
"""For copies of a last checkpoint, once nothing is computed any more."""
POLL_S = 0.05
MAX_COPY_WARNINGS = 20
"""So often in a run a node's word that it can't copy checkpoints is passed on."""


class EventJournal(Protocol):
    """As much of a run's journal (``run.journal``) as is needed here."""

    @property
    def paths(self) -> RunPaths:
        """The files of the attempt under way."""

    def heard(self, node: str, who: str, event: Mapping[str, Any]) -> bool:
        """Writes down what a task has sent; False: it was written down before."""


class CheckpointOwner(Protocol):
    """As much of a run (``run.live_run``) as is needed here."""

    @property
    def journal(self) -> EventJournal:
        """The journal that takes down what replicators send."""

    @property
    def sessions(self) -> dict[str, Session]:
        """By node, those that can be used; nodes are lost and come."""

    def addresses(self, needed: tuple[str, ...]) -> dict[str, str]:
        """By node's name, where its peers reach it. Raises SkyctlError where one in ``needed`` can't say."""

    @property
    def callbacks(self) -> Watcher:
        """The callbacks that show phases and warnings to the user."""


class Watcher(Protocol):
    """As much of a run's callbacks (``run.callbacks``) as is needed here."""

    @property
    def phase(self) -> Callable[[str], None]:
        """Called with a line that says what the run does now."""

    @property
    def warn(self) -> Callable[[str], None]:
        """Called with a line of warning, for a fault that does not end the run."""


class RunCheckpoints:
    """The replicators on a run's nodes, and what they are to keep.

    Args:
        run: whose checkpoints they are.
        problem: of its first plan; the layers stay the same ones.
        best: of the run so far.
    """

    def __init__(
        self,
        run: CheckpointOwner,
        rules: CheckpointRules,
        problem: Problem,
        best: BestCheckpoint | None = None,
    ) -> None:
        self._run, self._rules = run, rules
        self._shard_limits = shard_limits(problem)
        self._retention = RetentionPolicy(len(problem.layers), best=best, best_replicated=best)
        self._replicators: ReplicatorGroup | None = None
        self._mirror: CheckpointMirror | None = None
        self._followed: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._writers: tuple[str, ...] = ()
        self._nodes_asked: set[str] = set()
        self._protocol_errors: dict[str, ProtocolError] = {}
        self._copy_warnings: Counter[str] = Counter()

    @property
    def best(self) -> BestCheckpoint | None:
        """The one with the lowest validation loss; None: none was written after a validation."""
        return self._retention.best

    # --- while attempts are played

    def start_replicators(self, needed: tuple[str, ...], *, wait: bool) -> ReplicatorGroup:
        """Has a checkpoint replicator on every node; ``wait``: until they can be asked."""
        if self._replicators is None:
            self._replicators = ReplicatorGroup(
                self._run.journal.paths.run_id,
                self._run.sessions,
                self._run.journal.heard,
                self._take_news,
                make_tls_certificate(),
                shard_limits=self._shard_limits,
            )
        self._nodes_asked = set(self._run.sessions)
        self._replicators.start(self._run.addresses(needed))
        if wait:
            self._replicators.wait_ready()
        return self._replicators

    def restore(self, plan: Plan, done: int) -> RestorePoint | None:
        """Brings the newest checkpoint that the plan can go on from to its nodes; None: there is none.

        Args:
            done: steps that the run has finished.
        """
        callbacks = self._run.callbacks
        callbacks.phase("looking for the newest checkpoint")
        here = self._run.journal.paths.checkpoints
        replicators = self.start_replicators(nodes_in(plan), wait=True)
        origin = restore_newest(
            replicators,
            plan,
            done=done,
            here=here if here.is_dir() else None,
            warn=callbacks.warn,
        )
        whole = whole_steps(replicators.holdings(), self._retention.layers) if self.best is not None else ()
        self._retention.restarted(origin.step if origin is not None else None, whole)
        self._pin()
        return origin

    def replicate(self, plan: Plan) -> None:
        """Takes in what replicators say, and tells them whom to follow once all of them are there."""
        replicators = self._replicators
        if replicators is None:
            return
        replicators.take_events()
        rules = self._rules
        if rules.writes and set(self._run.sessions) - self._nodes_asked:  # a standby node has come
            with suppress(SkyctlError):
                self.start_replicators((), wait=False)
        nodes = nodes_in(plan)
        order = (*nodes, *sorted(name for name in replicators.nodes if name not in nodes))
        there = tuple(name for name in order if name in replicators.nodes)
        followed = there, self._writers or writers_in(plan)
        if replicators.starting or followed == self._followed or not rules.writes:
            return
        self._followed = followed
        replicators.follow(*followed, rules.replicas, rules.kept_steps)
        retention = self._retention
        retention.unreplicated = not rules.replicas or len(there) < 2
        retention.pinned_before = replicators.pinned
        if (
            retention.replicated is not None or retention.copying is not None
        ):  # else nodes go by what they had
            replicators.pin(retention.steps)

    def change_writers(self, nodes: tuple[str, ...]) -> None:
        """From now on these nodes' ranks write checkpoints; none: those of the plan's first pipeline."""
        self._writers = nodes
        if nodes:
            self._retention.writers_changed()
            self._pin()

    def written(self, step: int, loss: float | None) -> None:
        """Notes that every rank has written its layers after ``step`` steps: nodes keep that checkpoint.

        Args:
            loss: of the validation before it; None: there was none.
        """
        self._retention.written(step, loss)
        self._pin()

    def copy_here(
        self, step: int, node_of_layer: Mapping[int, str], shards: Mapping[int, ShardDigest]
    ) -> None:
        """Copies a checkpoint to this machine, in the background (``--keep-here``)."""
        paths = self._run.journal.paths
        if self._mirror is None:
            self._mirror = CheckpointMirror(paths, self._rules.keep, self._run.callbacks.warn)
        sources = {layer: self._run.sessions[node] for layer, node in node_of_layer.items()}
        best = self.best.step if self.best is not None else None
        self._mirror.take(MirrorRequest(step, paths.attempt, sources, shards, best))

    def take_protocol_errors(self) -> list[ProtocolError]:
        """Of nodes that the run has: what their replicators sent that none would, since the last call."""
        errors, self._protocol_errors = self._protocol_errors, {}
        return [error for name, error in errors.items() if name in self._run.sessions]

    def drop(self, name: str) -> None:
        """Lets the replicator of a lost node go: nothing is asked of it any more."""
        self._nodes_asked.discard(name)
        if self._replicators is not None:
            self._replicators.drop(name)

    # --- the end

    def wait_replicated(self, step: int) -> None:
        """Waits until other nodes have copies of the run's last checkpoint, where they are to have any.

        For seconds, and not where only a node that is not heard could bring that about.
        """
        replicators, retention = self._replicators, self._retention
        if replicators is None or retention.unreplicated or retention.newest != step:
            return
        callbacks = self._run.callbacks
        callbacks.phase("copying the last checkpoint to other nodes; Ctrl-C ends that")
        deadline = time.monotonic() + REPLICATION_WAIT_S
        _, writers = self._followed
        why = None
        while retention.replicated != step and why is None:
            replicators.take_events()
            heard = replicators.heard
            if len(heard) < 2 or not heard.issuperset(writers):
                silent = sorted({*replicators.nodes, *writers} - heard)
                why = f"{', '.join(silent)} not heard" if silent else "no node is left to copy it"
            elif time.monotonic() > deadline:
                why = "copying took too long"
            time.sleep(POLL_S)
        if retention.replicated != step:
            callbacks.warn(f"the checkpoint of step {step} is not on other nodes: {why}")

    def keep_last(self, step: int | None, plan: Plan) -> None:
        """The run has ended well: nodes keep its last checkpoint and the best one, with copies, and no other.

        Args:
            step: of that checkpoint; None: there is none, and nothing is kept.
        """
        replicators = self._replicators
        if replicators is None:
            return
        if replicators.starting:
            replicators.wait_ready()
        if step is None:
            for name, failure in replicators.forget().items():
                self._run.callbacks.warn(
                    f"checkpoints of this run are still on node {name}: {failure.message}"
                )
            return
        self._followed = (), ()  # told anew, followers look at once
        self.replicate(plan)
        self.wait_replicated(step)
        # nobody copies any more: else they copy what others prune
        replicators.follow(replicators.nodes, (), 0, self._rules.kept_steps)
        replicators.prune({step, *self._retention.steps})

    def close(self) -> None:
        """Ends the replicators and the copying to this machine; checkpoints on disk stay."""
        if self._mirror is not None:
            self._mirror.close()
        if self._replicators is not None:
            self._replicators.close()

    def _pin(self) -> None:
        if self._replicators is not None:
            self._replicators.pin(self._retention.steps)

    def _take_news(self, node: str, news: ReplicatorNews) -> None:
        """Takes the unasked news of a node's replicator. Raises ProtocolError for what can't be true."""
        retention, callbacks = self._retention, self._run.callbacks
        kept_before = retention.steps
        if isinstance(news, ReplicatorEnded):
            if isinstance(news.error, ProtocolError):
                self._protocol_errors.setdefault(node, news.error)
            callbacks.warn(f"node {node} keeps no checkpoints any more: {news.error.message}")
        elif isinstance(news, ReplicationFailed):
            retention.failed()
            self._copy_warnings[node] += 1
            if self._copy_warnings[node] <= MAX_COPY_WARNINGS:
                callbacks.warn(f"node {node} can't copy checkpoints of {news.source}: {news.error}")
        elif news.attempt == self._run.journal.paths.attempt:
            if news.step > self._rules.steps or max(news.layers, default=0) >= retention.layers:
                raise ProtocolError(
                    f"node {node} says that it has copied what there is not: layers "
                    f"{', '.join(map(str, list(news.layers)[:5]))} of step {news.step}",
                    node=node,
                )
            retention.copied(news.step, list(news.layers))
        if retention.steps != kept_before:
            self._pin()
