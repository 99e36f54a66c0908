"""Preflight of a cluster: every node side by side, through the very sessions that a launch would use."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from skyctl.agent.task_orders import write_order
from skyctl.check import diagnosis
from skyctl.check.check_answers import TorchEnvironment
from skyctl.check.check_orders import (
    ClockRequest,
    ConnectRequest,
    EnvironmentRequest,
    ListenRequest,
    PeerPort,
    TorchOrder,
)
from skyctl.check.check_report import (
    CheckReport,
    DtypeReport,
    NodeReport,
    PairReport,
    Tick,
    failed,
    failed_with,
    ok,
    skipped,
)
from skyctl.check.node_questions import CHECK_TASK, NodeQuestions
from skyctl.errors import ProtocolError, SkyctlError
from skyctl.records.cluster import Cluster
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions
from skyctl.remote.peer_addresses import find_peer_addresses, interface_with_address, own_addresses
from skyctl.remote.session_factory import close_sessions, make_connector, open_sessions

PRELOADED = (CHECK_TASK, "torch")
"""The modules that local nodes' tasks are forked with: not all that ranks need, which takes as long again."""
CONNECT_TIMEOUT_S = 5.0
"""How long one node tries to connect to another."""
ANSWER_TIMEOUT_S = 60.0
TORCH_TIMEOUT_S = 180.0
"""Torch's import takes long on a slow disk or a small share of a processor."""

_PINGS = 5
_NODES_AT_ONCE = 32
_PEERS_AT_ONCE = 32  # as check_task.py tries them

CheckProgress = Callable[[str, float, float], None]
"""Called with what is going on, and how much of how much is done."""


@dataclass
class _CheckedNode:
    """A node that a session is open on, and what is known of it so far."""

    session: Session
    ticks: list[Tick] = field(default_factory=list)
    torch: str | None = None
    dtypes: tuple[DtypeReport, ...] = ()
    address: str | None = None
    port: int | None = None
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    lost: SkyctlError | None = None
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    questions: NodeQuestions = field(init=False)

    def __post_init__(self) -> None:
        self.questions = NodeQuestions(self.session)

    @property
    def name(self) -> str:
        return self.session.node.name


def check_nodes(
    cluster: Cluster,
    options: ConnectOptions,
    on_event: CheckProgress | None = None,
) -> CheckReport:
    """Looks at every node and every pair; what fails is a problem with its next step, never an exception.

    Every node that lets us in connects to every other one, at the addresses and on ports of the kind that
    training uses. Nothing is left on the nodes but skyctl's own files in their cache.

    Args:
        on_event: called from this thread and others.
    """
    progress = _ProgressCounter(on_event, len(cluster.nodes))
    progress("connecting")
    with make_connector(cluster.nodes, preloaded=PRELOADED) as connector:
        outcomes = open_sessions(
            cluster.nodes, options, lambda name, _: progress(f"{name} answered"), connector=connector
        )
    sessions = {name: o for name, o in outcomes.items() if not isinstance(o, SkyctlError)}
    subjects = {name: _CheckedNode(session) for name, session in sessions.items()}
    try:
        with ThreadPoolExecutor(_NODES_AT_ONCE, "check") as pool:
            _on_every_node(pool, subjects, _inspect_node, progress)
            _find_addresses(subjects)
            _on_every_node(pool, subjects, _start_listening, progress)
            everyone = list(subjects.values())
            _on_every_node(pool, subjects, lambda subject: _connect_to_peers(subject, everyone), progress)
    finally:
        with suppress(SkyctlError, OSError):
            close_sessions(sessions.values())
    _compare_torch_versions(subjects)
    nodes = []
    for node in cluster.nodes:
        outcome = outcomes[node.name]
        if isinstance(outcome, SkyctlError):
            report = NodeReport(
                node=node.name,
                address=None,
                interface=None,
                ticks=tuple(diagnosis.connection_ticks(node, outcome)),
            )
        else:
            report = _node_report(subjects[node.name])
        nodes.append(report)
    pairs = _pair_reports(cluster, subjects)
    fine = all(report.ok for report in nodes) and all(pair.error is None for pair in pairs)
    return CheckReport(cluster=cluster.name, ok=fine, nodes=tuple(nodes), pairs=tuple(pairs))


class _ProgressCounter:
    """Counts what is done: each node connects, is looked at, listens, and meets its peers."""

    def __init__(self, on_event: CheckProgress | None, nodes: int) -> None:
        self.on_event = on_event
        self.total = nodes * 4
        self.done = -1
        self.lock = threading.Lock()

    def __call__(self, text: str) -> None:
        with self.lock:
            self.done += 1
            if self.on_event is not None:
                self.on_event(text, self.done, self.total)


def _on_every_node(
    pool: ThreadPoolExecutor,
    subjects: dict[str, _CheckedNode],
    work: Callable[[_CheckedNode], None],
    progress: _ProgressCounter,
) -> None:
    """Does one thing on every node at once; a node that fails is marked lost and left out of what follows."""

    def work_on(subject: _CheckedNode) -> None:
        if subject.lost is None:
            try:
                work(subject)
            except SkyctlError as exc:
                subject.lost = exc
        progress(f"{subject.name} {'checked' if subject.lost is None else 'failed'}")

    for job in [pool.submit(work_on, subject) for subject in subjects.values()]:
        job.result()


def _inspect_node(subject: _CheckedNode) -> None:
    """Reach to login went well, or there would be no session; Python, torch, devices, limits, clock."""
    node, session = subject.session.node, subject.session
    names = diagnosis.check_names(node)
    environment = subject.questions.ask(EnvironmentRequest, ANSWER_TIMEOUT_S)
    host = session.host if node.transport == "ssh" else "this machine"
    subject.ticks = [ok(name, host if name == "reach" else None) for name in names[: names.index("python")]]
    subject.ticks.append(diagnosis.python_tick(environment))
    clock = diagnosis.clock_tick(*_clock_offset(subject))
    answer: dict[str, Any] | SkyctlError
    try:
        order = write_order(TorchOrder(node.devices))
        answer = session.run_task(CHECK_TASK, order, TORCH_TIMEOUT_S, answer=TorchEnvironment)
        subject.torch = answer["torch"]
        subject.dtypes = tuple(DtypeReport(**fields) for fields in answer["dtypes"])
    except SkyctlError as exc:
        if session.lost is not None or isinstance(exc, ProtocolError):
            raise
        answer = exc
    subject.ticks += [*diagnosis.torch_ticks(node, answer), *diagnosis.dtype_ticks(node, subject.dtypes)]
    subject.ticks += [*diagnosis.limits_ticks(node, environment), clock]


def _clock_offset(subject: _CheckedNode) -> tuple[float, float]:
    """(offset, round trip) in seconds of the quickest of a few questions (Cristian's algorithm)."""
    best = (0.0, float("inf"))
    for _ in range(_PINGS):
        began, sent = time.time(), time.monotonic()
        there = subject.questions.ask(ClockRequest, ANSWER_TIMEOUT_S)["time_s"]
        round_trip_s = time.monotonic() - sent
        if round_trip_s < best[1]:
            best = (there - (began + round_trip_s / 2), round_trip_s)
    return best


def _find_addresses(subjects: dict[str, _CheckedNode]) -> None:
    there = {name: subject.session for name, subject in subjects.items() if subject.lost is None}
    for name, outcome in find_peer_addresses(there).items():
        subject = subjects[name]
        if isinstance(outcome, SkyctlError):
            hint = f"name the interface its peers reach it by: `interface:` of node {name!r} in cluster.yaml"
            subject.ticks.append(failed_with("address", outcome, hint))
        else:
            subject.address = outcome
            interface = interface_with_address(subject.session, outcome)
            finding = f"{outcome} ({interface})" if interface else outcome
            subject.ticks.append(ok("address", finding))


def _start_listening(subject: _CheckedNode) -> None:
    if subject.address is None:
        subject.ticks += skipped(["port"], "no address")
        return
    listen = partial(ListenRequest, address=subject.address, secret=subject.secret)
    answer = subject.questions.ask(listen, ANSWER_TIMEOUT_S)
    if "port" not in answer:
        hint = f"name another interface with `interface:` of node {subject.name!r} in cluster.yaml"
        finding = f"no port of {subject.address} can be listened on: {answer.get('error')}"
        subject.ticks.append(failed("port", finding, hint))
    else:
        subject.port = answer["port"]
        subject.ticks.append(ok("port"))


def _connect_to_peers(subject: _CheckedNode, everyone: Sequence[_CheckedNode]) -> None:
    """Connects to every peer that listens. All at once: packets that vanish cost one time-out."""
    peers = {
        peer.name: PeerPort(peer.address, peer.port, peer.secret)
        for peer in everyone
        if peer is not subject and peer.address is not None and peer.port is not None and peer.lost is None
    }
    if not peers:
        return
    waves = -(-len(peers) // _PEERS_AT_ONCE)
    limit_s = ANSWER_TIMEOUT_S + waves * 2 * CONNECT_TIMEOUT_S
    answer = subject.questions.ask(partial(ConnectRequest, peers=peers, wait_s=CONNECT_TIMEOUT_S), limit_s)
    results = answer.get("results", {})
    if not set(results) <= set(peers):
        name = subject.name
        raise ProtocolError(f"node {name} connected to nodes that it was not told of", node=name)
    subject.results = results


def _compare_torch_versions(subjects: dict[str, _CheckedNode]) -> None:
    versions = {name: s.torch for name, s in subjects.items() if s.torch is not None and s.lost is None}
    for name, tick in diagnosis.torch_version_warnings(versions).items():
        ticks = subjects[name].ticks
        ticks[:] = [tick if t.name == "torch" and t.status == "ok" else t for t in ticks]


def _node_report(subject: _CheckedNode) -> NodeReport:
    ticks, names = list(subject.ticks), diagnosis.check_names(subject.session.node)
    if subject.lost is not None:
        # Found out what could be; whatever was not said is not known.
        ticks = ticks or [ok(name) for name in names[: names.index("python")]]
        at = next((name for name in names if name not in {t.name for t in ticks}), "peers")
        hint = f"try again; `skyctl check --limit {subject.name} -v` shows more"
        ticks.append(failed_with(at, subject.lost, hint))
    rank = {name: i for i, name in enumerate(names)}
    rank["dtypes"] = rank["devices"]  # said only where there is something to say
    missing = [name for name in names if name not in {tick.name for tick in ticks}]
    ticks += skipped(missing, "the check ended before")
    ticks.sort(key=lambda tick: rank.get(tick.name, len(rank)))
    interface = interface_with_address(subject.session, subject.address) if subject.address else None
    return NodeReport(
        node=subject.name,
        address=subject.address,
        interface=interface,
        ticks=tuple(ticks),
        dtypes=subject.dtypes,
    )


def _pair_reports(cluster: Cluster, subjects: dict[str, _CheckedNode]) -> list[PairReport]:
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
                hint = diagnosis.pair_hint(pair, nodes, interfaces)
                pair = pair.model_copy(update={"error": error, "hint": hint})
            pairs.append(pair)
    return pairs
