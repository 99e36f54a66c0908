"""The checkpoint replicators of a run, one a node: what they hold, who follows whom, files brought together.

Replicators take files from each other directly. If two can't reach each other, the files that one needs go
over this process's sessions.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyctl.agent.task_orders import write_order, write_request
from skyctl.checkpoint.launcher.replicator_messages import (
    REPLICATOR_KINDS,
    ReplicatorEnded,
    ReplicatorNews,
    ReplicatorRequests,
)
from skyctl.checkpoint.node import layout
from skyctl.checkpoint.node.layout import HeldShard
from skyctl.checkpoint.node.recovery import RestorePoint, ShardTransfer, place_replicas, plan_transfers
from skyctl.checkpoint.node.replicator_events import (
    LayersReplicated,
    ReplicationFailed,
    ReplicatorAnswer,
    ReplicatorListening,
)
from skyctl.checkpoint.node.replicator_order import ReplicatorOrder
from skyctl.checkpoint.node.replicator_requests import (
    AdoptRequest,
    FollowedPeer,
    FollowRequest,
    ForgetRequest,
    ListRequest,
    PinRequest,
    PruneRequest,
    PushedFile,
    ReplicatorRequest,
    StopReplicatorRequest,
    VerifyRequest,
)
from skyctl.checkpoint.node.shard_follower import POLL_S
from skyctl.errors import NodeError, ProtocolError, RunError, SkyctlError, UnfitError
from skyctl.files import home, make_private, safe_name
from skyctl.remote.agent_session import Session
from skyctl.remote.remote_task import RemoteTask, TaskError, TaskExit, read_task_message, task_failure_error
from skyctl.remote.task_group import TaskGroup
from skyctl.transport.tls_identity import TlsIdentity

REPLICATOR_MODULE = "skyctl.checkpoint.node.replicator"
REPLICATOR_TASK = "keeper"
START_S = 60.0
LIST_S = 20.0
TRANSFER_S = 600.0
STOP_S = 3.0
LAUNCHER_COPIES = ""
"""Stands for this machine's own copies, where a node's name is expected: no node is called so."""

WriteDown = Callable[[str, str, Mapping[str, Any]], bool]
"""Told (node, task's name, message) of everything; False: it was heard before."""
Message = dict[str, Any]


def run_folder_on_node(session: Session, run_id: str) -> Path:
    """The folder of the run's checkpoints on that node. Its own: local nodes share one cache."""
    return Path(session.hello.cache) / "runs" / f"{run_id}@{safe_name(session.node.name)}"


class ReplicatorGroup:
    """The replicators of a run's nodes, as the launcher talks to them; for one thread.

    ``pinned``: the steps that nodes had pinned when their replicators began.

    Args:
        sessions: by node; may change, ``start`` and ``drop`` follow it.
        write_down: gets every message, in the calling thread.
        on_news: gets what is no answer, with the node.
        tls: the run's certificate and key, or None.
        shard_limits: by layer of the model, the most bytes that its file can have.
    """

    def __init__(
        self,
        run_id: str,
        sessions: Mapping[str, Session],
        write_down: WriteDown = lambda _node, _who, _message: True,
        on_news: Callable[[str, ReplicatorNews], None] = lambda _node, _news: None,
        tls: TlsIdentity | None = None,
        *,
        shard_limits: Mapping[int, int],
    ) -> None:
        self.run_id = run_id
        self._sessions, self._write_down, self._on_news, self._tls = sessions, write_down, on_news, tls
        self._secret = secrets.token_hex(16)  # over the sessions only
        self._tasks: dict[str, RemoteTask] = {}
        self._events: TaskGroup[str] = TaskGroup("replicator")
        self._listening: dict[str, ReplicatorListening] = {}
        self.pinned: frozenset[int] = frozenset()
        self._forgotten = False
        self._requests = ReplicatorRequests(shard_limits)

    @property
    def nodes(self) -> list[str]:
        """The names of nodes whose replicators listen and were not let go, so that they can be asked."""
        return [name for name in self._listening if name in self._tasks]

    @property
    def heard(self) -> set[str]:
        """Those of ``nodes`` that may still answer."""
        return set(filter(self._is_heard, self.nodes))

    def start(self, addresses: Mapping[str, str]) -> None:
        """A replicator on each of those nodes that has none; does not wait for it.

        Args:
            addresses: by node, where its peers reach it.
        """
        for name in addresses:
            if name in self._tasks or name not in self._sessions:
                continue
            session = self._sessions[name]
            order = ReplicatorOrder(
                run_id=self.run_id,
                node=name,
                folder=run_folder_on_node(session, self.run_id),
                secret=self._secret,
                address=addresses[name],
                poll_s=POLL_S,
                tls=self._tls,
            )
            try:
                task = session.start_task(REPLICATOR_MODULE, write_order(order), name=REPLICATOR_TASK)
            except SkyctlError as exc:
                self._on_news(name, ReplicatorEnded(exc))
                continue
            self._tasks[name] = task
            self._events.follow(name, task)

    @property
    def starting(self) -> bool:
        """Whether one was started and has not said yet where it listens, and its node is heard."""
        return any(name not in self._listening and self._is_heard(name) for name in self._tasks)

    def wait_ready(self) -> None:
        """Waits until all that were started listen; those that don't in time or are not heard are let go."""
        deadline = time.monotonic() + START_S
        while self.starting and time.monotonic() < deadline:
            self._take(0.5)
        for name in [name for name in self._tasks if name not in self._listening]:
            why = f"it did not start within {START_S:.0f} s" if self._is_heard(name) else "it is not heard"
            self._on_news(name, ReplicatorEnded(RunError(why)))
            self.drop(name)

    def drop(self, name: str) -> None:
        """That node is lost: it is asked no more, and ended if it ever hears of it."""
        task = self._tasks.pop(name, None)
        if task is not None:
            self._end(name, task)
        self._listening.pop(name, None)

    def take_events(self) -> None:
        """Takes in what replicators have sent, without waiting; ``on_news`` gets what is no answer."""
        while self._take(0.0):
            pass

    def follow(self, order: Iterable[str], writers: Collection[str], replicas: int, keep: int) -> None:
        """Says who copies whose checkpoints: each is to be on ``replicas`` other nodes, if there are so many.

        Args:
            order: nodes with ranks, in the pipeline's order, then others that may keep copies.
            writers: those whose ranks write checkpoints; others have nothing to be copied.
        """
        nodes = [name for name in order if name in self._listening]
        for name, owners in place_replicas(nodes, replicas + 1, writers).items():
            there = ((owner, self._listening[owner]) for owner in owners)
            peers = tuple(FollowedPeer(at.address, at.port, owner) for owner, at in there)
            with suppress(SkyctlError):
                request = FollowRequest(peers, keep, self._requests.limits)
                self._tasks[name].send(write_request(request))

    def holdings(
        self, limit_s: float = LIST_S, *, named: bool = False
    ) -> dict[str, dict[int, dict[int, HeldShard]]]:
        """By node, step and layer, what there is; nodes that do not answer hold nothing.

        Args:
            named: also files that are gone or truncated: ``damaged`` and ``bring`` say so.
        """
        requests = dict.fromkeys(self.nodes, ListRequest(named=named))
        return {
            name: {
                step: {
                    n: HeldShard(file.sha256, file.bytes, file.attempt, file.own)
                    for n, file in layers.items()
                }
                for step, layers in (answer.steps or {}).items()
            }
            for name, answer in self._ask_all(requests, limit_s).items()
            if isinstance(answer, ReplicatorAnswer)
        }

    def damaged(self, point: RestorePoint, used: Mapping[str, Collection[int]]) -> dict[str, dict[int, str]]:
        """By node, which of those layers are not whole there, and why (each file is read).

        A node that does not answer has none of them.
        """
        requests = {
            name: VerifyRequest(point.step, {layer: point.layers[layer].sha256 for layer in layers})
            for name, layers in used.items()
            if layers
        }
        faults: dict[str, dict[int, str]] = {}
        for name, answer in self._ask_all(requests, TRANSFER_S).items():
            if isinstance(answer, SkyctlError):
                faults[name] = dict.fromkeys(used[name], answer.message)
            elif answer.damaged:
                faults[name] = dict(answer.damaged)
        return faults

    def bring(
        self,
        point: RestorePoint,
        wanted: Mapping[str, Collection[int]],
        rates: Mapping[tuple[str, str], float] | None = None,
        here: Path | None = None,
    ) -> dict[str, dict[int, tuple[str, str]]]:
        """Brings the layers that each node needs to it; what could not be had, from where, and why.

        Args:
            rates: bytes a second between nodes.
            here: this machine's own copies (``LAUNCHER_COPIES`` among the sources).

        Raises:
            NodeError: a node can't keep what it is brought, wherever from: its disk is full, say.
        """
        asked: dict[int, tuple[str, list[ShardTransfer]]] = {}
        missing: list[tuple[str, ShardTransfer, str]] = []
        for name, transfers in plan_transfers(point, wanted, rates).items():
            by_source: dict[str, list[ShardTransfer]] = {}
            for transfer in transfers:
                by_source.setdefault(transfer.source, []).append(transfer)
            for source, needs in by_source.items():
                if source in self._listening:
                    request = self._requests.pull(point, self._listening[source], source, needs)
                    asked[self._send(name, request)] = (name, needs)
                else:
                    missing += [(name, need, "") for need in needs]
        for number, answer in self._gather(list(asked), TRANSFER_S).items():
            name, needs = asked[number]
            _check_writable(name, answer)
            for need in needs:
                if isinstance(answer, SkyctlError):
                    missing.append((name, need, answer.message))
                elif need.layer in (answer.failed or {}):
                    missing.append((name, need, (answer.failed or {})[need.layer]))
        lacking: dict[str, dict[int, tuple[str, str]]] = {}
        for name, need, why in missing:
            why_not_here = self._bring_over_here(point, name, need, here)
            if why_not_here is not None:
                reasons = "; ".join(words for words in (why, why_not_here) if words)
                lacking.setdefault(name, {})[need.layer] = (need.source, reasons)
        return lacking

    def _bring_over_here(
        self, point: RestorePoint, name: str, need: ShardTransfer, here: Path | None
    ) -> str | None:
        """One file by way of this machine; why not, or None. Raises as ``bring``."""
        try:
            with tempfile.TemporaryDirectory(prefix="shard-", dir=make_private(home())) as folder:
                copies = here if need.source == LAUNCHER_COPIES else None
                if copies is None:
                    session, copies = self._sessions[need.source], Path(folder)
                    there = run_folder_on_node(session, self.run_id)
                    remote = layout.layer_path(there, point.step, need.layer)
                    layout.make_step_folder(copies, point.step)
                    session.fetch(
                        str(remote), layout.layer_path(copies, point.step, need.layer), need.size_bytes
                    )
                fault = layout.find_fault(copies, point.step, need.layer, need.sha256)
                if fault is not None:
                    return fault  # the receiver would take it for its own
                local = layout.layer_path(copies, point.step, need.layer)
                path = self._sessions[name].push(local, need.sha256, keep=False)
                pushed = PushedFile(Path(path), need.sha256)
                request = AdoptRequest(point.step, point.attempt, {need.layer: pushed})
                answer = self._ask_all({name: request}, TRANSFER_S)[name]
        except (SkyctlError, KeyError, OSError) as exc:
            if isinstance(exc, NodeError) and exc.node == name:
                raise
            return exc.message if isinstance(exc, SkyctlError) else f"{type(exc).__name__}: {exc}"
        if isinstance(answer, SkyctlError):
            return answer.message
        _check_writable(name, answer)
        return next(iter((answer.failed or {}).values()), None)

    def prune(self, kept: Collection[int]) -> None:
        """Has every node remove the run's checkpoints of all steps but ``kept``; waits for their answers."""
        self._ask_all(dict.fromkeys(self.nodes, PruneRequest(tuple(sorted(kept)))), LIST_S)

    def pin(self, steps: Collection[int]) -> None:
        """Those are kept whatever nodes prune by themselves, and no others any more. Does not wait.

        Nothing once the run is forgotten: news of a copy that comes meanwhile would bring its folder back.
        """
        for name in self.nodes if not self._forgotten else ():
            with suppress(SkyctlError):
                self._tasks[name].send(write_request(PinRequest(tuple(sorted(steps)))))

    def forget(self, limit_s: float = LIST_S) -> dict[str, SkyctlError]:
        """Removes the run's folder on every node; where that failed, and why."""
        self._forgotten = True
        answers = self._ask_all(dict.fromkeys(self.nodes, ForgetRequest()), limit_s)
        return {name: answer for name, answer in answers.items() if isinstance(answer, SkyctlError)}

    def close(self) -> None:
        """Ends them all. Files that they hold stay; of those that they were just taking nothing is left."""
        for task in self._tasks.values():
            with suppress(SkyctlError):
                task.send(write_request(StopReplicatorRequest()))
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline and any(
            not task.ended and self._is_heard(name) for name, task in self._tasks.items()
        ):
            time.sleep(0.02)
        for name, task in self._tasks.items():
            self._end(name, task)
        self._tasks.clear()
        self._listening.clear()

    def _is_heard(self, name: str) -> bool:
        """Whether that node may still answer."""
        return name in self._sessions and self._sessions[name].is_waited_for

    def _end(self, name: str, task: RemoteTask) -> None:
        with suppress(SkyctlError):
            task.kill()
        if name in self._sessions:
            self._sessions[name].discard(task)

    # --- what comes and goes

    def _take(self, wait_s: float) -> bool:
        """Takes in one event; False where there was none in time."""
        came = self._events.receive(wait_s)
        if came is None:
            return False
        name = came.key
        if self._tasks.get(name) is not came.task:  # one that was dropped
            if came.value is not None and name in self._sessions:
                self._sessions[name].acknowledge(came.value.get("seq", 0))
        elif came.ended:
            self.drop(name)
        else:
            try:
                self._handle(name, came.value)
            except SkyctlError as exc:
                self._on_news(name, ReplicatorEnded(exc))
                self.drop(name)
        return True

    def _handle(self, name: str, message: Message) -> None:
        """Writes down what a replicator has sent, and acts on it.

        Raises:
            ProtocolError: no replicator sends that, or not now.
            SkyctlError: what has ended it.
        """
        node = self._sessions[name].node
        read = read_task_message(REPLICATOR_KINDS, node, message)
        if not self._write_down(name, REPLICATOR_TASK, read.plain):
            return
        event = read.event
        if isinstance(event, TaskError | TaskExit):
            raise task_failure_error(node, event)
        if isinstance(event, ReplicatorListening):
            if name in self._listening:
                raise ProtocolError(f"node {name} said twice where its replicator listens", node=name)
            self._listening[name] = event
            self.pinned |= set(event.pinned)
        elif isinstance(event, ReplicatorAnswer):
            self._requests.take(name, event)
        elif isinstance(event, LayersReplicated | ReplicationFailed):
            self._on_news(name, event)

    def _send(self, name: str, request: ReplicatorRequest) -> int:
        number = self._requests.next_number()
        task = self._tasks.get(name)
        try:
            if task is None:
                raise RunError(f"node {name} has no checkpoint replicator any more")
            task.send(write_request(replace(request, id=number)))
        except SkyctlError as exc:
            self._requests.answers[number] = exc
        else:
            self._requests.give(number, name)
        return number

    def _gather(self, numbers: Collection[int], limit_s: float) -> dict[int, ReplicatorAnswer | SkyctlError]:
        asked, answers, deadline = self._requests.asked, self._requests.answers, time.monotonic() + limit_s
        while any(number not in answers for number in numbers):
            self._take(min(0.5, max(0.0, deadline - time.monotonic())))
            for number in numbers:
                name = asked.get(number)
                if number in answers or name is None:
                    continue
                if name not in self._tasks:
                    answers[number] = RunError(f"the checkpoint replicator of node {name} is gone")
                elif not self._is_heard(name):
                    answers[number] = RunError(f"node {name} is not heard")
                elif time.monotonic() > deadline:
                    answers[number] = RunError(f"node {name} gave no answer within {limit_s:.0f} s")
        for number in numbers:
            asked.pop(number, None)
        return {number: answers.pop(number) for number in numbers}

    def _ask_all(
        self, requests: Mapping[str, ReplicatorRequest], limit_s: float
    ) -> dict[str, ReplicatorAnswer | SkyctlError]:
        ids = {self._send(name, request): name for name, request in requests.items()}
        return {ids[number]: answer for number, answer in self._gather(list(ids), limit_s).items()}


def _check_writable(name: str, answer: ReplicatorAnswer | SkyctlError) -> None:
    """Raises UnfitError where a node has answered that it can't keep any file."""
    if isinstance(answer, ReplicatorAnswer) and answer.unwritable is not None:
        raise UnfitError(
            f"node {name} can't keep the checkpoint that it is to go on from: {answer.unwritable}",
            node=name,
            hint=f"free space there (`skyctl clean {name}`); the run goes on from the same checkpoint",
        )
