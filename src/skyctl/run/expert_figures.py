"""What ranks have seen of experts on hosts: read, refused where no rank sees that, and put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyctl.agent.message_fields import FieldError, Index, Label, read_fields
from skyctl.errors import InputError
from skyctl.experts.step_record import StepRecord
from skyctl.run.expert_spec import RankExperts


@dataclass(frozen=True)
class LostHost:
    """A host that a rank has lost, in which step and why."""

    step: Index
    why: Label


@dataclass(frozen=True)
class ExpertFigures:
    """What one rank has seen.

    Attributes:
        tokens: by layer, the tokens that each expert was sent.
        hosts: by host's device, the tokens that it was sent.
        dropped: tokens of which no chosen expert has answered.
        lost: by host's device.
        record: as of ``StepRecord.to_dict``.
    """

    tokens: Mapping[int, tuple[Index, ...]]
    hosts: Mapping[str, Index]
    dropped: Index
    lost: Mapping[str, LostHost]
    record: Any


def read_figures(values: Any, own: RankExperts | None, steps: int) -> tuple[ExpertFigures, StepRecord] | None:
    """What a rank has sent of its experts; None: it has none on hosts.

    Args:
        own: what it has on hosts.
        steps: of the whole run.

    Raises:
        InputError: no rank with these experts sends that.
    """
    if own is None or values is None:
        if values is not None or own is not None:
            raise InputError(f"it has {'no ' if own is None else ''}experts on hosts")
        return None
    try:
        if not isinstance(values, dict):
            raise FieldError(f"{type(values).__name__} is no JSON object")
        figures = ExpertFigures(**read_fields(ExpertFigures, values, exact=True))
    except FieldError as exc:
        raise InputError(f"what it has seen of its experts has {exc}") from None
    record = StepRecord.from_dict(figures.record)
    if {layer: len(tokens) for layer, tokens in figures.tokens.items()} != own.counts:
        raise InputError("it tells of other experts than its layers have")
    if not {*figures.hosts, *figures.lost} <= {*own.hosts}:
        raise InputError("it tells of other hosts than it has")
    for move in record.moves:
        is_known = move.expert < own.counts.get(move.layer, 0)
        if not is_known or (move.host or 0) >= len(own.hosts) or max(move.step, move.copied) > steps:
            raise InputError(f"expert {move.expert} of layer {move.layer} can't have moved so")
    if any(step >= steps for step in (*record.forwards, *record.backwards, *record.masked_steps)):
        raise InputError(f"it tells of calls or masks after the last of {steps} steps")
    return figures, record


def describe_figures(seen: Mapping[int, tuple[ExpertFigures, StepRecord]]) -> str:
    """All ranks' figures as one sentence."""
    tokens: Counter[str] = Counter()
    dropped = failed = 0
    moved: set[tuple[int, int, int]] = set()
    masked: set[int] = set()
    for figures, record in seen.values():
        tokens.update(figures.hosts)
        dropped += figures.dropped
        failed += sum(map(len, (*record.forwards.values(), *record.backwards.values())))
        moved |= {(move.step, move.layer, move.expert) for move in record.moves}
        masked |= set(record.masked_steps)
    by_host = ", ".join(f"{count} to {host}" for host, count in sorted(tokens.items()))
    return (
        f"experts: tokens {by_host or 'to no host'}; without any answer: {dropped}; calls failed: {failed}; "
        f"steps with experts masked: {len(masked)}; experts that moved: {len(moved)}"
    )


def figures_record(seen: Mapping[int, tuple[ExpertFigures, StepRecord]]) -> dict[str, Any]:
    """``experts.json``: by rank, what it has sent."""
    return {
        "ranks": {
            str(rank): {
                "tokens": {str(layer): list(counts) for layer, counts in figures.tokens.items()},
                "hosts": dict(figures.hosts),
                "dropped": figures.dropped,
                "lost": {host: {"step": lost.step, "why": lost.why} for host, lost in figures.lost.items()},
                "record": record.to_dict(),
            }
            for rank, (figures, record) in sorted(seen.items())
        },
    }
