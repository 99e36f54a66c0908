"""The time that no step of a plan can be shorter than, and how much of the devices' time it uses.

Written from the definitions, not from the planner's code: a benchmark should not trust what it measures.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any


def bound_s(plan: dict[str, Any]) -> float:
    """The least step of a plan.json: the busiest device with its fill and drain, or a direction of a link.

    For stage s: Σ over earlier t of (f + x + latency), all its own work, Σ over earlier t of (b + x +
    latency). For a direction of a link: what comes before its first message, all messages, and what the last
    one must still go through. Also all that a shared resource must carry. Under ``zero-bubble`` only the
    gradients of inputs (b − w) lie on the way back. Messages' cost beside the network counts as nothing.
    """
    problem = plan["problem"]
    m = problem["microbatches"]
    stages = [(s["start"], s["stop"], s["replicas"][0]) for s in plan["stages"]]
    f, b, w, o = zip(*(_stage(problem, p, q, replica) for p, q, replica in stages), strict=True)
    ahead, back = [], []
    for (_, cut, here), (_, _, there) in pairwise(stages):
        size = problem["layers"][cut - 1]["output_bytes"]
        ahead.append(_way(problem, here["device"], there["device"], size))
        back.append(_way(problem, there["device"], here["device"], size))
    count = len(stages)
    trip = [0.0] * count  # one microbatch from stage s on, there and back
    for s in reversed(range(count)):
        beyond = sum(ahead[s]) + sum(back[s]) + trip[s + 1] if s + 1 < count else 0.0
        trip[s] = f[s] + b[s] - w[s] + beyond
    out = 0.0
    for s in range(count):
        fill = sum(f[t] + sum(ahead[t]) for t in range(s))
        drain = sum(b[t] - w[t] + sum(back[t]) for t in range(s)) + w[0] + o[0]
        out = max(out, fill + m * (f[s] + b[s]) + o[s], fill + m * (f[s] + b[s] - w[s]) + drain)
        if s + 1 < count:
            (x, way), (y, yaw) = ahead[s], back[s]
            home = b[s] - w[s] + drain
            out = max(out, fill + f[s] + m * x + way + trip[s + 1] + y + yaw + home)
            out = max(out, fill + f[s] + x + way + trip[s + 1] + m * y + yaw + home)
    return max(out, _shared_s(problem, stages))


def _shared_s(problem: dict[str, Any], stages: list[tuple[int, int, dict[str, Any]]]) -> float:
    """The most seconds that a shared resource must carry messages in a step."""
    out = 0.0
    for resource in problem.get("shared", []):
        ways = {tuple(pair) for pair in resource["links"]}
        load = 0.0
        for (_, cut, here), (_, _, there) in pairwise(stages):
            a, b = here["device"], there["device"]
            size = problem["layers"][cut - 1]["output_bytes"]
            load += size * (
                _share(problem, a, b) * ((a, b) in ways) + _share(problem, b, a) * ((b, a) in ways)
            )
        out = max(out, problem["microbatches"] * load / resource["bandwidth_bytes_per_s"])
    return out


def data_bound_s(problem: dict[str, Any]) -> float:
    """The least step in which all of a problem's devices hold the model, however gradients are summed.

    All devices compute all the time, in parts of a microbatch if need be; each sends and receives every byte
    of gradient once at least, over its fastest line. All but layers and lines counts as nothing.
    """
    rates, slowest = 0.0, math.inf
    for name in (device["id"] for device in problem["devices"]):
        f, b, _ = _times(problem, name, 0, len(problem["layers"]))
        rates += 1 / (f + b)
        links = [k for k in problem["links"] if name in (k["source"], k["target"])]
        fastest = max((float(k["bandwidth_bytes_per_s"]) for k in links), default=math.inf)
        slowest = min(slowest, fastest)
    sizes = math.fsum(layer["gradient_bytes"] for layer in problem["layers"])
    return max(int(problem["microbatches"]) / rates, sizes / slowest)


def utilisation(plan: dict[str, Any], step_s: float) -> float:
    """Device-seconds needed ÷ device-seconds there, each weighted by its device's speed.

    A device alone would take ``whole`` seconds for the step, so it brings ``step_s / whole`` of the step's
    work; what is needed is one step's work.
    """
    problem = plan["problem"]
    brought = 0.0
    for device in problem["devices"]:
        f, b, o = _times(problem, device["id"], 0, len(problem["layers"]))
        brought += step_s / (problem["microbatches"] * (f + b) + o)
    return 1 / brought


def _times(problem: dict[str, Any], device: str, start: int, stop: int) -> tuple[float, float, float]:
    times = problem["times"][device]
    cut = problem["schedule"] == "zero-bubble" and times.get("split_s") is not None
    keys = ("forward_s", "split_s" if cut else "backward_s", "optimizer_s")
    f, b, o = (sum(times[key][start:stop]) for key in keys)
    return f, b, o


def _stage(
    problem: dict[str, Any], start: int, stop: int, replica: dict[str, Any]
) -> tuple[float, float, float, float]:
    """Seconds of forward, backward, the part of it that can wait, and optimizer."""
    f, b, o = _times(problem, replica["device"], start, stop)
    if replica.get("recompute"):
        return f, b + f, 0.0, o
    weights = problem["times"][replica["device"]].get("weight_s")
    if problem["schedule"] != "zero-bubble" or weights is None:
        return f, b, 0.0, o
    return f, b, sum(weights[start:stop]), o


def _link(problem: dict[str, Any], source: str, target: str) -> dict[str, Any] | None:
    ends = (source, target)
    return next((k for k in problem["links"] if (k["source"], k["target"]) == ends), None)


def _share(problem: dict[str, Any], source: str, target: str) -> float:
    """Bytes on the link for a byte of output."""
    link = _link(problem, source, target)
    return 1.0 if link is None else float(link.get("sent_share", 1.0))


def _way(problem: dict[str, Any], source: str, target: str, size: float) -> tuple[float, float]:
    """Seconds on the link, and of latency."""
    link = _link(problem, source, target)
    if link is None:
        return 0.0, 0.0
    return size * _share(problem, source, target) / link["bandwidth_bytes_per_s"], link["latency_s"]
