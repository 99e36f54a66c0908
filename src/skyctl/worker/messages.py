"""The messages between two stages: a header, then the tensors of one microbatch.

The header (step, microbatch, flags) is sent the moment its sender has the tensors ready. It makes three
things possible: a mix-up is an error and not a wrong gradient; the last step is announced along the pipeline;
and waiting can be split without aligned clocks. While the header has not come, the peer was not ready (idle);
from the header to the last byte it is the network that is waited for (transfer). A message queued behind
earlier ones on its link keeps its header waiting only until those have arrived, which the receiver had to
wait for anyway. The header's own way takes ``latency_s`` (half of the shortest round trip seen when the pair
connected), so that much of a wait for it is counted as transfer too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from skyctl.errors import RunError
from skyctl.transport.pair import FIRST_TAG, Pair, Work

LAST_STEP = 1
"""Flag of a forward message: the pipeline ends with this step."""

WINDOW = 8
WINDOW_BYTES = 64 * 2**20
_HEADER = 4  # int64: step, microbatch, flags, number of tensors


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
    message only moves once its receive is posted, so one alone would wait for compute.
    """
    fitting = int(WINDOW_BYTES // max(message_bytes, 1.0))
    return min(microbatches, asked if asked > 0 else max(2, min(WINDOW, fitting)))


def message_bytes(specs: Sequence[Spec]) -> int:
    """The tensors' bytes, header left out."""
    total = 0
    for spec in specs:
        size = torch_dtype(spec.dtype).itemsize
        for extent in spec.shape:
            size *= extent
        total += size
    return total


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


@dataclass
class _Posted:
    microbatch: int
    header: torch.Tensor
    header_work: Work
    tensors: tuple[torch.Tensor, ...]
    works: list[Work]


class Inbox:
    """Receives one direction of a pair, in the order of microbatches, posting ``window`` receives ahead."""

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
    ) -> None:
        self._pair, self._backward = pair, backward
        self._kinds = [_kinds(boundary(m)) for m in range(microbatches)]
        self._microbatches, self._window = microbatches, window
        self._device, self._latency_s = device, latency_s
        self._posted: deque[_Posted] = deque()
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
        step, number, flags, count = posted.header.tolist()
        if (step, number, count) != (self._step, microbatch, len(posted.works)):
            raise RunError(
                f"{self._pair.peer} sent microbatch {number} of step {step} with {count} tensors; expected "
                f"microbatch {microbatch} of step {self._step} with {len(posted.works)}"
            )
        for work in posted.works:
            work.wait()
        end = time.perf_counter()
        if not self._posted:
            self.refill()
        travelling = min(announced - start, self._latency_s)
        return Taken(posted.tensors, flags, announced - start - travelling, end - announced + travelling)

    def refill(self) -> None:
        """Posts receives up to the window again: best after the action that was waited to begin."""
        while len(self._posted) < self._window and self._next < self._microbatches:
            self._post()

    def _post(self) -> None:
        microbatch = self._next
        header = torch.empty(_HEADER, dtype=torch.int64)
        tensors = tuple(
            torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._kinds[microbatch]
        )
        tag = _tag(self._backward, microbatch)
        header_work = self._pair.recv(header, tag)
        works = [self._pair.recv(t, tag) for t in tensors if t.numel()]
        self._posted.append(_Posted(microbatch, header, header_work, tensors, works))
        self._next += 1


class Outbox:
    """Sends one direction of a pair; keeps what is sent until it has gone.

    Args:
        window: how many messages may be under way before a further one waits for the oldest (None: any
            number). A link that is that far behind never runs dry while its sender waits.
    """

    def __init__(
        self, pair: Pair, boundary: Boundary, *, backward: bool, microbatches: int, window: int | None
    ) -> None:
        self._pair, self._backward, self._window = pair, backward, window
        self._kinds = [_kinds(boundary(m)) for m in range(microbatches)]
        self._under_way: deque[tuple[int, list[Work]]] = deque()

    def send(self, step: int, microbatch: int, tensors: Sequence[torch.Tensor], flags: int = 0) -> float:
        """Starts sending; the tensors must not change afterwards. Returns the seconds it had to wait.

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
        sent = [tensor for tensor in tensors if tensor.numel()]
        tag = _tag(self._backward, microbatch)
        header = torch.tensor((step, microbatch, flags, len(sent)), dtype=torch.int64)
        works = [self._pair.send(header, tag)]
        works.extend(self._pair.send(tensor, tag) for tensor in sent)
        self._under_way.append((microbatch, works))
        if self._window is None or len(self._under_way) <= self._window:
            return 0.0
        start = time.perf_counter()
        self._settle()
        return time.perf_counter() - start

    def confirm(self, microbatch: int) -> None:
        """The peer has answered that microbatch's message: lets its buffers go, and those before it."""
        while self._under_way and self._under_way[0][0] <= microbatch:
            self._settle()

    def drain(self) -> None:
        """Waits until everything has gone."""
        while self._under_way:
            self._settle()

    def _settle(self) -> None:
        _, works = self._under_way.popleft()
        for work in works:
            work.wait()


def _tag(backward: bool, microbatch: int) -> int:
    return FIRST_TAG + 2 * microbatch + int(backward)


def _kinds(specs: Sequence[Spec]) -> list[Kind]:
    return [(tuple(spec.shape), torch_dtype(spec.dtype)) for spec in specs]


def _words(tensors: Sequence[Kind]) -> str:
    return " and ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in tensors)
