"""How long trials will take, by those that have ended and the speeds of devices. Pure.

The logarithm of a trial's seconds is a sum: a part of each parameter and a part of the device. A parameter
whose values are numbers counts by its logarithm, if all are positive. Few trials say little, so each part is
held near 0 (ridge): a device is at first as fast as it was measured to be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skyctl.sweep.parameters import as_number

RIDGE = 0.3
"""In trials: a part counts by half after so many."""
LEAST_S = 1e-3


@dataclass(frozen=True)
class TimedTrial:
    """A trial that has ended by itself: what it was, where it ran, and its seconds."""

    parameters: Mapping[str, str]
    device: str
    seconds: float


class ParameterNumbers:
    """Trials' parameters as vectors.

    Args:
        everyone: the parameters of all trials.
    """

    def __init__(self, everyone: Sequence[Mapping[str, str]]) -> None:
        self._columns = _make_columns(everyone)
        self._known: dict[tuple[tuple[str, str], ...], Any] = {}

    def __len__(self) -> int:
        """How long a vector is."""
        return len(self._columns)

    def vector(self, parameters: Mapping[str, str]) -> Any:
        """Of these parameters: a number array."""
        key = tuple(parameters.items())
        if key not in self._known:
            self._known[key] = np.array([column.value(parameters) for column in self._columns], dtype=float)
        return self._known[key]


class TrialTimes:
    """Predicted seconds of trials.

    Args:
        timed: the trials that have ended; none: seconds are in a unit that nobody knows.
        speeds: by device, how fast it is, in any unit.
    """

    def __init__(
        self, timed: Sequence[TimedTrial], numbers: ParameterNumbers, speeds: Mapping[str, float]
    ) -> None:
        self._numbers, self._speeds, self._fitted = numbers, speeds, dict[str, float]()
        self._level, self._parts = 0.0, np.zeros(len(numbers))
        if timed:
            self._fit(timed)

    def work(self, parameters: Mapping[str, str]) -> float:
        """The time that a trial takes on a device whose ``pace`` is 1."""
        return math.exp(self._level + float(self._numbers.vector(parameters) @ self._parts))

    def pace(self, device: str) -> float:
        """The seconds there of a trial whose ``work`` is 1."""
        return math.exp(self._fitted.get(device, 0.0)) / self._speeds[device]

    def _fit(self, timed: Sequence[TimedTrial]) -> None:
        devices = list(dict.fromkeys(trial.device for trial in timed))
        on_device = np.array([[float(trial.device == device) for device in devices] for trial in timed])
        features = np.array([self._numbers.vector(trial.parameters) for trial in timed])
        logs = np.array(
            [math.log(max(trial.seconds, LEAST_S) * self._speeds[trial.device]) for trial in timed]
        )
        self._level = float(logs.mean())
        rows: Any = np.hstack([features, on_device])
        held = rows.T @ rows + RIDGE * np.eye(rows.shape[1])
        parts = np.linalg.solve(held, rows.T @ (logs - self._level))
        self._parts = parts[: len(self._numbers)]
        self._fitted = dict(zip(devices, map(float, parts[len(self._numbers) :]), strict=True))


@dataclass(frozen=True)
class _Column:
    """A parameter as a number: ``text`` is there (1) or not (0), or how far a number is from the mean."""

    name: str
    text: str | None = None
    log: bool = False
    mean: float = 0.0
    spread: float = 1.0

    def value(self, parameters: Mapping[str, str]) -> float:
        given = parameters.get(self.name)
        if given is None or self.text is not None:
            return float(given is not None and given == self.text)
        number = as_number(given) or 0.0
        return ((math.log(number) if self.log else number) - self.mean) / self.spread


def _make_columns(everyone: Sequence[Mapping[str, str]]) -> list[_Column]:
    columns: list[_Column] = []
    for name in dict.fromkeys(name for parameters in everyone for name in parameters):
        texts = list(dict.fromkeys(p[name] for p in everyone if name in p))
        if len(texts) < 2:
            continue
        numbers = [as_number(text) for text in texts]
        known = [number for number in numbers if number is not None]
        if len(known) < len(texts):
            columns += [_Column(name, text=text) for text in texts]
            continue
        log = min(known) > 0
        values = np.array([math.log(number) for number in known] if log else known)
        spread = float(values.std())
        if spread > 0:  # 1 and 1.0 are two texts and one number
            columns.append(_Column(name, log=log, mean=float(values.mean()), spread=spread))
    return columns
