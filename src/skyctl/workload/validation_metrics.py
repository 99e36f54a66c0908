"""The figures that the user's ``metrics(outputs, targets)`` gives at a validation, and their means.

Needs the standard library only: the launcher checks what nodes say of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from skyctl.errors import WorkloadError

METRIC_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.@/+-]{0,39}"
"""The form of a metric's name: it is shown in lines and tables, and is a key in files."""
MAX_METRICS = 16


def read_metrics(given: Any, who: str) -> dict[str, float]:
    """The results of a ``metrics()``, as numbers by name; values may be tensors of one element.

    Args:
        who: the function that gave it, as in ``train.py: metrics()``.

    Raises:
        WorkloadError: it is no dict, has too many entries, or a name or a value that can't be.
    """
    if not isinstance(given, Mapping):
        raise WorkloadError(
            f"{who} must give a dict of numbers, not {type(given).__name__}",
            hint="return {'accuracy': (outputs.argmax(1) == targets).float().mean()}",
        )
    if len(given) > MAX_METRICS:
        raise WorkloadError(f"{who} gives {len(given)} figures; {MAX_METRICS} are the most")
    metrics = {}
    for name, value in given.items():
        if not isinstance(name, str) or not re.fullmatch(METRIC_NAME, name):
            raise WorkloadError(
                f"{who} calls a figure {name!r:.80}; a name has at most 40 letters, digits and _ . @ / + -",
                hint="as in accuracy, top-5 or f1/macro",
            )
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            metrics[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
            raise WorkloadError(
                f"{who}: {name} must be one number, not {type(value).__name__}{shape}"
            ) from None
    return metrics


class MetricMeans:
    """The means of metrics over the samples of a validation."""

    def __init__(self) -> None:
        self._sums: dict[str, float] | None = None
        self._samples = 0

    def add(self, metrics: Mapping[str, float], samples: int) -> None:
        """Adds the metrics of that many samples, each of which is their mean.

        Raises:
            WorkloadError: they are not of the same names as before.
        """
        if self._sums is None:
            self._sums = dict.fromkeys(metrics, 0.0)
        if self._sums.keys() != metrics.keys():
            odd = sorted(self._sums.keys() ^ metrics.keys())
            raise WorkloadError(f"metrics() gives {', '.join(odd)} for some microbatches and not for others")
        self._samples += samples
        for name, value in metrics.items():
            self._sums[name] += value * samples

    def means(self) -> dict[str, float | None] | None:
        """By name, the mean over all samples (None: it is not finite); None where there are no metrics."""
        if not self._sums:
            return None
        means = {name: total / self._samples for name, total in self._sums.items()}
        return {name: mean if math.isfinite(mean) else None for name, mean in means.items()}
