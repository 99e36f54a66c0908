"""A rank's end of the line to one expert host: calls that are under way, and how long they are waited for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from skyctl.agent.frames import FrameError
from skyctl.experts.answers import AnswerDeadline
from skyctl.experts.host_messages import (
    HOST_ANSWERS,
    Adopt,
    Adopted,
    Backward,
    EndStep,
    ExpertState,
    Forward,
    HostAnswer,
    NotDone,
    Result,
    StateWanted,
    StepEnded,
    TrunkRequest,
    read_message,
    to_header,
)
from skyctl.experts.message_link import MessageLink

ANSWERED_BY: Mapping[type[Any], type[Any]] = {
    Forward: Result,
    Backward: Result,
    EndStep: StepEnded,
    StateWanted: ExpertState,
    Adopt: Adopted,
}
_DOUBTED = (Forward, Backward, EndStep)
"""A host that still owes the answer to one of these was too late, and is not asked anew before."""
PATIENCE = 20
"""A late host is waited for so many times as long as another, where none is left that is in time."""


class HostCall:
    """A request, and its answer once it is there.

    Attributes:
        answer: None: there is none yet, or the host is lost.
    """

    def __init__(self, request: TrunkRequest, sent: Sequence[Tensor]) -> None:
        self.request = request
        self.answer: HostAnswer | None = None
        self.tensors: list[Tensor] = []
        self.began, self.took_s = time.monotonic(), 0.0
        self._like = [(tensor.shape, tensor.dtype) for tensor in sent]
        self._over = threading.Event()

    def is_over(self, wait_s: float | None = 0.0) -> bool:
        """Whether there is an answer, or none will come; None: waits for that."""
        return self._over.wait(wait_s)

    def end(self, answer: HostAnswer | None, tensors: list[Tensor]) -> None:
        """The answer has come (None: the host is lost). Raises FrameError where it does not fit."""
        if answer is not None and not isinstance(answer, NotDone):
            if not isinstance(answer, ANSWERED_BY[type(self.request)]):
                raise FrameError(f"it answered {self.request.kind!r} with {answer.kind!r}")
            named = len(answer.names) if isinstance(answer, ExpertState) else 0
            wanted = self._like if isinstance(answer, Result) else [()] * named
            found = [(tensor.shape, tensor.dtype) for tensor in tensors]
            if len(found) != len(wanted) or (isinstance(answer, Result) and found != wanted):
                raise FrameError(f"it gave {_described(tensors)} for {_shown(self._like)}")
        self.took_s = time.monotonic() - self.began
        self.answer, self.tensors = answer, tensors
        self._over.set()


class HostClient:
    """A host, as one rank asks it; all but the link's own callbacks is for one thread.

    Attributes:
        place: its number among the rank's hosts.
        name: what to call it in a line.
        lost: why it is lost; None: it is not.
        is_late: a call was not answered in time; in this step it is waited for no more.

    Args:
        least_wait_s: a call is waited for so long in any case.
    """

    def __init__(self, place: int, name: str, link: MessageLink, least_wait_s: float) -> None:
        self.place, self.name = place, name
        self.lost: str | None = None
        self.is_late = False
        self._link, self._least_wait_s = link, least_wait_s
        self._lock = threading.Lock()
        self._open: dict[int, HostCall] = {}
        self._next = 0
        self._answered: queue.SimpleQueue[HostCall] = queue.SimpleQueue()
        self._calls, self._steps = AnswerDeadline(), AnswerDeadline()
        link.start(self._take, self._end)

    @property
    def next_call(self) -> int:
        """The number of the next request."""
        return self._next

    @property
    def owes(self) -> bool:
        """Whether it has still to answer what it was too late for."""
        with self._lock:
            return any(isinstance(call.request, _DOUBTED) for call in self._open.values())

    def ask(self, request: TrunkRequest, tensors: Sequence[Tensor] = ()) -> HostCall:
        """Starts a request, whose number is ``next_call``; on a host that is lost its call is over."""
        self._next += 1
        call = HostCall(request, tensors)
        with self._lock:
            is_lost = self.lost is not None
            if not is_lost and type(request) in ANSWERED_BY:
                self._open[request.call] = call
        if is_lost:
            call.end(None, [])
        else:
            self._link.send(to_header(request), tensors)
        return call

    def awaits(self, call: HostCall, *, patient: bool = False) -> bool:
        """Waits for a call as long as it is due; whether it was answered. If not, the host is late.

        Args:
            patient: for as long as the host is there.
        """
        limit_s = None if patient else self._limit_s(of_steps=isinstance(call.request, EndStep))
        if self.is_late:
            limit_s = 0.0
        wait_s = None if limit_s is None else max(0.0, call.began + limit_s - time.monotonic())
        self.is_late |= not call.is_over(wait_s)
        return call.is_over() and call.answer is not None

    @property
    def patience_s(self) -> float:
        """Seconds that it is waited for where no host is left that is in time."""
        limits = [self._limit_s(of_steps=of_steps) for of_steps in (False, True)]
        return PATIENCE * max(limit_s or self._least_wait_s for limit_s in limits)

    def _limit_s(self, *, of_steps: bool) -> float | None:
        """Seconds that a call may take, by the answers before; None: as long as it takes."""
        while not self._answered.empty():
            call = self._answered.get()
            if isinstance(call.request, _DOUBTED) and call.answer is not None:
                (self._steps if isinstance(call.request, EndStep) else self._calls).note(call.took_s)
        limit_s = (self._steps if of_steps else self._calls).limit_s
        return None if limit_s is None else max(limit_s, self._least_wait_s)

    def lose(self, reason: str) -> None:
        """Counts the host as lost: its calls end without answers, and nothing is asked of it any more."""
        self._link.close()
        self._end(reason)

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        self._link.close()

    def _take(self, header: dict[str, Any], tensors: list[Tensor]) -> None:
        answer = read_message(HOST_ANSWERS, header)
        with self._lock:
            call = self._open.get(answer.call)
        if call is None:
            raise FrameError(f"it answered a call {answer.call} that was not made")
        call.end(answer, tensors)
        with self._lock:
            del self._open[answer.call]
        self._answered.put(call)

    def _end(self, reason: str) -> None:
        with self._lock:
            self.lost = self.lost or reason
            ended, self._open = list(self._open.values()), {}
        for call in ended:
            call.end(None, [])


def _shown(kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return (
        ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in kinds) or "nothing"
    )


def _described(tensors: Sequence[Tensor]) -> str:
    return _shown([(tensor.shape, tensor.dtype) for tensor in tensors])
