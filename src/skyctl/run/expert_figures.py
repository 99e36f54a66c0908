"""Ranks' figures of experts on hosts: read, refused where no rank sees that, and put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyctl.agent.message_fields import FieldError, Index, Label, read_fields
from skyctl.compare.number_format import format_seconds
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
    """The figures that one rank has of its experts on hosts.

    Attributes:
        tokens: by layer, the tokens that each expert was sent.
        hosts: by host's device, the tokens that it was sent, by layer.
        dropped: tokens of which no chosen expert has answered.
        lost: by host's device.
        record: as of ``StepRecord.to_dict``.
    """

    tokens: Mapping[int, tuple[Index, ...]]
    hosts: Mapping[str, Mapping[int, Index]]
    dropped: Index
    lost: Mapping[str, LostHost]
    record: Any


def read_figures(values: Any, own: RankExperts | None, steps: int) -> tuple[ExpertFigures, StepRecord] | None:
    """The figures that a rank has sent of its experts; None: it has none on hosts.

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
    if any({*sent} != {*own.counts} for sent in figures.hosts.values()):
        raise InputError("it tells of other layers than it has")
    for move in record.moves:
        is_known = move.expert < own.counts.get(move.layer, 0)
        if not is_known or (move.host or 0) >= len(own.hosts) or max(move.step, move.copied) > steps:
            raise InputError(f"expert {move.expert} of layer {move.layer} can't have moved so")
    if any(step >= steps for step in (*record.forwards, *record.backwards, *record.masked_steps)):
        raise InputError(f"it tells of calls or masks after the last of {steps} steps")
    return figures, record


def host_loads(
    seen: Mapping[int, tuple[ExpertFigures, StepRecord]], devices: Sequence[str]
) -> dict[int, tuple[float, ...]]:
    """By layer, the part of its tokens that each of these hosts was sent; layers without any left out."""
    sent: dict[int, list[int]] = {}
    for figures, _ in seen.values():
        for layer in figures.tokens:
            of_layer = sent.setdefault(layer, [0] * len(devices))
            for place, device in enumerate(devices):
                of_layer[place] += figures.hosts.get(device, {}).get(layer, 0)
    return {layer: tuple(n / sum(row) for n in row) for layer, row in sent.items() if sum(row)}


def describe_figures(
    seen: Mapping[int, tuple[ExpertFigures, StepRecord]], step_s: float | None = None
) -> str:
    """All ranks' figures as one sentence.

    Args:
        step_s: the predicted step with these loads; None: not known.
    """
    tokens: Counter[str] = Counter()
    dropped = failed = 0
    moved: set[tuple[int, int, int]] = set()
    masked: set[int] = set()
    for figures, record in seen.values():
        tokens.update({host: sum(sent.values()) for host, sent in figures.hosts.items()})
        dropped += figures.dropped
        failed += sum(map(len, (*record.forwards.values(), *record.backwards.values())))
        moved |= {(move.step, move.layer, move.expert) for move in record.moves}
        masked |= set(record.masked_steps)
    by_host = ", ".join(f"{count} to {host}" for host, count in sorted(tokens.items()))
    step = "" if step_s is None else f"; predicted step with these loads: {format_seconds(step_s)}"
    return (
        f"experts: tokens {by_host or 'to no host'}; without any answer: {dropped}; calls failed: {failed}; "
        f"steps with experts masked: {len(masked)}; experts that moved: {len(moved)}{step}"
    )


def figures_record(
    seen: Mapping[int, tuple[ExpertFigures, StepRecord]], step_s: float | None = None
) -> dict[str, Any]:
    """``experts.json``: by rank, what it has sent; and the predicted step with these loads."""
    return {
        "predicted_iteration_s": step_s,
        "ranks": {
            str(rank): {
                "tokens": {str(layer): list(counts) for layer, counts in figures.tokens.items()},
                "hosts": {
                    host: {str(layer): count for layer, count in sent.items()}
                    for host, sent in figures.hosts.items()
                },
                "dropped": figures.dropped,
                "lost": {host: {"step": lost.step, "why": lost.why} for host, lost in figures.lost.items()},
                "record": record.to_dict(),
            }
            for rank, (figures, record) in sorted(seen.items())
        },
    }
