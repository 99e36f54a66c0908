"""Point-to-point between two ranks, and nothing wider: only the pairs a plan needs ever connect.

The side that listens does so on a port bound beforehand, and both prove the run's secret before anything else
is said (``gate``). A pair is then a ``ProcessGroupGloo`` of two, built directly, whose ends find each other
over that connection (``exchange``); Gloo's own connection is proved once more, since its port is open to
anybody. Or, given an identity, that first connection becomes TLS and carries everything (``tls``).

A payload moves once its receiver is ready, so receives are best posted ahead. Tensors on the CPU are read and
written in place; those of another device go through host memory (``staging``), and over NCCL where both ends
are CUDA and nothing is to be encrypted.

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

from skyctl.errors import RunError
from skyctl.transport.addresses import address_towards
from skyctl.transport.exchange import Exchange
from skyctl.transport.gate import Admitted, Gate, ImpostorError, enter, listening, tell_stderr, words
from skyctl.transport.identity import Identity
from skyctl.transport.nccl import Lanes, lanes_wanted
from skyctl.transport.staging import Staging, Streams, streams_of

Tensor = torch.Tensor
_c10d: Any = dist  # what follows is not in torch's type stubs

PING_TAG = 1
BYE_TAG = 2
PROOF_TAG = 4
FIRST_TAG = 16
"""Smaller tags are the pair's own (3: ``clocks``)."""
JOIN_S = 60.0
"""From a peer's proof to a pair that works."""
PURPOSE = "pair"

_LOST = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Socket closed",
    "pair closure",
    "onnection refused",
)


class PeerLostError(RunError):
    """The peer's end of a pair is gone: a consequence of another failure, hardly ever the first cause."""

    secondary = True


class Work(Protocol):
    """A transfer under way."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns once the tensor is received and usable, or sent and reusable (None: the pair's limit)."""


class Pair:
    """One end of a connection between two ranks.

    ``listen`` then ``accept`` on one side, ``connect`` on the other; then ``send`` and ``recv`` on both,
    which return at once. A message is matched to its receive by tag (at least ``FIRST_TAG``), in order among
    those of one tag. NCCL knows no tags: there, CUDA tensors match in the order they are posted.

    Args:
        peer: what to call the other end in an error, as in ``rank 2``.
        timeout_s: how long one transfer may take, waiting for the peer included.
        secret: what the two ends must share; it never leaves them.
        device: where this end's tensors are, to choose NCCL where both are CUDA (None: CPU).
        identity: both ends' TLS certificate; None: nothing is encrypted.
        tell: gets a line for each stranger that tried to be the peer.
    """

    def __init__(
        self,
        peer: str = "the peer",
        timeout_s: float = 1800.0,
        *,
        secret: str,
        device: torch.device | None = None,
        identity: Identity | None = None,
        tell: Callable[[str], None] = tell_stderr,
    ) -> None:
        self.peer = peer
        self.timeout_s = timeout_s
        self._limit = timedelta(seconds=timeout_s)
        self._secret, self._identity, self._tell = secret, identity, tell
        self._device = device or torch.device("cpu")
        self._gate: Gate | None = None
        self._sock: socket.socket | None = None
        self._group: Any = None
        self._lanes: Lanes | None = None
        self._staging: Staging | None = None
        self._address = ""
        self._rank = 0

    def listen(self, address: str) -> int:
        """Binds a free port of ``address`` and returns it.

        Raises:
            RunError: the address is not this machine's.
        """
        try:
            listener = listening(address)
        except OSError as exc:
            raise RunError(f"can't listen on {address} for {self.peer}: {words(exc)}") from exc
        self._address = address
        self._gate = Gate(listener, self._secret, purpose=PURPOSE, tell=self._tell)
        return int(self._gate.port)

    def accept(self, timeout_s: float = 300.0) -> None:
        """Waits until the peer has connected and proved itself; whoever can't prove it is sent away.

        Raises:
            RunError: it did not come within ``timeout_s``.
        """
        gate = self._gate
        assert gate is not None, "listen() first"
        try:
            self._join(0, gate.admit(timeout_s), min(timeout_s, JOIN_S))
        except (RuntimeError, OSError) as exc:
            raise self._unconnected(self._address, gate.port, timeout_s, exc) from exc
        finally:
            gate.close()
            self._gate = None

    def connect(self, host: str, port: int, address: str | None = None, timeout_s: float = 300.0) -> None:
        """Connects to a peer that listens at ``host``:``port``.

        Args:
            address: this end's own address (None: the one on the route to ``host``).

        Raises:
            RunError: no connection within ``timeout_s``, or what answers there is not the peer.
        """
        self._address = address or address_towards(host)
        try:
            admitted = enter(host, port, self._secret, purpose=PURPOSE, timeout_s=timeout_s)
            self._join(1, admitted, min(timeout_s, JOIN_S))
        except (RuntimeError, OSError) as exc:
            raise self._unconnected(host, port, timeout_s, exc) from exc

    def send(self, tensor: Tensor, tag: int) -> Work:
        """Starts sending; the tensor must not change before the work is done."""
        tensor = tensor.detach()
        if self._lanes is not None and tensor.is_cuda:
            return self._lanes.send(tensor.contiguous())
        return self._start(tensor.contiguous(), tag, sending=True)

    def recv(self, tensor: Tensor, tag: int) -> Work:
        """Starts receiving into a contiguous tensor, which is filled when the work is done."""
        assert tensor.is_contiguous(), "a receive needs a contiguous tensor"
        if self._lanes is not None and tensor.is_cuda:
            return self._lanes.recv(tensor)
        return self._start(tensor, tag, sending=False)

    def round_trip_s(self, rounds: int = 5) -> float:
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

    def close(self, *, politely: bool = False) -> None:
        """Lets go of the connection. Idempotent.

        Args:
            politely: first tell the peer and hear the same from it, so that nothing under way is cut off;
                only for a pair on which both ends have nothing more to send.
        """
        if self._gate is not None:
            self._gate.close()
        if self._staging is not None:
            self._staging.close(finish=politely)
            self._staging = None
        group, self._group = self._group, None
        if group is not None:
            word, heard = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
            with suppress(RuntimeError):
                answer = group.recv([heard], 1 - self._rank, BYE_TAG)
                if politely:
                    limit = timedelta(seconds=min(self.timeout_s, 60.0))
                    group.send([word], 1 - self._rank, BYE_TAG).wait(limit)
                    answer.wait(limit)
                else:
                    answer.wait(timedelta(milliseconds=1))  # its time-out ends every wait still under way
            if self._identity is not None:
                group.close()
        if self._lanes is not None:
            self._lanes.close()
        self._lanes = None
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def lost(self, exc: RuntimeError, waited_s: float) -> RunError:
        """The transport's own error in skyctl's words."""
        text = str(exc)
        if any(sign in text for sign in _LOST):
            return PeerLostError(
                f"the connection to {self.peer} is gone: its process ended, or the network broke"
            )
        if "imed out" in text:
            return RunError(
                f"nothing came through between this rank and {self.peer} for {waited_s:.0f} s",
                hint="see whether that node sleeps, swaps or lost its network",
            )
        return RunError(f"the transfer with {self.peer} failed: {text.splitlines()[0] if text else exc!r}")

    def _join(self, rank: int, admitted: Admitted, limit_s: float) -> None:
        """From a proved connection to one that carries tensors."""
        self._rank, self._sock = rank, admitted.sock
        if self._identity is not None:
            from skyctl.transport.tls import TlsGroup  # a Python without ssl can still train in the clear

            wrapped = self._identity.wrap(admitted.sock, server=rank == 0, timeout_s=limit_s)
            self._group = TlsGroup(wrapped, self.peer)
            return
        limit = timedelta(seconds=limit_s)
        store = Exchange(admitted.sock, limit_s)
        options = _c10d.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=self._address)]
        group = _c10d.ProcessGroupGloo(_c10d.PrefixStore("gloo", store), rank, 2, options)
        _prove(group, rank, admitted.key, limit)
        self._group = group
        if lanes_wanted(store, rank, self._device):
            self._lanes = Lanes(_c10d.PrefixStore("nccl", store), rank, self._device, limit, self)

    def _unconnected(self, host: str, port: int, waited_s: float, exc: Exception) -> RunError:
        reason = words(exc) if isinstance(exc, OSError) else str(exc).splitlines()[0]
        hint = (
            "a firewall or NAT may stand between the two nodes; 'skyctl check' tries every pair, and "
            "'interface:' in cluster.yaml names the network to use (a VPN's, say)"
        )
        if isinstance(exc, ImpostorError):
            hint = "another program, or another run's rank, answers at that address: is it the right node's?"
        return RunError(
            f"no connection with {self.peer} over {host}:{port} within {waited_s:.0f} s: {reason}", hint=hint
        )

    def _start(self, tensor: Tensor, tag: int, *, sending: bool) -> Work:
        group, staging = self._group, self._staging
        if group is None:
            raise PeerLostError(f"the connection to {self.peer} is closed")
        if staging is None and tensor.device.type != "cpu":
            staging = self._stage(streams_of(tensor.device))
        try:
            if staging is not None and (sending or staging.stages(tensor)):
                return _GlooWork(self, (staging.send if sending else staging.recv)(tensor, tag), tensor)
            post = group.send if sending else group.recv
            return _GlooWork(self, post([tensor], 1 - self._rank, tag), tensor)
        except RuntimeError as exc:
            raise self.lost(exc, 0.0) from exc

    def _stage(self, streams: Streams) -> Staging:
        """From now on sends go through a thread, and what is not in host memory through a buffer of it."""
        group, peer = self._group, 1 - self._rank
        self._staging = Staging(
            streams,
            lambda tensor, tag: group.send([tensor], peer, tag),
            lambda tensor, tag: group.recv([tensor], peer, tag),
            self.peer,
        )
        return self._staging


def _prove(group: Any, rank: int, key: bytes, limit: timedelta) -> None:
    """Gloo's own connection is between the two that hold this key, or RuntimeError.

    Gloo listens without asking who comes: a stranger who is quicker than the peer would be taken for it.
    """
    proofs = [hmac.digest(key, role, "sha256") for role in (b"gloo listener", b"gloo connector")]
    heard = bytearray(len(proofs[0]))
    mine = torch.frombuffer(bytearray(proofs[rank]), dtype=torch.uint8)
    answer = group.recv([torch.frombuffer(heard, dtype=torch.uint8)], 1 - rank, PROOF_TAG)
    group.send([mine], 1 - rank, PROOF_TAG).wait(limit)
    answer.wait(limit)
    if not hmac.compare_digest(heard, proofs[1 - rank]):
        raise RuntimeError("a stranger was quicker to Gloo's port than the peer")


class _GlooWork:
    """Holds its tensor until it is let go itself."""

    __slots__ = ("_pair", "_tensor", "_work")

    def __init__(self, pair: Pair, work: Any, tensor: Tensor) -> None:
        self._pair, self._work, self._tensor = pair, work, tensor

    def wait(self, timeout_s: float | None = None) -> None:
        if self._work is None:
            return
        limit = self._pair._limit if timeout_s is None else timedelta(seconds=timeout_s)
        try:
            self._work.wait(limit)
        except RuntimeError as exc:
            raise self._pair.lost(exc, limit.total_seconds()) from exc
        self._work = None  # Gloo's would wait for ever if it were asked again
