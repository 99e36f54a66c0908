"""A plan as a person reads it: who holds what, how busy, how full, and how sure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyctl.cli.command_output import Output
from skyctl.cli.show_pipelines import (
    MAX_NAMES,
    describe_hybrid,
    describe_sums,
    load_cells,
    pipeline_rows,
    share_rows,
)
from skyctl.compare.form_summary import describe_forms, form_table
from skyctl.compare.number_format import format_bytes, format_estimate, format_ratio, format_seconds
from skyctl.compare.rhythm_summary import describe_rounds
from skyctl.planner.explanation.advice import Advice
from skyctl.planner.explanation.plan_reasons import describe_choices, find_binding_constraint, stage_views
from skyctl.planner.explanation.unused_devices import percent_text
from skyctl.planner.trainer_export import TrainerExport
from skyctl.planning.backend_choice import describe_choice, describe_left_out
from skyctl.records.plan import Plan

if TYPE_CHECKING:
    from skyctl.planning.training_changes import TrainingChange
    from skyctl.records.profile import Profile


BAR_WIDTH = 20
NARROW_COLUMNS = 120
"""On narrower terminals bars are half as long."""
OPTIONAL_COLUMNS = ("from … to", "load", "in flight", "link ms")
"""Columns left out on a narrow terminal, the first of them first."""


def show_plan(out: Output, plan: Plan, *, time_limit_reached: bool = False) -> None:
    """A table of stages, or of shares; then what is unused, what binds, what is predicted and how sure.

    If the plan was chosen among forms, the result of each form follows.
    """
    bar = BAR_WIDTH // 2 if out.width is not None and out.width < NARROW_COLUMNS else BAR_WIDTH
    if plan.problem.rhythm.is_rounds:
        rows, lines = pipeline_rows(plan, bar), describe_rounds(plan)
    elif plan.problem.parallel == "data":
        rows, lines = share_rows(plan, bar), describe_sums(plan)
    elif plan.problem.parallel == "hybrid":
        rows, lines = pipeline_rows(plan, bar), describe_hybrid(plan)
    else:
        rows, lines = _stage_rows(plan, bar), _why(plan)
    columns = list(rows[0])
    out.table(columns, [list(row.values()) for row in rows], optional=OPTIONAL_COLUMNS, shorten="device")
    _show_unused(out, plan)
    for text in (*lines, *certainty_lines(plan)):
        out.line(text, wrap=True)
    if time_limit_reached and plan.certificate.status != "optimal" and plan.strategy == "optimal":
        out.line("next: a longer --time-limit may close the gap")
    show_backend(out, [plan])
    if plan.forms:
        out.line()
        out.table(*form_table(plan))
        for text in describe_forms(plan):
            out.line(text, wrap=True)


def show_backend(out: Output, plans: Sequence[Plan | None]) -> None:
    """A line on what carries tensors between ranks, and why: of the last plan that has several."""
    saying = [plan for plan in plans if plan is not None and len(plan.placed_stages) > 1]
    if saying and saying[-1].backend is not None:
        out.line(describe_choice(saying[-1].backend, saying[-1].predicted.iteration_s), wrap=True)


def show_left_out(out: Output, plan: Plan, profile: Profile) -> None:
    """A note on devices that the backend asked for could not serve."""
    if (text := describe_left_out(plan, profile)) is not None:
        out.note(text)


def show_full_training(out: Output, plan: Plan, profile: Profile) -> None:
    """A note on what each device would hold if the model itself were trained, and not adapters alone."""
    shapes = profile.workload.shapes if profile.workload is not None else ()
    layers = next((s.layers for s in shapes if s.microbatches == plan.problem.microbatches), ())
    if not layers or any(layer.full_state_bytes is None for layer in layers):
        return
    told = []
    for stage in plan.placed_stages:
        held = layers[stage.start : stage.stop]
        full = format_bytes(sum(layer.full_state_bytes or 0.0 for layer in held))
        told.append(f"{full} on {stage.device} (now {format_bytes(sum(x.state_bytes for x in held))})")
    out.note(f"full training would hold weights, gradients and optimizer state of {', '.join(told)}")


def _stage_rows(plan: Plan, bar: int) -> list[dict[str, object]]:
    """A row for each stage of a pipeline; ``bar``: characters of a full bar."""
    layers = plan.problem.layers
    memory = {device.id: device.memory_bytes for device in plan.problem.devices}
    predicted = {replica.device: replica for replica in plan.predicted.replicas}
    views = stage_views(plan)
    linked = any(view.link_s > 0 for view in views)
    rows: list[dict[str, object]] = []
    for index, (stage, view) in enumerate(zip(plan.placed_stages, views, strict=True)):
        room = memory[view.device]
        link = {"link ms": f"{view.link_s * 1e3:.1f}" if index < len(views) - 1 else ""}
        rows.append(
            {
                "stage": index,
                "device": view.device,
                "layers": f"{stage.start}:{stage.stop}",
                "from … to": f"{layers[stage.start].name} … {layers[stage.stop - 1].name}",
                **load_cells(predicted[view.device], plan.predicted.iteration_s, room, bar, stage.in_flight),
                **(link if linked else {}),
            }
        )
    return rows


def _why(plan: Plan) -> list[str]:
    """In words: what was picked for a pipeline, and what binds."""
    binds = find_binding_constraint(plan)
    picked = [f"picked: {text}" for text in describe_choices(plan)]
    return [*picked, f"what binds: {binds.kind} {binds.name}: {binds.detail}"]


def certainty_lines(plan: Plan) -> tuple[str, str]:
    """Two lines: the prediction, in terms of the objective, and how sure it is that no plan is better."""
    predicted = plan.predicted
    step = _seconds(predicted.iteration_s)
    if predicted.interval is not None:
        step = format_estimate(predicted.iteration_s, predicted.interval)
    how: str = plan.problem.schedule
    if plan.problem.parallel == "data":
        how = "all layers on each device"
    elif plan.problem.parallel == "hybrid":
        how = f"{len(plan.pipelines)} pipelines, {how}"
    if plan.problem.rhythm.is_rounds:
        steps = max(pipeline.local_steps or 1 for pipeline in plan.pipelines)
        return f"round: {step} predicted ({steps} local step{'' if steps == 1 else 's'})", _proof(plan)
    what = f"{plan.problem.microbatches} microbatches, {how}"
    if plan.problem.objective == "iteration":
        return f"step: {step} predicted ({what})", _proof(plan)
    slowest = _seconds(predicted.bottleneck_s)
    slowest_stage = (
        f"slowest stage: {slowest} a microbatch (links ignored); a step takes {step} predicted ({what})"
    )
    return slowest_stage, _proof(plan)


def _proof(plan: Plan) -> str:
    sure = plan.certificate
    proof = sure if sure.whole_blocks is None else sure.whole_blocks
    status, bound_s, method = proof.status, proof.lower_bound_s, proof.method
    which = "" if sure.whole_blocks is None else " that cuts between blocks only"
    how = f" ({method}, {sure.wall_s:.2f} s)"
    if status == "optimal":
        among = " among plans that cut between blocks only" if which else " for these numbers"
        return f"how sure: proved optimal{among}{how}"
    if bound_s is None:
        return f"how sure: no bound is claimed (strategy {plan.strategy}: {method}, {sure.wall_s:.2f} s)"
    gap = f" (gap {percent_text(sure.value_s / bound_s - 1)})" if bound_s > 0 else ""
    faster = "be faster" if plan.problem.objective == "iteration" else "have a slowest stage faster"
    return f"how sure: not proved: no plan{which} can {faster} than {_seconds(bound_s)}{gap}{how}"


def _seconds(seconds: float) -> str:
    if 0 < seconds < 0.01:
        return f"{seconds * 1e3:.4g} ms"
    return f"{seconds:.4f} s" if seconds < 1e6 else f"{seconds:.5g} s"


def show_export(out: Output, exported: TrainerExport, plan: Plan) -> None:
    """The setting's value alone on stdout, so that it can be piped; device order and notes on stderr."""
    if not out.as_json:
        out.line(exported.text)
    ranks = ", ".join(f"{rank} {device}" for rank, device in enumerate(exported.devices))
    out.note(f"{exported.setting}; pipeline ranks: {ranks}")
    for note in (*exported.notes, *certainty_lines(plan)):
        out.note(note)


def show_advice(out: Output, advice: Sequence[Advice]) -> None:
    """Prints what would shorten the step most, and which devices hardly matter."""
    helps = [item.text for item in advice if item.kind != "device"]
    for number, text in enumerate(helps):
        out.line(("what would help: " if number == 0 else " " * 17) + text, wrap=True)
    dispensable = [item.text for item in advice if item.kind == "device"]
    if dispensable:
        each = ", each by itself" if len(dispensable) > 1 else ""
        out.line(f"hardly needed{each}: {', '.join(dispensable)}", wrap=True)


def show_training_changes(out: Output, plan: Plan, changes: Sequence[TrainingChange]) -> None:
    """Prints the changes that would be faster and alter what is trained, a line each."""
    for change in changes:
        took = f"{format_seconds(change.iteration_s)} a {plan.problem.rhythm.unit}"
        step = f"{took} predicted, --parallel {change.parallel}"
        if change.kind in ("sync format", "compression"):
            text = f"--sync-format {change.name} would be {format_ratio(change.gain)} as fast ({step})"
        elif change.kind == "sync delay":
            text = (
                f"--sync-delay {change.name} would be {format_ratio(change.gain)} as fast, with gradients "
                f"that are applied a step later ({step})"
            )
        else:
            batch = f" {change.name} times as large"
            if plan.workload is not None:
                batch = f" of {int(change.name) * plan.workload.batch_size}"
            text = (
                f"a batch{batch} in {change.microbatches} microbatches would give "
                f"{format_ratio(change.gain)} as many samples a second ({step})"
            )
        out.line(f"changes training: {text}", wrap=True)


def _show_unused(out: Output, plan: Plan) -> None:
    """The unused devices, a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for unused in plan.unused:
        by_reason.setdefault(unused.reason, []).append(unused.device)
    for reason, devices in by_reason.items():
        more = f" and {len(devices) - MAX_NAMES} more" if len(devices) > MAX_NAMES else ""
        out.line(f"unused: {', '.join(devices[:MAX_NAMES])}{more}: {reason}", wrap=True)


def show_link_dtypes(out: Output, plan: Plan) -> None:
    """A line on the links that send their numbers in another dtype, where there are any."""
    from skyctl.planning.link_dtypes import encoded_links

    encoded = [
        f"{link.source} → {link.target} as {link.dtype} ({link.sent_share:.0%} of the bytes)"
        for link in encoded_links(plan)
    ]
    if encoded:
        out.line("sent: " + ", ".join(encoded))
