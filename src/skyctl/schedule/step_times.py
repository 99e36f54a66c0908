"""The seconds that a step is simulated from: of its stages, and of the messages between them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class StageTimes:
    """Seconds on one stage's device: forward and backward per microbatch, optimizer once a step.

    ``weight_s``: the part of ``backward_s`` that ``zero-bubble`` defers: there B takes ``backward_s −
    weight_s`` and W ``weight_s``; under other schedules B takes ``backward_s``.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    weight_s: float = 0.0


@dataclass(frozen=True)
class MessageTimes:
    """One message over one boundary in one direction.

    ``link_s``: seconds it occupies its directed link. ``shared``: (resource, seconds) for each shared
    resource it occupies.
    """

    link_s: float = 0.0
    latency_s: float = 0.0
    shared: tuple[tuple[Hashable, float], ...] = ()

    @property
    def unqueued_s(self) -> float:
        """Seconds from the message's start to its arrival where nothing else is on its way."""
        return max([self.link_s, *(seconds for _, seconds in self.shared)]) + self.latency_s


FREE_MESSAGE = MessageTimes()


@dataclass(frozen=True)
class BoundaryTimes:
    """The messages between stage s and s + 1: activations forward, gradients backward."""

    forward: MessageTimes = FREE_MESSAGE
    backward: MessageTimes = FREE_MESSAGE
