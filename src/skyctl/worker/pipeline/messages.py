"""The messages between two stages: a header, then the tensors of one microbatch.

The header (step, microbatch, flags) is sent the moment its sender has the tensors ready. It makes three
things possible: a mix-up is an error and not a wrong gradient; the last step is announced along the pipeline;
and waiting can be split without aligned clocks. While the header has not come, the peer was not ready (idle);
from the header to the last byte it is the network that is waited for (transfer). A message queued behind
earlier ones on its link keeps its header waiting only until those have arrived, which the receiver had to
wait for anyway. The header itself travels for ``latency_s`` (half of the shortest round trip seen when the
pair connected), so that much of a wait for it counts as transfer too.

If a link has a dtype, tensors are encoded into reused buffers and decoded on arrival (``tensor_codec``);
the time for both counts as transfer as well.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import torch

from skyctl.errors import RunError
from skyctl.transport.work import Work
from skyctl.worker.peer import FIRST_STREAM_TAG, Peer
from skyctl.worker.sums.tensor_codec import TensorCodec, codec_for

LAST_STEP = 1
"""Flag of a forward message: the pipeline ends with this step."""

_HEADER_FORMAT = struct.Struct("=4q")  # step, microbatch, flags, number of tensors


class BoundaryTensor(Protocol):
    """A tensor as it is known before it arrives; ``shape_inference.TensorSpec`` is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def requires_grad(self) -> bool: ...


TensorKind = tuple[tuple[int, ...], torch.dtype]
"""(shape, dtype)."""
MessageSpecs = Callable[[int], Sequence[BoundaryTensor]]
"""Microbatch → the tensors of its message."""


def message_bytes(specs: Sequence[BoundaryTensor]) -> int:
    """The bytes of a message's tensors, without its header."""
    return sum(parse_dtype(spec.dtype).itemsize * math.prod(spec.shape) for spec in specs)


def parse_dtype(name: str) -> torch.dtype:
    """``float32`` (or ``torch.float32``) → ``torch.float32``.

    Raises:
        RunError: torch has no such dtype.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise RunError(f"unknown dtype {name!r} at a stage's boundary")
    return dtype


class ReceivedMessage(NamedTuple):
    """The message of one microbatch, and how long it was waited for.

    Attributes:
        flags: ``LAST_STEP`` or 0.
        idle_s: waiting for the sender to be ready.
        transfer_s: waiting for the network, decoding included.
    """

    tensors: tuple[torch.Tensor, ...]
    flags: int
    idle_s: float
    transfer_s: float


class _Header:
    """A header's buffer, read and written without making tensors."""

    __slots__ = ("_bytes", "tensor")

    def __init__(self) -> None:
        self._bytes = bytearray(_HEADER_FORMAT.size)
        self.tensor = torch.frombuffer(self._bytes, dtype=torch.uint8)

    def write(self, step: int, microbatch: int, flags: int, count: int) -> None:
        _HEADER_FORMAT.pack_into(self._bytes, 0, step, microbatch, flags, count)

    def read(self) -> tuple[int, int, int, int]:
        step, microbatch, flags, count = _HEADER_FORMAT.unpack(self._bytes)
        return step, microbatch, flags, count


class _BufferPool:
    """Headers, and the buffers of encoded tensors; both are used again and again."""

    def __init__(self) -> None:
        self._headers: list[_Header] = []
        self._wires: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}

    def header(self) -> _Header:
        return self._headers.pop() if self._headers else _Header()

    def wire(self, codec: TensorCodec, device: torch.device) -> torch.Tensor:
        free = self._wires.get((codec.shape, codec.dtype))
        return free.pop() if free else torch.empty(codec.shape, dtype=codec.dtype, device=device)

    def give_back(self, header: _Header, wires: Sequence[torch.Tensor]) -> None:
        """Frees buffers whose transfers are all done."""
        self._headers.append(header)
        for wire in wires:
            self._wires.setdefault((tuple(wire.shape), wire.dtype), []).append(wire)


class _MessageStream:
    """The common part of both ends of one direction: the peer, and each microbatch's tensors and codecs."""

    def __init__(
        self,
        peer: Peer,
        specs: MessageSpecs,
        *,
        backward: bool,
        microbatches: int,
        link_dtype: str | None,
    ) -> None:
        self._peer, self._backward = peer, backward
        self._kinds = [
            [(tuple(spec.shape), parse_dtype(spec.dtype)) for spec in specs(m)] for m in range(microbatches)
        ]
        distinct = {kind for kinds in self._kinds for kind in kinds}
        codecs = {kind: codec_for(link_dtype, *kind) for kind in distinct}
        self._codecs = [[codecs[kind] for kind in kinds] for kinds in self._kinds]
        self._buffers = _BufferPool()

    def _tag(self, microbatch: int) -> int:
        return FIRST_STREAM_TAG + 2 * microbatch + int(self._backward)


class _IncomingTensor(NamedTuple):
    """One tensor of a message: the buffer it arrives in, and its codec (None: it arrives as it is)."""

    wire: torch.Tensor
    kind: TensorKind
    codec: TensorCodec | None


class _PostedReceive(NamedTuple):
    header: _Header
    header_work: Work
    incoming: list[_IncomingTensor]
    works: list[Work]


class MessageReceiver(_MessageStream):
    """Receives one direction of a connection, in the order of microbatches.

    Args:
        specs: the tensors of each microbatch's message.
        backward: whether these are gradients.
        window: how many receives are posted ahead.
        link_dtype: what floats are sent as (None: unchanged).
    """

    def __init__(
        self,
        peer: Peer,
        specs: MessageSpecs,
        *,
        backward: bool,
        microbatches: int,
        window: int,
        device: torch.device,
        link_dtype: str | None = None,
    ) -> None:
        super().__init__(peer, specs, backward=backward, microbatches=microbatches, link_dtype=link_dtype)
        self._window, self._device = window, device
        self._posted: deque[_PostedReceive] = deque()
        self._step = self._next = self._count = 0

    def begin(self, step: int, count: int | None = None) -> None:
        """Posts the step's first receives; every message of the step before must have been received.

        Args:
            count: how many messages it has; None: one for each microbatch that the stream was made for.
        """
        assert not self._posted, "messages of the step before were left"
        self._step, self._next = step, 0
        self._count = len(self._kinds) if count is None else count
        self.refill()

    def receive(self, microbatch: int) -> ReceivedMessage:
        """Waits for that microbatch's message.

        Raises:
            PeerLostError: the sender is gone.
            PeerProtocolError: this is another message than the one expected.
            RunError: the transfer failed.
        """
        posted = self._posted.popleft()
        start = time.perf_counter()
        posted.header_work.wait()
        announced = time.perf_counter()
        step, number, flags, count = posted.header.read()
        if (step, number, count) != (self._step, microbatch, len(posted.works)):
            raise self._peer.protocol_error(
                f"sent microbatch {number} of step {step} with {count} tensors; "
                f"expected microbatch {microbatch} of step {self._step} with {len(posted.works)}"
            )
        for work in posted.works:
            work.wait()
        tensors = tuple(self._decode(item) for item in posted.incoming)
        self._buffers.give_back(
            posted.header, [item.wire for item in posted.incoming if item.codec is not None]
        )
        end = time.perf_counter()
        if not self._posted:
            self.refill()
        travelling_s = min(announced - start, self._peer.latency_s)
        return ReceivedMessage(
            tensors, flags, announced - start - travelling_s, end - announced + travelling_s
        )

    def refill(self) -> None:
        """Posts receives up to the window again: best after the action that was waited for has run."""
        if len(self._posted) >= self._window or self._next >= self._count:
            return
        with self._peer.together():
            while len(self._posted) < self._window and self._next < self._count:
                self._post()

    def _post(self) -> None:
        header = self._buffers.header()
        pairs = zip(self._kinds[self._next], self._codecs[self._next], strict=True)
        incoming = [_IncomingTensor(self._buffer(kind, codec), kind, codec) for kind, codec in pairs]
        tag = self._tag(self._next)
        header_work = self._peer.recv(header.tensor, tag)
        works = [self._peer.recv(item.wire, tag) for item in incoming if item.wire.numel()]
        self._posted.append(_PostedReceive(header, header_work, incoming, works))
        self._next += 1

    def _buffer(self, kind: TensorKind, codec: TensorCodec | None) -> torch.Tensor:
        if codec is not None:
            return self._buffers.wire(codec, self._device)
        return torch.empty(kind[0], dtype=kind[1], device=self._device)

    def _decode(self, incoming: _IncomingTensor) -> torch.Tensor:
        if incoming.codec is None:
            return incoming.wire
        tensor = torch.empty(incoming.kind[0], dtype=incoming.kind[1], device=self._device)
        incoming.codec.decode(incoming.wire, tensor)
        return tensor


class _PendingSend(NamedTuple):
    microbatch: int
    header: _Header
    wires: list[torch.Tensor]
    works: list[Work]


class MessageSender(_MessageStream):
    """Sends one direction of a connection; keeps what is sent until it has left.

    Args:
        specs: the tensors of each microbatch's message.
        backward: whether these are gradients.
        window: how many messages may be under way before a further one waits for the oldest (None: any
            number). A link that is that far behind never runs dry while its sender waits.
        link_dtype: what floats are sent as (None: unchanged).
    """

    def __init__(
        self,
        peer: Peer,
        specs: MessageSpecs,
        *,
        backward: bool,
        microbatches: int,
        window: int | None,
        link_dtype: str | None = None,
    ) -> None:
        super().__init__(peer, specs, backward=backward, microbatches=microbatches, link_dtype=link_dtype)
        self._window = window
        self._pending: deque[_PendingSend] = deque()

    def send(self, step: int, microbatch: int, tensors: Sequence[torch.Tensor], flags: int = 0) -> float:
        """Starts sending; the tensors must not change afterwards.

        Returns:
            The seconds it took to wait for room in the window, and to encode.

        Raises:
            RunError: the tensors are not what the receiver was told to expect, or an earlier send failed.
        """
        self._check(microbatch, tensors)
        start = time.perf_counter()
        filled = [(t, codec) for t, codec in zip(tensors, self._codecs[microbatch], strict=True) if t.numel()]
        tag = self._tag(microbatch)
        header = self._buffers.header()
        header.write(step, microbatch, flags, len(filled))
        wires: list[torch.Tensor] = []
        with nullcontext() if any(codec for _, codec in filled) else self._peer.together():
            # the header goes first: the receiver, too, counts the encoding as transfer
            works = [self._peer.send(header.tensor, tag)]
            for tensor, codec in filled:
                out = tensor
                if codec is not None:
                    out = self._buffers.wire(codec, tensor.device)
                    codec.encode(tensor, out)
                    wires.append(out)
                works.append(self._peer.send(out, tag))
        spent_s = time.perf_counter() - start if wires else 0.0
        self._pending.append(_PendingSend(microbatch, header, wires, works))
        if self._window is None or len(self._pending) <= self._window:
            return spent_s
        start = time.perf_counter()
        self._finish_oldest()
        return spent_s + time.perf_counter() - start

    def confirm(self, microbatch: int) -> None:
        """The peer has answered that microbatch's message: frees its buffers, and those before it."""
        while self._pending and self._pending[0].microbatch <= microbatch:
            self._finish_oldest()

    def drain(self) -> None:
        """Waits until everything has left."""
        while self._pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        pending = self._pending.popleft()
        for work in pending.works:
            work.wait()
        self._buffers.give_back(pending.header, pending.wires)

    def _check(self, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        actual, expected = [(tuple(t.shape), t.dtype) for t in tensors], self._kinds[microbatch]
        if actual != expected:
            what = "the gradient of its input" if self._backward else "its output"
            raise RunError(
                f"{what} is {_describe_tensors(actual)}; a trial run gave {_describe_tensors(expected)}",
                hint="a layer's output must have the same shapes and dtypes for every input of one size",
            )


def _describe_tensors(tensors: Sequence[TensorKind]) -> str:
    return " and ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in tensors)
