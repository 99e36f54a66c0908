"""A plan as a person reads it: who holds what, how busy, how full, and how sure."""

from __future__ import annotations

from skyctl.cli.output import Output
from skyctl.planner.explain import binding
from skyctl.records.plan import Plan

BAR = 20
NARROW = 100
"""Below so many columns the table leaves out the layers' names and draws shorter bars."""


def show_plan(out: Output, plan: Plan) -> None:
    """One table and a few lines; numbers with their units."""
    predicted = {replica.device: replica for replica in plan.predicted.replicas}
    memory = {device.id: device.memory_bytes for device in plan.problem.devices}
    layers = plan.problem.layers
    narrow = out.width is not None and out.width < NARROW
    bar = BAR // 2 if narrow else BAR
    rows: list[tuple[object, ...]] = []
    for index, stage in enumerate(plan.stages):
        for replica in stage.replicas:
            said = predicted[replica.device]
            step = plan.predicted.iteration_s or 1.0
            busy = said.compute_s / step
            rows.append(
                (
                    index,
                    replica.device,
                    f"{stage.start}–{stage.stop}",
                    "" if narrow else f"{layers[stage.start].name} … {layers[stage.stop - 1].name}",
                    f"{said.compute_s:.3f}",
                    "█" * round(busy * bar) + "·" * (bar - round(busy * bar)),
                    f"{busy:.0%}",
                    replica.in_flight,
                    _memory(said.memory_bytes, memory[replica.device]),
                )
            )
    columns = ["stage", "device", "layers", "from … to", "busy s", "load", "", "in flight", "memory GiB"]
    if narrow:
        at = columns.index("from … to")
        columns.pop(at)
        rows = [(*row[:at], *row[at + 1 :]) for row in rows]
    out.table(columns, rows, wrap="from … to")
    for unused in plan.unused:
        out.line(f"unused: {unused.device}: {unused.reason}")
    binds = binding(plan)
    out.line(f"what binds: {binds.kind} {binds.name}: {binds.detail}")
    sure = plan.certificate
    bound = "no bound" if sure.lower_bound_s is None else f"bound {sure.lower_bound_s:.4f} s"
    gap = "" if sure.gap is None else f", gap {sure.gap:.2%}"
    out.line(
        f"{plan.strategy}: a step of {plan.problem.microbatches} microbatches ({plan.problem.schedule}) "
        f"is predicted to take {plan.predicted.iteration_s:.4f} s"
    )
    out.line(f"certificate: {sure.status} ({bound}{gap}; {sure.method}, {sure.wall_s:.2f} s)")


def _memory(used: float, available: float | None) -> str:
    of = "unlimited" if available is None else f"{available / 2**30:.2f}"
    return f"{used / 2**30:.2f} of {of}"
