"""Text generated over a cluster's nodes: a pipeline of ranks, and the tokens that come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skyctl.agent.task_events import LogEvent
from skyctl.errors import ProtocolError, RunError, SkyctlError
from skyctl.jobs.training_request import send_workload
from skyctl.planning.generation_stages import StageLayers
from skyctl.records.backend import SKYCTL
from skyctl.records.cluster import Cluster, Node, split_device_id
from skyctl.remote.agent_session import Session
from skyctl.remote.credentials import make_credentials
from skyctl.remote.peer_addresses import find_peer_addresses
from skyctl.remote.remote_task import (
    TaskError,
    TaskExit,
    read_task_message,
    task_failure_error,
)
from skyctl.run.attempt import RANK_MODULE
from skyctl.run.key_exchange import KeyExchange
from skyctl.run.rank_messages import own_key_fault
from skyctl.run.rank_tasks import RankTasks
from skyctl.run.world_order import world_order
from skyctl.worker.rank_events import (
    EnvironmentEvent,
    HeartbeatEvent,
    KeyWantedEvent,
    ReadyEvent,
    StoredEvent,
    TokenEvent,
)
from skyctl.worker.rank_order import GenerationOrder, Sampling
from skyctl.worker.rank_requests import BuildRequest, StartRequest, TokensRequest
from skyctl.workload.workload_spec import WorkloadSpec

KINDS: Mapping[str, type] = {
    kind.kind: kind
    for kind in (
        *(EnvironmentEvent, StoredEvent, KeyWantedEvent, ReadyEvent, HeartbeatEvent, TokenEvent),
        LogEvent,
    )
}
SILENCE_S = 60.0
"""Ranks say every few seconds that they are alive."""
PATIENCE_S = 3600.0
"""How long a stage waits for the one before it: while a long prompt is read, and between tokens."""


@dataclass
class TextPipeline:
    """Ranks that generate: ``start`` once, ``tokens`` for a prompt, and ``close`` in any case.

    Args:
        sessions: by node, of all nodes with a stage.
        spec: an ``hf:`` workload, as ``Workload.spec`` has it.
        stages: in the layers' order.
        threads: by device; None: as many as torch takes.
        vocabulary: tokens are below it.
        encrypt: what ranks send each other.
        note: told which nodes have the weights themselves.
    """

    cluster: Cluster
    sessions: Mapping[str, Session]
    spec: WorkloadSpec
    stages: Sequence[StageLayers]
    threads: Mapping[str, int | None]
    sampling: Sampling
    vocabulary: int
    encrypt: bool = False
    note: Callable[[str], None] = lambda _text: None
    _nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tasks = RankTasks("rank", self.sessions, lambda: "stop")

    def start(self) -> None:
        """Sends each node its layers' weights, starts the ranks and brings them together.

        Raises:
            SkyctlError: a node could not say where others reach it, or a rank has failed.
        """
        nodes = [split_device_id(stage.device)[0] for stage in self.stages]
        addresses: dict[str, str] = {}
        for name, address in find_peer_addresses({node: self.sessions[node] for node in nodes}).items():
            if isinstance(address, SkyctlError):
                raise address
            addresses[name] = address
        layers: dict[str, set[int]] = {}
        for node, stage in zip(nodes, self.stages, strict=True):
            layers.setdefault(node, set()).update(range(stage.start, stage.stop))
        used = {node: self.sessions[node] for node in layers}
        workload = send_workload(self.spec, used, with_data=(), layers=layers, note=self.note)
        self._nodes = [self.cluster.node(node) for node in nodes]
        last = len(nodes) - 1
        pairs = [(rank, rank + 1) for rank in range(last)]
        credentials = make_credentials(len(nodes), pairs, encrypt=self.encrypt)
        for rank, (node, stage) in enumerate(zip(nodes, self.stages, strict=True)):
            world = world_order(
                rank,
                self._nodes,
                addresses,
                backend=SKYCTL,
                before=rank - 1 if rank else None,
                after=rank + 1 if rank < last else None,
                timeout_s=PATIENCE_S,
            )
            own = credentials[rank]
            order = GenerationOrder(
                world=replace(world, secrets=own.secrets, tls=own.tls),
                device=split_device_id(stage.device)[1],
                threads=self.threads[stage.device],
                workload=workload[node],
                layers=(stage.start, stage.stop),
                sampling=self.sampling,
            )
            self._tasks.start(node, RANK_MODULE, order)
        self._connect()

    def _connect(self) -> None:
        """Lets ranks build, tells each the keys that it waits for of others, and has all start together."""
        keys = KeyExchange()
        ready: set[int] = set()
        while len(ready) < len(self._nodes):
            rank, event = self._next()
            if isinstance(event, EnvironmentEvent):
                self._tasks.send(rank, BuildRequest())
            elif isinstance(event, StoredEvent | KeyWantedEvent):
                if isinstance(event, StoredEvent) and (fault := own_key_fault(event.key, rank)):
                    node = self._nodes[rank].name
                    raise ProtocolError(f"node {node} sent 'stored' for rank {rank}, but {fault}", node=node)
                for other, answer in keys.answers(rank, event):
                    self._tasks.send(other, answer)
            elif isinstance(event, ReadyEvent):
                ready.add(rank)
        for rank in range(len(self._nodes)):
            self._tasks.send(rank, StartRequest())

    def tokens(self, prompt: Sequence[int]) -> Iterator[int]:
        """The tokens that follow a prompt, without end.

        Raises:
            SkyctlError: a rank has failed or fallen silent.
        """
        given = tuple(prompt)
        while True:
            self._tasks.send(0, TokensRequest(given))
            rank, event = self._next()
            node = self._nodes[rank].name
            if not isinstance(event, TokenEvent) or rank + 1 < len(self._nodes):
                raise ProtocolError(f"node {node} sent {event.kind!r} where a token is due", node=node)
            if event.token >= self.vocabulary:
                raise ProtocolError(f"node {node} sent token {event.token} of {self.vocabulary}", node=node)
            yield event.token
            given = (event.token,)

    def close(self) -> None:
        """Kills every rank that still runs. Idempotent; a lost node raises nothing."""
        self._tasks.kill()

    def _next(self) -> tuple[int, Any]:
        """The next event that is more than a sign of life, and the rank that it is of."""
        while True:
            came = self._tasks.receive(SILENCE_S)
            if came is None:
                raise RunError(f"no rank was heard for {SILENCE_S:.0f} s")
            if came.error is not None:
                raise came.error
            node = self._nodes[came.key]
            if came.value is None:
                raise RunError(f"rank {came.key} on node {node.name} has ended without a word")
            event = read_task_message(KINDS, node, came.value).event
            if isinstance(event, TaskError | TaskExit):
                raise task_failure_error(node, event, workload=self.spec.source)
            if not isinstance(event, HeartbeatEvent | LogEvent):
                return came.key, event
