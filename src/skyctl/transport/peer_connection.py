"""Point-to-point between two ranks, and nothing wider: only ranks that a plan makes neighbours ever connect.

One side listens on a port bound beforehand, and both prove the pair's secret before anything else is said
(``handshake``). That one connection then carries everything, as it is (``socket_transport``) or, given a TLS
identity, encrypted (``tls_transport``); nothing listens from then on.

A payload moves once its receiver is ready, so receives are best posted ahead. Tensors on the CPU are read and
written in place; those of another device go through host memory (``host_staging``), or over NCCL where both
ends are CUDA and nothing is to be encrypted.

A peer that is gone shows as ``PeerLostError``, one that is silent too long as ``RunError``; both name it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch

from skyctl.agent.network_interfaces import NoRouteError, local_address_towards
from skyctl.errors import RunError
from skyctl.transport.handshake import (
    AuthenticatedSocket,
    AuthenticatingListener,
    AuthenticationError,
    Caller,
    ConnectionAttempt,
    connect_authenticated,
    log_to_stderr,
    open_listener,
    os_error_reason,
)
from skyctl.transport.host_staging import CopyStreams, HostStaging, make_copy_streams
from skyctl.transport.message_transport import MessageTransport
from skyctl.transport.nccl_communicators import NcclCommunicators, is_nccl_usable
from skyctl.transport.peer_store import PeerStore
from skyctl.transport.socket_transport import SocketTransport
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.transport.transfer_errors import (
    PeerLostError,
    PeerProtocolError,
    PeerUnreachableError,
    TransferClosedError,
    translate_transfer_error,
)
from skyctl.transport.work import NO_TIMEOUT, Work

Tensor = torch.Tensor

CLOSE_TAG = 2
STORE_TAG = 4
FIRST_TAG = 16
"""Smaller tags are the connection's own."""
SETUP_TIMEOUT_S = 60.0
"""From an authenticated socket to a connection that carries tensors."""
CLOSE_TIMEOUT_S = 10.0
"""For the last message of a graceful close. All that was sent has arrived by then, whatever the peer is at;
and one that has told the others that the run ends, and goes on itself, is not to hold them up for long."""
LEAST_SETUP_S = 1.0
"""For that, where the time for connecting is nearly over."""
PURPOSE = "pair"


class PeerConnection:
    """One end of a connection between two ranks.

    ``listen`` then ``accept`` on one side, ``connect`` on the other; then ``send`` and ``recv`` on both,
    which return at once. A message is matched to its receive by tag (at least ``FIRST_TAG``), in order among
    those of one tag. NCCL knows no tags: there, CUDA tensors match in the order they are posted.

    Args:
        peer: what to call the other end in an error, such as ``rank 2``.
        peer_rank: its rank, for the launcher; None: it is none.
        timeout_s: how long one transfer may take, waiting for the peer included.
        secret: what these two ends share, and nobody else; it never leaves them.
        device: where this end's tensors are, to choose NCCL where both are CUDA (None: CPU).
        identity: both ends' TLS certificate; None: nothing is encrypted.
        purpose: both ends say the same, so that connections of different purposes are never mixed up.
        log: gets a line for each unauthenticated peer that was refused.
    """

    def __init__(
        self,
        peer: str = "the peer",
        timeout_s: float = 1800.0,
        *,
        secret: str,
        peer_rank: int | None = None,
        device: torch.device | None = None,
        identity: TlsIdentity | None = None,
        purpose: str = PURPOSE,
        log: Callable[[str], None] = log_to_stderr,
    ) -> None:
        self.peer = peer
        self._peer_rank = peer_rank
        self.timeout_s = timeout_s
        self._limit = timedelta(seconds=timeout_s)
        self._identity, self._log = identity, log
        self._purpose = purpose
        self.caller = Caller(secret, purpose)
        self._lock = threading.Lock()
        self._attempt = ConnectionAttempt()
        self._device = device or torch.device("cpu")
        self._listener: AuthenticatingListener | None = None
        self._transport: MessageTransport | None = None
        self._nccl: NcclCommunicators | None = None
        self._staging: HostStaging | None = None
        self._address = ""

    def own_address(self, towards: str, interface: str | None = None) -> str:
        """This machine's address on the route to the peer's host ``towards``, or of the interface named.

        Raises:
            PeerUnreachableError: there is no route.
            RunError: no such interface, or it has no address.
        """
        try:
            return local_address_towards(towards, interface)
        except NoRouteError as exc:
            raise PeerUnreachableError(exc.message, peer_rank=self._peer_rank, hint=exc.hint) from exc

    def listen(self, address: str) -> int:
        """Binds a free port of ``address`` and returns it.

        Raises:
            RunError: the address is not this machine's.
        """
        self._listener = self.open_listener(address)
        return int(self._listener.port)

    def open_listener(self, address: str) -> AuthenticatingListener:
        """A listener of the caller's own, on a free port of ``address``, that lets this peer in.

        Raises:
            RunError: the address is not this machine's.
        """
        self._address = address
        try:
            sock = open_listener(address)
        except OSError as exc:
            raise RunError(f"can't listen on {address} for {self.peer}: {os_error_reason(exc)}") from exc
        caller = self.caller
        return AuthenticatingListener(sock, caller.secret, purpose=caller.purpose, log=self._log)

    def accept(self, timeout_s: float = 300.0) -> None:
        """Waits until the peer has connected and authenticated itself; others are refused.

        Raises:
            RunError: it did not connect within ``timeout_s``.
        """
        listener = self._listener
        assert listener is not None, "listen() first"
        try:
            self._join(0, listener.accept(timeout_s), min(timeout_s, SETUP_TIMEOUT_S))
        except (RuntimeError, OSError) as exc:
            raise self.connect_error(self._address, listener.port, timeout_s, exc) from exc
        finally:
            listener.close()
            self._listener = None

    def take(self, admitted: AuthenticatedSocket, timeout_s: float = SETUP_TIMEOUT_S) -> None:
        """Goes on with the peer that a listener (``open_listener``) has let in, as ``accept`` does.

        Raises:
            RunError: it breaks off, or is silent.
        """
        host, port = admitted.sock.getsockname()[:2]
        try:
            self._join(0, admitted, timeout_s)
        except (RuntimeError, OSError) as exc:
            if self.is_closed:
                raise self.closed_error() from exc
            raise self.connect_error(host, port, timeout_s, exc) from exc

    def connect(
        self,
        host: str,
        port: int,
        address: str | None = None,
        timeout_s: float = 300.0,
        *,
        is_patient: bool = False,
    ) -> None:
        """Connects to a peer that listens at ``host``:``port``.

        Args:
            address: this end's own address (None: the one on the route to ``host``).
            is_patient: the peer may come to expect this connection later than others.

        Raises:
            RunError: no connection within ``timeout_s``, or what answers there is not the peer.
        """
        self._address = address or self.own_address(host)
        deadline = time.monotonic() + timeout_s
        try:
            admitted = connect_authenticated(
                host,
                port,
                self.caller.secret,
                purpose=self.caller.purpose,
                timeout_s=timeout_s,
                is_patient=is_patient,
                attempt=self._attempt,
            )
            left_s = max(LEAST_SETUP_S, deadline - time.monotonic())
            self._join(1, admitted, min(left_s, SETUP_TIMEOUT_S))
        except (RuntimeError, OSError) as exc:
            if self.is_closed:
                raise self.closed_error() from exc
            raise self.connect_error(host, port, timeout_s, exc) from exc

    def restart(self, generation: int) -> None:
        """Closes the connection at once; the next one is of that number, and of no other's at its other end.

        No attempt may be under way.
        """
        self.close()
        self._attempt = ConnectionAttempt()
        self.caller = Caller(self.caller.secret, f"{self._purpose} {generation}")

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called last, so that no connection can come about."""
        return self._attempt.is_ended

    def send(self, tensor: Tensor, tag: int) -> Work:
        """Starts sending; the tensor must not change before the work is done."""
        tensor = tensor.detach()
        if self._nccl is not None and tensor.is_cuda:
            return self._nccl.send(tensor.contiguous())
        return self._start(tensor.contiguous(), tag, sending=True)

    def recv(self, tensor: Tensor, tag: int) -> Work:
        """Starts receiving into a contiguous tensor, which is filled when the work is done."""
        assert tensor.is_contiguous(), "a receive needs a contiguous tensor"
        if self._nccl is not None and tensor.is_cuda:
            return self._nccl.recv(tensor)
        return self._start(tensor, tag, sending=False)

    def together(self) -> AbstractContextManager[None]:
        """Starts all that is sent and received within it together, at its end (``MessageTransport``)."""
        return nullcontext() if self._transport is None else self._transport.together()

    def interrupt(self) -> None:
        """Ends what is under way at once, and the connection with it; ``close`` has yet to follow."""
        self._attempt.end()
        with self._lock:
            transport = self._transport
        if transport is not None:
            transport.fail(TransferClosedError("the connection is closed"))

    def close(self, *, graceful: bool = False) -> None:
        """Closes the connection. Idempotent.

        Args:
            graceful: first exchange a last message with the peer, so that nothing in flight is cut off; only
                where neither end has anything more to send.
        """
        if graceful:
            self._attempt.end()
        else:
            self.interrupt()  # before what waits for threads
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            staging, self._staging = self._staging, None
            transport, self._transport = self._transport, None
            nccl, self._nccl = self._nccl, None
        if staging is not None:
            staging.close(finish=graceful)
        if transport is not None:
            if graceful:
                word, heard = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
                limit = timedelta(seconds=min(self.timeout_s, CLOSE_TIMEOUT_S))
                with suppress(RuntimeError):
                    answer = transport.recv(heard, CLOSE_TAG)
                    transport.send(word, CLOSE_TAG).wait(limit)
                    answer.wait(limit)
            transport.close()
        if nccl is not None:
            nccl.close()

    def translate_error(self, exc: RuntimeError, waited_s: float) -> RunError:
        """The transport's error as skyctl's, with the peer named."""
        return translate_transfer_error(exc, self.peer, waited_s, self._peer_rank)

    def closed_error(self) -> PeerLostError:
        """The error where this end has closed the connection, or never had one."""
        return PeerLostError(f"the connection to {self.peer} is closed", peer_rank=self._peer_rank)

    def protocol_error(self, fault: str) -> PeerProtocolError:
        """The error for what the peer has sent; ``fault`` goes on from its name ("sent step 3, …")."""
        return PeerProtocolError(f"{self.peer} {fault}", peer_rank=self._peer_rank)

    def _join(self, rank: int, admitted: AuthenticatedSocket, limit_s: float) -> None:
        """From an authenticated socket to a connection that carries tensors."""
        attempt = self._attempt
        try:
            attempt.watch(admitted.sock)
            if self._identity is None:
                transport: MessageTransport = SocketTransport(admitted.sock, self.peer)
            else:
                from skyctl.transport.tls_transport import (
                    TlsTransport,  # a Python without ssl can still train in the clear
                )

                wrapped = self._identity.wrap(admitted, server=rank == 0, timeout_s=limit_s)
                transport = TlsTransport(wrapped, self.peer)
        except BaseException:
            admitted.sock.close()
            raise
        finally:
            attempt.forget()
        with self._lock:
            is_late = attempt.is_ended
            if not is_late:
                self._transport = transport
        if is_late:
            transport.close()
            raise ConnectionAbortedError("it was closed here")
        if self._identity is None:
            store = PeerStore(transport, STORE_TAG, limit_s)
            if is_nccl_usable(store, rank, self._device):
                self._start_nccl(transport, store, rank, limit_s)

    def _start_nccl(self, transport: MessageTransport, store: PeerStore, rank: int, limit_s: float) -> None:
        nccl = NcclCommunicators(store, rank, self._device, timedelta(seconds=limit_s), self._nccl_error)
        with self._lock:
            is_late = self._transport is not transport
            if not is_late:
                self._nccl = nccl
        if is_late:
            nccl.close()
            raise ConnectionAbortedError("it was closed here")

    def _nccl_error(self, exc: RuntimeError) -> RunError:
        return self.translate_error(exc, self.timeout_s)

    def connect_error(self, host: str, port: int, waited_s: float, exc: Exception) -> RunError:
        """The error where no connection came about, for that reason."""
        reason = os_error_reason(exc) if isinstance(exc, OSError) else str(exc).splitlines()[0]
        hint = (
            "a firewall or NAT may stand between the two nodes; 'skyctl check' tries every pair, and "
            "'interface:' in cluster.yaml names the network to use (a VPN's, say)"
        )
        if isinstance(exc, AuthenticationError):
            hint = "another program, or another run's rank, answers at that address: is it the right node's?"
        return PeerUnreachableError(
            f"no connection with {self.peer} over {host}:{port} within {waited_s:.0f} s: {reason}",
            peer_rank=self._peer_rank,
            hint=hint,
        )

    def _start(self, tensor: Tensor, tag: int, *, sending: bool) -> Work:
        transport, staging = self._transport, self._staging
        if transport is None:
            raise self.closed_error()
        if staging is None and tensor.device.type != "cpu":
            staging = self._start_staging(transport, make_copy_streams(tensor.device))
        try:
            if staging is not None and (sending or staging.stages(tensor)):
                return PairWork(self, (staging.send if sending else staging.recv)(tensor, tag))
            return PairWork(self, (transport.send if sending else transport.recv)(tensor, tag))
        except RuntimeError as exc:
            raise self.translate_error(exc, 0.0) from exc

    def _start_staging(self, transport: MessageTransport, streams: CopyStreams) -> HostStaging:
        """From now on a thread does the sends, and tensors of a device go through buffers in host memory."""
        with self._lock:
            if self._transport is not transport:
                raise self.closed_error()
            if self._staging is None:
                self._staging = HostStaging(streams, transport.send, transport.recv, self.peer)
            return self._staging


class PairWork:
    """A transfer between two ranks that is under way; its errors are skyctl's and name the peer."""

    __slots__ = ("_connection", "_work")

    def __init__(self, connection: PeerConnection, work: Any) -> None:
        self._connection, self._work = connection, work

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Returns True once the tensor is received and usable, or sent and reusable.

        Args:
            timeout: ``NO_TIMEOUT``: the connection's limit.

        Raises:
            PeerLostError: the peer is gone.
            PeerProtocolError: the peer has sent what skyctl never sends.
            RunError: nothing came in time.
        """
        limit = timeout or self._connection._limit
        try:
            self._work.wait(limit)
        except RuntimeError as exc:
            raise self._connection.translate_error(exc, limit.total_seconds()) from exc
        return True
