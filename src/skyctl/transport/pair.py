"""Point-to-point between two ranks, and nothing wider: only the pairs a plan needs ever connect.

A pair is a ``ProcessGroupGloo`` of two, built directly, with a key-value store of its own that the side that
listens serves on a port bound beforehand. The store's keys stand under the run's secret. Gloo moves a payload
once its receiver is ready, so receives are best posted ahead. Tensors on the CPU are read and written in
place; those of another device go through host memory (``staging``), and over NCCL where both ends are CUDA.

A peer that is gone shows as ``PeerLostError``, one that is silent too long as ``RunError``; both name it.
"""

from __future__ import annotations

import hashlib
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from skyctl.errors import RunError
from skyctl.transport.addresses import address_towards
from skyctl.transport.nccl import Lanes, lanes_wanted
from skyctl.transport.staging import Staging, Streams, streams_of

Tensor = torch.Tensor
_c10d: Any = dist  # what follows is not in torch's type stubs

PING_TAG = 1
BYE_TAG = 2
FIRST_TAG = 16
"""Smaller tags are the pair's own."""

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
        secret: what the two ends must share; it never leaves them, only its digest names the store's keys.
        device: where this end's tensors are, to choose NCCL where both are CUDA (None: CPU).
    """

    def __init__(
        self,
        peer: str = "the peer",
        timeout_s: float = 1800.0,
        *,
        secret: str = "",
        device: torch.device | None = None,
    ) -> None:
        self.peer = peer
        self.timeout_s = timeout_s
        self._limit = timedelta(seconds=timeout_s)
        self._prefix = "pair-" + hashlib.sha256(secret.encode()).hexdigest()[:32]
        self._device = device or torch.device("cpu")
        self._listener: socket.socket | None = None
        self._store: Any = None
        self._group: Any = None
        self._lanes: Lanes | None = None
        self._staging: Staging | None = None
        self._address = ""
        self._port = 0
        self._rank = 0

    def listen(self, address: str) -> int:
        """Binds a free port of ``address`` and returns it.

        Raises:
            RunError: the address is not this machine's.
        """
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((address, 0))
            listener.listen(16)
        except OSError as exc:
            listener.close()
            raise RunError(f"can't listen on {address} for {self.peer}: {exc.strerror or exc}") from exc
        self._listener, self._address = listener, address
        self._port = int(listener.getsockname()[1])
        return self._port

    def accept(self, timeout_s: float = 300.0) -> None:
        """Waits until the peer has connected.

        Raises:
            RunError: it did not come within ``timeout_s``.
        """
        assert self._listener is not None, "listen() first"
        descriptor, self._listener = self._listener.detach(), None
        limit = timedelta(seconds=timeout_s)
        try:
            self._store = _c10d.TCPStore(
                self._address,
                self._port,
                None,
                True,
                timeout=limit,
                wait_for_workers=False,
                master_listen_fd=descriptor,
            )
            self._join(0, limit)
        except RuntimeError as exc:
            raise self._unconnected(self._address, self._port, timeout_s, exc) from exc

    def connect(self, host: str, port: int, address: str | None = None, timeout_s: float = 300.0) -> None:
        """Connects to a peer that listens at ``host``:``port``.

        Args:
            address: this end's own address (None: the one on the route to ``host``).

        Raises:
            RunError: no connection within ``timeout_s``.
        """
        self._address = address or address_towards(host)
        limit = timedelta(seconds=timeout_s)
        try:
            self._store = _c10d.TCPStore(host, port, None, False, timeout=limit)
            self._join(1, limit)
        except RuntimeError as exc:
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
        if self._listener is not None:
            self._listener.close()
            self._listener = None
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
        if self._lanes is not None:
            self._lanes.close()
        self._lanes = None
        self._store = None

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

    def _join(self, rank: int, limit: timedelta) -> None:
        assert self._store is not None
        store = _c10d.PrefixStore(self._prefix, self._store)
        options = _c10d.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=self._address)]
        self._rank = rank
        self._group = _c10d.ProcessGroupGloo(_c10d.PrefixStore("gloo", store), rank, 2, options)
        if lanes_wanted(store, rank, self._device):
            self._lanes = Lanes(_c10d.PrefixStore("nccl", store), rank, self._device, limit, self)

    def _unconnected(self, host: str, port: int, waited_s: float, exc: RuntimeError) -> RunError:
        reason = str(exc).splitlines()[0]
        return RunError(
            f"no connection with {self.peer} over {host}:{port} within {waited_s:.0f} s: {reason}",
            hint="a firewall or NAT may stand between the two nodes; 'skyctl check' tries every pair, and "
            "'interface:' in cluster.yaml names the network to use (a VPN's, say)",
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
