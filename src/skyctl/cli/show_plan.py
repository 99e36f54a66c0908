"""A plan as a person reads it: who holds what, how busy, how full, and how sure."""

from __future__ import annotations

from skyctl.cli.output import Output
from skyctl.planner.explain import binding, stages
from skyctl.planner.export import Export
from skyctl.records.plan import Plan

BAR = 20
NARROW = 100
"""Below so many columns the table leaves out what can be spared and draws shorter bars."""
SPARED = ("from … to", "in flight")
NAMES = 4
"""So many unused devices with the same reason are named."""


def show_plan(out: Output, plan: Plan) -> None:
    """One table and a few lines; numbers with their units."""
    narrow = out.width is not None and out.width < NARROW
    bar = BAR // 2 if narrow else BAR
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
                "layers": f"{stage.start}–{stage.stop}",
                "from … to": f"{layers[stage.start].name} … {layers[stage.stop - 1].name}",
                "busy s": f"{said.compute_s:.3f}",
                "load": "█" * filled + "·" * (bar - filled),
                "": f"{view.busy:.0%}",
                "in flight": stage.replicas[0].in_flight,
                "memory GiB": _memory(view.memory_bytes, memory[view.device]),
            }
            | ({"link ms": f"{view.link_s * 1e3:.1f}" if index < len(views) - 1 else ""} if linked else {})
        )
    columns = [name for name in rows[0] if not (narrow and name in SPARED)]
    out.table(columns, [[row[name] for name in columns] for row in rows], wrap="from … to")
    _unused(out, plan)
    binds = binding(plan)
    out.line(f"what binds: {binds.kind} {binds.name}: {binds.detail}")
    for text in _sure(plan):
        out.line(text)


def _sure(plan: Plan) -> tuple[str, str]:
    sure = plan.certificate
    bound = "no bound" if sure.lower_bound_s is None else f"bound {sure.lower_bound_s:.4f} s"
    gap = "" if sure.gap is None else f", gap {sure.gap:.2%}"
    return (
        f"{plan.strategy}: a step of {plan.problem.microbatches} microbatches ({plan.problem.schedule}) "
        f"is predicted to take {plan.predicted.iteration_s:.4f} s",
        f"certificate: {sure.status} ({bound}{gap}; {sure.method}, {sure.wall_s:.2f} s)",
    )


def show_export(out: Output, exported: Export, plan: Plan) -> None:
    """The setting's value alone on stdout (so that it can be piped); what goes with it on stderr."""
    if not out.as_json:
        out.line(exported.text)
    ranks = ", ".join(f"{rank} {device}" for rank, device in enumerate(exported.devices))
    out.note(f"{exported.setting}; pipeline ranks: {ranks}")
    for note in (*exported.notes, *_sure(plan)):
        out.note(note)


def _unused(out: Output, plan: Plan) -> None:
    by_reason: dict[str, list[str]] = {}
    for one in plan.unused:
        by_reason.setdefault(one.reason, []).append(one.device)
    for reason, devices in by_reason.items():
        more = f" and {len(devices) - NAMES} more" if len(devices) > NAMES else ""
        out.line(f"unused: {', '.join(devices[:NAMES])}{more}: {reason}")


def _memory(used: float, available: float | None) -> str:
    of = "unlimited" if available is None else f"{available / 2**30:.2f}"
    return f"{used / 2**30:.2f} of {of}"
