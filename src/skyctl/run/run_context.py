"""How a run is to be played, and what all of its attempts share: nodes, replicators, kept checkpoints."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from skyctl.checkpoint.launcher.mirror import CheckpointMirror, MirrorRequest
from skyctl.checkpoint.launcher.policy import RetentionPolicy
from skyctl.checkpoint.launcher.replicator_group import ReplicatorGroup
from skyctl.checkpoint.launcher.replicator_messages import ReplicatorEnded, ReplicatorNews
from skyctl.checkpoint.node.replicator_events import ReplicationFailed, ShardDigest
from skyctl.errors import ProtocolError, SkyctlError
from skyctl.jobs.training_request import TrainingRequest, shipped_data_changed
from skyctl.records.backend import Backend
from skyctl.records.cluster import Cluster
from skyctl.records.plan import Plan
from skyctl.remote.agent_session import Session
from skyctl.remote.credentials import make_tls_certificate
from skyctl.remote.peer_addresses import find_peer_addresses
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.event_sink import EventSink
from skyctl.run.first_steps import KeepPart
from skyctl.run.health_monitor import Deadlines
from skyctl.run.plan_update import nodes_in, writers_in
from skyctl.workload.shipped_files import digest_workload, files_to_ship

DEFAULT_REPLICAS = 2
REPLICATION_WAIT_S = 15.0
"""For copies of a last checkpoint, once nothing is computed any more."""
POLL_S = 0.05
MAX_COPY_WARNINGS = 20
"""So often in a run a node's word that it can't copy checkpoints is passed on."""


@dataclass(frozen=True)
class RunOptions:
    """How long to train and what to keep.

    Attributes:
        trace: record what every rank does when.
        ignore_changes: train on a cluster that is not what the plan was made for, too.
        encrypt: what passes between the stages, and checkpoints between nodes, go through TLS (a plan that
            was made so is always run so).
        backend: what is to carry tensors between ranks, whatever the plan says; None: what it says.
        checkpoint_every: steps from one checkpoint to the next; 0: none; None: chosen
            (``checkpoint.launcher.policy.checkpoint_interval``).
        keep: checkpoints that are kept.
        replicas: other nodes with a copy of each checkpoint; None: two, or all there are.
        keep_here: copy checkpoints to this machine, too.
        max_restarts: attempts after a fault, counted anew after each checkpoint.
        wandb: the project of Weights & Biases that each step's figures go to, too; None: to none.
    """

    steps: int = 10
    weights: bool = True
    trace: bool = False
    ignore_changes: bool = False
    encrypt: bool = False
    backend: Backend | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    checkpoint_every: int | None = None
    keep: int = 2
    replicas: int | None = None
    keep_here: bool = False
    max_restarts: int = 3
    wandb: str | None = None

    @property
    def writes_checkpoints(self) -> bool:
        """Whether the run writes any."""
        return self.checkpoint_every != 0

    @property
    def replica_count(self) -> int:
        """On how many other nodes each checkpoint file is to be."""
        return DEFAULT_REPLICAS if self.replicas is None else self.replicas

    @property
    def kept_steps(self) -> int:
        """How many checkpoints a node keeps: the newest may not be whole everywhere, so two at least."""
        return max(2, self.keep)


@dataclass
class RunContext:
    """What all attempts of a run share.

    Attributes:
        sessions: by node, those that can be used; changed in place as nodes are lost and come.
        on_checkpoint: told after how many steps every rank has written its layers.
        on_tick: called twice a second while an attempt is watched.
        shard_limits: by layer of the model, the most bytes that its file of a checkpoint can have.
        keep_part: for what first steps see; None: no attempt's first steps are compared.
    """

    cluster: Cluster
    request: TrainingRequest
    sessions: dict[str, Session]
    options: RunOptions
    callbacks: RunCallbacks
    sink: EventSink
    on_checkpoint: Callable[[int], None]
    on_tick: Callable[[], None]
    shard_limits: Mapping[int, int]
    keep_part: KeepPart | None = None
    _files: Mapping[str, bytes] | None = None
    _addresses: dict[str, str] = field(default_factory=dict)
    _replicators: ReplicatorGroup | None = None
    _mirror: CheckpointMirror | None = None
    _followed: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    _retention: RetentionPolicy | None = None
    _nodes_asked: set[str] = field(default_factory=set)
    _protocol_errors: dict[str, ProtocolError] = field(default_factory=dict)
    _copy_warnings: Counter[str] = field(default_factory=Counter)

    def files_to_ship(self) -> Mapping[str, bytes]:
        """The user's code, and the data files that go along: for every attempt those of the first one here.

        So whoever edits them while the run goes on changes nothing of it. A process that has taken the run
        over has them as they are then, and says where they have changed.
        """
        if self._files is None:
            spec = self.request.spec
            self._files = files_to_ship(spec)
            began = self.sink.state.order.get("digest")
            changed = ["the code"] if began is not None and digest_workload(spec) != began else []
            changed += ["the data files that are shipped"] if shipped_data_changed(spec) else []
            if changed:
                self.callbacks.warn(
                    f"{' and '.join(changed)} of {spec.source} are not those that the run began with; it "
                    "goes on with what is here now"
                )
        return self._files

    def addresses(self, needed: tuple[str, ...]) -> dict[str, str]:
        """By node, the address where its peers reach it; found out again when the nodes have changed.

        Raises:
            SkyctlError: a node that is needed could not say.
        """
        if set(self._addresses) != set(self.sessions):
            outcomes = find_peer_addresses(self.sessions)
            for name in needed:
                outcome = outcomes.get(name)
                if isinstance(outcome, SkyctlError):
                    raise outcome
            self._addresses = {n: a for n, a in outcomes.items() if isinstance(a, str)}
        return self._addresses

    def start_replicators(self, needed: tuple[str, ...], *, wait: bool) -> ReplicatorGroup:
        """Has a checkpoint replicator on every node; ``wait``: until they can be asked."""
        if self._replicators is None:
            self._replicators = ReplicatorGroup(
                self.sink.paths.run_id,
                self.sessions,
                self.sink.heard,
                self._on_replicator_news,
                make_tls_certificate(),
                shard_limits=self.shard_limits,
            )
        self._nodes_asked = set(self.sessions)
        self._replicators.start(self.addresses(needed))
        if wait:
            self._replicators.wait_ready()
        return self._replicators

    def replicate(self, plan: Plan) -> None:
        """Takes in what replicators say, and tells them whom to follow once all of them are there."""
        replicators = self._replicators
        if replicators is None:
            return
        replicators.take_events()
        nodes = nodes_in(plan)
        writes = self.options.writes_checkpoints
        if writes and set(self.sessions) - self._nodes_asked:  # a standby node has come
            with suppress(SkyctlError):
                self.start_replicators((), wait=False)
        order = (*nodes, *sorted(name for name in replicators.nodes if name not in nodes))
        there = tuple(name for name in order if name in replicators.nodes)
        followed = there, writers_in(plan)
        if not replicators.starting and followed != self._followed and writes:
            self._followed = followed
            replicas = self.options.replica_count
            replicators.follow(*followed, replicas, self.options.kept_steps)
            retention = self.retention(plan)
            retention.unreplicated = not replicas or len(there) < 2
            retention.pinned_before = replicators.pinned
            if (
                retention.replicated is not None or retention.copying is not None
            ):  # else nodes go by what they had
                replicators.pin(retention.steps)

    def retention(self, plan: Plan) -> RetentionPolicy:
        """Which checkpoints are kept on every node."""
        if self._retention is None:
            self._retention = RetentionPolicy(len(plan.problem.layers))
        return self._retention

    def written(self, step: int, plan: Plan) -> None:
        """Every rank has written its layers after so many steps."""
        self.retention(plan).written(step)
        self._pin()

    def restarts_from(self, step: int | None, plan: Plan) -> None:
        """An attempt is about to go on from that checkpoint (None: from the beginning)."""
        self.retention(plan).restarted(step)
        self._pin()

    def copy_here(
        self, step: int, node_of_layer: Mapping[int, str], shards: Mapping[int, ShardDigest]
    ) -> None:
        """Copies a checkpoint to this machine, in the background (``--keep-here``)."""
        if self._mirror is None:
            self._mirror = CheckpointMirror(self.sink.paths, self.options.keep, self.callbacks.warn)
        sources = {layer: self.sessions[node] for layer, node in node_of_layer.items()}
        self._mirror.take(MirrorRequest(step, self.sink.paths.attempt, sources, shards))

    def take_protocol_errors(self) -> list[ProtocolError]:
        """Of nodes that the run has: what their replicators sent that none would, since the last call."""
        found, self._protocol_errors = self._protocol_errors, {}
        return [error for name, error in found.items() if name in self.sessions]

    def drop(self, name: str) -> None:
        """A node is lost: nothing is asked of it any more."""
        self._addresses.pop(name, None)
        self._nodes_asked.discard(name)
        if self._replicators is not None:
            self._replicators.drop(name)

    def wait_replicated(self, step: int) -> None:
        """Waits until other nodes have copies of the run's last checkpoint, where they are to have any.

        For seconds, and not where only a node that is not heard could bring that about.
        """
        replicators, retention = self._replicators, self._retention
        if replicators is None or retention is None or retention.unreplicated or retention.newest != step:
            return
        self.callbacks.phase("copying the last checkpoint to other nodes; Ctrl-C ends that")
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
            self.callbacks.warn(f"the checkpoint of step {step} is not on other nodes: {why}")

    def keep_last_checkpoint(self, step: int | None, plan: Plan) -> None:
        """The run has ended well: nodes keep its last checkpoint, with copies, and no earlier one.

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
                self.callbacks.warn(f"checkpoints of this run are still on node {name}: {failure.message}")
            return
        self._followed = (), ()  # told anew, followers look at once
        self.replicate(plan)
        self.wait_replicated(step)
        # nobody copies any more: else they copy what others prune
        replicators.follow(replicators.nodes, (), 0, self.options.kept_steps)
        replicators.prune({step, *self.retention(plan).steps})

    def close(self) -> None:
        """Replicators end; what they hold stays."""
        if self._mirror is not None:
            self._mirror.close()
        if self._replicators is not None:
            self._replicators.close()

    def _pin(self) -> None:
        if self._replicators is not None and self._retention is not None:
            self._replicators.pin(self._retention.steps)

    def _on_replicator_news(self, node: str, news: ReplicatorNews) -> None:
        retention = self._retention
        known = retention.steps if retention is not None else []
        if isinstance(news, ReplicatorEnded):
            if isinstance(news.error, ProtocolError):
                self._protocol_errors.setdefault(node, news.error)
            self.callbacks.warn(f"node {node} keeps no checkpoints any more: {news.error.message}")
        elif isinstance(news, ReplicationFailed):
            if retention is not None:
                retention.failed()
            self._copy_warnings[node] += 1
            if self._copy_warnings[node] <= MAX_COPY_WARNINGS:
                self.callbacks.warn(f"node {node} can't copy checkpoints of {news.source}: {news.error}")
        elif retention is not None and news.attempt == self.sink.paths.attempt:
            if news.step > self.options.steps or max(news.layers, default=0) >= retention.layers:
                raise ProtocolError(
                    f"node {node} says that it has copied what there is not: layers "
                    f"{', '.join(map(str, list(news.layers)[:5]))} of step {news.step}",
                    node=node,
                )
            retention.copied(news.step, list(news.layers))
        if retention is not None and retention.steps != known:
            self._pin()
