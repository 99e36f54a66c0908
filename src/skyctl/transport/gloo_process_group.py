"""Torch's own Gloo between the ranks of a run: only planned pairs connect, and each proves its secret.

Gloo itself admits whoever reaches its port, believes what rank he says he is, and encrypts nothing. So its
listener takes packets from the peers' addresses alone, and each pair proves its secret before anything else
is sent over it. Left to others are the moment before the listener is narrowed, and users of a peer's own
address, who can stall or end a run. A message that is longer than expected ends the process, a shorter one
passes: that is how Gloo is written.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from skyctl.agent.network_interfaces import local_address_towards
from skyctl.errors import RunError
from skyctl.transport.congestion_control import suit_round_trip
from skyctl.transport.planned_process_group import (
    PEER_READY_TIMEOUT_S,
    PairOptions,
    PlannedProcessGroup,
    Store,
)
from skyctl.transport.process_group import read_address, run_in_thread, wait_for_all
from skyctl.transport.transfer_errors import (
    PeerUnreachableError,
    TransferClosedError,
    TransferTimeoutError,
    translate_transfer_error,
)
from skyctl.transport.work import NO_TIMEOUT, Work

_c10d: Any = dist  # what follows is not in torch's type stubs
NONCE_TAG, PROOF_TAG, CLOSE_TAG, DOUBT_TAG, FIRST_TAG = 0, 1, 2, 3, 16
NONCE_BYTES = 32
GRACE_S = 10.0
"""At the end a peer is waited for so long."""
_SOURCE_ADDRESS = 0xFFF00000 + 12
"""Of an IPv4 packet, for a socket's filter: ``SKF_NET_OFF`` and the place in its header."""
_SO_ATTACH_FILTER, _WHOLE_PACKET = 26, 0x40000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06


class _StoreByPlace(_c10d.Store):  # type: ignore[misc]
    """A store of keys by rank, as Gloo uses it, whose ranks are places on a ring: ``0/PLACE``."""

    def __init__(self, store: Store, ring: Sequence[int]) -> None:
        super().__init__()
        self._store: Any = store  # Gloo sets bytes
        self._rank_keys = {f"0/{place}": f"0/{rank}" for place, rank in enumerate(ring)}

    def _by_rank(self, key: str) -> str:
        return self._rank_keys.get(key, key)

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(self._by_rank(key), value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(self._by_rank(key))
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        for key in keys:
            self.get(key)


_KEPT: list[Any] = []
"""Gloo's ends of all groups of this process. Freeing one ends the process at times: Gloo's event loop finds a
connection that another thread has just closed (``state_ <= CONNECTED. 5 vs 4``). So none is ever freed."""


class GlooProcessGroup(PlannedProcessGroup):
    """One rank's end of Gloo's connections to its peers.

    Args:
        rank, size: of this process, and of all.
        hosts: by rank, the address at which each peer's machine is reached.
        timeout: for one transfer, waiting for the peer included.
        ring: all ranks, in the order in which ``sum_in_ring`` goes round; both its neighbours are peers of a
            rank. None: in their own order.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        hosts: Mapping[int, str],
        timeout: timedelta,
        ring: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, size, hosts)
        self._ring = list(ring or range(size))  # Gloo's ranks are places on it
        self._names = {peer: f"rank {peer} ({host})" for peer, host in hosts.items()}
        self._timeout = timeout
        self._gloo: Any = None
        self._sockets: list[socket.socket] = []
        self._is_closed = False

    def connect(self, store: Store, options: PairOptions) -> None:
        """Connects to all peers at the same time, and has each prove the pair's secret.

        Raises:
            PeerProtocolError: a peer does not say where it is.
            PeerUnreachableError: what answers as a peer does not know the pair's secret.
            RunError: peers are reached from several addresses, and Gloo uses one; or it has no listener.
        """
        if not self.peers:
            return
        own = {peer: local_address_towards(options.hosts[peer], options.interface) for peer in self.peers}
        if len(set(own.values())) > 1:
            raise RunError(
                f"rank {self.rank()} reaches its peers from {', '.join(sorted(set(own.values())))}, and Gloo "
                "uses one address",
                hint="--backend skyctl connects each pair on its own route",
            )
        [address] = set(own.values())
        store.set(f"gloo-address/{self.rank()}", address)
        allowed = {peer: read_address(store.get(f"gloo-address/{peer}"), peer) for peer in self.peers}
        for peer, theirs in allowed.items():
            if (leaves_by := local_address_towards(theirs)) != address:
                raise RunError(
                    f"rank {self.rank()} is to use {address}, and what it sends to {self._names[peer]} "
                    f"leaves from {leaves_by}: Gloo can't be told otherwise",
                    hint="--backend skyctl, or another 'interface:' in cluster.yaml",
                )
        gloo_options = _c10d.ProcessGroupGloo._Options()
        try:
            with _new_sockets(address) as opened:  # it listens from here on
                gloo_options._devices = [
                    _c10d.ProcessGroupGloo.create_device(hostname=address, lazy_init=True)
                ]
        except TypeError as exc:
            raise RunError(
                f"torch {torch.__version__} can't connect planned pairs alone over Gloo",
                hint="a newer torch on this node, or --backend skyctl",
            ) from exc
        _narrow_listeners(opened, list(allowed.values()))
        gloo_options._timeout = timedelta(seconds=PEER_READY_TIMEOUT_S)
        place = self._ring.index(self.rank())
        with _new_sockets(address) as opened:  # peers connect as soon as this one says where it is
            places = _StoreByPlace(store, self._ring)
            self._gloo = _c10d.ProcessGroupGloo(places, place, self.size(), gloo_options)
            _KEPT.append(self._gloo)
            wait_for_all(
                [run_in_thread(partial(self._prove, peer, options.secrets[peer])) for peer in self.peers]
            )
        # another group of this process may have begun to listen meanwhile, and Gloo ends the process where
        # a listener is shut down
        self._sockets = [sock for sock in opened if not _listens(sock)]
        for sock in set(opened) - set(self._sockets):
            sock.close()
        for sock in self._sockets:
            suit_round_trip(sock)

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int) -> Work:  # type: ignore[override]
        """As ``dist.isend``: starts sending the one tensor, which must not change before the work is done."""
        return self._start("send", dst, tensors[0].detach().contiguous(), FIRST_TAG + tag)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int) -> Work:  # type: ignore[override]
        """As ``dist.irecv``: starts receiving into the one tensor, which is contiguous."""
        return self._start("recv", src, tensors[0], FIRST_TAG + tag)

    def sum_in_ring(self, tensor: torch.Tensor) -> None:
        """Sums a contiguous tensor over all ranks, in place, by Gloo's own ``all_reduce``.

        Raises:
            PeerLostError: a neighbour on the ring is gone.
        """
        try:
            self._gloo.allreduce([tensor]).wait()
        except RuntimeError as exc:
            lost = self._lost_neighbour()
            raise _translate(exc, self._names[lost], lost, 0.0, is_late=False) from exc

    def _lost_neighbour(self) -> int:
        """Which of both neighbours on the ring is gone, since one of them is; Gloo's error does not say.

        Nothing can be started over a broken connection. Nobody waits, or this rank's own failure would reach
        the other one on a long way round, and that would seem gone as well.
        """
        place = self._ring.index(self.rank())
        before, following = (self._ring[(place + step) % self.size()] for step in (-1, 1))
        try:
            self._gloo.recv([torch.zeros(1)], self._ring.index(following), DOUBT_TAG)
        except RuntimeError:
            return following
        return before

    def close(self, *, graceful: bool = False) -> None:
        """Closes all connections; whatever waits on them ends. Idempotent.

        Args:
            graceful: each only once its peer closes it, too, but for ``GRACE_S`` at most.
        """
        if self._is_closed:
            return
        if graceful and self._gloo is not None:
            self._say_goodbye()
        self._is_closed = True
        for sock in self._sockets:
            with sock, suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _say_goodbye(self) -> None:
        """Exchanges a last word with each peer, so that nothing in flight is cut off; some may be gone."""
        works = []
        for peer in self.peers:
            with suppress(RuntimeError):
                for act in (self._gloo.send, self._gloo.recv):
                    works.append(act([torch.zeros(1, dtype=torch.int64)], self._ring.index(peer), CLOSE_TAG))
        for work in works:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=GRACE_S))

    def close_pair(self, peer: int) -> None:  # noqa: ARG002 — Gloo's connections are not told apart
        """Closes all connections at once: this rank has failed."""
        self.close()

    def _start(self, act: Literal["send", "recv"], peer: int, tensor: torch.Tensor, tag: int) -> Work:
        name = self._names.get(peer)
        if name is None:
            raise self.no_peer(peer)
        try:
            work = getattr(self._gloo, act)([tensor], self._ring.index(peer), tag)
            return GlooWork(work, name, peer, self._timeout)
        except RuntimeError as exc:
            raise _translate(exc, name, peer, 0.0, is_late=False) from exc

    def _prove(self, peer: int, secret: str) -> None:
        """Both ends of a pair show that they know its secret, by fresh random bytes of both."""
        low, high = sorted((self.rank(), peer))
        nonce = secrets.token_bytes(NONCE_BYTES)
        theirs = self._exchange(peer, nonce, NONCE_TAG)
        nonces = (nonce, theirs) if self.rank() == low else (theirs, nonce)

        def proof(rank: int) -> bytes:
            statement = f"skyctl gloo {low} {high} {rank} ".encode() + b"".join(nonces)
            return hmac.new(secret.encode(), statement, hashlib.sha256).digest()

        if not hmac.compare_digest(self._exchange(peer, proof(self.rank()), PROOF_TAG), proof(peer)):
            raise PeerUnreachableError(
                f"what answers as {self._names[peer]} does not know the secret of their pair",
                peer_rank=peer,
                hint="who else is logged in there? --backend skyctl admits nobody else",
            )

    def _exchange(self, peer: int, message: bytes, tag: int) -> bytes:
        there = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        back = torch.zeros(len(message), dtype=torch.uint8)
        works = [
            self._start("send", peer, there, tag),
            self._start("recv", peer, back, tag),
        ]
        for work in works:
            work.wait(timedelta(seconds=PEER_READY_TIMEOUT_S))
        return bytes(back.tolist())


class GlooWork:
    """A transfer of Gloo's that is under way; its errors are skyctl's and name the peer."""

    __slots__ = ("_name", "_peer", "_timeout", "_work")

    def __init__(self, work: Any, name: str, peer: int, timeout: timedelta) -> None:
        self._work, self._name, self._peer, self._timeout = work, name, peer, timeout

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Returns True once the tensor is received and usable, or sent and reusable.

        Args:
            timeout: ``NO_TIMEOUT``: the group's limit.

        Raises:
            PeerLostError: the peer is gone.
            RunError: nothing came in time.
        """
        limit = timeout or self._timeout
        began = time.monotonic()
        try:
            self._work.wait(limit)
        except RuntimeError as exc:
            waited_s = time.monotonic() - began
            is_late = waited_s >= limit.total_seconds()
            raise _translate(exc, self._name, self._peer, waited_s, is_late=is_late) from exc
        return True


def _translate(exc: RuntimeError, name: str, peer: int, waited_s: float, *, is_late: bool) -> RunError:
    """Gloo raises RuntimeError for everything: who waited in vain knows, all else is a lost connection."""
    kind = TransferTimeoutError if is_late else TransferClosedError
    return translate_transfer_error(kind(str(exc)), name, waited_s, peer)


@contextmanager
def _new_sockets(address: str) -> Iterator[list[socket.socket]]:
    """The TCP sockets at that address of ours that are opened within it, as copies; there once it is over."""
    before = _tcp_sockets(address)
    for sock in before.values():
        sock.close()
    sockets: list[socket.socket] = []
    try:
        yield sockets
    finally:
        for name, sock in _tcp_sockets(address).items():
            if name in before:
                sock.close()
            else:
                sockets.append(sock)


def _tcp_sockets(address: str) -> dict[str, socket.socket]:
    """By name of the kernel's, this process's TCP sockets at an address of ours, as copies.

    Other threads look for theirs at the same time: their copies come and go, and so may a descriptor's number
    be another file's from one call to the next. So a copy is asked for its own name.
    """
    sockets: dict[str, socket.socket] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if not str(entry.readlink()).startswith("socket:"):
                continue
            copy = os.dup(int(entry.name))
            name = str((entry.parent / str(copy)).readlink())
            if name in sockets or not name.startswith("socket:"):
                os.close(copy)
                continue
            sock = socket.socket(fileno=copy)
            is_tcp = (sock.family, sock.type) == (socket.AF_INET, socket.SOCK_STREAM)
            if is_tcp and sock.getsockname()[0] == address:  # an open TCP socket has a name
                sockets[name] = sock
            else:
                sock.close()
    return sockets


def _narrow_listeners(opened: Sequence[socket.socket], addresses: Sequence[str]) -> None:
    """Has those of them that listen take packets from these IPv4 addresses alone, and closes the copies.

    Raises:
        RunError: none of them listens: whatever does would be open to everybody.
    """
    count = 0
    for sock in opened:
        with sock:
            if _listens(sock):
                _take_from(sock, addresses)
                count += 1
    if not count:
        raise RunError(
            f"Gloo of torch {torch.__version__} opens no listener that can be narrowed to the run's peers",
            hint="--backend skyctl",
        )


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _take_from(listener: socket.socket, addresses: Sequence[str]) -> None:
    """Has the kernel drop what comes to a listener from anywhere else than these IPv4 addresses."""
    program = [(_LOAD, 0, 0, _SOURCE_ADDRESS)]
    for address in sorted(set(addresses)):  # one that is not this one skips the way in
        program += [(_JUMP_IF_EQUAL, 0, 1, int(IPv4Address(address))), (_RETURN, 0, 0, _WHOLE_PACKET)]
    program.append((_RETURN, 0, 0, 0))
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    memory = ctypes.create_string_buffer(code)
    program_header = struct.pack("HL", len(program), ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program_header)
