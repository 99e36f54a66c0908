"""A plan's notes on the runs that it learned from: what is used of which, what is not and why."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.learning.corrections import LearnedCorrections, LearnedEstimates
from skyctl.learning.evidence import Dismissal, spread_of
from skyctl.records.cluster import node_of
from skyctl.records.plan import Contradiction
from skyctl.records.profile import Observation, Remeasurement


def learned_notes(learned: LearnedCorrections) -> list[str]:
    """The sources of the corrections, and the evidence that is not used, in words."""
    corrections, estimates = learned.corrections, learned.estimates
    by_source: dict[str, list[str]] = {}
    for (device, target), estimate in estimates.by_subject.items():
        text = None
        if target is None and device in corrections.factors:
            text = f"times of {device} {corrections.factors[device]:.2f} × the probe's"
        elif target is not None and (device, target) in corrections.rates:
            text = f"rate of {device} → {target} {1 / estimate.factor:.2f} × the probe's"
        if text is not None:
            by_source.setdefault(_source_text(estimate.sources, estimate.remeasured), []).append(text)
    return [f"{source}: {', '.join(texts)}" for source, texts in by_source.items()] + _unused_notes(estimates)


def spread_text(observation: Observation) -> str:
    """How uneven the steps of an observation's run were, in words."""
    spread = spread_of(observation)
    if observation.layers_spread is None:
        return f"its steps' p90 is {spread:.1f} times their p10"
    return f"of {observation.device}'s seconds a step the p90 is {spread:.1f} times the p10"


def _source_text(sources: Sequence[Observation], remeasured: Remeasurement | None) -> str:
    """The source of a factor, in words."""
    again = "" if remeasured is None else f"measured again on {remeasured.seen}"
    if not sources:
        return f"as {again}"
    runs = list(dict.fromkeys(obs.run_id for obs in sources))
    text = f"as seen in run {runs[-1]}" + (f" and {len(runs) - 1} earlier" if len(runs) > 1 else "")
    return text + (f" and {again}" if again else "")


def _unused_notes(estimates: LearnedEstimates) -> list[str]:
    """The evidence that is not used, and why; each run that was disturbed once."""
    notes = [contradiction_text(contradiction) for contradiction in estimates.contradictions]
    for estimate in estimates.by_subject.values():
        notes += [_dismissal_text(gone, estimates) for gone in estimate.dismissals]
    notes += [
        f"run {run} was disturbed ({spread_text(obs)}): not used"
        for run, obs in {obs.run_id: obs for obs in estimates.disturbed}.items()
    ]
    return notes


def contradiction_text(contradiction: Contradiction) -> str:
    """That a plan does not reckon with what a run saw, and what settles it."""
    device, target = contradiction.device, contradiction.target
    nodes = node_of(device) if target is None else f"{node_of(device)} and {node_of(target)}"
    subject = _subject_text(device, target, contradiction.factor)
    believed = contradiction.believed
    known = "" if believed == 1.0 else f" ({_ratio(target, believed)} is known)"
    return (
        f"run {contradiction.run_id} saw {subject}, more than runs differ by{known}: not planned with before "
        f"the next launch or compare --measure of the workload has measured {nodes} again"
    )


def _dismissal_text(gone: Dismissal, estimates: LearnedEstimates) -> str:
    observation, by = gone.observation, gone.by
    if isinstance(by, Remeasurement):
        why = f"{_ratio(observation.target, by.factor)} was measured on {by.seen}"
    else:
        why = f"run {by.run_id} saw {_ratio(observation.target, estimates.factor(by))}"
    what = _subject_text(observation.device, observation.target, estimates.factor(observation))
    return f"run {observation.run_id} saw {what}: not used, since {why}"


def _subject_text(device: str, target: str | None, factor: float) -> str:
    what = f"times of {device}" if target is None else f"a rate of {device} → {target}"
    return f"{what} {_ratio(target, factor)} the probe's"


def _ratio(target: str | None, factor: float) -> str:
    """Times of a device, or the rate of a link, as a multiple of the probe's."""
    return f"{factor if target is None else 1 / factor:.2f} ×"
