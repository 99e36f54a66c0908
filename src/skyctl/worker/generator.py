"""A rank that generates text: its stage's layers, called with one token after another.

::

    → rank GenerationOrder
    rank → EnvironmentEvent, StoredEvent, …       as a rank that trains (``rank``)
    rank → ReadyEvent
    → rank StartRequest
    → first rank TokensRequest                    the prompt; then each token that was chosen
    last rank → TokenEvent                        the next token

A stage sends the next one how many tokens follow, then what its last layer gives for them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.agent.task_events import to_message
from skyctl.agent.task_orders import read_request
from skyctl.agent.task_runner import TaskChannel
from skyctl.errors import RunError
from skyctl.worker.launcher_link import LauncherLink
from skyctl.worker.peer import FIRST_STREAM_TAG
from skyctl.worker.progress import Progress
from skyctl.worker.rank_environment import use_device
from skyctl.worker.rank_errors import with_phase
from skyctl.worker.rank_events import CONNECT_PHASE, ReadyEvent, TokenEvent
from skyctl.worker.rank_order import GenerationOrder, Sampling
from skyctl.worker.rank_requests import StartRequest, TokensRequest
from skyctl.worker.world import World
from skyctl.workload.hf.generation import remember_tokens
from skyctl.workload.workload import load_workload

COUNT_TAG, VALUE_TAG = FIRST_STREAM_TAG, FIRST_STREAM_TAG + 1


class Generator:
    """One rank that generates, until its task is ended: ``run`` once, then ``close`` in any case.

    Args:
        order: what this rank is to do.
        channel: the line to the launcher.
    """

    def __init__(self, order: GenerationOrder, channel: TaskChannel) -> None:
        self._order, self._channel = order, channel
        self._progress = Progress("build")
        self._link = LauncherLink(channel, self._progress)
        self._world: World | None = None
        self._patience = timedelta(seconds=order.world.timeout_s)

    def run(self) -> dict[str, Any]:
        """Generates for as long as it is asked to; does not return."""
        order = self._order
        self._link.start()
        if order.threads is not None:
            torch.set_num_threads(order.threads)
        self._link.tell_environment(order.device)
        device = use_device(order.device)
        world = self._world = World(order.world, None, self._link, device)
        world.join()
        layers = self._build(device)
        self._progress.phase = CONNECT_PHASE
        world.connect()
        self._channel.send(to_message(ReadyEvent()))
        self._link.expect(StartRequest)
        choose = TokenChoice(order.sampling)
        self._progress.phase = "generating"
        with torch.inference_mode():
            while True:
                value = self._receive(device)
                for layer in layers:
                    value = layer(value)
                if order.world.after is None:
                    self._channel.send(to_message(TokenEvent(choose(value[0, -1]))))
                else:
                    self._send(value)

    def close(self) -> None:
        """Closes the connections to other ranks. Idempotent."""
        self._link.close()
        if self._world is not None:
            self._world.close()

    def explain(self, exc: Exception) -> Exception:
        """The error to report: with the phase it happened in, and the cause in the first line."""
        return with_phase(exc, self._progress.phase, self._order.device)

    def _build(self, device: torch.device) -> list[nn.Module]:
        """The stage's layers, whose parameters need neither gradients nor masters."""
        workload = load_workload(self._order.workload)
        start, stop = self._order.layers
        for layer in workload.model.layers:
            layer.requires_grad_(False)
        layers = workload.build(start, stop, device)
        remember_tokens(layers)
        (self._received,) = workload.boundary(start, 1)
        assert workload.model.hub is not None
        self._positions = workload.model.hub.settings.positions
        return layers

    def _receive(self, device: torch.device) -> Tensor:
        """Ids [1, tokens] of the launcher, or what the stage before gives for them, [1, tokens, …]."""
        assert self._world is not None
        before = self._world.neighbours.previous
        if before is None:
            message = self._channel.recv()
            assert message is not None
            ids = read_request([TokensRequest], message[0]).ids
            return torch.tensor([ids], device=device)
        count = torch.zeros(1, dtype=torch.int64)
        before.recv(count, COUNT_TAG).wait(self._patience)
        tokens = int(count.item())
        if not 1 <= tokens <= (self._positions or tokens):
            raise before.protocol_error(f"sent {tokens} tokens")
        shape = (1, tokens, *self._received.shape[2:])
        value = torch.empty(shape, dtype=getattr(torch, self._received.dtype), device=device)
        before.recv(value, VALUE_TAG).wait(self._patience)
        return value

    def _send(self, value: Tensor) -> None:
        assert self._world is not None
        following = self._world.neighbours.following
        assert following is not None
        if not isinstance(value, Tensor):
            raise RunError(f"a layer gives a {type(value).__name__}, where one tensor goes to the next stage")
        sent = following.send(torch.tensor([value.shape[1]]), COUNT_TAG)
        following.send(value.contiguous(), VALUE_TAG).wait(self._patience)
        sent.wait(self._patience)


class TokenChoice:
    """Chooses each next token from its scores, as the order's ``Sampling`` says."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, scores: Tensor) -> int:
        """The next token.

        Args:
            scores: [vocabulary].
        """
        if self._sampling.temperature == 0:
            return int(scores.argmax().item())
        sorted_scores, order = (scores.float().cpu() / self._sampling.temperature).sort(descending=True)
        shares = sorted_scores.softmax(dim=-1)
        left_out = shares.cumsum(dim=-1) - shares >= self._sampling.top_p  # those before it reach it
        left_out[0] = False
        shares[left_out] = 0.0
        return int(order[torch.multinomial(shares, 1, generator=self._generator)].item())
