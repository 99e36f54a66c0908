"""A comparison's report, made of its profile, plans, runs, traces and what ``verify`` says of them."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from skyctl import __version__
from skyctl.compare import chrome_trace, timeline
from skyctl.compare.charts.chart import MatrixCell, MatrixChart
from skyctl.compare.conclusion import conclude
from skyctl.compare.outcome import ALONE, StrategyOutcome, device_labels, pipeline_problem, summarize_outcomes
from skyctl.compare.report_data import (
    ComparisonReport,
    DeviceSpeed,
    Reproduction,
    RouteMap,
    StepTimelines,
    VerifiedPlan,
)
from skyctl.compare.step_seconds import describe_steps
from skyctl.compare.sweeps import ComparisonSweep, add_measured_steps
from skyctl.compare.sync_summary import SyncRow
from skyctl.jobs.route_map import map_routes
from skyctl.planner.api import verify
from skyctl.planner.plan_record import pipeline_simulations
from skyctl.probe.link_matrix import (
    LinkSummary,
    LinkSummaryCell,
    colour,
    latency_text,
    rate_text,
    summarize_links,
    text_colour,
)
from skyctl.probe.profile_tables import condition_notes
from skyctl.records.cluster import Cluster
from skyctl.records.measurement import median
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.records.profile import DeviceProfile, Profile

VERIFIED_SIZE = 200_000
"""Layers × devices × microbatches up to which a plan is verified while its report is written."""
SIMULATED_ACTIONS = 200_000
"""Actions of a step up to which it is drawn."""
LEAST_RATE_SPAN = 8.0
"""The colours span at least this factor: links that hardly differ look alike."""


def build_report(
    outcomes: Sequence[StrategyOutcome],
    profile: Profile | None,
    *,
    cluster: Cluster,
    workload: str,
    reproduction: Reproduction,
    sweeps: Sequence[ComparisonSweep] = (),
    syncs: Sequence[SyncRow] = (),
    created: datetime | None = None,
) -> ComparisonReport:
    """Everything the report shows, with names that say nothing of who made it.

    Args:
        workload: as typed; of a path the last part is kept.
    """
    compared = summarize_outcomes(outcomes)
    hide = Anonymizer(cluster)
    shown = [row.model_copy(update={"error": hide(row.error)}) if row.error else row for row in compared]
    problem = pipeline_problem(outcomes)
    conclusion = conclude(outcomes)
    return ComparisonReport(
        cluster=cluster.name,
        workload=anonymize_workload(workload),
        created=(created or datetime.now(UTC)).strftime("%-d %B %Y, %H:%M UTC"),
        rows=shown,
        outcomes=outcomes,
        conclusion=conclusion,
        about=_about(outcomes),
        devices=_device_speeds(problem, profile, outcomes) if problem is not None else (),
        links=_links(profile, cluster) if profile is not None else None,
        steps={o.strategy: _steps(o) for o in outcomes if o.plan is not None},
        verified=_verify_plans(outcomes),
        sweeps=[add_measured_steps(sweep, compared) for sweep in sweeps],
        reproduction=reproduction,
        notes=[f"{ids}: {note}" for ids, note in condition_notes(profile)] if profile is not None else (),
        syncs=syncs,
        routes=_route_map(outcomes, conclusion.best),
    )


def _route_map(outcomes: Sequence[StrategyOutcome], best: str | None) -> RouteMap | None:
    """The routes of the strategy ``best``, else of the last that has any; None: no plan sums anything."""
    summed = [o for o in outcomes if o.plan is not None and o.plan.sync is not None]
    if not summed:
        return None
    shown = next((o for o in summed if o.strategy == best), summed[-1])
    assert shown.plan is not None
    return RouteMap(shown.strategy, map_routes(shown.plan))


class Anonymizer:
    """Takes out of a text who the user is and where their files are: home folders, logins, keys."""

    def __init__(self, cluster: Cluster) -> None:
        private = {str(Path.home())}
        for node in cluster.nodes:
            private |= {text for text in (node.identity_file, node.host) if text and text != node.name}
        self._private = sorted((text for text in private if len(text) > 1), key=len, reverse=True)
        self._users = {node.user for node in cluster.nodes if node.user}

    def __call__(self, text: str | None) -> str | None:
        """The text without private names and paths."""
        if text is None:
            return None
        for word in self._private:
            text = text.replace(word, "~" if word.startswith("/") else "…")
        for user in self._users:
            text = re.sub(rf"\b{re.escape(user)}@", "", text)
        return re.sub(r"(?<![\w~.])/(?:home|root|Users)(?:/[^\s:,;'\"]*)?", "~", text)


def anonymize_workload(text: str) -> str:
    """``gpt:…`` as it is; of a file or a folder its name alone."""
    kind, colon, rest = text.partition(":")
    if colon and kind in ("gpt", "bert"):
        return text
    if colon and kind == "hf":
        path, comma, options = rest.partition(",")
        return f"hf:{Path(path).name or path}{comma}{options}"
    return Path(text).name or text


def _about(outcomes: Sequence[StrategyOutcome]) -> list[str]:
    """The settings that all rows have in common, a phrase each; none where there is no plan."""
    problem = pipeline_problem(outcomes)
    if problem is None:
        return []
    about = [f"{problem.microbatches} microbatches"]
    workload = next((o.plan.workload for o in outcomes if o.plan is not None), None)
    if workload is not None:
        about = [f"batch {workload.batch_size} in {about[0]}", workload.dtype]
        about += [f"LoRA {workload.lora}"] if workload.lora is not None else []
    about[0] += "".join(
        f" ({o.strategy}: {o.plan.problem.microbatches})"
        for o in outcomes
        if o.plan is not None and o.plan.problem.microbatches != problem.microbatches
    )
    about.append(f"schedule {problem.schedule}")
    about[-1] += "".join(
        f" ({o.strategy}: {o.plan.problem.schedule})"
        for o in outcomes
        if o.plan is not None and o.strategy != ALONE and o.plan.problem.schedule != problem.schedule
    )
    plans = {outcome.strategy: outcome.plan for outcome in outcomes}
    measured = any(outcome.measurement is not None for outcome in outcomes)
    about += describe_steps(plans, measured=measured)
    steps = max((len(o.measurement.steps) for o in outcomes if o.measurement is not None), default=0)
    return [*about, f"{steps} training steps"] if steps else about


def _device_speeds(
    problem: Problem, profile: Profile | None, outcomes: Sequence[StrategyOutcome]
) -> list[DeviceSpeed]:
    profiled = {device.id: device for device in profile.devices} if profile is not None else {}
    plan = next(o.plan for o in outcomes if o.plan is not None)
    batch = plan.workload.batch_size if plan.workload is not None else problem.microbatches
    named = device_labels(problem)
    size = batch // problem.microbatches
    out = []
    for device in problem.devices:
        times = problem.times.get(device.id)
        step_s = problem.microbatches * problem.alone_s(device)
        step_s += sum(times.optimizer_s) if times is not None else 0.0
        measured = profiled.get(device.id)
        out.append(
            DeviceSpeed(
                device=device.id,
                label=named[device.id],
                hardware=_hardware_text(measured) if measured is not None else "",
                samples_per_s=batch / step_s if step_s > 0 else None,
                spread=_spread(measured, size) if measured is not None else None,
                memory_bytes=device.memory_bytes,
            )
        )
    return out


def _hardware_text(device: DeviceProfile) -> str:
    parts = [device.name]
    if device.threads is not None:
        parts.append(f"{device.threads} thread{'' if device.threads == 1 else 's'}")
    if device.slowdown != 1.0:
        parts.append(f"slowed {device.slowdown:g}× (emulated)")
    return ", ".join(parts)


def _spread(device: DeviceProfile, size: int) -> float | None:
    seen = [t.spread for t in device.timings if t.spread is not None and t.microbatch_size == size]
    return median(seen) if seen else None


def _links(profile: Profile, cluster: Cluster) -> MatrixChart:
    names = {node.name for node in cluster.nodes}
    summary = summarize_links(profile)
    if not summary.by_site and not set(summary.names) <= names:
        kept = [i for i, name in enumerate(summary.names) if name in names]
        cells = tuple(tuple(summary.cells[i][j] for j in kept) for i in kept)
        summary = LinkSummary(tuple(summary.names[i] for i in kept), cells, by_site=False)
    low, high = summary.span()
    if high < LEAST_RATE_SPAN * low:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(LEAST_RATE_SPAN), middle * math.sqrt(LEAST_RATE_SPAN)
    key = "Mbit/s (G: Gbit/s), below it milliseconds one way, measured over the path that training uses."
    key += " Yellow is fast, violet is slow."
    if any(cell is not None and cell.estimated for row in summary.cells for cell in row):
        key += " ~ is filled in from other links."
    return link_chart(summary, "Links by site" if summary.by_site else "Links", key, (low, high))


def link_chart(summary: LinkSummary, title: str, key: str, span: tuple[float, float]) -> MatrixChart:
    """The links as a square. ``span``: the rates in Mbit/s that have the slowest and the fastest colour."""
    cells = tuple(
        tuple(
            _link_cell(f"{sender} → {target}", cell, span)
            for target, cell in zip(summary.names, row, strict=True)
        )
        for sender, row in zip(summary.names, summary.cells, strict=True)
    )
    return MatrixChart(title, summary.names, cells, key)


def _link_cell(way: str, cell: LinkSummaryCell | None, span: tuple[float, float]) -> MatrixCell | None:
    if cell is None:
        return None
    if cell.mbit is None or cell.latency_ms is None:
        return MatrixCell(("✗",), f"{way}: no connection")
    fill = colour(cell.mbit, *span)
    rate, latency = rate_text(cell.mbit), latency_text(cell.latency_ms)
    lines = (("~" if cell.estimated else "") + rate, f"{latency} ms")
    return MatrixCell(lines, f"{way}: {rate} Mbit/s, {latency} ms one way", fill, text_colour(fill))


def _steps(outcome: StrategyOutcome) -> StepTimelines:
    """The plan's step, simulated once more, and what was traced of its run; nothing of rounds."""
    plan = outcome.plan
    assert plan is not None
    if (
        plan.problem.rhythm.is_rounds
        or len(plan.placed_stages) * plan.problem.microbatches * 2 > SIMULATED_ACTIONS
    ):
        return StepTimelines()
    devices = [stage.device for stage in plan.placed_stages]
    simulated = timeline.plan_timeline(plan, pipeline_simulations(plan))
    trace = outcome.measurement.trace if outcome.measurement is not None else None
    return StepTimelines(simulated, _read_trace(trace, devices) if trace is not None else None)


def _read_trace(path: str, devices: Sequence[str]) -> timeline.Timeline | None:
    """The trace in that file; None where it can't be read or is another plan's."""
    try:
        trace = chrome_trace.read_trace(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return trace if list(trace.devices) == list(devices) and trace.steps else None


def _verify_plans(outcomes: Sequence[StrategyOutcome]) -> dict[str, VerifiedPlan]:
    """The verdicts of ``skyctl verify`` on the plans that claim a bound, where that takes no long time."""
    out = {}
    for outcome in outcomes:
        plan = outcome.plan
        if plan is None or plan.certificate.lower_bound_s is None or not _small(plan):
            continue
        began = time.perf_counter()
        verdict = verify(plan.problem, plan)
        items = tuple(
            (check.name, check.ok if check.checked else None, check.detail) for check in verdict.checks
        )
        out[outcome.strategy] = VerifiedPlan(verdict.ok, items, time.perf_counter() - began)
    return out


def _small(plan: Plan) -> bool:
    problem = plan.problem
    return len(problem.layers) * len(problem.devices) * problem.microbatches <= VERIFIED_SIZE


def versions(profile: Profile | None) -> list[tuple[str, str]]:
    """The versions that measured and ran a comparison: (what, version)."""
    out = [("skyctl", __version__)]
    if profile is not None:
        torches = sorted({node.torch for node in profile.nodes})
        pythons = sorted({node.python for node in profile.nodes})
        out += [("torch on the nodes", ", ".join(torches)), ("Python on the nodes", ", ".join(pythons))]
        out.append(("profile measured", profile.created))
    return out
