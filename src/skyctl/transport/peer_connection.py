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
"""For the last message of a graceful close. What was sent has arrived by then, whatever the peer is at; and
one that has told the others that the run ends, and goes on itself, is not to hold them up for long."""
HANDSHAKE_PURPOSE = "pair"


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
        log: Callable[[str], None] = log_to_stderr,
    ) -> None:
        self.peer = peer
        self._peer_rank = peer_rank
        self.timeout_s = timeout_s
        self._limit = timedelta(seconds=timeout_s)
        self._secret, self._identity, self._log = secret, identity, log
        self._device = device or torch.device("cpu")
        self._listener: AuthenticatingListener | None = None
        self._transport: MessageTransport | None = None
        self._nccl: NcclCommunicators | None = None
        self._staging: HostStaging | None = None
        self._address = ""
        self._rank = 0

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
        try:
            listener = open_listener(address)
        except OSError as exc:
            raise RunError(f"can't listen on {address} for {self.peer}: {os_error_reason(exc)}") from exc
        self._address = address
        self._listener = AuthenticatingListener(
            listener, self._secret, purpose=HANDSHAKE_PURPOSE, log=self._log
        )
        return int(self._listener.port)

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
            raise self._connect_error(self._address, listener.port, timeout_s, exc) from exc
        finally:
            listener.close()
            self._listener = None

    def connect(self, host: str, port: int, address: str | None = None, timeout_s: float = 300.0) -> None:
        """Connects to a peer that listens at ``host``:``port``.

        Args:
            address: this end's own address (None: the one on the route to ``host``).

        Raises:
            RunError: no connection within ``timeout_s``, or what answers there is not the peer.
        """
        self._address = address or self.own_address(host)
        try:
            admitted = connect_authenticated(
                host, port, self._secret, purpose=HANDSHAKE_PURPOSE, timeout_s=timeout_s
            )
            self._join(1, admitted, min(timeout_s, SETUP_TIMEOUT_S))
        except (RuntimeError, OSError) as exc:
            raise self._connect_error(host, port, timeout_s, exc) from exc

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
        """What is sent and received within it is started together, at its end (``MessageTransport``)."""
        return nullcontext() if self._transport is None else self._transport.together()

    def close(self, *, graceful: bool = False) -> None:
        """Closes the connection. Idempotent.

        Args:
            graceful: first exchange a last message with the peer, so that nothing in flight is cut off; only
                where neither end has anything more to send.
        """
        if self._listener is not None:
            self._listener.close()
        if self._staging is not None:
            self._staging.close(finish=graceful)
            self._staging = None
        transport, self._transport = self._transport, None
        if transport is not None:
            if graceful:
                word, heard = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
                limit = timedelta(seconds=min(self.timeout_s, CLOSE_TIMEOUT_S))
                with suppress(RuntimeError):
                    answer = transport.recv(heard, CLOSE_TAG)
                    transport.send(word, CLOSE_TAG).wait(limit)
                    answer.wait(limit)
            transport.close()
        if self._nccl is not None:
            self._nccl.close()
        self._nccl = None

    def translate_error(self, exc: RuntimeError, waited_s: float) -> RunError:
        """The transport's error as skyctl's, with the peer named."""
        return translate_transfer_error(exc, self.peer, waited_s, self._peer_rank)

    def protocol_error(self, fault: str) -> PeerProtocolError:
        """The error for what the peer has sent; ``fault`` goes on from its name ("sent step 3, …")."""
        return PeerProtocolError(f"{self.peer} {fault}", peer_rank=self._peer_rank)

    def _join(self, rank: int, admitted: AuthenticatedSocket, limit_s: float) -> None:
        """From an authenticated socket to a connection that carries tensors."""
        self._rank = rank
        if self._identity is not None:
            from skyctl.transport.tls_transport import (
                TlsTransport,  # a Python without ssl can still train in the clear
            )

            wrapped = self._identity.wrap(admitted, server=rank == 0, timeout_s=limit_s)
            self._transport = TlsTransport(wrapped, self.peer)
            return
        self._transport = SocketTransport(admitted.sock, self.peer)
        store = PeerStore(self._transport, STORE_TAG, limit_s)
        if is_nccl_usable(store, rank, self._device):
            self._nccl = NcclCommunicators(
                store, rank, self._device, timedelta(seconds=limit_s), self._nccl_error
            )

    def _nccl_error(self, exc: RuntimeError) -> RunError:
        return self.translate_error(exc, self.timeout_s)

    def _connect_error(self, host: str, port: int, waited_s: float, exc: Exception) -> RunError:
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
            raise PeerLostError(f"the connection to {self.peer} is closed", peer_rank=self._peer_rank)
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
