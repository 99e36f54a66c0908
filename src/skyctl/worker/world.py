"""All ranks of a run as torch.distributed knows them, and those of them that this rank talks to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from skyctl.agent.task_events import to_message
from skyctl.errors import RunError
from skyctl.transport.planned_process_group import PairOptions, PlannedProcessGroup
from skyctl.transport.process_group import SkyctlProcessGroup, run_in_thread, wait_for_all
from skyctl.transport.torch_backend import join, planned_group, planned_pair
from skyctl.worker.launcher_link import LauncherLink
from skyctl.worker.peer import Neighbours, Peer
from skyctl.worker.rank_events import KeyWantedEvent, StoredEvent
from skyctl.worker.rank_order import MEMBER_PURPOSE, SUM_PURPOSE, WorldOrder
from skyctl.worker.rank_requests import StoredRequest
from skyctl.worker.trace import clock_offset
from skyctl.worker.trace.trace_recorder import TraceRecorder

_c10d: Any = dist  # Store is not in torch's type stubs


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
                answer = self._link.expect(StoredRequest)
                self._values[answer.key] = bytes.fromhex(answer.value)
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        """Waits until every key is set; the launcher watches for how long."""
        for key in keys:
            self.get(key)


class World:
    """A rank's place among all: ``join``, then ``connect``; ``close`` in any case.

    Attributes:
        peers: by rank, those that it talks to.
        store: over which they find each other, until training begins.

    Args:
        order: its place there.
        ring: the ranks in the order in which the backend's own collective sums; None: nothing does.
        recorder: given clock offsets, where a trace is recorded.
        may_change: ranks may leave, and others join: sums have connections of their own (``connect_sums``).
    """

    def __init__(
        self,
        order: WorldOrder,
        ring: Sequence[int] | None,
        link: LauncherLink,
        device: torch.device,
        recorder: TraceRecorder | None = None,
        *,
        may_change: bool = False,
    ) -> None:
        self._order, self._ring, self._may_change = order, ring, may_change
        self._member_group: SkyctlProcessGroup | None = None
        self._sum_group: SkyctlProcessGroup | None = None
        self._group_options: dict[str, PairOptions] = {}
        self._device, self._recorder = device, recorder
        self._group: PlannedProcessGroup | None = None
        self._is_member = False
        self.store = LauncherStore(link)  # torch keeps none of its own
        self.peers: dict[int, Peer] = {}

    @property
    def neighbours(self) -> Neighbours:
        """Those before and after this rank in its pipeline."""
        before, after = self._order.before, self._order.after
        return Neighbours(
            None if before is None else self.peers[before], None if after is None else self.peers[after]
        )

    def join(self) -> None:
        """Makes this process a rank of torch.distributed; nothing is exchanged yet.

        Raises:
            RunError: the order has no secret for a peer.
        """
        order = self._order
        if unknown := order.hosts.keys() - order.secrets.keys():
            raise RunError(f"the order has no secret that this rank shares with rank {min(unknown)}")
        near = [rank for rank in (order.before, order.after) if rank is not None]
        hosts = {rank: order.hosts[rank] for rank in near} if self._may_change else order.hosts
        self._options = PairOptions(
            hosts=hosts,
            secrets={rank: order.secrets[rank] for rank in hosts},
            interface=order.interface,
            identity=order.tls,
            devices=dict.fromkeys(near, self._device),
            backend=order.backend,
            ring=self._ring,
        )
        group: Any = join(self.store, order.rank, order.ranks, self._options, order.timeout_s)
        self._group, self._is_member = group, True
        self.peers = {rank: Peer(group, rank, f"rank {rank} ({host})") for rank, host in hosts.items()}

    def connect(self) -> None:
        """Connects to all peers at the same time, measures how far they are, and compares clocks.

        Raises:
            PeerUnreachableError: a peer can't be reached, or did not come in time.
            RunError: the interface named has no address.
        """
        assert self._group is not None, "join() first"
        self._group.connect(self.store, self._options)
        wait_for_all([run_in_thread(peer.measure_latency) for peer in self.peers.values()])
        self.compare_clocks("start")

    def connect_members(self) -> dict[int, Peer]:
        """By rank, all peers over a second connection each, which stays while those of sums come and go.

        Raises:
            PeerUnreachableError: a peer can't be reached, or did not come in time.
        """
        group, options = self._make_group(MEMBER_PURPOSE)
        self._member_group = group
        group.connect(self.store, options)
        return {rank: self._peer(group, rank) for rank in self._order.hosts}

    def connect_sums(self, *, later: bool = False) -> tuple[SkyctlProcessGroup, dict[int, Peer]]:
        """The connections that sums go over: they come and go with the ranks that are there.

        Args:
            later: this rank is no member yet; it connects to nobody before it ``reconnect``s.

        Raises:
            PeerUnreachableError: a peer can't be reached, or did not come in time.
        """
        group, options = self._make_group(SUM_PURPOSE)
        self._sum_group = group
        peers = {rank: self._peer(group, rank) for rank in self._order.hosts}
        if later:
            group.find_listeners(self.store, options)
        else:
            group.connect(self.store, options)
            wait_for_all([run_in_thread(peer.measure_latency) for peer in peers.values()])
        return group, peers

    def admit(self, rank: int, host: str, secret: str, limit_s: float) -> tuple[Peer, Peer]:
        """A rank of a higher number is to become a peer: returns it as a member and as one that sums.

        Listens for it, and waits until it has connected as a member, for ``limit_s`` at most.

        Raises:
            PeerUnreachableError: it did not come in time.
        """
        found = []
        for purpose, group in ((SUM_PURPOSE, self._sum_group), (MEMBER_PURPOSE, self._member_group)):
            assert group is not None, "connect_members() and connect_sums() first"
            options = self._group_options[purpose]
            options = replace(options, hosts={rank: host}, secrets={rank: secret})
            pair = planned_pair(rank, options, self._order.timeout_s)
            group.listen_for(rank, pair, self.store, options)
            found.append(Peer(group, rank, f"rank {rank} ({host})"))
        assert self._member_group is not None
        self._member_group.accept(rank, limit_s)
        as_summing, as_member = found
        return as_member, as_summing

    def _make_group(self, purpose: str) -> tuple[SkyctlProcessGroup, PairOptions]:
        order = self._order
        keeps = purpose == SUM_PURPOSE
        options = replace(
            self._options, hosts=order.hosts, purpose=purpose, keeps_listening=keeps, devices={}
        )
        options = replace(options, secrets={rank: order.secrets[rank] for rank in order.hosts})
        self._group_options[purpose] = options
        return planned_group(order.rank, order.ranks, options, order.timeout_s), options

    def _peer(self, group: SkyctlProcessGroup, rank: int) -> Peer:
        return Peer(group, rank, f"rank {rank} ({self._order.hosts[rank]})")

    def compare_clocks(self, when: str) -> None:
        """Compares clocks with the ranks that the order names, at the run's ``start`` or ``end``.

        No-op without a trace. Nothing else may be under way.

        Raises:
            PeerLostError, RunError: the connection's.
        """
        if self._recorder is None:
            return
        answers = [
            run_in_thread(partial(clock_offset.answer_clock_requests, self.peers[rank]))
            for rank in self._order.clock_for
        ]
        if self._order.clock_of is not None:
            offset = clock_offset.measure_clock_offset(self.peers[self._order.clock_of])
            self._recorder.record_clock_offset(when, offset)
        for answer in answers:
            answer.result()

    def close(self, *, graceful: bool = False) -> None:
        """Closes the connections to all peers; whatever waits on them ends. Idempotent.

        Args:
            graceful: only once the peers close too.
        """
        for group in (self._group, self._member_group, self._sum_group):
            if group is not None:
                group.close(graceful=graceful)
        if self._is_member and not graceful:
            self._is_member = False
            dist.destroy_process_group()
