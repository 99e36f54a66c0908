"""The changes for better or worse since the recording, by kind."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from planner_values.outcomes import Outcome

RELATIVE = 1e-9
"""The relative difference up to which the contract calls values equal."""
LOOSE = 0.15
"""Relative: how far one search that a limit ends may be off by itself."""
LOOSE_MEAN = 0.02
"""The same, of all such searches of a group in the mean."""
KINDS = ("value", "status", "gap", "proof", "agrees")
"""Compared of each case. ``proof``: whether ``verify`` still finds the bound again."""
PROVED = {"optimal": 3, "exit 3": 3, "bounded": 2, "feasible": 1, "exit 1": 0, "exit 2": -1}
CHECKED = {"witness": 1, "search": 1, "none": 0, "unchecked": 0, "refused": -1}
BETTER, WORSE, EQUAL, LOOK = "better", "worse", "equal", "look"
"""``look``: better than what was proved to be impossible, which only a larger choice of plans explains."""


@dataclass
class Tally:
    """Of one group of cases: by kind and verdict how many, what differs in words, and both times."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    lines: list[tuple[str, str]] = field(default_factory=list)
    """Of what differs: its verdict, and a sentence."""
    cases: int = 0
    before_s: float = 0.0
    now_s: float = 0.0

    def add(self, name: str, kind: str, verdict: str, words: str) -> None:
        """Counts one comparison, and keeps its words where the two differ."""
        self.counts[kind, verdict] += 1
        if verdict != EQUAL:
            self.lines.append((verdict, f"{verdict}: {name}: {kind}: {words}"))

    @property
    def worse(self) -> int:
        """How many comparisons are worse."""
        return sum(count for (_, verdict), count in self.counts.items() if verdict == WORSE)


def compare_rows(rows: Iterable[tuple[str, Outcome | None, Outcome]], *, loose: bool) -> Tally:
    """(name, as recorded, as it is now); ``loose``: values may be off by what a limit makes of them."""
    tally = Tally()
    ratios, gaps = [], []
    for name, before, now in rows:
        tally.cases += 1
        if before is None:
            tally.add(name, "status", LOOK, "it is not in the recording")
            continue
        tally.before_s += before.seconds
        tally.now_s += now.seconds
        for kind, verdict in _verdicts(before, now, LOOSE if loose else RELATIVE).items():
            tally.add(name, kind, verdict, f"{_said(before, kind)} → {_said(now, kind)}")
        if before.value_s and now.value_s:
            ratios.append(now.value_s / before.value_s)
        if before.gap is not None and now.gap is not None:
            gaps.append((1 + now.gap) / (1 + before.gap))
    if loose and ratios:
        mean = statistics.geometric_mean(ratios)
        tally.add("all", "value", _ordered(-1, -mean, LOOSE_MEAN), f"{mean:.4f} × in the mean")
    if loose and gaps:
        mean = statistics.geometric_mean(gaps)
        tally.add("all", "gap", _ordered(-1, -mean, LOOSE_MEAN), f"value ÷ bound {mean:.4f} × in the mean")
    return tally


def _verdicts(before: Outcome, now: Outcome, far: float) -> dict[str, str]:
    """By kind; ``far``: how much values may be off where a limit has ended one of the searches."""
    by_clock = far > RELATIVE and {before.status, now.status} != {"optimal"}
    far = far if by_clock else RELATIVE
    found = {"status": _status(before, now, by_clock=by_clock)}
    if before.value_s is not None and now.value_s is not None:
        found["value"] = _value(before, now, far)
        found["gap"] = _gap(before, now, far)
        found["proof"] = _ordered(CHECKED[before.proof], CHECKED[now.proof], 0)
    found["agrees"] = _ordered(-len(before.disagrees.split()), -len(now.disagrees.split()), 0)
    return found


def _ordered(before: float, now: float, slack: float) -> str:
    """Of what is better where it is more."""
    if now < before - slack:
        return WORSE
    return BETTER if now > before + slack else EQUAL


def _status(before: Outcome, now: Outcome, *, by_clock: bool) -> str:
    has_plan = (before.value_s is not None, now.value_s is not None)
    if has_plan == (True, False):
        return WORSE
    if has_plan == (False, True):
        return LOOK if before.status == "exit 3" else BETTER
    if before.status == now.status or (by_clock and all(has_plan)):
        return EQUAL
    return _ordered(PROVED.get(before.status, 0), PROVED.get(now.status, 0), 0)


def _value(before: Outcome, now: Outcome, far: float) -> str:
    assert before.value_s is not None
    assert now.value_s is not None
    if now.bound_s is not None and now.bound_s > before.value_s * (1 + RELATIVE):
        return WORSE  # the recorded plan is below what is now called impossible
    if before.bound_s is not None and now.value_s < before.bound_s * (1 - RELATIVE):
        return LOOK
    return _ordered(-before.value_s, -now.value_s, far * before.value_s)


def _gap(before: Outcome, now: Outcome, far: float) -> str:
    if before.gap is None or now.gap is None:
        return _ordered(float(before.gap is not None), float(now.gap is not None), 0)
    return _ordered(-before.gap, -now.gap, 2 * far * (1 + before.gap))  # value and bound may both be off


def _said(outcome: Outcome, kind: str) -> str:
    if kind == "value":
        bound = "" if outcome.bound_s is None else f" (bound {outcome.bound_s:.9g})"
        return f"{outcome.value_s:.9g} s{bound}"
    if kind == "gap":
        return "none" if outcome.gap is None else f"{100 * outcome.gap:.3g}%"
    if kind == "agrees":
        return outcome.disagrees or "all"
    return str(getattr(outcome, kind))


def compare_forgeries(
    before: dict[str, list[int]], now: dict[str, list[int]], *, some: bool = False
) -> Tally:
    """By kind of forgery, whether as large a part of them is refused; ``some``: not all were tried."""
    tally = Tally(cases=sum(of for _, of in now.values()))
    for kind in sorted({*before, *now}):
        refused, of = before.get(kind, [0, 0])
        refused_now, of_now = now.get(kind, [0, 0])
        words = f"{refused} of {of} refused → {refused_now} of {of_now}"
        if not of_now and some:
            continue
        if not of_now:
            tally.add(kind, "refused", WORSE, f"{words}: it was not tried")
        elif not of:
            tally.add(kind, "refused", LOOK, words)
        else:
            tally.add(kind, "refused", _ordered(refused / of, refused_now / of_now, RELATIVE), words)
    return tally


def compare_large(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> Tally:
    """The large problems: value, status and gap within what a limit makes of them."""
    tally = Tally()
    for name, row in now.items():
        tally.cases += 1
        if name not in before:
            tally.add(name, "status", LOOK, "it is not in the recording")
            continue
        tally.before_s += before[name].get("cpu_s", 0.0)
        tally.now_s += row.get("cpu_s", 0.0)
        for kind, verdict in _verdicts(_of_large(before[name]), _of_large(row), LOOSE).items():
            said = [_said(_of_large(one), kind) for one in (before[name], row)]
            tally.add(name, kind, verdict, " → ".join(said))
    return tally


def _of_large(row: dict[str, Any]) -> Outcome:
    """Its gap stands for its bound: with ``auto`` it is of all forms."""
    value_s, gap = row.get("value_s"), row.get("gap")
    bound_s = None if value_s is None or gap is None else value_s / (1 + gap)
    checked = {True: "search", False: "unchecked"}.get(row.get("verified"), "none")  # type: ignore[arg-type]
    return Outcome(row["status"], value_s, bound_s, checked)
