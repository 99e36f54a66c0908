"""The planner's values as they were recorded, and what has become better or worse since.

For changes that rewrite the planner: recorded before, compared after. One process, one thread of the solver.

    python benchmarks/planner_record.py                  # compares; exit 1 where it is worse
    python benchmarks/planner_record.py --only mixed     # one section (may be repeated)
    python benchmarks/planner_record.py --quick          # every tenth problem, and nothing large
    python benchmarks/planner_record.py --write          # records anew, where a change is meant
    python benchmarks/planner_record.py --case "64 × 163, four sites"       # one large problem; of those
                                                         # with 1,000 devices takes minutes and 12 GiB

Sections, all from seeds (``planner_values/instances.py``):

- ``suites``: the 500 pipelines, 300 data-parallel and 200 hybrid problems that the tests hold against brute
  force: value, status, bound, gap.
- ``mixed``: 128 problems by ``auto``, ``pipeline``, ``data`` and ``hybrid``, each plain, with a delay, with
  staleness, with rounds and with compressed sums. Also whether JSON, ``verify``, ``predict`` and the interval
  agree with the plan.
- ``forgeries``: plans of the first of these with one thing changed: how many of each kind are refused.
- ``wide``: 100 larger problems of each form: how ``verify`` finds their bounds again.
- ``large``: the sizes that people ask about: seconds, memory, gap.

A case is *worse* with a higher value, a lesser status, a larger gap, a bound that ``verify`` no longer finds
again, or a record that disagrees with itself. *Look* marks what was proved to be impossible: that is right
only if there are more plans to choose from now. A limit may end searches of ``wide`` and ``large``: one value
may be off by 15%, a group's by 2% in the mean. Limits, and the seconds that are reported, are a processor's
(one thread); ratios are relative to fixed work between the cases, and still as uneven as the machine is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from planner_values import large
from planner_values.clocks import Pace, processor_clock
from planner_values.comparing import (
    BETTER,
    EQUAL,
    KINDS,
    LOOK,
    WORSE,
    Tally,
    compare_forgeries,
    compare_large,
    compare_rows,
)
from planner_values.forgeries import forged
from planner_values.instances import mixed, suites, wide
from planner_values.outcomes import Outcome, observed
from tables.page import machine, markdown

from skyctl import Problem

RECORD = Path(__file__).resolve().parent / "planner_values" / "recorded.json"
SECTIONS = ("suites", "mixed", "forgeries", "wide", "large")
ENDS_S = 60.0
"""For problems whose search ends by itself: never the clock decides."""
WIDE_S = 0.5
FORGED = 8
"""Problems whose plans are forged, in every strategy and form."""
SHOWN = 20
"""Lines of what differs, a group, unless all are asked for."""
SLOWER = 1.1

Section = dict[str, Any]


def record_suites(every: int, pace: Pace) -> Section:
    """One row a problem; ``verify`` is left to the tests."""
    rows = {}
    for name, problem in _every(suites(), every):
        pace.tick()
        rows[name] = observed(problem, problem.parallel, ENDS_S, checked=False)[0].row()
    return {"rows": rows, "problems": _digest(problem for _, problem in suites())}


def record_mixed(every: int, pace: Pace) -> Section:
    """One row a problem, strategy and form."""
    rows = {}
    for number, strategy, form, problem in mixed():
        pace.tick()
        if int(number) % every == 0:
            rows[f"{strategy}, {form} {number}"] = observed(problem, strategy, ENDS_S)[0].row()
    return {"rows": rows, "problems": _digest(problem for *_, problem in mixed())}


def record_forgeries(every: int, pace: Pace) -> Section:
    """By kind of forgery [refused, tried]."""
    found: dict[str, list[int]] = {}
    for _, strategy, _, problem in mixed(max(2, FORGED // every)):
        pace.tick()
        made = observed(problem, strategy, ENDS_S, checked=False)[1]
        if made is None or len(made.placed_stages) < 2:
            continue
        for kind, refused in forged(made, strategy, ENDS_S):
            counted = found.setdefault(kind, [0, 0])
            counted[0] += refused
            counted[1] += 1
    return {"kinds": dict(sorted(found.items()))}


def record_wide(every: int, pace: Pace) -> Section:
    """One row a problem, and by form what ``verify`` says of bounds, how often."""
    rows = {}
    said: dict[str, Counter[str]] = {}
    for name, problem in _every(wide(), every):
        pace.tick()
        outcome, _, words = observed(problem, problem.parallel, WIDE_S)
        rows[name] = outcome.row()
        said.setdefault(problem.parallel, Counter())[f"{outcome.proof}: {words}"] += 1
    words_of = {form: dict(counted.most_common()) for form, counted in said.items()}
    return {"rows": rows, "said": words_of, "problems": _digest(problem for _, problem in wide())}


def record_large(every: int, pace: Pace) -> Section:
    """One row a case; those of long patience are kept as they were recorded by name."""
    if every > 1:
        return {"rows": {}}
    rows = {}
    for name, case in large.CASES.items():
        if not case.long:
            pace.tick()
            rows[name] = large.measured_apart(name)
            print(f"{name}: {_told(rows[name])} (goal: {case.goal})", flush=True)
    return {"rows": rows}


RECORDERS: dict[str, Callable[[int, Pace], Section]] = {
    "suites": record_suites,
    "mixed": record_mixed,
    "forgeries": record_forgeries,
    "wide": record_wide,
    "large": record_large,
}


def _every(named: Iterator[tuple[str, Problem]], every: int) -> Iterator[tuple[str, Problem]]:
    return (one for number, one in enumerate(named) if number % every == 0)


def _digest(problems: Iterator[Problem]) -> str:
    """Of the problems' files: where it differs, other problems are compared."""
    found = hashlib.sha256()
    for problem in problems:
        found.update(problem.to_json().encode())
    return found.hexdigest()[:16]


def recorded_section(name: str, every: int) -> Section:
    """One section as it is now, with how long it took and the processor's pace meanwhile."""
    pace, began = Pace(), time.monotonic()
    with processor_clock():
        pace.tick()
        section = RECORDERS[name](every, pace)
    took_s = time.monotonic() - began
    return {**section, "pace_s": round(pace.mean_s, 5), "took_s": round(took_s, 1)}


def compared(name: str, before: Section, now: Section, *, some: bool) -> dict[str, Tally]:
    """By group of cases, what has changed; ``some``: not all cases were looked at."""
    if name == "forgeries":
        return {name: compare_forgeries(before["kinds"], now["kinds"], some=some)}
    if name == "large":
        return {name: compare_large(before["rows"], now["rows"])}
    groups: dict[str, list[tuple[str, Outcome | None, Outcome]]] = {}
    for case, row in now["rows"].items():
        known = before["rows"].get(case)
        each = (case, None if known is None else Outcome.of_row(known), Outcome.of_row(row))
        groups.setdefault(case.rpartition(" ")[0], []).append(each)
    return {f"{name}: {group}": compare_rows(rows, loose=name == "wide") for group, rows in groups.items()}


def show(name: str, before: Section, now: Section, *, everything: bool, some: bool) -> int:
    """Prints what has changed in one section; how many comparisons are worse."""
    if before.get("problems") != now.get("problems"):
        print(f"{name}: the problems are not those of the recording, so values may differ for that reason")
    groups = compared(name, before, now, some=some)
    pace = now["pace_s"] / before["pace_s"]
    kinds = ("refused",) if name == "forgeries" else KINDS
    body = []
    for group, tally in groups.items():
        ratio = tally.now_s / tally.before_s / pace if tally.before_s else None
        slow = " slower" if ratio is not None and ratio > SLOWER else ""
        body.append(
            [
                group,
                str(tally.cases),
                *(_counted(tally, kind) for kind in kinds),
                "–" if ratio is None else f"{ratio:.2f} ×{slow}",
            ]
        )
    print(markdown(["group", "cases", *kinds, "seconds"], body))
    for tally in groups.values():
        order = sorted(tally.lines, key=lambda line: (WORSE, LOOK, BETTER).index(line[0]))
        for _, line in order if everything else order[:SHOWN]:
            print(line)
        if len(order) > SHOWN and not everything:
            print(f"… and {len(order) - SHOWN} more (--all)")
    if name == "wide" and not some:
        _show_said(before["said"], now["said"])
    print(f"took {now['took_s']:.0f} s, {before['took_s']:.0f} when recorded")
    print(f"the same fixed work took {pace:.2f} × as long as then; seconds above are divided by that\n")
    return sum(tally.worse for tally in groups.values())


def _counted(tally: Tally, kind: str) -> str:
    """``120 = 3 < 1 >``: equal, better, worse; and how many are to be looked at."""
    marks = {EQUAL: "=", BETTER: "better", WORSE: "WORSE", LOOK: "look"}
    parts = [f"{tally.counts[kind, one]} {mark}" for one, mark in marks.items() if tally.counts[kind, one]]
    return ", ".join(parts) or "–"


def _show_said(before: dict[str, dict[str, int]], now: dict[str, dict[str, int]]) -> None:
    """How often ``verify`` said what of a bound, as recorded and now."""
    for form, said in now.items():
        known = before.get(form, {})
        for words in sorted({*said, *known}):
            print(f"{form}: {known.get(words, 0)} → {said.get(words, 0)}: {words}")


def _told(row: dict[str, Any]) -> str:
    gap = f", gap {100 * row['gap']:.3g}%" if row.get("gap") is not None else ""
    value = f", {row['value_s']:.6g} s" if row.get("value_s") is not None else ""
    memory = f", {row['peak_mb'] / 1e3:.2f} GB" if row.get("peak_mb") else ""
    return f"{row['status']}{value}{gap} in {row.get('cpu_s', row['wall_s']):.2f} s{memory}"


def recorded() -> dict[str, Section]:
    """By name, the sections of the recording."""
    found: dict[str, Section] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return found


def write(name: str, section: Section) -> None:
    """Puts a section into the recording, one row a line, so that its changes can be read."""
    known = {**recorded(), name: section}
    record = {one: known[one] for one in SECTIONS if one in known}
    parts = []
    for name, section in record.items():
        fields = []
        for key, value in section.items():
            if isinstance(value, dict):
                rows = ",\n".join(f"   {_json(one)}: {_json(row)}" for one, row in value.items())
                fields.append(f'  "{key}": {{\n{rows}\n  }}')
            else:
                fields.append(f"  {_json(key)}: {_json(value)}")
        parts.append(f" {_json(name)}: {{\n" + ",\n".join(fields) + "\n }")
    RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    """Compares, or records, the sections asked for."""
    given = _arguments()
    record = recorded()
    if given.case is not None:
        pace = Pace()
        pace.tick()
        row = large.measured(given.case)
        if given.write:
            section = {
                "machine": machine(),
                "pace_s": pace.mean_s,
                "took_s": 0.0,
                **recorded().get("large", {}),
            }
            write("large", {**section, "rows": {**section.get("rows", {}), given.case: row}})
        print(_json(row), flush=True)
        return 0
    worse = 0
    for name in given.only or SECTIONS:
        now = recorded_section(name, 10 if given.quick else 1)
        if not given.write:
            worse += show(name, record[name], now, everything=given.all, some=given.quick)
            continue
        if name == "large":
            now["rows"] = {**record.get(name, {}).get("rows", {}), **now["rows"]}
        write(name, {"machine": machine(), **now})
        print(f"{name}: recorded in {now['took_s']:.0f} s", flush=True)
    if not given.write:
        print(f"{worse} worse" if worse else "nothing is worse")
    return 1 if worse else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=SECTIONS, help="this section (may be repeated)")
    parser.add_argument("--quick", action="store_true", help="every tenth problem, and nothing large")
    parser.add_argument("--all", action="store_true", help="every difference, however many there are")
    parser.add_argument("--write", action="store_true", help="record anew what is asked for")
    parser.add_argument("--case", choices=large.CASES, help="one large problem, here; with --write recorded")
    given = parser.parse_args()
    if given.write and given.quick:
        parser.error("--quick compares only: a recording has all problems")
    return given


if __name__ == "__main__":
    sys.exit(main())
