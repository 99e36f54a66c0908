"""Point-to-point between two ranks, and nothing wider: only ranks that a plan makes neighbours ever connect.

One side listens on a port bound beforehand, and both prove the run's secret before anything else is said
(``handshake``). The connection is then a ``ProcessGroupGloo`` of two, built directly, whose ends find each
other over the authenticated socket (``peer_store``); Gloo's own connection is authenticated once more, since
its port is open to anybody. Or, given a TLS identity, the first socket becomes TLS and carries everything
(``tls_group``).

A payload moves once its receiver is ready, so receives are best posted ahead. Tensors on the CPU are read and
written in place; those of another device go through host memory (``host_staging``), or over NCCL where both
ends are CUDA and nothing is to be encrypted.

A peer that is gone shows as ``PeerLostError``, one that is silent too long as ``RunError``; both name it.
"""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from skyctl.agent.network_interfaces import local_address_towards
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
from skyctl.transport.nccl_communicators import NcclCommunicators, is_nccl_usable
from skyctl.transport.peer_store import PeerStore
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.transport.transfer_errors import PeerLostError, translate_transfer_error

Tensor = torch.Tensor
_c10d: Any = dist  # what follows is not in torch's type stubs

PING_TAG = 1
CLOSE_TAG = 2
PROOF_TAG = 4
FIRST_TAG = 16
"""Smaller tags are the connection's own (3: ``clock_offset``)."""
SETUP_TIMEOUT_S = 60.0
"""From an authenticated socket to a connection that carries tensors."""
HANDSHAKE_PURPOSE = "pair"


class Work(Protocol):
    """A transfer between two ranks that is under way."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns once the tensor is received and usable, or sent and reusable (None: the default limit)."""


class PeerConnection:
    """One end of a connection between two ranks.

    ``listen`` then ``accept`` on one side, ``connect`` on the other; then ``send`` and ``recv`` on both,
    which return at once. A message is matched to its receive by tag (at least ``FIRST_TAG``), in order among
    those of one tag. NCCL knows no tags: there, CUDA tensors match in the order they are posted.

    Args:
        peer: what to call the other end in an error, such as ``rank 2``.
        timeout_s: how long one transfer may take, waiting for the peer included.
        secret: what the two ends must share; it never leaves them.
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
        device: torch.device | None = None,
        identity: TlsIdentity | None = None,
        log: Callable[[str], None] = log_to_stderr,
    ) -> None:
        self.peer = peer
        self.timeout_s = timeout_s
        self._limit = timedelta(seconds=timeout_s)
        self._secret, self._identity, self._log = secret, identity, log
        self._device = device or torch.device("cpu")
        self._listener: AuthenticatingListener | None = None
        self._sock: socket.socket | None = None
        self._group: Any = None
        self._nccl: NcclCommunicators | None = None
        self._staging: HostStaging | None = None
        self._address = ""
        self._rank = 0

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
        self._address = address or local_address_towards(host)
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

    def measure_round_trip_s(self, rounds: int = 5) -> float:
        """The shortest of ``rounds`` round trips of a small message; both ends must call it alike."""
        times = []
        for _ in range(rounds):
            there, back = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
            answer = self.recv(back, PING_TAG)
            if self._rank:
                answer.wait()
                self.send(there, PING_TAG).wait()
            else:
                start = time.perf_counter()
                question = self.send(there, PING_TAG)
                answer.wait()
                times.append(time.perf_counter() - start)
                question.wait()
        result = torch.tensor([min(times) if times else 0.0], dtype=torch.float64)
        (self.recv(result, PING_TAG) if self._rank else self.send(result, PING_TAG)).wait()
        return float(result.item())

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
        group, self._group = self._group, None
        if group is not None:
            word, heard = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
            with suppress(RuntimeError):
                answer = group.recv([heard], 1 - self._rank, CLOSE_TAG)
                if graceful:
                    limit = timedelta(seconds=min(self.timeout_s, 60.0))
                    group.send([word], 1 - self._rank, CLOSE_TAG).wait(limit)
                    answer.wait(limit)
                else:
                    answer.wait(timedelta(milliseconds=1))  # its time-out ends every wait still under way
            if self._identity is not None:
                group.close()
        if self._nccl is not None:
            self._nccl.close()
        self._nccl = None
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def translate_error(self, exc: RuntimeError, waited_s: float) -> RunError:
        """The transport's error as skyctl's, with the peer named."""
        return translate_transfer_error(exc, self.peer, waited_s)

    def _join(self, rank: int, admitted: AuthenticatedSocket, limit_s: float) -> None:
        """From an authenticated socket to a connection that carries tensors."""
        self._rank, self._sock = rank, admitted.sock
        if self._identity is not None:
            from skyctl.transport.tls_group import (
                TlsProcessGroup,  # a Python without ssl can still train in the clear
            )

            wrapped = self._identity.wrap(admitted.sock, server=rank == 0, timeout_s=limit_s)
            self._group = TlsProcessGroup(wrapped, self.peer)
            return
        limit = timedelta(seconds=limit_s)
        store = PeerStore(admitted.sock, limit_s)
        options = _c10d.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=self._address)]
        group = _c10d.ProcessGroupGloo(_c10d.PrefixStore("gloo", store), rank, 2, options)
        _authenticate_gloo(group, rank, admitted.key, limit)
        self._group = group
        if is_nccl_usable(store, rank, self._device):
            self._nccl = NcclCommunicators(
                _c10d.PrefixStore("nccl", store), rank, self._device, limit, self._nccl_error
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
        return RunError(
            f"no connection with {self.peer} over {host}:{port} within {waited_s:.0f} s: {reason}", hint=hint
        )

    def _start(self, tensor: Tensor, tag: int, *, sending: bool) -> Work:
        group, staging = self._group, self._staging
        if group is None:
            raise PeerLostError(f"the connection to {self.peer} is closed")
        if staging is None and tensor.device.type != "cpu":
            staging = self._start_staging(make_copy_streams(tensor.device))
        try:
            if staging is not None and (sending or staging.stages(tensor)):
                return _GlooWork(self, (staging.send if sending else staging.recv)(tensor, tag), tensor)
            post = group.send if sending else group.recv
            return _GlooWork(self, post([tensor], 1 - self._rank, tag), tensor)
        except RuntimeError as exc:
            raise self.translate_error(exc, 0.0) from exc

    def _start_staging(self, streams: CopyStreams) -> HostStaging:
        """From now on a thread does the sends, and tensors of a device go through buffers in host memory."""
        group, peer = self._group, 1 - self._rank
        self._staging = HostStaging(
            streams,
            lambda tensor, tag: group.send([tensor], peer, tag),
            lambda tensor, tag: group.recv([tensor], peer, tag),
            self.peer,
        )
        return self._staging


def _authenticate_gloo(group: Any, rank: int, key: bytes, limit: timedelta) -> None:
    """Checks that Gloo's own connection is between the two that hold this key; RuntimeError where it is not.

    Gloo accepts whoever connects: anybody quicker than the peer would be taken for it.
    """
    proofs = [hmac.digest(key, role, "sha256") for role in (b"gloo listener", b"gloo connector")]
    heard = bytearray(len(proofs[0]))
    mine = torch.frombuffer(bytearray(proofs[rank]), dtype=torch.uint8)
    answer = group.recv([torch.frombuffer(heard, dtype=torch.uint8)], 1 - rank, PROOF_TAG)
    group.send([mine], 1 - rank, PROOF_TAG).wait(limit)
    answer.wait(limit)
    if not hmac.compare_digest(heard, proofs[1 - rank]):
        raise RuntimeError("an unauthenticated peer was quicker to Gloo's port than the right one")


class _GlooWork:
    """A Gloo transfer; it holds its tensor for as long as it exists itself."""

    __slots__ = ("_connection", "_tensor", "_work")

    def __init__(self, connection: PeerConnection, work: Any, tensor: Tensor) -> None:
        self._connection, self._work, self._tensor = connection, work, tensor

    def wait(self, timeout_s: float | None = None) -> None:
        if self._work is None:
            return
        limit = self._connection._limit if timeout_s is None else timedelta(seconds=timeout_s)
        try:
            self._work.wait(limit)
        except RuntimeError as exc:
            raise self._connection.translate_error(exc, limit.total_seconds()) from exc
        self._work = None  # Gloo's would wait for ever if it were asked again
