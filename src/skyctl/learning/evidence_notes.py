"""What a plan says of the runs that it learned from: what is used of which, what is not and why."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.learning.corrections import LearnedCorrections, LearnedEstimates
from skyctl.learning.evidence import Dismissal, spread_of
from skyctl.records.cluster import node_of
from skyctl.records.plan import Contradiction
from skyctl.records.profile import Observation, Remeasurement


def learned_notes(learned: LearnedCorrections) -> list[str]:
    """What the corrections come from, and what was seen and is not used."""
    corrections, estimates = learned.corrections, learned.estimates
    found: dict[str, list[str]] = {}
    for (device, target), known in estimates.by_subject.items():
        text = None
        if target is None and device in corrections.factors:
            text = f"times of {device} {corrections.factors[device]:.2f} × the probe's"
        elif target is not None and (device, target) in corrections.rates:
            text = f"rate of {device} → {target} {1 / known.factor:.2f} × the probe's"
        if text is not None:
            found.setdefault(_source_text(known.sources, known.remeasured), []).append(text)
    return [f"{source}: {', '.join(texts)}" for source, texts in found.items()] + _unused_notes(estimates)


def spread_text(one: Observation) -> str:
    """How uneven the steps of an observation's run were, in words."""
    whose = "its steps'" if one.layers_spread is None else f"of {one.device}'s seconds a step the"
    return f"{whose} p90 is {spread_of(one):.1f} times {'their' if one.layers_spread is None else 'the'} p10"


def _source_text(sources: Sequence[Observation], remeasured: Remeasurement | None) -> str:
    """Where a factor comes from."""
    again = "" if remeasured is None else f"measured again on {remeasured.seen}"
    if not sources:
        return f"as {again}"
    runs = list(dict.fromkeys(one.run_id for one in sources))
    text = f"as seen in run {runs[-1]}" + (f" and {len(runs) - 1} earlier" if len(runs) > 1 else "")
    return text + (f" and {again}" if again else "")


def _unused_notes(found: LearnedEstimates) -> list[str]:
    """What is not used, and why; each run that was disturbed once."""
    said = [contradiction_text(one) for one in found.contradictions]
    for known in found.by_subject.values():
        said += [_dismissal_text(gone, found) for gone in known.dismissals]
    said += [
        f"run {run} was disturbed ({spread_text(one)}): not used"
        for run, one in {one.run_id: one for one in found.disturbed}.items()
    ]
    return said


def contradiction_text(one: Contradiction) -> str:
    """That a plan does not reckon with what a run saw, and what settles it."""
    nodes = node_of(one.device) if one.target is None else f"{node_of(one.device)} and {node_of(one.target)}"
    known = "" if one.believed == 1.0 else f" ({_ratio(one.target, one.believed)} is known)"
    return (
        f"run {one.run_id} saw {_subject_text(one.device, one.target, one.factor)}, more than runs differ by"
        f"{known}: not planned with before the next launch or compare --measure of the workload has measured "
        f"{nodes} again"
    )


def _dismissal_text(gone: Dismissal, found: LearnedEstimates) -> str:
    one, by = gone.observation, gone.by
    if isinstance(by, Remeasurement):
        why = f"{_ratio(one.target, by.factor)} was measured on {by.seen}"
    else:
        why = f"run {by.run_id} saw {_ratio(one.target, found.factor(by))}"
    what = _subject_text(one.device, one.target, found.factor(one))
    return f"run {one.run_id} saw {what}: not used, since {why}"


def _subject_text(device: str, target: str | None, factor: float) -> str:
    what = f"times of {device}" if target is None else f"a rate of {device} → {target}"
    return f"{what} {_ratio(target, factor)} the probe's"


def _ratio(target: str | None, factor: float) -> str:
    """Times of a device, or the rate of a link, as a multiple of the probe's."""
    return f"{factor if target is None else 1 / factor:.2f} ×"
