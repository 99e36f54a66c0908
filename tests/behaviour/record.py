"""Records how skyctl behaves, or says what has changed since: for restructurings that must change nothing.

    python -m tests.behaviour.record --compare                # all of it, about ten minutes on two cores
    python -m tests.behaviour.record --compare planner help   # some parts
    python -m tests.behaviour.record --write runs             # a part anew, where a change is meant

The recording lies beside this file, in ``recorded/PART.json``. Measured figures are compared by their
shape, computed ones by value: the planner's to 1e-9. Losses must agree to 1e-6 on the processor that they
were recorded on, and within a wider tolerance on another one.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from tests.behaviour import offline, online, planning
from tests.behaviour.observing import HERE, LOSSES, RELATIVE, Room, differences, processor

RECORDED = HERE / "recorded"
ABROAD = {"bfloat16": 3e-2, "int8": 1e-2}
"""How far losses may be off on another processor, where numbers are coarse."""
ABROAD_FINE = 1e-4
WORKERS = 2

Observed = Iterator[tuple[str, dict[str, Any]]]


def record_planner(*, fast: bool = False) -> Observed:
    for i, (name, case) in enumerate(planning.cases()):
        if not fast or i % 10 == 0:
            yield name, case()


def record_bounded(*, fast: bool = False) -> Observed:
    for name, case in planning.bounded_cases():
        if not fast:
            yield name, case()


def record_help(*, fast: bool = False) -> Observed:
    with Room() as room:
        yield from offline.help_pages(room)


def record_commands(*, fast: bool = False) -> Observed:
    cases = list(offline.fast_cases() if fast else offline.all_cases())
    with Room() as room, ThreadPoolExecutor(WORKERS) as pool:
        offline.furnish(room)
        found = pool.map(lambda case: case[1](room), cases)
        yield from zip((name for name, _ in cases), found, strict=True)


def record_runs(*, fast: bool = False) -> Observed:
    for name in online.ROOMS:
        if (not fast or name == "quick run") and online.possible(name):
            yield name, online.observed(name)


PARTS: dict[str, Callable[..., Observed]] = {
    "planner": record_planner,
    "bounded": record_bounded,
    "help": record_help,
    "commands": record_commands,
    "runs": record_runs,
}


@cache
def machine() -> dict[str, str]:
    """The software and the hardware that the last bits of a loss depend on."""
    import torch

    return {
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(),
        "machine": platform.machine(),
    }


def changes(part: str, recorded: dict[str, Any], found: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """The differences, a line each: the key, what was recorded, what is there now."""
    lines = []
    for name, present in found:
        if name not in recorded["cases"]:
            lines.append(f"{part}: {name}: not recorded")
            continue
        before = recorded["cases"][name]
        if part == "bounded":
            lines += [f"{part}: {name}: {line}" for line in planning.contradictions(before, present)]
            continue
        here = recorded["machine"] == machine() if part == "runs" else True
        found_here = differences(before, present, lambda path, n=name, h=here: tolerance(f"{n}{path}", h))
        lines += [f"{part}: {name}: {line}" for line in found_here]
    return lines


def tolerance(path: str, here: bool) -> float:
    if not LOSSES & set(path.split("/")):
        return RELATIVE
    if here:
        return 1e-6
    return next((far for word, far in ABROAD.items() if word in path), ABROAD_FINE)


def load(part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / f"{part}.json").read_text(encoding="utf-8"))
    return found


def compare(part: str, *, fast: bool = False) -> list[str]:
    """All that differs from the recording; nothing of the recording may be missing either."""
    recorded = load(part)
    found = dict(PARTS[part](fast=fast))
    lines = changes(part, recorded, found.items())
    if not fast:
        for name in sorted(recorded["cases"].keys() - found.keys()):
            if part != "runs" or online.possible(name):
                lines.append(f"{part}: {name}: recorded, not there now")
    return lines


def write(part: str, cases: dict[str, Any]) -> None:
    RECORDED.mkdir(exist_ok=True)
    document = {"part": part, "machine": machine() if part == "runs" else {}, "cases": cases}
    text = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False)
    (RECORDED / f"{part}.json").write_text(text + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="record what is so now")
    what.add_argument("--compare", action="store_true", help="exit 1 where something differs")
    parser.add_argument(
        "--fast", action="store_true", help="with --compare: only what the ordinary suite does"
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--only", help="of `runs`: only this room")
    given = parser.parse_args()
    worse = 0
    for part in given.parts or PARTS:
        began = time.monotonic()
        if given.only:
            found = {given.only: online.observed(given.only)}
            if given.write:
                write(part, {**load(part)["cases"], **found})
            lines = changes(part, load(part), found.items())
        elif given.write:
            write(part, dict(PARTS[part]()))
            lines = []
        else:
            lines = compare(part, fast=given.fast)
        print("\n".join(lines), end="\n" if lines else "")
        print(f"{part}: {len(lines)} differences, {time.monotonic() - began:.0f} s", file=sys.stderr)
        worse += len(lines)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
