"""The messages between two stages: a header, then the tensors of one microbatch.

The header (step, microbatch, flags) is sent the moment its sender has the tensors ready. It makes three
things possible: a mix-up is an error and not a wrong gradient; the last step is announced along the pipeline;
and waiting can be split without aligned clocks. While the header has not come, the peer was not ready (idle);
from the header to the last byte it is the network that is waited for (transfer). A message queued behind
earlier ones on its link keeps its header waiting only until those have arrived, which the receiver had to
wait for anyway. The header's own way takes ``latency_s`` (half of the shortest round trip seen when the pair
connected), so that much of a wait for it is counted as transfer too.

Where a link has a dtype, tensors are encoded into buffers that are used again and decoded when taken
(``codec``); what that takes is counted as transfer as well.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from skyctl.errors import RunError
from skyctl.transport.pair import FIRST_TAG, Pair, Work
from skyctl.worker.codec import Code, code_for

LAST_STEP = 1
"""Flag of a forward message: the pipeline ends with this step."""

WINDOW = 8
WINDOW_BYTES = 64 * 2**20
_HEADER = struct.Struct("=4q")  # step, microbatch, flags, number of tensors


class Spec(Protocol):
    """What is known of a tensor before it comes (``workload.TensorSpec``)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def requires_grad(self) -> bool: ...


Kind = tuple[tuple[int, ...], torch.dtype]
Boundary = Callable[[int], Sequence[Spec]]
"""Microbatch → the tensors of its message."""


def window(asked: int, microbatches: int, message_bytes: float) -> int:
    """How many receives to post ahead.

    A plan that counts a window gets that one. Otherwise 8, or as many as fit into 64 MiB, but at least 2: a
    message only moves once its receive is posted, so one alone would wait for compute; and the word that it
    is posted queues behind the data that goes the other way.
    """
    fitting = int(WINDOW_BYTES // max(message_bytes, 1.0))
    return min(microbatches, asked if asked > 0 else max(2, min(WINDOW, fitting)))


def message_bytes(specs: Sequence[Spec]) -> int:
    """The tensors' bytes, header left out."""
    return sum(torch_dtype(spec.dtype).itemsize * math.prod(spec.shape) for spec in specs)


def torch_dtype(name: str) -> torch.dtype:
    """``float32`` (or ``torch.float32``) → ``torch.float32``."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise RunError(f"unknown dtype {name!r} at a stage's boundary")
    return found


class Taken(NamedTuple):
    """One message, and what waiting for it took."""

    tensors: tuple[torch.Tensor, ...]
    flags: int
    idle_s: float
    transfer_s: float


class _Header:
    """A header's buffer, read and written without making tensors."""

    __slots__ = ("_bytes", "tensor")

    def __init__(self) -> None:
        self._bytes = bytearray(_HEADER.size)
        self.tensor = torch.frombuffer(self._bytes, dtype=torch.uint8)

    def write(self, step: int, microbatch: int, flags: int, count: int) -> None:
        _HEADER.pack_into(self._bytes, 0, step, microbatch, flags, count)

    def read(self) -> tuple[int, int, int, int]:
        step, microbatch, flags, count = _HEADER.unpack(self._bytes)
        return step, microbatch, flags, count


class _Buffers:
    """Headers, and buffers for what goes over the link in another form; both are used again and again."""

    def __init__(self) -> None:
        self._headers: list[_Header] = []
        self._wires: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}

    def header(self) -> _Header:
        return self._headers.pop() if self._headers else _Header()

    def wire(self, code: Code, device: torch.device) -> torch.Tensor:
        free = self._wires.get((code.shape, code.dtype))
        return free.pop() if free else torch.empty(code.shape, dtype=code.dtype, device=device)

    def give_back(self, header: _Header, wires: Sequence[torch.Tensor]) -> None:
        """Nothing is under way to or from them any more."""
        self._headers.append(header)
        for wire in wires:
            self._wires.setdefault((tuple(wire.shape), wire.dtype), []).append(wire)


class _Coming(NamedTuple):
    """One tensor of a message: where it arrives, and how it was sent (None: as it is, right there)."""

    wire: torch.Tensor
    kind: Kind
    code: Code | None


@dataclass
class _Posted:
    microbatch: int
    header: _Header
    header_work: Work
    coming: list[_Coming]
    works: list[Work]


class Inbox:
    """Receives one direction of a pair, in the order of microbatches, posting ``window`` receives ahead.

    ``dtype``: what its link's numbers are sent as (None: as they are).
    """

    def __init__(
        self,
        pair: Pair,
        boundary: Boundary,
        *,
        backward: bool,
        microbatches: int,
        window: int,
        device: torch.device,
        latency_s: float,
        dtype: str | None = None,
    ) -> None:
        self._pair, self._backward = pair, backward
        self._kinds = [_kinds(boundary(m)) for m in range(microbatches)]
        self._codes = _codes(dtype, self._kinds)
        self._microbatches, self._window = microbatches, window
        self._device, self._latency_s = device, latency_s
        self._posted: deque[_Posted] = deque()
        self._buffers = _Buffers()
        self._step = 0
        self._next = 0

    def begin(self, step: int) -> None:
        """Posts the step's first receives. The step before must have taken all its messages."""
        assert not self._posted, "messages of the step before were left"
        self._step, self._next = step, 0
        self.refill()

    def take(self, microbatch: int) -> Taken:
        """Waits for that microbatch's message.

        Raises:
            PeerLostError, RunError: the pair's, and RunError for a message other than the one expected.
        """
        posted = self._posted.popleft()
        start = time.perf_counter()
        posted.header_work.wait()
        announced = time.perf_counter()
        step, number, flags, count = posted.header.read()
        if (step, number, count) != (self._step, microbatch, len(posted.works)):
            raise RunError(
                f"{self._pair.peer} sent microbatch {number} of step {step} with {count} tensors; expected "
                f"microbatch {microbatch} of step {self._step} with {len(posted.works)}"
            )
        for work in posted.works:
            work.wait()
        tensors = tuple(self._read(coming) for coming in posted.coming)
        self._buffers.give_back(posted.header, [c.wire for c in posted.coming if c.code is not None])
        end = time.perf_counter()
        if not self._posted:
            self.refill()
        travelling = min(announced - start, self._latency_s)
        return Taken(tensors, flags, announced - start - travelling, end - announced + travelling)

    def refill(self) -> None:
        """Posts receives up to the window again: best after the action that was waited to begin."""
        while len(self._posted) < self._window and self._next < self._microbatches:
            self._post()

    def _post(self) -> None:
        microbatch = self._next
        header = self._buffers.header()
        pairs = zip(self._kinds[microbatch], self._codes[microbatch], strict=True)
        coming = [_Coming(self._room(kind, code), kind, code) for kind, code in pairs]
        tag = _tag(self._backward, microbatch)
        header_work = self._pair.recv(header.tensor, tag)
        works = [self._pair.recv(c.wire, tag) for c in coming if c.wire.numel()]
        self._posted.append(_Posted(microbatch, header, header_work, coming, works))
        self._next += 1

    def _room(self, kind: Kind, code: Code | None) -> torch.Tensor:
        if code is not None:
            return self._buffers.wire(code, self._device)
        return torch.empty(kind[0], dtype=kind[1], device=self._device)

    def _read(self, coming: _Coming) -> torch.Tensor:
        if coming.code is None:
            return coming.wire
        tensor = torch.empty(coming.kind[0], dtype=coming.kind[1], device=self._device)
        coming.code.decode(coming.wire, tensor)
        return tensor


class _Sent(NamedTuple):
    microbatch: int
    header: _Header
    wires: list[torch.Tensor]
    works: list[Work]


class Outbox:
    """Sends one direction of a pair; keeps what is sent until it has gone.

    Args:
        window: how many messages may be under way before a further one waits for the oldest (None: any
            number). A link that is that far behind never runs dry while its sender waits.
        dtype: what the link's numbers are sent as (None: as they are).
    """

    def __init__(
        self,
        pair: Pair,
        boundary: Boundary,
        *,
        backward: bool,
        microbatches: int,
        window: int | None,
        dtype: str | None = None,
    ) -> None:
        self._pair, self._backward, self._window = pair, backward, window
        self._kinds = [_kinds(boundary(m)) for m in range(microbatches)]
        self._codes = _codes(dtype, self._kinds)
        self._under_way: deque[_Sent] = deque()
        self._buffers = _Buffers()

    def send(self, step: int, microbatch: int, tensors: Sequence[torch.Tensor], flags: int = 0) -> float:
        """Starts sending; the tensors must not change afterwards.

        Returns:
            The seconds it had to wait, and took to encode.

        Raises:
            RunError: the tensors are not what the other side was told to expect, or an earlier send failed.
        """
        given = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        if given != self._kinds[microbatch]:
            what = "the gradient of its input" if self._backward else "its output"
            raise RunError(
                f"{what} is {_words(given)}; a trial run gave {_words(self._kinds[microbatch])}",
                hint="a layer's output must have the same shapes and dtypes for every input of one size",
            )
        start = time.perf_counter()
        sent = [(t, code) for t, code in zip(tensors, self._codes[microbatch], strict=True) if t.numel()]
        tag = _tag(self._backward, microbatch)
        header = self._buffers.header()
        header.write(step, microbatch, flags, len(sent))
        works = [self._pair.send(header.tensor, tag)]  # first: the peer, too, counts the encoding as transfer
        wires = []
        for tensor, code in sent:
            out = tensor
            if code is not None:
                out = self._buffers.wire(code, tensor.device)
                code.encode(tensor, out)
                wires.append(out)
            works.append(self._pair.send(out, tag))
        spent_s = time.perf_counter() - start if wires else 0.0
        self._under_way.append(_Sent(microbatch, header, wires, works))
        if self._window is None or len(self._under_way) <= self._window:
            return spent_s
        start = time.perf_counter()
        self._settle()
        return spent_s + time.perf_counter() - start

    def confirm(self, microbatch: int) -> None:
        """The peer has answered that microbatch's message: lets its buffers go, and those before it."""
        while self._under_way and self._under_way[0].microbatch <= microbatch:
            self._settle()

    def drain(self) -> None:
        """Waits until everything has gone."""
        while self._under_way:
            self._settle()

    def _settle(self) -> None:
        sent = self._under_way.popleft()
        for work in sent.works:
            work.wait()
        self._buffers.give_back(sent.header, sent.wires)


def _tag(backward: bool, microbatch: int) -> int:
    return FIRST_TAG + 2 * microbatch + int(backward)


def _kinds(specs: Sequence[Spec]) -> list[Kind]:
    return [(tuple(spec.shape), torch_dtype(spec.dtype)) for spec in specs]


def _codes(link_dtype: str | None, kinds: Sequence[Sequence[Kind]]) -> list[list[Code | None]]:
    """By microbatch, how each tensor is sent; microbatches of one size share theirs."""
    known: dict[Kind, Code | None] = {}
    for kind in (kind for message in kinds for kind in message):
        if kind not in known:
            known[kind] = code_for(link_dtype, *kind)
    return [[known[kind] for kind in message] for message in kinds]


def _words(tensors: Sequence[Kind]) -> str:
    return " and ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in tensors)
