"""Tokens to experts on hosts and back: all parts are sent, then gathered; in the backward likewise.

A part whose host is late or lost is zero. In the forward the gate's softmax leaves it out, and no gradient is
sent for it. In the backward its input has no gradient; the expert still gets its own, for the host does what
it was sent before the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from skyctl.errors import WorkloadError
from skyctl.experts.host_client import HostCall, HostClient
from skyctl.experts.host_messages import Backward, Forward, NotDone
from skyctl.schedule.seeds import splitmix64

_Part = tuple[int, HostClient, HostCall]
"""The expert's place in the layer, and what was asked of which host."""


class Switchboard(Protocol):
    """All that a rank knows of its hosts (``trunk_experts``)."""

    @property
    def is_patient(self) -> bool:
        """Whether hosts are waited for as long as they are there."""

    def host_of(self, layer: int, expert: int) -> HostClient | None:
        """The host that holds an expert; None: it is lost or late."""

    def next_number(self) -> int:
        """The number of the next call in its step."""

    def fails(self, number: int, *, backward: bool) -> bool:
        """Whether the record, that this step is made again from, has that call as failed."""

    def note_failed(self, number: int, *, backward: bool) -> None:
        """A call has brought nothing back."""

    def note_tokens(self, layer: int, first: int, counts: Sequence[int], nbytes: int) -> None:
        """Notes what was sent in a forward.

        Args:
            first: the number of the first expert.
            counts: tokens of each expert from there on.
            nbytes: of all these tokens.
        """


class RemoteDispatch:
    """Gives the tokens of one ``Experts`` to hosts.

    Args:
        layer: the workload layer that holds it.
        first: the number of its first expert there.
    """

    def __init__(self, board: Switchboard, layer: int, first: int) -> None:
        self._board, self._layer, self._first = board, layer, first

    def __call__(self, tokens: Tensor, counts: Sequence[int]) -> tuple[Tensor, Sequence[bool]]:
        """As ``experts.layer.Dispatch``.

        Raises:
            WorkloadError: an expert's own code has failed.
        """
        exchange = _Exchange(self._board, self._layer, self._first, counts, trains=torch.is_grad_enabled())
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())  # experts train where tokens do not
        answers: Tensor = _RemoteExperts.apply(exchange, tokens, anchor)  # type: ignore[no-untyped-call]
        return answers, exchange.answering


class _Exchange:
    """One forward of the layer, and its backward."""

    def __init__(
        self, board: Switchboard, layer: int, first: int, counts: Sequence[int], *, trains: bool
    ) -> None:
        self._board, self._layer, self._first, self._counts = board, layer, first, counts
        self._trains = trains
        self._forwards: dict[int, tuple[HostClient, HostCall]] = {}
        self.answering: list[bool] = [True] * len(counts)

    def forward(self, tokens: Tensor) -> Tensor:
        board, seed = self._board, torch.default_generator.initial_seed()
        parts: list[_Part] = []
        failed: dict[int, int] = {}
        numbers: dict[int, int] = {}
        for expert, part in enumerate(torch.split(tokens, list(self._counts))):
            if not len(part):
                continue
            numbers[expert] = number = board.next_number()
            host = board.host_of(self._layer, self._first + expert)
            if host is None or board.fails(number, backward=False):
                failed[expert] = number
                continue
            place = self._first + expert
            request = Forward(host.next_call, self._layer, place, splitmix64(seed, place), self._trains)
            parts.append((expert, host, host.ask(request, [part])))
        board.note_tokens(self._layer, self._first, self._counts, tokens.numel() * tokens.element_size())
        answers = torch.zeros_like(tokens)
        rows = torch.split(answers, list(self._counts))
        for expert, host, call in parts:
            if _is_answered(call, host, board):
                rows[expert].copy_(call.tensors[0])
                self._forwards[expert] = (host, call)
            else:
                failed[expert] = numbers[expert]
        for expert, number in failed.items():
            self.answering[expert] = False
            board.note_failed(number, backward=False)
        return answers

    def backward(self, gradients: Tensor) -> Tensor:
        board, parts = self._board, []
        numbers: dict[int, int] = {}
        given = torch.split(gradients, list(self._counts))
        for expert, (host, call) in self._forwards.items():
            numbers[expert] = board.next_number()
            request = Backward(host.next_call, call.request.call)
            parts.append((expert, host, host.ask(request, [given[expert]])))
        self._forwards.clear()
        of_tokens = torch.zeros_like(gradients)
        rows = torch.split(of_tokens, list(self._counts))
        for expert, host, call in parts:
            is_answered = _is_answered(call, host, board)
            if is_answered and not board.fails(numbers[expert], backward=True):
                rows[expert].copy_(call.tensors[0])
            else:
                board.note_failed(numbers[expert], backward=True)
        return of_tokens


def _is_answered(call: HostCall, host: HostClient, board: Switchboard) -> bool:
    """Waits for a call as long as it is due.

    Raises:
        WorkloadError: the expert's own code has failed.
    """
    if not host.awaits(call, patient=board.is_patient):
        return False
    if isinstance(call.answer, NotDone):
        if call.answer.by_expert:
            raise WorkloadError(f"{host.name}: {call.answer.reason}")
        return False
    return True


class _RemoteExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, tokens: Tensor, anchor: Tensor) -> Tensor:  # noqa: ARG004
        ctx.exchange = exchange
        return exchange.forward(tokens)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> Any:
        of_tokens = ctx.exchange.backward(gradients)
        return None, of_tokens if ctx.needs_input_grad[1] else None, None
