"""The backend ``skyctl`` of torch.distributed: authenticated connections between pairs of ranks.

Only ranks that the options name as peers ever connect (``peer_connection``); tensors of any device go over
them, in the clear or under TLS. The lower rank of a pair listens and says in the store where, the higher one
connects; nothing needs the store afterwards. If listeners stay, ranks may ``reconnect``: all of those that
go on, or a few. Each time has a number that both ends prove, so who comes with an earlier one is refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager
from functools import partial
from ipaddress import IPv4Address

import torch

from skyctl.errors import RunError
from skyctl.transport.handshake import AuthenticatedSocket, AuthenticatingListener
from skyctl.transport.peer_connection import (
    FIRST_TAG,
    LEAST_SETUP_S,
    PURPOSE,
    SETUP_TIMEOUT_S,
    PeerConnection,
)
from skyctl.transport.planned_process_group import (
    PEER_READY_TIMEOUT_S,
    PairOptions,
    PlannedProcessGroup,
    Store,
)
from skyctl.transport.transfer_errors import (
    NumberUsedError,
    PeerLostError,
    PeerProtocolError,
    PeerUnreachableError,
)
from skyctl.transport.work import Work

CONNECT_TIMEOUT_S = 60.0
"""For a connection to a peer that listens already."""
_INTERRUPT_INTERVAL_S = 0.1
"""A thread that waits for a peer looks up so often whether another thread has ended that."""


class SkyctlProcessGroup(PlannedProcessGroup):
    """Peers over connections that are proved from the first byte, and under TLS if that is asked for.

    Args:
        rank, size: of this process, and of all.
        pairs: by rank, the connection to each peer.
    """

    def __init__(self, rank: int, size: int, pairs: Mapping[int, PeerConnection]) -> None:
        super().__init__(rank, size, pairs)
        self._pairs = dict(sorted(pairs.items()))
        self._listeners: dict[AuthenticatingListener, list[int]] = {}  # and who comes there
        self._where: dict[int, tuple[str, int]] = {}  # at least of those that this rank calls
        self._keeps_listening = self._is_closed = self._is_aborted = False
        self._used: set[int] = set()
        self._changing = threading.Lock()
        self._meeting = threading.Lock()

    def connect(self, store: Store, options: PairOptions) -> None:
        """As ``PlannedProcessGroup.connect``: the lower rank listens, the higher one connects."""
        self._keeps_listening = options.keeps_listening
        for peer, pair in self._pairs.items():
            if peer > self.rank():
                address = pair.own_address(options.hosts[peer], options.interface)
                listener = pair.open_listener(address)
                self._listeners[listener] = [peer]
                key = _listening_key(options.purpose, self.rank(), peer)
                store.set(key, f"{address}:{listener.port}")

        locate = partial(self._locate, store, options)
        self._meet(self.peers, locate, options.ready_s, CONNECT_TIMEOUT_S)

    def listen_for(self, peer: int, pair: PeerConnection, store: Store, options: PairOptions) -> None:
        """A rank of a higher number is to be a peer, too: listens for it, and says in the store where.

        It connects when both ``reconnect``, or by ``accept``.

        Args:
            options: of the group, with that rank in ``hosts``.

        Raises:
            PeerUnreachableError, RunError: as ``connect``.
        """
        address = pair.own_address(options.hosts[peer], options.interface)
        listener = pair.open_listener(address)
        with self._changing:
            self._pairs[peer] = pair
            self.peers = sorted(self._pairs)
            self._listeners[listener] = [peer]
        store.set(_listening_key(options.purpose, self.rank(), peer), f"{address}:{listener.port}")

    def accept(self, peer: int, timeout_s: float) -> None:
        """Waits until a rank that was listened for has connected; listens no more. Raises as ``connect``."""
        listener = next(at for at, callers in self._listeners.items() if peer in callers)
        try:
            self._accept(listener, {peer: self._pairs[peer]}, timeout_s)
        finally:
            listener.close()

    def find_listeners(self, store: Store, options: PairOptions) -> None:
        """Learns where the lower ranks listen for this one, which has the highest number: to ``reconnect``.

        Raises: as ``connect``.
        """
        self._keeps_listening = True
        for peer in self.peers:
            self._locate(store, options, peer)

    def _locate(self, store: Store, options: PairOptions, peer: int) -> tuple[str, int]:
        said = store.get(_listening_key(options.purpose, peer, self.rank()))
        host, port = self._where[peer] = read_listening(said, peer)
        self._pairs[peer].own_address(host, options.interface)
        return host, port

    def reconnect(self, uuid: int, peers: Collection[int], timeout_s: float) -> None:
        """Ends all connections at once, and connects anew to these peers, at the same time; the others stay
        closed.

        All of them call it, with the same number and each other as peers. Ranks keep their numbers. One call
        at a time; where it raises, all connections are closed, and it may be called again with another
        number. ``abort`` and ``close_pair`` of another thread end it.

        Args:
            uuid: a number of this time, not used before. No connection comes about with a rank that has
                another.

        Raises:
            PeerUnreachableError: a peer did not come within ``timeout_s``.
            PeerLostError: another thread closed the connections meanwhile.
            NumberUsedError: the number was used before; nothing has changed.
            RunError: listeners don't stay, or a rank is no peer; nothing has changed.
        """
        if unknown := set(peers) - self._pairs.keys():
            raise self.no_peer(min(unknown))
        if not self._keeps_listening:
            raise RunError(
                f"rank {self.rank()} can't reconnect: it has stopped listening",
                hint="PairOptions(…, keeps_listening=True), on all ranks",
            )
        self._reconnect(uuid, peers, timeout_s)

    def _reconnect(
        self, uuid: int, peers: Collection[int], timeout_s: float, change: Callable[[], None] = lambda: None
    ) -> None:
        """As ``reconnect``.

        Args:
            change: called once all connections are closed: who the peers are may be another matter then.
        """
        if not self._meeting.acquire(blocking=False):
            raise RunError(f"rank {self.rank()} is reconnecting already", hint="abort() ends that")
        try:
            with self._changing:
                if self._is_closed:
                    raise RunError(f"rank {self.rank()} can't reconnect: its group is closed")
                if uuid in self._used:
                    raise NumberUsedError(f"the number {uuid} was already used to connect ranks")
                self._used.add(uuid)
                self._is_aborted = False
                self._close_pairs()
                change()
                for peer in peers:
                    self._pairs[peer].restart(uuid)
            self._meet(peers, self._locate_again, timeout_s, timeout_s, is_patient=True)
        except PeerLostError as exc:
            if not self._is_aborted:
                raise
            raise PeerLostError(
                f"rank {self.rank()} has closed its connections while it was reconnecting", peer_rank=None
            ) from exc
        finally:
            self._meeting.release()

    def _locate_again(self, peer: int) -> tuple[str, int]:
        try:
            return self._where[peer]
        except KeyError:
            raise PeerUnreachableError(
                f"rank {peer} has never said where it listens", peer_rank=peer
            ) from None

    def _meet(
        self,
        peers: Collection[int],
        locate: Callable[[int], tuple[str, int]],
        accept_s: float,
        connect_s: float,
        *,
        is_patient: bool = False,
    ) -> None:
        """Connects to these peers at the same time: to the lower ranks, and from the higher ones.

        If it raises, all connections and threads have ended.

        Args:
            locate: where a lower rank listens.
            accept_s, connect_s: limits for those that come here, and for those that are called.
            is_patient: whoever is called may listen for this connection later.
        """
        meetings: list[Future[None]] = []
        try:
            for listener, callers in list(self._listeners.items()):
                if pairs := {peer: self._pairs[peer] for peer in callers if peer in peers}:
                    meetings.append(run_in_thread(partial(self._accept, listener, pairs, accept_s)))
            for peer in sorted(peers):
                if peer < self.rank():
                    host, port = locate(peer)
                    call = partial(self._pairs[peer].connect, host, port, host, connect_s)
                    meetings.append(run_in_thread(partial(call, is_patient=is_patient)))
            wait_for_all(meetings, accept_s + connect_s)
        except BaseException:
            self._close_pairs()
            wait(meetings)
            raise
        finally:
            if not self._keeps_listening:
                self._stop_listening()

    def _accept(
        self, listener: AuthenticatingListener, pairs: Mapping[int, PeerConnection], timeout_s: float
    ) -> None:
        """Lets these peers in at a listener, each once."""
        missing, deadline = dict(pairs), time.monotonic() + timeout_s
        joining: list[Future[None]] = []
        try:
            while missing:
                listener.expect({peer: pair.caller for peer, pair in missing.items()})
                admitted = self._accept_one(listener, missing, deadline, timeout_s)
                left_s = min(SETUP_TIMEOUT_S, max(LEAST_SETUP_S, deadline - time.monotonic()))
                pair = missing.pop(admitted.caller)
                joining.append(run_in_thread(partial(pair.take, admitted, left_s)))
            listener.expect({})
            if not self._keeps_listening:
                listener.close()
            wait_for_all(joining)
        except BaseException:
            for pair in pairs.values():
                pair.close()
            wait(joining)
            raise

    def _accept_one(
        self,
        listener: AuthenticatingListener,
        missing: Mapping[int, PeerConnection],
        deadline: float,
        timeout_s: float,
    ) -> AuthenticatedSocket:
        first = missing[min(missing)]
        while True:
            left_s = deadline - time.monotonic()
            try:
                return listener.accept(min(left_s, _INTERRUPT_INTERVAL_S))
            except OSError as exc:
                closed = next((pair for pair in missing.values() if pair.is_closed), None)
                if closed is not None:
                    raise closed.closed_error() from exc
                if left_s <= _INTERRUPT_INTERVAL_S or not isinstance(exc, TimeoutError):
                    raise first.connect_error(listener.address, listener.port, timeout_s, exc) from exc

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int) -> Work:  # type: ignore[override]
        """As ``dist.isend``: starts sending the one tensor, which must not change before the work is done."""
        return self._pair(dst).send(tensors[0], FIRST_TAG + tag)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int) -> Work:  # type: ignore[override]
        """As ``dist.irecv``: starts receiving into the only tensor, which is contiguous."""
        return self._pair(src).recv(tensors[0], FIRST_TAG + tag)

    def together(self, peer: int) -> AbstractContextManager[None]:
        """Starts all that is exchanged with that peer within it together, at its end."""
        return self._pair(peer).together()

    def close(self, *, graceful: bool = False) -> None:
        """As ``PlannedProcessGroup.close``."""
        with self._changing:
            self._is_closed = self._is_aborted = True
        for pair in self._pairs.values():
            pair.close(graceful=graceful)
        self._stop_listening()

    def close_pair(self, peer: int) -> None:
        """As ``PlannedProcessGroup.close_pair``; a ``reconnect`` that includes that peer ends, too."""
        with self._changing:
            self._pair(peer).close()

    def abort(self) -> None:
        """Closes all connections at once; what waits on them ends, ``reconnect`` too. Another may follow."""
        with self._changing:
            self._is_aborted = True
            self._close_pairs()

    def _close_pairs(self) -> None:
        pairs = list(self._pairs.values())
        for pair in pairs:
            pair.interrupt()
        for pair in pairs:
            pair.close()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _pair(self, peer: int) -> PeerConnection:
        try:
            return self._pairs[peer]
        except KeyError:
            raise self.no_peer(peer) from None


def read_address(address: bytes, peer: int) -> str:
    """The IPv4 address that a rank says is its own. Raises PeerProtocolError where it is none."""
    try:
        return str(IPv4Address(address.decode()))
    except ValueError:
        raise PeerProtocolError(
            f"rank {peer} says that its address is {bytes(address[:100])!r}", peer_rank=peer
        ) from None


def read_listening(message: bytes, peer: int) -> tuple[str, int]:
    """The host and port at which a peer says that it listens."""
    try:
        host, port = message.decode().split(":")
        host = str(IPv4Address(host))
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise ValueError
    except ValueError:
        raise PeerProtocolError(
            f"rank {peer} says that it listens at {bytes(message[:100])!r}", peer_rank=peer
        ) from None
    return host, int(port)


def _listening_key(purpose: str, listening: int, calling: int) -> str:
    prefix = "" if purpose == PURPOSE else f"{purpose}-"
    return f"{prefix}listening/{listening}/{calling}"


def wait_for_all(futures: Collection[Future[None]], limit_s: float = PEER_READY_TIMEOUT_S) -> None:
    """Returns when all are done; raises the first error at once, whichever of them has it."""
    done, _ = wait(futures, limit_s, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
    for future in futures:
        future.result(0.0)  # raises TimeoutError: it is not done


def run_in_thread(action: Callable[[], None]) -> Future[None]:
    """Runs it in a daemon thread: a failure elsewhere must not wait for it."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            action()
            future.set_result(None)
        except BaseException as exc:  # noqa: BLE001 — raised where the result is asked for
            future.set_exception(exc)

    threading.Thread(target=run, daemon=True, name="meets a peer").start()
    return future
