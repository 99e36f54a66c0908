"""Who holds which layers, to scale: a bar a device, as wide as a step's work on it; idle is hatched."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.compare.report import parts
from skyctl.compare.report.facts import Report
from skyctl.compare.report.markup import Markup, el, name
from skyctl.compare.report.scale import Scale, axis, grid, of_seconds
from skyctl.compare.report.units import memory
from skyctl.compare.rows import Row, Share
from skyctl.compare.words import seconds, times
from skyctl.records.plan import Plan

HIGH = 34
MOST_LAYERS = 160
"""With more layers on a device their borders are not drawn."""


def maps(report: Report) -> Markup:
    """The section."""
    lead = (
        "One bar a device, in the pipeline's order, all on one scale: how long a step's work takes there, "
        "layer by layer, and how long it waits."
    )
    if not report.planned:
        return parts.section("maps", "Who holds what", None, parts.empty("There is no plan to draw."))
    measured = bool(report.measured)
    entries = [
        (parts.swatch("predicted"), "computing, as predicted; a part a layer"),
        (parts.swatch("hatched"), "idle"),
        (parts.stroke("end", upright=True), "end of the step"),
    ]
    if measured:
        entries.insert(1, (parts.swatch("measured"), "computing, as measured"))
        entries.append((parts.stroke("end seen", upright=True), "end of the step, measured"))
    scale = of_seconds(parts.longest_s(report), 1.02)
    drawn = [_map(report, rows, called, scale) for rows, called in parts.groups(report)]
    return parts.section("maps", "Who holds what", lead, parts.legend(*entries), drawn)


def _map(report: Report, rows: Sequence[Row], called: str, scale: Scale) -> Markup:
    row = rows[0]
    plan = report.outcome(row.strategy).plan
    assert plan is not None
    said: list[object] = [el("b", seconds(row.predicted_s)), " predicted"]
    if row.measured:
        said += [" · ", el("b", seconds(row.measured.median)), " measured"]
    speedup = row.measured_speedup if row.measured else row.predicted_speedup
    said += [f" · {times(speedup)}"] if speedup is not None else []
    lanes = [_lane(report, row, share, plan, scale) for share in row.shares]
    return parts.figure(
        name(called),
        said,
        el("ul", lanes, class_="lanes"),
        el("div", axis(scale, "of a step"), class_="axis-lane"),
        caption=[el("span", "Unused: "), parts.names(row.unused), ". ", _why(plan)] if row.unused else None,
    )


def _why(plan: Plan) -> str:
    reasons = list(dict.fromkeys(one.reason for one in plan.unused))
    return "; ".join(reasons)


def _lane(report: Report, row: Row, share: Share, plan: Plan, scale: Scale) -> Markup:
    both = share.measured_compute_s is not None
    top, high = (2, 19) if both else (6, 22)
    step_s = row.predicted_s or 0.0
    busy_s = min(share.predicted_compute_s, step_s) if step_s else share.predicted_compute_s
    drawn: list[object] = [*grid(scale, HIGH)]
    if step_s > busy_s:
        idle = f"{share.label}: idle {seconds(step_s - busy_s)} of a step"
        drawn.append(
            el("rect", parts.title(idle), x=scale.x(busy_s), width=scale.wide(step_s - busy_s), y=top,
               height=high, class_="hatched")
        )  # fmt: skip
    drawn += _layers(share, plan, busy_s, scale, top, high)
    if both:
        did_s = share.measured_compute_s or 0.0
        words = f"{share.label}: computed {seconds(did_s)} of a step as measured, predicted {seconds(busy_s)}"
        drawn.append(
            el("rect", parts.title(words), x=0, y=24, width=scale.wide(did_s), height=6, class_="measured")
        )
    drawn.append(el("line", x1=scale.x(step_s), x2=scale.x(step_s), y1=-3, y2=HIGH + 3, class_="end"))
    if row.measured:
        at = scale.x(row.measured.median)
        drawn.append(el("line", x1=at, x2=at, y1=-3, y2=HIGH + 3, class_="end seen"))
    count = share.stop - share.start
    below = f"layers {share.start}–{share.stop} · {count}"
    return parts.lane(
        name(share.label),
        below,
        drawn,
        [el("b", seconds(busy_s)), f" · {busy_s / step_s:.0%} busy" if step_s else "",
         [el("small", text) for text in _memory(report, row, share, plan)]],
        f"{share.label}: {count} layers, busy {seconds(busy_s)} of {seconds(step_s)}",
    )  # fmt: skip


def _layers(share: Share, plan: Plan, busy_s: float, scale: Scale, top: int, high: int) -> list[Markup]:
    """The busy part, cut in proportion to what each layer takes there."""
    shape = {"y": top, "height": high, "class_": "predicted"}
    costs = layer_s(plan, share.device, share.start, share.stop)
    total_s = sum(costs)
    if total_s <= 0 or len(costs) > MOST_LAYERS or len(costs) < 2:
        title = f"{share.label}: layers {share.start}–{share.stop}, {seconds(busy_s)} of a step"
        return [el("rect", parts.title(title), x=0, width=scale.wide(busy_s), **shape)]
    out, at_s = [], 0.0
    for layer, cost_s in zip(plan.problem.layers[share.start : share.stop], costs, strict=True):
        part_s = busy_s * cost_s / total_s
        words = f"{layer.name} on {share.label}: {seconds(cost_s)} of a step"
        out.append(el("rect", parts.title(words), x=scale.x(at_s), width=scale.wide(part_s), **shape))
        if at_s:
            at = scale.x(at_s)
            out.append(el("line", x1=at, x2=at, y1=top, y2=top + high, class_="cut"))
        at_s += part_s
    # Borders last, so that no layer covers one.
    return [one for one in out if one.startswith("<rect")] + [one for one in out if one.startswith("<line")]


def layer_s(plan: Plan, device: str, start: int, stop: int) -> list[float]:
    """Seconds a step of each of those layers on that device: all microbatches, and its optimizer."""
    problem = plan.problem
    times_ = problem.times.get(device)
    again = any(r.recompute for stage in plan.stages for r in stage.replicas if r.device == device)
    count = problem.microbatches
    if times_ is None:
        rate = next(one.flops_per_s for one in problem.devices if one.id == device)
        return [count * layer.flops / rate * (4 / 3 if again else 1) for layer in problem.layers[start:stop]]
    parts_ = zip(times_.forward_s, times_.backward_s, times_.optimizer_s, strict=True)
    whole = [count * (f * (2 if again else 1) + b) + o for f, b, o in parts_]
    return whole[start:stop]


def _memory(report: Report, row: Row, share: Share, plan: Plan) -> list[str]:
    """``121 MiB of 5.40 GiB``, and the most that was seen where that is known."""
    need = next(one.memory_bytes for one in plan.predicted.replicas if one.device == share.device)
    have = next(one.memory_bytes for one in plan.problem.devices if one.id == share.device)
    said = f"{memory(need)} of {memory(have) if have is not None else 'unlimited'}"
    done = report.outcome(row.strategy).measurement
    seen = next(
        (r.peak_memory_bytes for r in done.replicas if r.device == share.device), None
    ) if done else None  # fmt: skip
    return [said, f"{memory(seen)} at most, measured"] if seen else [said]
