"""Three ranks of which one lies in its role: a helper, a parameter server's root or worker, an owner.

The parts that ranks play are the real ones, over real connections, as threads of this process. The liar's
messages pass through ``Liar``, which changes one of them. The launcher is told what the ranks say of it.
"""

from __future__ import annotations

import functools
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from skyctl.agent.task_runner import make_error_event
from skyctl.errors import SkyctlError
from skyctl.records.cluster import Node
from skyctl.run.attempt_state import AttemptState
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.health_monitor import Deadlines, HealthMonitor, RankHealth, judge_health
from skyctl.run.rank_failure import FailureReport
from skyctl.transport.peer_connection import FIRST_TAG, PeerConnection
from skyctl.worker.rank_errors import with_phase
from skyctl.worker.rank_order import RoundOptions, Staleness, SumGroupOrder, SumOrder
from skyctl.worker.rounds.weight_average import GOES_ON, WeightAverage
from skyctl.worker.sums import sum_work
from skyctl.worker.sums.route_sum import RouteSum
from skyctl.worker.sums.sum_layout import make_layout
from skyctl.worker.sums.sum_messages import GRADIENTS, HEADER
from skyctl.worker.sums.sum_work import SumWork
from skyctl.worker.updates.lr_scheduler import LearningRateScheduler
from skyctl.worker.updates.parameter_root import ParameterRoot, RootWeights
from skyctl.worker.updates.stale_sync import StaleSync
from skyctl.workload.recipe import Recipe

from ..helpers.orders import beside, helper_order, rank_order, rank_spec
from ..worker.sums import RouteEdges, connected, places, ring, star
from . import lies

COUNT, STEPS = 3, 3
STUCK_S = 0.4
"""Ranks that get nowhere for so long wait for something that does not come."""
NUMBERS = [[8], [300], [70]]
"""Of each layer whose gradients are summed."""
CHUNK = 64
Peers = Mapping[int, Any]


@dataclass(frozen=True)
class Role:
    """The rank that lies, and what each rank does: ``act(rank, peers)``; ``helps``: it holds no layers.

    ``owned``: each rank's data is its own.
    """

    liar: int
    routes: Sequence[RouteEdges]
    act: Callable[[int, Peers], None]
    helps: bool = False
    owned: bool = False


def _sum(rank: int, peers: Peers) -> None:
    routes = star(COUNT, root=2)
    part = RouteSum(0, places(routes, rank), peers)
    layout = make_layout(NUMBERS, [1.0], CHUNK)
    try:
        for step in range(STEPS):
            sum_work = SumWork(layout, step, kind=GRADIENTS, helps=rank == 2)
            part.begin(sum_work, 3)
            at = 0
            for last in layout.last_layer_of if rank != 2 else ():
                sum_work.add_bucket([torch.ones(n) for layer in NUMBERS[at : last + 1] for n in layer])
                at = last + 1
            part.agree(bytes(3))
            sum_work.wait()
    finally:
        _close(peers)
        part.close()


def _train(rank: int, peers: Peers) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]
    root = None
    if rank == 0:
        held = RootWeights(
            layers,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            lambda _parameters, optimizer: LearningRateScheduler(optimizer, Recipe(total_steps=STEPS)),
        )
        root = ParameterRoot(held, range(COUNT), staleness=1, first=0, steps=STEPS)
    group = SumGroupOrder(0, 0, tuple(places(star(COUNT), rank)), start=0, stop=3)
    sums = SumOrder("float32", CHUNK, (group,), staleness=Staleness(1))
    sync = StaleSync(layers, rank, sums, peers, share=1 / COUNT, first=0, steps=STEPS, root=root)
    try:
        for clock in range(STEPS):
            sync.start_step()
            sync.begin(clock)
            nn.Sequential(*layers)(torch.ones(2, 3)).square().mean().backward()
            sync.finish(is_last=False)
    finally:
        _close(peers)
        sync.close()


def _average(rank: int, peers: Peers) -> None:
    group = SumGroupOrder(0, 0, tuple(places(ring(COUNT), rank)), start=0, stop=2)
    layers = [nn.Linear(5, 3), nn.Linear(3, 2)]
    average = WeightAverage(layers, 0, [group], peers, chunk_bytes=CHUNK)
    try:
        for step in range(STEPS):
            average.average(step, 2 + rank, GOES_ON)
    finally:
        _close(peers)
        average.close()


def _close(peers: Peers) -> None:
    """As at the end of a rank's process, whatever ended it."""
    for peer in peers.values():
        peer.close()


ROLES: Mapping[str, Role] = {
    "helper": Role(2, star(COUNT, root=2), _sum, helps=True),
    "root": Role(0, star(COUNT), _train),
    "worker": Role(1, star(COUNT), _train),
    "owner": Role(1, ring(COUNT), _average, owned=True),
}
KINDS = (
    *("header", "noise", "short", "long", "frame"),  # malformed
    *("late", "swapped"),
    *("lost", "silent", "closes"),
    *("payload", "nan", "twice", "tag"),  # false
)


class Liar:
    """One message of a rank, counted over all that it sends, becomes a lie."""

    def __init__(self, rng: random.Random, kind: str, at: int) -> None:
        self._rng, self._kind, self._at = rng, kind, at
        self._lock = threading.Lock()
        self.count = 0
        self._held: list[Callable[[], Any]] = []

    def speak_for(self, connection: PeerConnection) -> None:
        honest = connection.send

        def send(tensor: torch.Tensor, tag: int) -> Any:
            with self._lock:
                number, self.count = self.count, self.count + 1
                held, self._held = self._held, []
            if number == self._at or (number > self._at and self._kind == "silent"):
                return self._lie(connection, honest, tensor, tag)
            done = honest(tensor, tag)
            for late in held:
                late()
            return done

        connection.send = send  # type: ignore[method-assign]

    def _lie(
        self, connection: PeerConnection, honest: Callable[..., Any], tensor: torch.Tensor, tag: int
    ) -> Any:
        rng, kind = self._rng, self._kind
        false = tensor.clone()
        head = min(HEADER.size, false.numel())
        if kind == "header":
            at = 8 * rng.randrange(head // 8)
            false[at : at + 8] = _noise(rng, 8)
        elif kind == "noise":
            false[:head] = _noise(rng, head)
        elif kind == "payload":
            false[head:] = _noise(rng, false.numel() - head)
        elif kind == "nan":
            false[head:] = 0xFF  # of any float
        elif kind == "short":
            false = false[: rng.randrange(false.numel())].clone()
        elif kind == "long":
            false = torch.cat([false, _noise(rng, rng.choice([1, 8, 1 << 16]))])
        elif kind == "tag":
            tag = rng.choice([FIRST_TAG, tag + 1, tag + 2, tag ^ 1, (1 << 32) - 1])
        elif kind == "late":
            time.sleep(STUCK_S / 4)
        elif kind == "twice":
            honest(tensor.clone(), tag)
        elif kind == "frame":
            connection._transport._sock.sendall(rng.randbytes(rng.choice([1, 13, 200])))  # type: ignore[union-attr]
        elif kind == "closes":
            connection.close()
        elif kind == "swapped":
            self._held = [lambda: honest(false, tag)]
        if kind in ("lost", "silent", "swapped"):
            return SimpleNamespace(wait=lambda timeout=None: True)
        return honest(false, tag)


def _noise(rng: random.Random, count: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(rng.randbytes(count) or b"\0"), dtype=torch.uint8)[:count]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a lie: the ranks' errors, the first one first, or that they got nowhere."""

    errors: Sequence[tuple[int, BaseException]]
    stuck: Sequence[int]


def play(role: Role, rng: random.Random, kind: str) -> Outcome:
    """All ranks' parts, one message of the liar's being a lie of that kind."""
    return _play(role, Liar(rng, kind, rng.randrange(_messages_of(role.act, role.liar))))


@functools.cache
def _messages_of(act: Callable[[int, Peers], None], liar: int) -> int:
    """How many messages the liar sends where it tells the truth."""
    role = next(one for one in ROLES.values() if (one.act, one.liar) == (act, liar))
    honest = Liar(random.Random(0), "", -1)
    assert _play(role, honest, limit_s=60.0) == Outcome([], [])
    return honest.count


def _play(role: Role, liar: Liar, limit_s: float = STUCK_S) -> Outcome:
    errors: list[tuple[int, BaseException]] = []
    with mock.patch.object(sum_work, "LINGER_S", STUCK_S / 4), connected(role.routes, COUNT) as ends:
        for peer in ends[role.liar].values():
            liar.speak_for(peer._group._pairs[peer.rank])

        def attempt(rank: int) -> None:
            try:
                role.act(rank, ends[rank])
            except BaseException as exc:  # a bug must be seen as what it is
                errors.append((rank, exc))

        with ThreadPoolExecutor(COUNT) as pool:
            ranks = [pool.submit(attempt, rank) for rank in range(COUNT)]
            left = wait(ranks, limit_s).not_done
            while left and (before := len(errors)):  # some have ended, so others will
                left = wait(ranks, limit_s).not_done
                if len(errors) == before:
                    break
            stuck = [rank for rank, one in enumerate(ranks) if one in left]
            said = list(errors)
            for peers in ends:
                _close(peers)
    return Outcome(said, stuck)


def node_of(role: Role, rank: int) -> str:
    return lies.LIAR if rank == role.liar else f"{lies.HONEST}-{rank}"


def make_attempt(role: Role) -> AttemptState:
    """These ranks as the launcher has them."""
    names = [node_of(role, rank) for rank in range(COUNT)]
    specs = []
    for rank, name in enumerate(names):
        edges = [edge for _, _, up, down in role.routes for edge in (*up, *down) if rank in edge]
        peers = sorted({other for edge in edges for other in edge} - {rank})
        rounds = RoundOptions(1, owner=name) if role.owned else None
        held = beside(rank_order(steps=STEPS, layers=[0, 4]), rank, peers, rounds=rounds)
        order = helper_order(held) if role.helps and rank == role.liar else held
        specs.append(rank_spec(rank, name, order, shard_limits=dict.fromkeys(range(4), 10_000)))
    return AttemptState(specs, {name: Node(name=name, transport="local") for name in names})


def say(state: AttemptState, rank: int, message: lies.Message) -> None:
    """A rank's message, as the launcher takes it in."""
    read = state.read(rank, dict(message))
    event = None if read is None else state.accept(rank, read.event)
    if event is not None:
        list(state.report(rank, event))


def blame(role: Role, outcome: Outcome) -> tuple[SkyctlError, FailureReport] | None:
    """The launcher's verdict on the ranks' errors; None: there are none."""
    state = make_attempt(role)
    failed = []
    for rank, exc in outcome.errors:
        assert isinstance(exc, Exception)
        event = make_error_event(with_phase(exc, "step 1", "cpu:0"))
        say(state, rank, {key: value for key, value in event.items() if value is not None})
        failed.append(state.ranks[rank])
    sessions: Any = {
        node_of(role, rank): SimpleNamespace(
            node=Node(name=node_of(role, rank), transport="local"),
            host="127.0.0.1",
            lost=None,
            silent_s=0.0,
            disconnected_s=0.0,
        )
        for rank in range(COUNT)
    }
    monitor = HealthMonitor(state.ranks, sessions, Deadlines(), RunCallbacks())
    return monitor.first_cause(failed, 0, lambda _rank: None) if failed else None


def health_of(role: Role, outcome: Outcome, *, liar_is_heard: bool) -> Any:
    """The launcher's verdict on ranks that wait for each other, the liar being heard meanwhile or not."""
    ranks = [
        RankHealth(
            number=rank,
            node=node_of(role, rank),
            name=f"rank {rank}",
            phase="step 1",
            waiting=True,
            still_s=100.0,
            started_s=200.0,
            heard_s=0.0 if rank != role.liar or liar_is_heard else 20.0,
        )
        for rank in outcome.stuck
    ]
    return judge_health(ranks, Deadlines(), 60.0)


def events_of(role: str) -> list[lies.Message]:
    """A rank's messages to the launcher in that role, in order; the last two: how it can end otherwise."""
    layers = {str(layer): {"sha256": lies.SHA, "bytes": 1000} for layer in range(4)}
    first, ready = lies.FACTS, {"event": "ready"}
    if role == "helper":
        told: list[lies.Message] = [lies.LOG, {"event": "alive", "phase": "step 0", "waiting": True}]
        return [first, ready, *told, {"event": "result", "steps": STEPS}, lies.ERROR, lies.EXIT]
    sizes = {"layers": [8, 300, 70], "parameters": 3, "figures": 0}
    ready = {"event": "ready", "sums": sizes, "sketches": {"0": [{"norm": 1.0, "sums": [1.0]}]}}
    more: dict[str, Any] = {"local_steps": 5, "own_loss": 1.0} if role == "owner" else {"ahead": 1}
    steps = [lies.step_message(step, sync_s=0.1, **more) for step in range(STEPS)]
    saved = {**lies.CHECKPOINT, "layers": {} if ROLES[role].liar else layers}
    return [
        first,
        ready,
        {"event": "alive", "phase": "step 0", "waiting": True},
        steps[0],
        saved,
        *steps[1:],
        {"event": "result", "steps": STEPS},
        lies.ERROR,
        lies.EXIT,
    ]


def tell(role: str, rng: random.Random) -> AttemptState:
    """The launcher after the liar has told its story, with a lie in it.

    Raises what the launcher ends the run with.
    """
    state, liar = make_attempt(ROLES[role]), ROLES[role].liar
    *story, error, exit_ = events_of(role)
    at = rng.randrange(len(story))
    how = rng.choice(["mutated", "mutated", "ended", "late", "missing", "twice", "noise"])
    if how == "mutated":
        story[at : at + 1] = lies.lies(rng, [story[at]], 1)
    elif how == "ended":
        story[at : at + 1] = lies.lies(rng, [error, exit_], 1)
    elif how == "late":
        story.insert(rng.randrange(len(story)), story.pop(at))
    elif how == "missing":
        del story[at]
    elif how == "twice":
        story.insert(at, story[at])
    else:
        story.insert(at, {"event": os.fsdecode(rng.randbytes(3))})
    for message in story:
        say(state, liar, message)
    return state
