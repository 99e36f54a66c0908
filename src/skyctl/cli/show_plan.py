"""A plan as a person reads it: who holds what, how busy, how full, and how sure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyctl.cli.output import Output
from skyctl.planner.advice import Advice
from skyctl.planner.explain import binding, stages
from skyctl.planner.export import Export
from skyctl.planner.reasons import picked
from skyctl.records.plan import Plan

BAR = 20
NARROW = 120
"""Below so many columns bars are half as long."""
SPARED = ("from … to", "load", "in flight", "link ms")
"""Columns left out on a narrow terminal, the first one first."""
NAMES = 4
"""So many unused devices with the same reason are named."""
WHOLE_BLOCKS = re.compile(
    r"whole blocks only; among such plans (?P<status>\w+)(, bound (?P<bound>\S+) s)?: (?P<method>.*)",
    re.DOTALL,
)
"""How the certificate's method begins where only plans that cut between blocks were looked at."""


def show_plan(out: Output, plan: Plan, *, time_limit_reached: bool = False) -> None:
    """One table and a few lines; numbers with their units."""
    bar = BAR // 2 if out.width is not None and out.width < NARROW else BAR
    layers = plan.problem.layers
    memory = {device.id: device.memory_bytes for device in plan.problem.devices}
    predicted = {replica.device: replica for replica in plan.predicted.replicas}
    views = stages(plan)
    linked = any(view.link_s > 0 for view in views)
    rows: list[dict[str, object]] = []
    for index, (stage, view) in enumerate(zip(plan.stages, views, strict=True)):
        said = predicted[view.device]
        filled = min(bar, round(view.busy * bar))
        rows.append(
            {
                "stage": index,
                "device": view.device,
                "layers": f"{stage.start}:{stage.stop}",
                "from … to": f"{layers[stage.start].name} … {layers[stage.stop - 1].name}",
                "busy s": f"{said.compute_s:.3f}",
                "load": "█" * filled + "·" * (bar - filled),
                "busy": f"{view.busy:.0%}",
                "in flight": stage.replicas[0].in_flight,
                "memory GiB": _memory(view.memory_bytes, memory[view.device]),
            }
            | ({"link ms": f"{view.link_s * 1e3:.1f}" if index < len(views) - 1 else ""} if linked else {})
        )
    columns = list(rows[0])
    out.table(columns, [list(row.values()) for row in rows], spare=SPARED, shorten="device")
    _unused(out, plan)
    for text in picked(plan):
        out.line(f"picked: {text}", wrap=True)
    binds = binding(plan)
    out.line(f"what binds: {binds.kind} {binds.name}: {binds.detail}", wrap=True)
    for text in _sure(plan):
        out.line(text, wrap=True)
    if time_limit_reached and plan.certificate.status != "optimal" and plan.strategy == "optimal":
        out.line("next: a longer --time-limit may close the gap")


def _sure(plan: Plan) -> tuple[str, str]:
    """What is predicted, in the objective's words, and how sure it is that nothing is better."""
    step = _seconds(plan.predicted.iteration_s)
    what = f"{plan.problem.microbatches} microbatches, {plan.problem.schedule}"
    if plan.problem.objective == "iteration":
        return f"step: {step} predicted ({what})", _proof(plan)
    slowest = _seconds(plan.predicted.bottleneck_s)
    said = f"slowest stage: {slowest} a microbatch (links ignored); a step takes {step} predicted ({what})"
    return said, _proof(plan)


def _proof(plan: Plan) -> str:
    sure = plan.certificate
    status, bound_s, method, which = sure.status, sure.lower_bound_s, sure.method, ""
    if parts := WHOLE_BLOCKS.fullmatch(method):
        status, method = parts["status"], parts["method"]  # type: ignore[assignment]
        bound_s = None if parts["bound"] is None else float(parts["bound"])
        which = " that cuts between blocks only"
    how = f" ({method}, {sure.wall_s:.2f} s)"
    if status == "optimal":
        among = " among plans that cut between blocks only" if which else " for these numbers"
        return f"how sure: proved optimal{among}{how}"
    if bound_s is None:
        return f"how sure: no bound is claimed (strategy {plan.strategy}: {method}, {sure.wall_s:.2f} s)"
    gap = f" (gap {_percent(sure.value_s / bound_s - 1)})" if bound_s > 0 else ""
    faster = "be faster" if plan.problem.objective == "iteration" else "have a slowest stage faster"
    return f"how sure: not proved: no plan{which} can {faster} than {_seconds(bound_s)}{gap}{how}"


def _seconds(seconds: float) -> str:
    if 0 < seconds < 0.01:
        return f"{seconds * 1e3:.4g} ms"
    return f"{seconds:.4f} s" if seconds < 1e6 else f"{seconds:.5g} s"


def _percent(share: float) -> str:
    percent = share * 100
    return f"{percent:.0f}%" if percent >= 9.5 else f"{percent:.2g}%"


def show_export(out: Output, exported: Export, plan: Plan) -> None:
    """The setting's value alone on stdout (so that it can be piped); what goes with it on stderr."""
    if not out.as_json:
        out.line(exported.text)
    ranks = ", ".join(f"{rank} {device}" for rank, device in enumerate(exported.devices))
    out.note(f"{exported.setting}; pipeline ranks: {ranks}")
    for note in (*exported.notes, *_sure(plan)):
        out.note(note)


def show_advice(out: Output, advice: Sequence[Advice]) -> None:
    """What would help most, and which devices are hardly needed."""
    helps = [one.text for one in advice if one.kind != "device"]
    for number, text in enumerate(helps):
        out.line(("what would help: " if number == 0 else " " * 17) + text, wrap=True)
    spared = [one.text for one in advice if one.kind == "device"]
    if spared:
        each = ", each by itself" if len(spared) > 1 else ""
        out.line(f"hardly needed{each}: {', '.join(spared)}", wrap=True)


def _unused(out: Output, plan: Plan) -> None:
    by_reason: dict[str, list[str]] = {}
    for one in plan.unused:
        by_reason.setdefault(one.reason, []).append(one.device)
    for reason, devices in by_reason.items():
        more = f" and {len(devices) - NAMES} more" if len(devices) > NAMES else ""
        out.line(f"unused: {', '.join(devices[:NAMES])}{more}: {reason}", wrap=True)


def _memory(used: float, available: float | None) -> str:
    of = "unlimited" if available is None else f"{available / 2**30:.2f}"
    return f"{used / 2**30:.2f} of {of}"
