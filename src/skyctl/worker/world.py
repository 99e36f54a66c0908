"""All ranks of a run as torch.distributed knows them, and those of them that this rank talks to."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from skyctl.agent.task_events import to_message
from skyctl.transport.process_group import (
    PairOptions,
    PlannedProcessGroup,
    join,
    run_in_thread,
    wait_for_all,
)
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.transport.torch_backend import BACKEND
from skyctl.worker import clock_offset
from skyctl.worker.launcher_link import LauncherLink
from skyctl.worker.peer import Neighbours, Peer
from skyctl.worker.rank_events import KeyWantedEvent, StoredEvent
from skyctl.worker.replicas import ReplicaPlace, close_replicas, end_offer, offer_replicas
from skyctl.worker.trace_recorder import TraceRecorder

_c10d: Any = dist  # Store is not in torch's type stubs
DEFAULT_TRANSFER_TIMEOUT_S = 1800.0
"""For one transfer, waiting for the peer included, where the payload gives no ``timeout_s``."""


class LauncherStore(_c10d.Store):  # type: ignore[misc]
    """The store over which ranks find each other: the launcher keeps it, and no port is open for it.

    It serves until the ranks start; nothing needs it afterwards, since a run outlives its launcher.
    """

    def __init__(self, link: LauncherLink) -> None:
        super().__init__()
        self._link = link
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a key, once for all ranks."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._link.channel.send(to_message(StoredEvent(key, data.hex())))

    def get(self, key: str) -> bytes:
        """The key's value; waits until a rank has set it.

        Raises:
            RunError: the launcher says something else.
        """
        if key not in self._values:
            self._link.channel.send(to_message(KeyWantedEvent(key)))
            while key not in self._values:
                answer = self._link.expect("stored")
                self._values[str(answer["key"])] = bytes.fromhex(answer["value"])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        """Waits until every key is set; the launcher watches for how long."""
        for key in keys:
            self.get(key)


class World:
    """A rank's place among all: ``join``, then ``connect``; ``close`` in any case.

    Attributes:
        peers: by rank, those that it talks to.

    Args:
        payload: the rank's payload (``worker.rank``).
        recorder: given clock offsets, where a trace is recorded.
    """

    def __init__(
        self,
        payload: Mapping[str, Any],
        link: LauncherLink,
        device: torch.device,
        recorder: TraceRecorder | None = None,
    ) -> None:
        self._payload, self._link, self._device, self._recorder = payload, link, device, recorder
        self._group: PlannedProcessGroup | None = None
        self._is_member = False
        self._store = LauncherStore(link)  # torch keeps none of its own
        sync = payload.get("sync") or {"peers": (), "groups": ()}
        self._ring = next((group["ring"] for group in sync["groups"] if group.get("ring")), None)
        ends = (payload["previous"], payload["next"])
        told = [*(end for end in ends if end is not None), *sync["peers"]]
        self._hosts = {int(peer["rank"]): str(peer["host"]) for peer in told}
        self.peers: dict[int, Peer] = {}
        before, after = (None if end is None else int(end["rank"]) for end in ends)
        self._before, self._after = before, after
        self._clock_of: int | None = sync.get("clock_of") if before is None else before
        self._clock_for: list[int] = [*(sync.get("clock_for") or ()), *(() if after is None else (after,))]

    @property
    def neighbours(self) -> Neighbours:
        """Those before and after this rank in its pipeline."""
        before, after = self._before, self._after
        return Neighbours(
            None if before is None else self.peers[before], None if after is None else self.peers[after]
        )

    def join(self) -> None:
        """Makes this process a rank of torch.distributed; nothing is exchanged yet."""
        payload = self._payload
        self._options = PairOptions(
            hosts=self._hosts,
            secrets={rank: str(payload["secrets"][str(rank)]) for rank in self._hosts},
            interface=payload.get("interface"),
            identity=TlsIdentity.from_credentials(payload.get("tls")),
            devices={rank: self._device for rank in (self._before, self._after) if rank is not None},
            backend=str(payload.get("backend") or BACKEND),
            ring=self._ring,
        )
        timeout_s = float(payload.get("timeout_s") or DEFAULT_TRANSFER_TIMEOUT_S)
        group: Any = join(self._store, int(payload["rank"]), int(payload["ranks"]), self._options, timeout_s)
        self._group, self._is_member = group, True
        offer_replicas(self._store, self._replica_place(timeout_s), validates=self._validates)
        self.peers = {rank: Peer(group, rank, f"rank {rank} ({host})") for rank, host in self._hosts.items()}

    @property
    def _validates(self) -> bool:
        return (self._payload.get("recipe") or {}).get("validate_every") is not None

    def _replica_place(self, timeout_s: float) -> ReplicaPlace | None:
        """Who holds this rank's layers, too; None: it holds none."""
        told = self._payload.get("replicas")
        if told is None:
            return None
        return ReplicaPlace(
            tuple(map(int, told["ranks"])),
            str(self._payload["replica_secret"]).encode(),
            str(told["address"]),
            self._options.interface,
            self._options.identity,
            timeout_s,
            told["unlike"],
        )

    def connect(self) -> None:
        """Connects to all peers at the same time, measures how far they are, and compares clocks.

        Raises:
            PeerUnreachableError: a peer can't be reached, or did not come in time.
            RunError: the interface named has no address.
        """
        assert self._group is not None, "join() first"
        end_offer()
        self._group.connect(self._store, self._options)
        wait_for_all([run_in_thread(peer.measure_latency) for peer in self.peers.values()])
        self.compare_clocks("start")

    def compare_clocks(self, when: str) -> None:
        """Compares clocks with the ranks that the payload names, at the run's ``start`` or ``end``.

        No-op without a trace. Nothing else may be under way.

        Raises:
            PeerLostError, RunError: the connection's.
        """
        if self._recorder is None:
            return
        answers = [
            run_in_thread(partial(clock_offset.answer_clock_requests, self.peers[rank]))
            for rank in self._clock_for
        ]
        if self._clock_of is not None:
            offset = clock_offset.measure_clock_offset(self.peers[self._clock_of])
            self._recorder.record_clock_offset(when, offset)
        for answer in answers:
            answer.result()

    def close(self, *, graceful: bool = False) -> None:
        """Closes the connections to all peers; whatever waits on them ends. Idempotent.

        Args:
            graceful: only once the peers close too.
        """
        close_replicas(graceful=graceful)
        if self._group is not None:
            self._group.close(graceful=graceful)
        if self._is_member and not graceful:
            self._is_member = False
            dist.destroy_process_group()
