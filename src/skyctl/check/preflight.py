"""Preflight of a cluster: every node side by side, through the very sessions that a launch would use."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from skyctl.check import judge
from skyctl.check.report import (
    CheckReport,
    NodeReport,
    PairReport,
    Tick,
    failed,
    failed_by,
    ok,
    skipped,
)
from skyctl.errors import NodeError, SkyctlError
from skyctl.records.cluster import Cluster
from skyctl.remote.addresses import interface_of, own_addresses, peer_address_outcomes
from skyctl.remote.base import ConnectOptions
from skyctl.remote.session import Session, Task, open_sessions, translate

MODULE = "skyctl.check.node"
CONNECT_TIMEOUT_S = 5.0
"""How long one node tries to connect to another."""

_PINGS = 5
_AT_ONCE = 32
_PEERS_AT_ONCE = 32  # as node.py tries them

OnEvent = Callable[[str, float, float], None]
"""Called with what is going on, and how much of how much is done."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds. ``torch_s``: its import takes long on a slow disk or a small share of a processor."""

    answer_s: float = 60.0
    torch_s: float = 180.0
    connect_s: float = CONNECT_TIMEOUT_S


@dataclass
class _Subject:
    """A node that a session is open on, and what is known of it so far."""

    session: Session
    timeouts: Timeouts
    ticks: list[Tick] = field(default_factory=list)
    torch: str | None = None
    address: str | None = None
    port: int | None = None
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    lost: SkyctlError | None = None
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    _task: Task | None = None
    _ids: Iterator[int] = field(default_factory=count)

    @property
    def name(self) -> str:
        return self.session.node.name

    def ask(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """One question to the task that serves on the node (started at the first one).

        Raises:
            SkyctlError: the task failed, the node is lost, or no answer in time.
        """
        if self._task is None:
            self._task = self.session.task(MODULE, {"op": "serve"}, name="check")
        number = next(self._ids)
        self._task.send({"op": op, "id": number, **arguments})
        deadline = time.monotonic() + timeout_s
        while (event := self._task.recv(max(0.0, deadline - time.monotonic()))) is not None:
            message = event[0]
            if message.get("event") == "answer" and message["id"] == number:
                return message
            if message.get("event") in ("error", "exit"):
                raise translate(self.session.node, message)
        raise NodeError(f"node {self.name} did not answer within {timeout_s:g} s", node=self.name)


def check_nodes(
    cluster: Cluster,
    options: ConnectOptions,
    on_event: OnEvent | None = None,
    timeouts: Timeouts | None = None,
) -> CheckReport:
    """Looks at every node and every pair; what fails is a cross with its next step, never an exception.

    Every node that lets us in connects to every other one, at the addresses and on ports of the kind that
    training uses. Nothing is left on the nodes but skyctl's own files in their cache.

    Args:
        on_event: called from this thread and others.
    """
    timeouts = timeouts or Timeouts()
    said = _Said(on_event, len(cluster.nodes))
    said("connecting")
    outcomes = open_sessions(cluster.nodes, options, lambda name, _: said(f"{name} answered"))
    sessions = {name: o for name, o in outcomes.items() if not isinstance(o, SkyctlError)}
    subjects = {name: _Subject(session, timeouts) for name, session in sessions.items()}
    with _closing(sessions), ThreadPoolExecutor(_AT_ONCE, "check") as pool:
        _each(pool, subjects, _look, said)
        _addresses(subjects)
        _each(pool, subjects, _listen, said)
        everyone = list(subjects.values())
        _each(pool, subjects, lambda subject: _meet(subject, everyone), said)
    _compare_torch(subjects)
    nodes = []
    for node in cluster.nodes:
        outcome = outcomes[node.name]
        if isinstance(outcome, SkyctlError):
            report = NodeReport(
                node=node.name, address=None, interface=None, ticks=tuple(judge.connection(node, outcome))
            )
        else:
            report = _report(subjects[node.name])
        nodes.append(report)
    pairs = _pairs(cluster, subjects)
    fine = all(report.ok for report in nodes) and all(pair.error is None for pair in pairs)
    return CheckReport(cluster=cluster.name, ok=fine, nodes=tuple(nodes), pairs=tuple(pairs))


class _Said:
    """Counts what is done: each node connects, is looked at, listens, and meets its peers."""

    def __init__(self, on_event: OnEvent | None, nodes: int) -> None:
        self.on_event = on_event
        self.total = nodes * 4
        self.done = -1
        self.lock = threading.Lock()

    def __call__(self, text: str) -> None:
        with self.lock:
            self.done += 1
            if self.on_event is not None:
                self.on_event(text, self.done, self.total)


@contextmanager
def _closing(sessions: dict[str, Session]) -> Iterator[None]:
    try:
        yield
    finally:
        threads = [threading.Thread(target=_close, args=(s,), name="close") for s in sessions.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _close(session: Session) -> None:
    with suppress(SkyctlError, OSError):
        session.close()


def _each(
    pool: ThreadPoolExecutor,
    subjects: dict[str, _Subject],
    work: Callable[[_Subject], None],
    said: _Said,
) -> None:
    """Does one thing on every node at once; a node that fails is marked lost and left out of what follows."""

    def one(subject: _Subject) -> None:
        if subject.lost is None:
            try:
                work(subject)
            except SkyctlError as exc:
                subject.lost = exc
        said(f"{subject.name} {'checked' if subject.lost is None else 'failed'}")

    for job in [pool.submit(one, subject) for subject in subjects.values()]:
        job.result()


def _look(subject: _Subject) -> None:
    """Reach to login went well, or there would be no session; Python, torch, devices, limits, clock."""
    node, session = subject.session.node, subject.session
    names = judge.names(node)
    facts = subject.ask("facts", subject.timeouts.answer_s)
    found = session.host if node.transport == "ssh" else "this machine"
    subject.ticks = [ok(name, found if name == "reach" else None) for name in names[: names.index("python")]]
    subject.ticks.append(judge.python_tick(facts))
    clock = judge.clock_tick(*_clock(subject))
    answer: dict[str, Any] | SkyctlError
    try:
        devices = list(node.devices) if node.devices is not None else None
        answer = session.call(MODULE, {"op": "torch", "devices": devices}, subject.timeouts.torch_s)
        subject.torch = str(answer["torch"])
    except SkyctlError as exc:
        if session.lost is not None:
            raise
        answer = exc
    subject.ticks += [*judge.torch_ticks(node, answer), *judge.limits_ticks(node, facts), clock]


def _clock(subject: _Subject) -> tuple[float, float]:
    """(offset, round trip) in seconds of the quickest of a few questions (Cristian's algorithm)."""
    best = (0.0, float("inf"))
    for _ in range(_PINGS):
        began, sent = time.time(), time.monotonic()
        there = float(subject.ask("clock", subject.timeouts.answer_s)["time_s"])
        round_trip_s = time.monotonic() - sent
        if round_trip_s < best[1]:
            best = (there - (began + round_trip_s / 2), round_trip_s)
    return best


def _addresses(subjects: dict[str, _Subject]) -> None:
    there = {name: subject.session for name, subject in subjects.items() if subject.lost is None}
    for name, outcome in peer_address_outcomes(there).items():
        subject = subjects[name]
        if isinstance(outcome, SkyctlError):
            hint = f"name the interface its peers reach it by: `interface:` of node {name!r} in cluster.yaml"
            subject.ticks.append(failed_by("address", outcome, hint))
        else:
            subject.address = outcome
            interface = interface_of(subject.session, outcome)
            found = f"{outcome} ({interface})" if interface else outcome
            subject.ticks.append(ok("address", found))


def _listen(subject: _Subject) -> None:
    if subject.address is None:
        subject.ticks += skipped(["port"], "no address")
        return
    answer = subject.ask("listen", subject.timeouts.answer_s, address=subject.address, secret=subject.secret)
    if "error" in answer:
        hint = f"name another interface with `interface:` of node {subject.name!r} in cluster.yaml"
        found = f"no port of {subject.address} can be listened on: {answer['error']}"
        subject.ticks.append(failed("port", found, hint))
    else:
        subject.port = int(answer["port"])
        subject.ticks.append(ok("port"))


def _meet(subject: _Subject, everyone: Sequence[_Subject]) -> None:
    """Connects to every peer that listens. All at once: packets that vanish cost one time-out."""
    peers = {
        peer.name: {"host": peer.address, "port": peer.port, "secret": peer.secret}
        for peer in everyone
        if peer is not subject and peer.port is not None and peer.lost is None
    }
    if not peers:
        return
    waves = -(-len(peers) // _PEERS_AT_ONCE)
    limit_s = subject.timeouts.answer_s + waves * 2 * subject.timeouts.connect_s
    answer = subject.ask("connect", limit_s, peers=peers, wait_s=subject.timeouts.connect_s)
    subject.results = answer.get("results", {})


def _compare_torch(subjects: dict[str, _Subject]) -> None:
    versions = {name: s.torch for name, s in subjects.items() if s.torch is not None and s.lost is None}
    for name, tick in judge.same_torch(versions).items():
        ticks = subjects[name].ticks
        ticks[:] = [tick if t.name == "torch" and t.status == "ok" else t for t in ticks]


def _report(subject: _Subject) -> NodeReport:
    ticks, names = list(subject.ticks), judge.names(subject.session.node)
    if subject.lost is not None:
        # Found out what could be; whatever was not said is not known.
        ticks = ticks or [ok(name) for name in names[: names.index("python")]]
        at = next((name for name in names if name not in {t.name for t in ticks}), "peers")
        hint = f"try again; `skyctl check --limit {subject.name} -v` shows more"
        ticks.append(failed_by(at, subject.lost, hint))
    rank = {name: i for i, name in enumerate(names)}
    missing = [name for name in names if name not in {tick.name for tick in ticks}]
    ticks += skipped(missing, "the check ended before")
    ticks.sort(key=lambda tick: rank.get(tick.name, len(rank)))
    interface = interface_of(subject.session, subject.address) if subject.address else None
    return NodeReport(node=subject.name, address=subject.address, interface=interface, ticks=tuple(ticks))


def _pairs(cluster: Cluster, subjects: dict[str, _Subject]) -> list[PairReport]:
    nodes = {node.name: node for node in cluster.nodes}
    interfaces = {
        name: {interface: address for address, interface in own_addresses(s.session).items()}
        for name, s in subjects.items()
    }
    pairs = []
    for source in subjects.values():
        for target, result in source.results.items():
            pair = PairReport(source=source.name, target=target, connect_s=result.get("connect_s"))
            if "error" in result:
                where = f"{subjects[target].address}:{subjects[target].port}"
                error = f"{source.name} can't connect to {target} at {where}: {result['error']}"
                hint = judge.pair_hint(pair, nodes, interfaces)
                pair = pair.model_copy(update={"error": error, "hint": hint})
            pairs.append(pair)
    return pairs
