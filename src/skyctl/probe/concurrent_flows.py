"""Flows between several processes of the probe at the same time: started together, and what they got.

A hub waits until its peers are connected, and then all its flows begin; with ``hold`` those of several hubs
begin together, when the launcher says so. Every flow is a number of messages of one size; its receiver notes
when each was there (``probe/node/link_speed.py``).
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyctl.errors import ProtocolError
from skyctl.probe.device_probes import DeviceProbe, DeviceProbes
from skyctl.probe.node.probe_requests import FlowPair, FlowRequest, GoRequest
from skyctl.probe.probe_messages import check_arrivals

FlowEnds = tuple[str, str]
"""The nodes (source, target) of a flow."""
LEAST_MESSAGE_BYTES = 512


@dataclass(frozen=True)
class FlowSizes:
    """How long flows run, and in how many messages.

    ``settle_s`` to ``most_settle_s``: left out at the start, for TCP's slow start and the buckets' bursts, as
    ``settle_latencies`` latencies ask for. ``measure_s``: what follows, if the flow were alone.
    ``transfer_s``: how long it may take.
    """

    measure_s: float
    settle_s: float
    most_settle_s: float
    settle_latencies: int
    messages: int
    most_bytes: int
    transfer_s: float

    def settle_for(self, latency_s: float) -> float:
        """Seconds left out where the slowest link has that latency."""
        return min(self.most_settle_s, max(self.settle_s, self.settle_latencies * latency_s))

    def message_bytes(self, rate: float, settle_s: float) -> int:
        """A message of a flow that would take ``settle_s + measure_s`` at that rate (bytes/s)."""
        total_bytes = min(self.most_bytes, rate * (settle_s + self.measure_s))
        return max(LEAST_MESSAGE_BYTES, int(total_bytes / self.messages))


@dataclass(frozen=True)
class ReceivedFlow:
    """One flow as it came: when each message was there (seconds from the go), and a message's bytes."""

    arrivals_s: Sequence[float]
    message_bytes: int

    def passed_bytes(self, at_s: float) -> float:
        """Bytes that had come by then, each message counted as it grew, at an even pace."""
        done = bisect_left(self.arrivals_s, at_s)
        if done == len(self.arrivals_s):
            return float(done * self.message_bytes)
        before_s = self.arrivals_s[done - 1] if done else 0.0
        took_s = self.arrivals_s[done] - before_s
        return (done + (at_s - before_s) / took_s) * self.message_bytes if took_s > 0 else 0.0


def joint_rate(flows: Sequence[ReceivedFlow], settle_s: float) -> float | None:
    """Bytes per second of all flows while all of them ran; None where there was no such time."""
    end_s = min(flow.arrivals_s[-1] if flow.arrivals_s else 0.0 for flow in flows)
    start_s = min(settle_s, end_s / 2)
    if end_s <= start_s:
        return None
    passed_bytes = sum(flow.passed_bytes(end_s) - flow.passed_bytes(start_s) for flow in flows)
    return passed_bytes / (end_s - start_s)


@dataclass(frozen=True)
class HubRequest:
    """Flows of one hub with its peers. ``message_bytes``: by peer, of what it is sent and what comes back."""

    hub: str
    message_bytes: Mapping[str, tuple[int, int]]
    phase: str


Answers = dict[str, dict[str, list[float]] | str]
"""By node, when each message had come, by peer (seconds from the go); or why that is not known."""


class FlowPlayer:
    """Runs flows between processes of the probe.

    ``silent``: nodes that were asked and did not answer. ``busy_shares``: by node, the part of its processors
    that its flows of the last round took, as it says.

    Args:
        addresses: by node, the address at which its peers reach it; nodes without one are left out.
        limit_s: how long hubs, and then their peers, are waited for.
    """

    def __init__(
        self,
        probes: DeviceProbes,
        addresses: Mapping[str, str],
        sizes: FlowSizes,
        connect_s: float,
        transfer_s: float,
        limit_s: float,
    ) -> None:
        self._fleet, self._addresses, self.sizes, self._limit_s = probes, addresses, sizes, limit_s
        self._connect_s, self._transfer_s = connect_s, transfer_s
        first = probes.first_of_nodes()
        self.members = {name: member for name, member in first.items() if name in addresses}
        self.silent: set[str] = set()
        self.busy_shares: dict[str, float] = {}
        self._requests: dict[str, HubRequest] = {}
        self._secrets: dict[FlowEnds, str] = {}
        self._asked: list[str] = []
        self._ready: set[str] = set()
        self._answers: Answers = {}

    def missing(self, names: Sequence[str]) -> str | None:
        """The first of those nodes that can't take part any more."""
        return next((name for name in names if name in self.silent or name in self._fleet.failures), None)

    def play(self, requests: Sequence[HubRequest], *, hold: bool = False) -> Answers:
        """Starts the hubs, then their peers; returns when all have answered or are too late.

        Args:
            requests: without a node in common.
            hold: no hub's flows begin before all hubs are ready.
        """
        self._requests = {request.hub: request for request in requests}
        self._secrets = {(o.hub, peer): secrets.token_hex(16) for o in requests for peer in o.message_bytes}
        self._asked, self._ready, self._answers = [], set(), {}
        self.busy_shares = {}
        for request in requests:
            self._send(request.hub, request, "hub", list(request.message_bytes), hold=hold)
        self._wait(list(self._requests))
        self._wait([name for name in self._asked if name not in self._answers])
        for request in requests:
            for name in (request.hub, *request.message_bytes):
                self._answers.setdefault(name, "no answer in time")
        return self._answers

    def _send(
        self,
        name: str,
        request: HubRequest,
        role: str,
        others: Sequence[str],
        *,
        hold: bool = False,
        host: str | None = None,
        port: int | None = None,
    ) -> None:
        member = self.members[name]
        member.phase = request.phase
        pairs = []
        for other in others:
            peer = other if name == request.hub else name
            sent, received = request.message_bytes[peer]
            pairs.append(
                FlowPair(
                    peer=other,
                    secret=self._secrets[request.hub, peer],
                    messages=self.sizes.messages,
                    send_bytes=sent if name == request.hub else received,
                    receive_bytes=received if name == request.hub else sent,
                )
            )
        asked = FlowRequest(
            hub=request.hub,
            address=self._addresses[name],
            role=role,
            pairs=tuple(pairs),
            timeout_s=self._connect_s,
            transfer_s=self._transfer_s,
            hold=hold,
            host=host,
            port=port,
        )
        self._fleet.send(member, asked)

    def _wait(self, names: Sequence[str]) -> None:
        members = [self.members[name] for name in names]
        self._fleet.wait(members, "line", self._limit_s, self._hear, fatal=False)
        self.silent |= {name for name in names if name not in self._answers}

    def _hear(self, member: DeviceProbe, event: dict[str, Any]) -> None:
        name, hub = member.node.name, str(event.get("hub"))
        request = self._requests.get(hub)
        if request is None or member is not self.members[name] or name not in (hub, *request.message_bytes):
            return  # of an earlier round
        kind = event.get("event")
        if kind == "line":
            if "error" not in event:
                sizes = (
                    {hub: request.message_bytes[name][0]}
                    if name != hub
                    else {peer: back for peer, (_, back) in request.message_bytes.items()}
                )
                check_arrivals(member.node, event.get("arrivals", {}), sizes, self.sizes.messages)
                self.busy_shares[name] = event.get("busy_share") or 0.0
            self._answers[name] = event["error"] if "error" in event else event["arrivals"]
        elif kind == "line-listening":
            again = set(self._asked) & set(request.message_bytes)
            if name != hub or again or len(event["ports"]) != len(request.message_bytes):
                raise ProtocolError(f"node {name} listens for flows that it was not asked for", node=name)
            for peer, port in zip(request.message_bytes, event["ports"], strict=True):
                self._send(peer, request, "peer", [hub], host=event["address"], port=port)
                self._asked.append(peer)
        elif kind == "line-ready":
            self._ready.add(hub)
            gave_up = self._answers.keys() & self._requests.keys()  # a hub that waits has not answered
            if self._ready == set(self._requests) and not gave_up:
                for other in self._requests:
                    self._fleet.send(self.members[other], GoRequest())


def arrivals_of(answers: Answers, names: Sequence[str]) -> dict[str, dict[str, list[float]]] | str:
    """The arrivals at all of them, by node and peer; or the first reason why those are not known."""
    arrivals = {}
    for name in names:
        answer = answers[name]
        if isinstance(answer, str):
            return f"{name}: {answer}"
        arrivals[name] = answer
    return arrivals
