"""Ranks of one node that exchange tensors with each other over loopback, to measure what that costs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from functools import partial
from typing import Any

from skyctl.errors import RunError
from skyctl.transport import BACKEND, GLOO
from skyctl.transport.gloo_process_group import GlooProcessGroup
from skyctl.transport.peer_connection import PeerConnection
from skyctl.transport.planned_process_group import PairOptions, PlannedProcessGroup
from skyctl.transport.process_group import SkyctlProcessGroup, run_in_thread, wait_for_all
from skyctl.transport.tls_identity import TlsIdentity

HOST = "127.0.0.1"


class LoopbackRanks:
    """How ranks of this node are connected: each pair proves a secret, since others may be logged in here.

    Args:
        size: of all ranks, in this process and others.
        secret: of every pair.
        backend: what carries tensors: ``skyctl`` or ``gloo``.
        identity: the TLS certificate of all ranks; None: nothing is encrypted.
        timeout_s: for connecting, and for one transfer.
    """

    def __init__(
        self, size: int, secret: str, backend: str, identity: TlsIdentity | None, timeout_s: float
    ) -> None:
        self._size, self._secret, self._backend = size, secret, backend
        self._identity, self._timeout_s = identity, timeout_s

    def connect(self, store: Any, peers: Mapping[int, Sequence[int]]) -> dict[int, PlannedProcessGroup]:
        """The ranks of this process, connected.

        Args:
            store: a ``dist.Store`` that all ranks reach.
            peers: by rank of this process, those that it exchanges tensors with.

        Raises:
            RunError: they can't connect to each other, or not in time.
        """
        groups, connecting = {}, []
        try:
            for rank, others in peers.items():
                groups[rank] = self._make(rank, others)
                options = PairOptions(
                    dict.fromkeys(others, HOST),
                    dict.fromkeys(others, self._secret),
                    identity=self._identity,
                    backend=self._backend,
                )
                connecting.append(run_in_thread(partial(groups[rank].connect, store, options)))
            wait_for_all(connecting, self._timeout_s)
        except (RuntimeError, OSError, FutureTimeoutError) as exc:
            for group in groups.values():
                group.close()
            raise RunError(
                f"this node can't connect to itself over {self._backend} within {self._timeout_s:g} s: "
                f"{exc or 'no answer'}"
            ) from exc
        return groups

    def _make(self, rank: int, peers: Sequence[int]) -> PlannedProcessGroup:
        if self._backend == GLOO:
            limit = timedelta(seconds=self._timeout_s)
            return GlooProcessGroup(rank, self._size, dict.fromkeys(peers, HOST), limit)
        assert self._backend == BACKEND, self._backend
        pairs = {
            peer: PeerConnection("itself", self._timeout_s, secret=self._secret, identity=self._identity)
            for peer in peers
        }
        return SkyctlProcessGroup(rank, self._size, pairs)
