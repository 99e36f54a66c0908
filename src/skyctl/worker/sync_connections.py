"""The connections of a rank to those that it sums gradients with: one for each, apart from its neighbours'.

So sums never hold up activations. All routes between two ranks share their connection, each with tags of its
own. They are made as neighbours' are: by the launcher's word, and the pair's secret (``peer_connection``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from skyctl.transport import clock_offset
from skyctl.transport.peer_connection import PeerConnection
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.worker.stage_io import (
    CONNECT_TIMEOUT_S,
    DEFAULT_TRANSFER_TIMEOUT_S,
    PEER_READY_TIMEOUT_S,
    Neighbour,
    run_in_thread,
)
from skyctl.worker.trace_recorder import TraceRecorder


class SyncConnections:
    """The connections to every rank that a route joins this one with.

    Chunks are added in host memory, so the connections carry that, whatever the devices.

    Args:
        payload: the rank's payload (``worker.rank``), with ``sync``.
        recorder: given the offset of ``sync.clock_of``'s clock, where a trace is recorded.
    """

    def __init__(self, payload: Mapping[str, Any], recorder: TraceRecorder | None = None) -> None:
        self._recorder = recorder
        self._clock_of: int | None = payload["sync"].get("clock_of")
        self._clock_for: list[int] = payload["sync"].get("clock_for") or []
        self._rank, self._interface = int(payload["rank"]), payload.get("interface")
        self._hosts = {int(peer["rank"]): str(peer["host"]) for peer in payload["sync"]["peers"]}
        timeout_s = float(payload.get("timeout_s") or DEFAULT_TRANSFER_TIMEOUT_S)
        secrets = payload["secrets"].get("peers") or {}
        self.peers = {
            rank: Neighbour(
                PeerConnection(
                    f"rank {rank} ({host})",
                    timeout_s,
                    secret=str(secrets[str(rank)]),
                    peer_rank=rank,
                    identity=TlsIdentity.from_credentials(payload.get("tls")),
                )
            )
            for rank, host in sorted(self._hosts.items())
        }

    def connect(
        self, announce: Callable[[int, str, int], None], address_of: Callable[[int], tuple[str, int]]
    ) -> None:
        """Connects to all of them at the same time.

        Args:
            announce: told the port and the address on which this rank waits for a higher one, and which.
            address_of: waits for the host and port of a lower rank.

        Raises:
            PeerUnreachableError: a peer can't be reached, or did not come in time.
            RunError: the interface named has no address.
        """
        accepted: list[Future[None]] = []
        for rank, peer in self.peers.items():
            if rank > self._rank:
                address = peer.connection.own_address(self._hosts[rank], self._interface)
                port = peer.connection.listen(address)
                announce(port, address, rank)
                accepted.append(run_in_thread(partial(_accept, peer)))
        for rank, peer in self.peers.items():
            if rank < self._rank:
                host, port = address_of(rank)
                own = peer.connection.own_address(host, self._interface)
                peer.connection.connect(host, port, own, CONNECT_TIMEOUT_S)
                peer.latency_s = peer.connection.measure_round_trip_s() / 2
        for future in accepted:
            future.result()
        self.compare_clocks("start")

    def compare_clocks(self, when: str) -> None:
        """Compares clocks with the ranks that the payload names, at the run's ``start`` or ``end``.

        No-op without a trace. No sum may be under way.

        Raises:
            PeerLostError, RunError: the connection's.
        """
        if self._recorder is None:
            return
        answers = [
            run_in_thread(partial(clock_offset.answer_clock_requests, self.peers[rank].connection))
            for rank in self._clock_for
        ]
        if self._clock_of is not None:
            offset = clock_offset.measure_clock_offset(self.peers[self._clock_of].connection)
            self._recorder.record_clock_offset(when, offset)
        for answer in answers:
            answer.result()

    def close(self, *, graceful: bool = False) -> None:
        """Closes them; whatever waits on them ends.

        Args:
            graceful: only once the peers close too. All ranks go through their pairs in one order.
        """
        for peer in self.peers.values():
            peer.connection.close(graceful=graceful)


def _accept(peer: Neighbour) -> None:
    peer.connection.accept(PEER_READY_TIMEOUT_S)
    peer.latency_s = peer.connection.measure_round_trip_s() / 2
