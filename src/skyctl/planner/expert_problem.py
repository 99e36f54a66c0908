"""Experts, devices and placements as plain values. Times are in seconds a step, loads in tokens a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from skyctl.errors import InputError

MOST_COPIES = 2
"""An expert is on so many devices at most; its tokens are split between them."""


@dataclass(frozen=True)
class ExpertLoad:
    """One expert.

    Attributes:
        tokens: that it is sent per step, as from ``Experts.counts``.
        memory_bytes: what a device needs for it in training: weights, gradients and the optimizer's state.
        weight_bytes: what is sent to move or copy it.
    """

    name: str
    tokens: float
    memory_bytes: int
    weight_bytes: int = 0


@dataclass(frozen=True)
class ExpertDevice:
    """One device.

    Attributes:
        compute_s: seconds a token, forward and backward.
        line_s: seconds a token that is sent there and returned.
        memory_bytes: all of it; ``held_bytes``: what is taken already, as by layers of the trunk.
        byte_s: seconds a byte over its line, for moves.
    """

    name: str
    compute_s: float
    memory_bytes: int
    line_s: float = 0.0
    held_bytes: int = 0
    byte_s: float = 0.0

    @property
    def token_s(self) -> float:
        """Seconds a token, line included."""
        return self.compute_s + self.line_s

    @property
    def room_bytes(self) -> int:
        """The bytes that are left for experts."""
        return self.memory_bytes - self.held_bytes


@dataclass(frozen=True)
class PlacementProblem:
    """Experts to place, and devices to hold them.

    Raises:
        InputError: there are none, two have one name, or a figure is negative or no number.
    """

    experts: Sequence[ExpertLoad]
    devices: Sequence[ExpertDevice]

    def __post_init__(self) -> None:
        for kind, names in (
            ("experts", [expert.name for expert in self.experts]),
            ("devices", [device.name for device in self.devices]),
        ):
            if not names:
                raise InputError(f"a placement of experts needs {kind}, there are none")
            if len(set(names)) < len(names):
                raise InputError(f"two {kind} have the name {max(names, key=names.count)!r}")
        things: list[ExpertLoad | ExpertDevice] = [*self.experts, *self.devices]
        for thing in things:
            figures = asdict(thing)
            name = figures.pop("name")
            for figure, value in figures.items():
                if not (math.isfinite(value) and value >= 0):
                    raise InputError(f"{figure} of {name!r} must be at least 0, it is {value}")
        for device in self.devices:
            if not device.compute_s:
                raise InputError(f"compute_s of {device.name!r} must be above 0")


@dataclass(frozen=True)
class PlacementWitness:
    """Prices of devices that prove a lower bound; see ``verification.expert_placement``.

    Attributes:
        times: by device, of its time.
        memory: by device, of a byte of its room, in seconds.
    """

    times: tuple[float, ...]
    memory: tuple[float, ...]


@dataclass(frozen=True)
class ExpertPlacement:
    """The devices that hold each expert, and the time that they take.

    Attributes:
        shares: by expert, its holders' names and the share of its tokens that each gets, 1 in all.
        time_s: of the slowest device.
        bound_s: no placement is faster, by ``witness``.
        is_optimal: the search has ended by itself, so that none is faster by more than a millionth.
            Unlike ``bound_s``, it may be the solver's word only.
    """

    shares: tuple[Mapping[str, float], ...]
    time_s: float
    bound_s: float
    witness: PlacementWitness
    is_optimal: bool = False


def device_times(problem: PlacementProblem, shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By device, its time per step."""
    return {
        device.name: device.token_s
        * sum(
            expert.tokens * held.get(device.name, 0.0)
            for expert, held in zip(problem.experts, shares, strict=True)
        )
        for device in problem.devices
    }
