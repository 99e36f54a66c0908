"""Seeded runs with faults drawn at random: does each end as if nothing had happened, or say what is wrong?

Three nodes and 40 steps a run; odd seeds in a lab over real SSH, even ones on this machine's own processes.
Seeds take the forms of plans in turn (``tests/helpers/forms.py``; ``--form``: one only); a quarter encrypts.
Half of those whose form has several pipelines that sum each step are elastic: nodes leave and enter in it.
A run is well where it ends with an error that names a node, or with the losses of an undisturbed one (finite
ones where its form can't have those after such faults); where each attempt was begun for something that names
a node; where nothing of it is left, and nothing was waited for without a word for more than 15 s. Each seed's
figures are a line of the record; seeds that are in it are not run again. The last line printed sums up. Needs
root; 100 take an hour.

    make chaos ARGS=--write                            # seeds 1..100, and the table in docs/faults.md
    python benchmarks/chaos.py --seeds 7..7 -v         # one, with what its command printed
    python benchmarks/chaos.py --steps 600 --faults 15..15 --seeds 1..1 --record build/long.jsonl
    python benchmarks/chaos.py --kind killed:rank --steps 400 --faults 15..15 --record build/killed.jsonl
    python benchmarks/chaos.py --backend gloo --only lab --kind killed:rank --kind "link down" --faults 1
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from surviving import lab
from surviving.backends import FORMS, NODES, Backend, backend
from surviving.resources import Resources
from surviving.strikes import KINDS, Strike, Striker, draw
from surviving.watching import SILENT_S, Watch
from tables.page import Table, markdown, write

STEPS, FAULTS, SEEDS = 40, (1, 3), (1, 100)
EVERY = ("--checkpoint-every", "5")
"""Of undisturbed runs, too: forms settle what they put off wherever a checkpoint is written."""
ENCRYPTED = 0.25
"""Of the seeds."""
ELASTIC, ELASTIC_FORMS = 0.5, ("data", "hybrid")
"""Of the seeds with these forms."""
BACKENDS = ("skyctl", "gloo")
"""The backends that carry tensors, as ``launch --backend`` is told."""
DOCUMENT = lab.ROOT / "docs" / "faults.md"
LOOK_S = 0.02
RESOURCES_S = 1.0
STEP_LIMIT_S, LIMIT_S = 2.0, 180.0
"""A run that has not ended after so many seconds a step, and so many more, hangs."""
EQUAL = 1e-5
WELL = ("equal", "ended", "error")
"""``ended``: with losses that are finite, and equal only as far as the form's are after what happened."""


def backend_of(seed: int) -> str:
    """Half of the seeds over real SSH."""
    return "lab" if seed % 2 else "local"


def form_of(seed: int) -> str:
    """The form of a seed's plan: all of them in turn, each in both halves."""
    return list(FORMS)[seed // 2 % len(FORMS)]


def encrypted(seed: int) -> bool:
    """Whether a seed's run passes all through TLS."""
    return random.Random(f"{seed} encrypted").random() < ENCRYPTED


def elastic(seed: int, form: str, carrier: str) -> bool:
    """Whether a seed's run goes on in the step in which it loses a node."""
    drawn = random.Random(f"{seed} elastic").random() < ELASTIC
    return drawn and form in ELASTIC_FORMS and carrier == "skyctl"


def play(
    where: Backend, steps: int, strikes: list[Strike], *more: str, verbose: bool = False
) -> dict[str, Any]:
    """One run; figures. ``ok``: it is as it must be.

    Args:
        more: options of its ``launch``.
    """
    began = time.monotonic()
    words = (
        "--steps",
        str(steps),
        "--json",
        *EVERY,
        "--max-restarts",
        "10",
        "--hold",
        "60",
        *more,
    )
    run = where.cluster.launch(*words)
    striker, watch, resources = Striker(where, run, strikes), Watch(run), Resources(run)
    looked = began
    limit = began + LIMIT_S + STEP_LIMIT_S * steps
    try:
        while time.monotonic() < limit:
            ended = watch.look() is not None and run.child.process.poll() is not None
            if striker.launcher_gone:
                watch.pause()
            elif ended:
                break
            striker.act(watch.steps)
            if time.monotonic() > looked + RESOURCES_S:
                resources.look()
                looked = time.monotonic()
            time.sleep(LOOK_S)
        watch.look()
    finally:
        striker.end()
    figures = {"strikes": striker.done, **_outcome(where, run, steps), "silent_s": round(watch.longest_s, 1)}
    figures["noticed_s"] = noticed(striker.done, run.state["attempts"], _ends(run))
    figures["end_s"] = round(watch.end_s, 1)
    run_s = time.monotonic() - began
    code = run.child.process.poll()
    if code is None:
        run.child.kill()
    where.cluster.run("stop", run.id, "--now", code=None)  # what could not be told to end
    where.cluster.run("checkpoint", "rm", run.id, "--yes", code=None)  # what a lost node still had
    figures |= {"left": where.left(), "silences": watch.silences, "resources": resources.figures}
    figures["run_s"], figures["wall_s"] = round(run_s, 1), round(time.monotonic() - began, 1)
    figures["ok"] = figures["outcome"] in WELL and not figures["left"] and not watch.silences
    if verbose or not figures["ok"]:
        log = (run.folder / "supervisor.log").read_text()
        print(f"{json.dumps(run.state['attempts'])}\n{log}\n{run.child.err}", file=sys.stderr, flush=True)
    return figures


def _ends(run: Any) -> dict[int, float]:
    """When each attempt was said to have ended, to the millisecond; the run's state has seconds."""
    numbers = [attempt["number"] for attempt in run.state["attempts"]]
    said = {number: lab.said_at(run, f"attempt {number} of run {run.id} ended", 0.0) for number in numbers}
    return {number: at for number, at in said.items() if at is not None}


def noticed(
    strikes: list[dict[str, Any]], attempts: list[dict[str, Any]], ends: Mapping[int, float]
) -> list[dict[str, Any]]:
    """The error that ended each failed attempt, and how many seconds after the last strike before that.

    Args:
        ends: by an attempt's number, when it ended; of those that failed.
    """
    found = []
    for attempt in attempts:
        ended = ends.get(attempt["number"])
        if ended is None or attempt["error"] is None:
            continue
        before = [one for one in strikes if one.get("at", math.inf) <= ended]
        if before:
            last = max(before, key=lambda one: float(one["at"]))
            kind, after_s = f"{last['kind']} {last.get('part', '')}".strip(), round(ended - last["at"], 1)
            found.append({"kind": kind, "after_s": after_s, "error": attempt["error"][:300]})
    return found


def _outcome(where: Backend, run: Any, steps: int) -> dict[str, Any]:
    """How the run ended: one of ``WELL`` (``error``: one that names a node); else what is wrong."""
    child, state = run.child, run.state
    restarts = lab.restarts(run)
    found: dict[str, Any] = {
        "attempts": len(state["attempts"]),
        "why": [one["why"] for one in restarts],
        "planned_attempts": sum(one["planned"] for one in restarts),
        "lost_steps": sum(one["lost_steps"] for one in restarts),
    }
    code = child.process.poll()
    if code is None:
        return {**found, "outcome": "hangs"}
    if "Traceback" in child.err or "bug in skyctl" in child.err:
        return {**found, "outcome": "bug", "error": child.err[-2000:]}
    if any(not one["planned"] and not _names_a_node(one["why"]) for one in restarts):
        return {**found, "outcome": "unclear reason"}
    if code == 0:
        told = json.loads(child.out)["steps"]
        held = _undisturbed_steps(where.form.needs, state["attempts"], steps)
        differs = lab.differs(told[:held], where.losses[:held])
        if [one["step"] for one in told] != list(range(steps)):
            differs = math.inf
        if differs > EQUAL or not all(math.isfinite(one["loss"]) for one in told):
            return {**found, "outcome": "differs", "loss_differs": differs}
        return {**found, "outcome": "equal" if held == steps else "ended", "loss_differs": differs}
    error = child.err[child.err.rfind("error:") :].strip()
    named = error.startswith("error:") and _names_a_node(error)
    return {**found, "outcome": "error" if named else "unclear error", "error": error[:2000], "code": code}


def _names_a_node(text: str) -> bool:
    return any(name in text for name in NODES)


def _undisturbed_steps(needs: int | None, attempts: list[dict[str, Any]], steps: int) -> int:
    """How many of a run's steps, from the first on, have the losses of an undisturbed run."""
    if needs is None:
        return 0
    return min([steps, *(int(one["from_step"]) for one in attempts if len(one["devices"]) < needs)])


def run_seeds(
    seeds: Iterable[int],
    steps: int,
    faults: tuple[int, int],
    record: Path,
    *,
    kinds: Mapping[str, tuple[str, ...]] = KINDS,
    form: str | None = None,
    carrier: str = "skyctl",
    verbose: bool,
) -> None:
    """Runs those that the record lacks, and adds their lines to it.

    Args:
        kinds: of faults.
        form: of all plans; None: each seed's own.
        carrier: one of ``BACKENDS``; torch's Gloo encrypts nothing.
    """
    known = {line["seed"] for line in _lines(record)}
    todo = [seed for seed in seeds if seed not in known]
    for name, its in product(("lab", "local"), FORMS):
        mine = [s for s in todo if (backend_of(s), form or form_of(s)) == (name, its)]
        while mine:
            with backend(name, its) as where:
                where.losses = where.cluster.losses(steps, *EVERY)
                while mine:
                    seed = mine.pop(0)
                    figures = {"seed": seed, "backend": name, "form": its, "steps": steps, "over": carrier}
                    figures["encrypted"] = carrier == "skyctl" and encrypted(seed)
                    figures["elastic"] = elastic(seed, its, carrier)
                    strikes = draw(seed, name, steps, faults, kinds)
                    words = ["--encrypt"] if figures["encrypted"] else ["--backend", carrier]
                    if figures["elastic"]:
                        words.append("--elastic")
                    figures |= play(where, steps, strikes, *words, verbose=verbose)
                    record.parent.mkdir(parents=True, exist_ok=True)
                    with record.open("a") as file:
                        file.write(json.dumps(figures) + "\n")
                    print(json.dumps(figures), file=sys.stderr, flush=True)
                    if not figures["ok"]:
                        break  # the next ones get nodes that nothing was done to


def _lines(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all runs, and which are not as they must be."""
    return {
        "benchmark": "chaos",
        "runs": len(lines),
        **{word: sum(line["outcome"] == word for line in lines) for word in WELL},
        "not_ok": [line["seed"] for line in lines if not line["ok"]],
        "faults": sum(not one.get("missed") for line in lines for one in line["strikes"]),
        "attempts": sum(line["attempts"] for line in lines),
        "lost_steps": sum(line["lost_steps"] for line in lines),
        "silent_s": max((line["silent_s"] for line in lines), default=0.0),
        "loss_differs": max((line.get("loss_differs", 0.0) for line in lines), default=0.0),
        "run_s": round(sum(line["run_s"] for line in lines)),
    }


def table(lines: list[dict[str, Any]]) -> Table:
    """For docs/faults.md: a row for each kind of fault and where it was done."""
    head = ("fault", "where", "done", "in runs", *(f"outcome: {word}" for word in WELL), "attempts, median")
    rows = []
    for kind in KINDS:
        for name in ("local", "lab"):
            struck = [
                (line, [one for one in line["strikes"] if one["kind"] == kind and not one.get("missed")])
                for line in lines
                if line["backend"] == name
            ]
            runs = [line for line, strikes in struck if strikes]
            if not runs:
                continue
            attempts = sorted(line["attempts"] for line in runs)
            rows.append(
                (
                    kind,
                    name,
                    str(sum(len(strikes) for _, strikes in struck)),
                    str(len(runs)),
                    *(str(sum(line["outcome"] == word for line in runs)) for word in WELL),
                    str(attempts[len(attempts) // 2]),
                )
            )
    figures = summary(lines)
    bad = figures["not_ok"]
    differs = f"{figures['loss_differs']:.2g}" if figures["loss_differs"] else "none, to the last bit"
    text = (
        f"{figures['runs']} runs, {figures['faults']} faults, {figures['attempts']} attempts: "
        f"{figures['equal']} ended with the losses of an undisturbed run (largest relative difference: "
        f"{differs}), {figures['ended']} with finite ones where a form can't have those, "
        f"{figures['error']} with an error that names a node, {len(bad)} otherwise or with "
        f"something left or unsaid{': seeds ' + ', '.join(map(str, bad)) if bad else ''}. "
        f"{figures['lost_steps']} steps were done again. The longest silence was {figures['silent_s']:.1f} s "
        f"({SILENT_S:.0f} s are allowed); a run took {figures['run_s'] / max(1, figures['runs']):.0f} s on "
        "average.\n\n"
    )
    return Table(figures, text + markdown(head, rows))


def main() -> int:
    """Exit code 1 where a run of the record was not as it must be."""
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seeds = [n for n in range(given.seeds[0], given.seeds[1] + 1) if given.only in (None, backend_of(n))]
    run_seeds(
        seeds,
        given.steps,
        given.faults,
        given.record,
        kinds=_kinds(given.kind),
        form=given.form,
        carrier=given.backend,
        verbose=given.verbose,
    )
    lines = sorted(
        (line for line in _lines(given.record) if line["seed"] in seeds), key=lambda line: line["seed"]
    )
    if given.write:
        write("chaos", [table(lines)], f'make chaos ARGS="--seeds {seeds[0]}..{seeds[-1]} --write"', DOCUMENT)
    figures = summary(lines)
    print(json.dumps(figures), flush=True)
    return int(bool(figures["not_ok"]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=_span, default=SEEDS, metavar="A..B", help="default 1..100")
    parser.add_argument("--only", choices=("lab", "local"), help="this half of the seeds")
    parser.add_argument("--form", choices=FORMS, help="of every plan; default: each seed's")
    parser.add_argument(
        "--kind", action="append", metavar="KIND[:PART]", help="draw these faults only: killed:rank"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    parser.add_argument(
        "--faults", type=_span, default=FAULTS, metavar="A..B", help="of each run, default 1..3"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="skyctl", help="what carries tensors")
    parser.add_argument("--record", type=Path, help="a line a seed; default build/chaos[-BACKEND].jsonl")
    parser.add_argument("--write", action="store_true", help="put the table into docs/faults.md")
    parser.add_argument("-v", "--verbose", action="store_true", help="what each run's command printed")
    given = parser.parse_args()
    of_backend = "" if given.backend == "skyctl" else f"-{given.backend}"
    given.record = given.record or lab.ROOT / "build" / f"chaos{of_backend}.jsonl"
    return given


def _kinds(asked: list[str] | None) -> Mapping[str, tuple[str, ...]]:
    """All, or those of ``KIND[:PART]``."""
    found: dict[str, tuple[str, ...]] = {}
    for one in asked or ():
        kind, _, part = one.partition(":")
        found[kind] = (*found.get(kind, ()), part) if part else KINDS[kind]
    return found or KINDS


def _span(text: str) -> tuple[int, int]:
    """``3..7``, or ``3`` alone."""
    first, dots, last = text.partition("..")
    return int(first), int(last if dots else first)


if __name__ == "__main__":
    sys.exit(main())
