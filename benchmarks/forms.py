"""Pipeline, data parallelism or both: is what `auto` chooses the fastest, and does the prediction hold?

One JSON line a case. Needs root (network namespaces, cgroups, sshd).

    python benchmarks/forms.py                              # every case, about an hour
    python benchmarks/forms.py --case "WAN, bert"           # one of them (may be repeated)

Each form's plan is launched in turns in one lab; ``auto`` is the form that it chose. Seconds are medians of
the steps but each run's first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from runs.data import LARGE_PICTURES
from runs.form_cases import CLUSTERS, SIZES, WORKLOADS, source_in
from runs.labs import Bench, lab

FORMS = ("pipeline", "data", "hybrid")
TURNS, STEPS = 2, 4
"""Runs of each form's plan, one form after the other; steps of each."""
CASES = [f"{cluster}, {workload}" for cluster, workloads in WORKLOADS.items() for workload in workloads]


def cases(wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One figure a case; the labs are brought up once for all cases in each."""
    for cluster, workloads in WORKLOADS.items():
        here = [name for name in workloads if f"{cluster}, {name}" in wanted]
        if not here:
            continue
        with lab(CLUSTERS[cluster]) as bench:
            for name in here:
                yield {"benchmark": "forms", "cluster": cluster, "workload": name, **_case(bench, name)}


def _case(bench: Bench, name: str) -> dict[str, Any]:
    source = source_in(bench.folder, name, LARGE_PICTURES)
    sizes = SIZES[name]
    bench.skyctl("probe", source, *sizes)
    made = {form: plan for form in FORMS if (plan := _plan(bench, source, sizes, form)) is not None}
    chosen = _plan(bench, source, sizes, "auto")
    assert chosen is not None, "auto finds a plan where any form does"
    form = chosen["problem"].get("parallel", "pipeline")
    if _placed(chosen) != _placed(made.get(form)):
        made["auto"] = chosen
    took: dict[str, list[float]] = {form: [] for form in made}
    for _ in range(TURNS):
        for each in made:
            run = bench.skyctl(
                "launch", bench.folder / f"{each}.json", "--steps", STEPS, "--checkpoint-every", 0
            )
            took[each] += [step["iteration_s"] for step in run["steps"][1:]]
    measured = {each: median(seconds) for each, seconds in took.items()}
    own = measured.get("auto", measured.get(form, 0.0))
    return {
        "chosen": form,
        "forms": {
            each: {
                "plan": _shape(plan),
                "predicted_s": round(plan["predicted"]["iteration_s"], 4),
                "measured_s": round(measured[each], 4),
                "error": round(plan["predicted"]["iteration_s"] / measured[each] - 1, 4),
            }
            for each, plan in made.items()
        },
        "of_fastest": round(own / min(measured.values()), 4),
    }


def _plan(bench: Bench, source: str, sizes: Sequence[object], form: str) -> dict[str, Any] | None:
    """That form's plan; None where none fits."""
    path = bench.folder / f"{form}.json"
    path.unlink(missing_ok=True)
    bench.skyctl("plan", source, *sizes, "--parallel", form, "--no-learn", "-o", path, ok=(0, 3))
    return json.loads(path.read_text()) if path.exists() else None


def _placed(plan: dict[str, Any] | None) -> Any:
    return None if plan is None else plan["pipelines" if "pipelines" in plan else "stages"]


def _shape(plan: dict[str, Any]) -> list[Any]:
    """By pipeline its microbatches and its stages' layers."""
    if "stages" in plan:
        row = [[s["replicas"][0]["device"], s["start"], s["stop"]] for s in plan["stages"]]
        return [[plan["problem"]["microbatches"], row]]
    return [
        [one["microbatches"], [[s["device"], s["start"], s["stop"]] for s in one["stages"]]]
        for one in plan["pipelines"]
    ]


def main() -> None:
    """Runs the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", action="append", choices=CASES)
    given = parser.parse_args()
    for line in cases(given.case or CASES):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
