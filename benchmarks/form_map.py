"""Which form wins where, on paper: sites of unequal devices, and how many tokens a step has.

Prints one JSON line a point. ``--write`` puts the table into docs/forms.md.

    python benchmarks/form_map.py --write                  # ten devices, two minutes
    python benchmarks/form_map.py --devices 100            # more of them

Lines between regions are those that Yuan et al. measured and published (Decentralized Training of Foundation
Models in Heterogeneous Environments, NeurIPS 2022, 2206.01288): delay in ms and Gbit/s; within a region 5 ms
and 2 Gbit/s, as there. A site's devices share its way to another. Of more sites than regions, those of
one region are as far apart as the nearest two regions are. The model is a GPT of 24 blocks and hidden
1024; devices are of three speeds. Plans are those of ``skyctl plan`` in each form, each within a limit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

from tables.page import machine, markdown, replaced

from skyctl.errors import SkyctlError
from skyctl.planner.api import plan
from skyctl.records.problem import Device, Layer, Link, Problem, SharedResource

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "forms.md"
REGIONS = ("Oregon", "Virginia", "Frankfurt", "Tokyo", "Ohio", "London", "Seoul", "Ireland")
LINES = {
    "Oregon-Virginia": (67, 0.79), "Oregon-Ohio": (49, 1.10), "Oregon-Tokyo": (96, 0.523),
    "Oregon-Seoul": (124, 0.46), "Oregon-London": (136, 0.42), "Oregon-Frankfurt": (143, 0.404),
    "Oregon-Ireland": (124, 0.482), "Virginia-Ohio": (11, 1.12), "Virginia-Tokyo": (143, 0.524),
    "Virginia-Seoul": (172, 0.5), "Virginia-London": (76, 1.16), "Virginia-Frankfurt": (90, 1.02),
    "Virginia-Ireland": (67, 1.05), "Ohio-Tokyo": (130, 0.694), "Ohio-Seoul": (159, 0.529),
    "Ohio-London": (86, 1.05), "Ohio-Frankfurt": (99, 0.799), "Ohio-Ireland": (77, 1.14),
    "Tokyo-Seoul": (34, 1.10), "Tokyo-London": (210, 0.366), "Tokyo-Frankfurt": (223, 0.36),
    "Tokyo-Ireland": (199, 0.465), "Seoul-London": (238, 0.342), "Seoul-Frankfurt": (235, 0.358),
    "Seoul-Ireland": (228, 0.335), "London-Frankfurt": (14, 1.14), "London-Ireland": (12, 1.09),
    "Frankfurt-Ireland": (24, 1.08),
}  # fmt: skip
"""Between regions: delay there and back in ms, Gbit/s."""
NEAR_MS, NEAR_GBIT = 5.0, 2.0
HIDDEN, BLOCKS, WORDS = 1024, 24, 50257
FLOPS_PER_S = (8e12, 4e12, 2e12)
"""Of devices, one after the other."""
MEMORY_BYTES = 16e9
STATE_OF_GRADIENT = 4
"""Weights, gradients, and Adam's two figures a weight."""
FORMS = ("pipeline", "data", "hybrid")
TOKENS = (2**13, 2**15, 2**17, 2**19)
MICROBATCH_TOKENS = 8192
"""At most."""
SITES = (1, 2, 4, 8, 50)
DEVICES = (10,)
LIMIT_S = 4.0


def problem_of(sites: int, devices: int, tokens: int) -> Problem:
    """Devices dealt out to the sites in turn; microbatches that keep a pipeline of all of them busy."""
    names = [f"n{d}" for d in range(devices)]
    site = {name: d % sites for d, name in enumerate(names)}
    microbatches = max(16, 2 * devices, tokens // MICROBATCH_TOKENS)
    each = tokens / microbatches
    block, words = 12 * HIDDEN**2, WORDS * HIDDEN
    layers = [
        Layer(
            name=f"block.{number}" if numel == block else f"words.{number}",
            flops=6 * numel * each,
            state_bytes=4 * STATE_OF_GRADIENT * numel,
            gradient_bytes=4 * numel,
            activation_bytes=34 * HIDDEN * each if numel == block else 4 * HIDDEN * each,
            output_bytes=4 * HIDDEN * each,
        )
        for number, numel in enumerate([words, *[block] * BLOCKS, words])
    ]
    links: list[Link] = []
    shared: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for a, b in permutations(names, 2):
        one, other = site[a], site[b]
        ms, gbit = (NEAR_MS, NEAR_GBIT) if one == other else _line(one, other)
        links.append(
            Link(source=a, target=b, latency_s=ms / 2000, bandwidth_bytes_per_s=min(gbit, NEAR_GBIT) * 1.25e8)
        )
        if one != other:
            shared.setdefault((one, other), []).append((a, b))
    return Problem(
        layers=tuple(layers),
        devices=tuple(
            Device(id=name, flops_per_s=FLOPS_PER_S[d % len(FLOPS_PER_S)], memory_bytes=MEMORY_BYTES)
            for d, name in enumerate(names)
        ),
        links=tuple(links),
        shared=tuple(
            SharedResource(
                name=f"site {one} to site {other}",
                bandwidth_bytes_per_s=_line(one, other)[1] * 1.25e8,
                links=tuple(pairs),
            )
            for (one, other), pairs in shared.items()
        ),
        microbatches=microbatches,
    )


def _line(one: int, other: int) -> tuple[float, float]:
    """Between two sites: delay there and back in ms, Gbit/s."""
    a, b = REGIONS[one % len(REGIONS)], REGIONS[other % len(REGIONS)]
    if a == b:
        return min(LINES.values())
    return LINES.get(f"{a}-{b}") or LINES[f"{b}-{a}"]


def point(sites: int, devices: int, tokens: int) -> dict[str, Any]:
    """The step that each form's plan would take there."""
    problem = problem_of(sites, devices, tokens)
    found: dict[str, Any] = {}
    for form in FORMS:
        try:
            made = plan(problem.model_copy(update={"parallel": form}), "heuristic", LIMIT_S)
        except SkyctlError as exc:
            found[form] = {"error": type(exc).__name__}
            continue
        found[form] = {
            "step_s": round(made.predicted.iteration_s, 4),
            "pipelines": [len(pipeline.stages) for pipeline in made.pipelines],
        }
    steps = {form: one["step_s"] for form, one in found.items() if "step_s" in one}
    order = sorted(steps, key=lambda form: steps[form])
    return {
        "benchmark": "form map",
        "sites": sites,
        "devices": devices,
        "tokens": tokens,
        "gradient_bytes_per_flop": 4 / (6 * tokens),
        "forms": found,
        "best": order[0] if order else None,
        "ahead": round(steps[order[1]] / steps[order[0]], 3) if len(order) > 1 else None,
    }


def points(sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """All points of these numbers of devices."""
    for devices in sizes:
        for sites in (number for number in SITES if number <= devices):
            for tokens in TOKENS:
                yield point(sites, devices, tokens)


def write(found: list[dict[str, Any]]) -> None:
    """Puts the tables, one a number of devices, between their marks."""
    texts = []
    for devices in sorted({one["devices"] for one in found}):
        rows = []
        for sites in sorted({one["sites"] for one in found if one["devices"] == devices}):
            here = {one["tokens"]: one for one in found if (one["devices"], one["sites"]) == (devices, sites)}
            rows.append([str(sites), *(_cell(here[tokens]) for tokens in TOKENS)])
        head = ["sites", *(f"{tokens // 1024}k tokens" for tokens in TOKENS)]
        texts.append(f"**{devices} devices**\n\n{markdown(head, rows)}")
    how = f"`python benchmarks/form_map.py --write`, at most {LIMIT_S:g} s a plan · {machine()}."
    text = replaced(DOCUMENT.read_text(encoding="utf-8"), "map", "\n\n".join([*texts, how]))
    DOCUMENT.write_text(text, encoding="utf-8")


def _cell(one: dict[str, Any]) -> str:
    best = one["best"]
    if best is None:
        return "–"
    stages = one["forms"][best]["pipelines"]
    lengths = "/".join(map(str, sorted(set(stages))))
    shape = {"pipeline": lengths, "data": str(len(stages)), "hybrid": f"{len(stages)} × {lengths}"}[best]
    return f"{best} ({shape})" + (f", {one['ahead']:.2f} ×" if one["ahead"] is not None else "")


def main() -> None:
    """Runs the sizes asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--devices", type=int, action="append", help="this many devices (may be repeated)")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/forms.md")
    given = parser.parse_args()
    found = []
    for line in points(tuple(given.devices or DEVICES)):
        print(json.dumps(line), flush=True)
        found.append(line)
    if given.write:
        write(found)


if __name__ == "__main__":
    main()
