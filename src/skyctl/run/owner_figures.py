"""The figures of each owner of data in a round, and of all together, as in ``metrics.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, pvariance
from typing import Any

from skyctl.records.measurement import OwnerMeasurement, ValidationMeasurement
from skyctl.worker.rank_events import StepEvent, ValidationEvent


@dataclass(frozen=True)
class OwnerFigures:
    """One owner's part of a round.

    Attributes:
        local_steps: that it made; 0: it had no part in the round.
        samples: that count in the average of weights; 0: none, or they were dropped.
        loss: the mean over what it trained on, before the average; None: nothing, or it is no number (of
            work that was dropped, which ends no run).
        validation_loss, validation_metrics: on its own held-out data, with the averaged weights.
    """

    local_steps: int
    samples: int
    loss: float | None
    validation_loss: float | None = None
    validation_metrics: Mapping[str, float | None] | None = None


def owner_figures(event: StepEvent, validation: ValidationEvent | None) -> OwnerFigures:
    """An owner's figures of one round, from the events of its pipeline's last rank.

    Args:
        validation: on its held-out data after the round; None: there was none, or it has not come yet.
    """
    loss = event.own_loss
    return OwnerFigures(
        local_steps=event.local_steps or 0,
        samples=event.samples,
        loss=loss if loss is not None and math.isfinite(loss) else None,
        validation_loss=None if validation is None else validation.loss,
        validation_metrics=None if validation is None else validation.metrics,
    )


def measured_owners(rounds: Sequence[Mapping[str, OwnerFigures]]) -> tuple[OwnerMeasurement, ...]:
    """One record for each owner: its part in all of these rounds, by owner's name each."""
    measured = []
    for name in rounds[-1] if rounds else ():
        each = [figures[name] for figures in rounds if name in figures]
        made = [figures for figures in each if figures.local_steps]
        losses = [figures.loss for figures in made if figures.loss is not None]
        validations = [figures.validation_loss for figures in each if figures.validation_loss is not None]
        measured.append(
            OwnerMeasurement(
                owner=name,
                rounds=len(made),
                local_steps=float(median(figures.local_steps for figures in made)) if made else 0.0,
                samples=sum(figures.samples for figures in each),
                loss=losses[-1] if losses else None,
                validation_loss=validations[-1] if validations else None,
            )
        )
    return tuple(measured)


def owner_lines(owners: Mapping[str, OwnerFigures]) -> dict[str, Any]:
    """The keys of a round's line in ``metrics.jsonl``: each owner's figures, and their variances.

    ``loss_variance``: over the owners that trained; ``validation_loss_variance``: over all that validated.
    """
    if not owners:
        return {}
    each = {
        name: {key: value for key, value in vars(figures).items() if value is not None}
        for name, figures in owners.items()
    }
    losses = [figures.loss for figures in owners.values() if figures.loss is not None]
    validations = [
        figures.validation_loss for figures in owners.values() if figures.validation_loss is not None
    ]
    return {
        "owners": each,
        "loss_variance": _variance(losses),
        "validation_loss_variance": _variance(validations),
    }


def joined_validation(step: int, events: Sequence[ValidationEvent]) -> ValidationMeasurement:
    """The validation of all owners together: means weighted by the samples that each validates on."""
    weights = [float(event.samples or 1) for event in events]
    names = dict.fromkeys(name for event in events for name in event.metrics or {})
    metrics: dict[str, float | None] | None = {} if names else None
    if all(event.metrics is None for event in events):
        metrics = None
    for name in names:
        values = [(event.metrics or {}).get(name) for event in events]
        present = [value for value in values if value is not None]
        assert metrics is not None
        metrics[name] = _mean(present, weights) if len(present) == len(values) else None
    if len(events) == 1:  # as it was told
        alone = events[0].metrics
        metrics = None if alone is None else dict(alone)
        return ValidationMeasurement(step=step, loss=events[0].loss, metrics=metrics)
    loss = _mean([event.loss for event in events], weights)
    return ValidationMeasurement(step=step, loss=loss, metrics=metrics)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean; no sum on the way is larger than the largest value, whatever nodes say."""
    total = math.fsum(weights)
    return math.fsum(value * (weight / total) for value, weight in zip(values, weights, strict=True))


def _variance(values: Sequence[float]) -> float | None:
    """None of no values, and where it is too large for a float."""
    try:
        return pvariance(values) if values else None
    except OverflowError:
        return None
