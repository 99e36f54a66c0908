"""What no step of a plan can be shorter than, and how much of the devices' time it uses.

Written from the definitions, not from the planner's code: a benchmark should not trust what it measures.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any


def bound_s(plan: dict[str, Any], *, shared: bool = True) -> float:
    """The least step of a plan.json: the busiest device with its fill and drain, or a direction of a link.

    For stage s: Σ over earlier t of (f + x + latency), all its own work, Σ over earlier t of (b + x +
    latency). For a direction of a link: what comes before its first message, all messages, and what the last
    one must still go through. ``shared``: also all that a shared resource must carry.
    """
    problem = plan["problem"]
    m = problem["microbatches"]
    stages = [(s["start"], s["stop"], s["replicas"][0]["device"]) for s in plan["stages"]]
    times = [_times(problem, d, p, q) for p, q, d in stages]
    f, b, o = zip(*times, strict=True)
    ahead, back = [], []
    for (_, cut, here), (_, _, there) in pairwise(stages):
        size = problem["layers"][cut - 1]["output_bytes"]
        ahead.append(_way(problem, here, there, size))
        back.append(_way(problem, there, here, size))
    count = len(stages)
    trip = [0.0] * count  # one microbatch from stage s on, there and back
    for s in reversed(range(count)):
        trip[s] = f[s] + b[s] + (sum(ahead[s]) + sum(back[s]) + trip[s + 1] if s + 1 < count else 0.0)
    out = 0.0
    for s in range(count):
        fill = sum(f[t] + sum(ahead[t]) for t in range(s))
        drain = sum(b[t] + sum(back[t]) for t in range(s))
        out = max(out, fill + m * (f[s] + b[s]) + max(drain + o[0], o[s]))
        if s + 1 < count:
            (x, way), (y, yaw) = ahead[s], back[s]
            out = max(out, fill + f[s] + m * x + way + trip[s + 1] + y + yaw + b[s] + drain)
            out = max(out, fill + f[s] + x + way + trip[s + 1] + m * y + yaw + b[s] + drain)
    if shared:
        for resource in problem.get("shared", []):
            ways = {tuple(pair) for pair in resource["links"]}
            load = 0.0
            for (_, cut, here), (_, _, there) in pairwise(stages):
                size = problem["layers"][cut - 1]["output_bytes"]
                load += m * size * (((here, there) in ways) + ((there, here) in ways))
            out = max(out, load / resource["bandwidth_bytes_per_s"])
    return out


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
    f, b, o = (sum(times[f"{key}_s"][start:stop]) for key in ("forward", "backward", "optimizer"))
    return f, b, o


def _way(problem: dict[str, Any], source: str, target: str, size: float) -> tuple[float, float]:
    """Seconds on the link, and of latency."""
    for link in problem["links"]:
        if (link["source"], link["target"]) == (source, target):
            sent = size * link.get("sent_share", 1.0)
            return sent / link["bandwidth_bytes_per_s"], link["latency_s"]
    return 0.0, 0.0
