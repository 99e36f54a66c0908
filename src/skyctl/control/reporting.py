"""What a comparison's report is made from: profile, plans, runs, traces, and what ``verify`` says of them."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from skyctl import __version__
from skyctl.compare import chrome, timeline
from skyctl.compare.heatmap import Square, plot_heat
from skyctl.compare.report.facts import Again, Checked, LinkCell, LinkMap, Machine, Report, Steps
from skyctl.compare.rows import Outcome, labels_of, rows
from skyctl.compare.sweeps import Sweep, with_measured
from skyctl.planner.api import verify
from skyctl.planner.playing import play_of
from skyctl.probe.heat import Cell, Grid, colour, grid, ink, latency_words, rate_words
from skyctl.probe.show import condition_notes
from skyctl.records.cluster import Cluster
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.records.profile import DeviceProfile, Profile

CHECKED = 200_000
"""Layers × devices × microbatches up to which a plan is verified while its report is written."""
PLAYED = 200_000
"""Actions of a step up to which it is drawn."""
CONTRAST = 8.0
"""The colours span at least this factor: links that hardly differ look alike."""


def gather(
    outcomes: Sequence[Outcome],
    profile: Profile | None,
    *,
    cluster: Cluster,
    workload: str,
    again: Again,
    sweeps: Sequence[Sweep] = (),
    created: datetime | None = None,
) -> Report:
    """Everything the report shows, with names that say nothing of who made it.

    Args:
        workload: as typed; of a path the last part is kept.
    """
    compared = rows(outcomes)
    hide = Hiding(cluster)
    shown = [row.model_copy(update={"error": hide(row.error)}) if row.error else row for row in compared]
    problem = next((o.plan.problem for o in outcomes if o.plan is not None), None)
    return Report(
        cluster=cluster.name,
        workload=public_workload(workload),
        created=(created or datetime.now(UTC)).strftime("%-d %B %Y, %H:%M UTC"),
        rows=shown,
        outcomes=outcomes,
        about=_about(outcomes),
        machines=_machines(problem, profile, outcomes) if problem is not None else (),
        links=_links(profile, cluster) if profile is not None else None,
        steps={o.strategy: _steps(o) for o in outcomes if o.plan is not None},
        checked=_checked(outcomes),
        sweeps=[with_measured(sweep, compared) for sweep in sweeps],
        again=again,
        notes=_notes(profile) if profile is not None else (),
    )


class Hiding:
    """Takes out of a text who the user is and where their files lie: home folders, logins, keys."""

    def __init__(self, cluster: Cluster) -> None:
        private = {str(Path.home())}
        for node in cluster.nodes:
            private |= {text for text in (node.identity_file, node.host) if text and text != node.name}
        self._private = sorted((text for text in private if len(text) > 1), key=len, reverse=True)
        self._users = {node.user for node in cluster.nodes if node.user}

    def __call__(self, text: str | None) -> str | None:
        """The text without them."""
        if text is None:
            return None
        for one in self._private:
            text = text.replace(one, "~" if one.startswith("/") else "…")
        for user in self._users:
            text = re.sub(rf"\b{re.escape(user)}@", "", text)
        return re.sub(r"(?<![\w~.])/(?:home|root|Users)(?:/[^\s:,;'\"]*)?", "~", text)


def public_workload(text: str) -> str:
    """``gpt:…`` as it is; of a file or a folder its name alone."""
    kind, colon, rest = text.partition(":")
    if colon and kind in ("gpt", "bert"):
        return text
    if colon and kind == "hf":
        path, comma, options = rest.partition(",")
        return f"hf:{Path(path).name or path}{comma}{options}"
    return Path(text).name or text


def _about(outcomes: Sequence[Outcome]) -> list[str]:
    plan = next((o.plan for o in outcomes if o.plan is not None), None)
    if plan is None:
        return []
    said = []
    if plan.workload is not None:
        said.append(f"batch {plan.workload.batch_size} in {plan.problem.microbatches} microbatches")
        said.append(plan.workload.dtype)
    else:
        said.append(f"{plan.problem.microbatches} microbatches")
    said.append(f"schedule {plan.problem.schedule}")
    steps = max((len(o.measurement.steps) for o in outcomes if o.measurement is not None), default=0)
    return [*said, f"{steps} training steps"] if steps else said


def _machines(problem: Problem, profile: Profile | None, outcomes: Sequence[Outcome]) -> list[Machine]:
    known = {device.id: device for device in profile.devices} if profile is not None else {}
    plan = next(o.plan for o in outcomes if o.plan is not None)
    batch = plan.workload.batch_size if plan.workload is not None else problem.microbatches
    named = labels_of(problem)
    size = batch // problem.microbatches
    out = []
    for device in problem.devices:
        times = problem.times.get(device.id)
        step_s = problem.microbatches * problem.alone_s(device)
        step_s += sum(times.optimizer_s) if times is not None else 0.0
        measured = known.get(device.id)
        out.append(
            Machine(
                device=device.id,
                label=named[device.id],
                what=_what(measured) if measured is not None else "",
                samples_per_s=batch / step_s if step_s > 0 else None,
                spread=_spread(measured, size) if measured is not None else None,
                memory_bytes=device.memory_bytes,
            )
        )
    return out


def _what(device: DeviceProfile) -> str:
    parts = [device.name]
    if device.threads is not None:
        parts.append(f"{device.threads} thread{'' if device.threads == 1 else 's'}")
    if device.slowdown != 1.0:
        parts.append(f"slowed {device.slowdown:g}× (emulated)")
    return ", ".join(parts)


def _notes(profile: Profile) -> list[str]:
    """What to know of the figures, the nodes that it holds for first."""
    by_note: dict[str, list[str]] = {}
    for name, note in condition_notes(profile):
        by_note.setdefault(note, []).append(name)
    return [f"{', '.join(names)}: {note}" for note, names in by_note.items()]


def _spread(device: DeviceProfile, size: int) -> float | None:
    seen = [t.spread for t in device.timings if t.spread is not None and t.microbatch_size == size]
    return median(seen) if seen else None


def _links(profile: Profile, cluster: Cluster) -> LinkMap:
    names = {node.name for node in cluster.nodes}
    found = grid(profile)
    if not found.by_site and not set(found.names) <= names:
        kept = [i for i, name in enumerate(found.names) if name in names]
        cells = tuple(tuple(found.cells[i][j] for j in kept) for i in kept)
        found = Grid(tuple(found.names[i] for i in kept), cells, by_site=False)
    low, high = found.span()
    if high < CONTRAST * low:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(CONTRAST), middle * math.sqrt(CONTRAST)
    drawn = []
    for sender, row in zip(found.names, found.cells, strict=True):
        ends = zip(found.names, row, strict=True)
        drawn.append(tuple(_link(f"{sender} → {target}", cell, low, high) for target, cell in ends))
    key = "Mbit/s (G: Gbit/s), below it milliseconds one way, measured over the path that training uses."
    key += " Yellow is fast, violet is slow."
    if any(cell is not None and cell.estimated for row in found.cells for cell in row):
        key += " ~ is filled in from other links."
    return LinkMap(found.names, tuple(drawn), key, found.by_site)


def _link(way: str, cell: Cell | None, low: float, high: float) -> LinkCell | None:
    if cell is None:
        return None
    if cell.mbit is None or cell.latency_ms is None:
        return LinkCell(("✗",), f"{way}: no connection")
    shade = colour(cell.mbit, low, high)
    rate, latency = rate_words(cell.mbit), latency_words(cell.latency_ms)
    words = (("~" if cell.estimated else "") + rate, f"{latency} ms")
    return LinkCell(words, f"{way}: {rate} Mbit/s, {latency} ms one way", shade, ink(shade))


def _steps(outcome: Outcome) -> Steps:
    """The plan played once more, and what was traced of its run."""
    plan = outcome.plan
    assert plan is not None
    if len(plan.stages) * plan.problem.microbatches * 2 > PLAYED:
        return Steps()
    devices = [stage.replicas[0].device for stage in plan.stages]
    simulated = timeline.simulated(play_of(plan), devices)
    trace = outcome.measurement.trace if outcome.measurement is not None else None
    return Steps(simulated, _traced(trace, devices) if trace is not None else None)


def _traced(path: str, devices: Sequence[str]) -> timeline.Timeline | None:
    """A trace that can't be read, or is another plan's, is no reason to have no report."""
    try:
        found = chrome.read(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if list(found.devices) == list(devices) and found.steps else None


def _checked(outcomes: Sequence[Outcome]) -> dict[str, Checked]:
    """What ``skyctl verify`` says of the plans with a certificate, where that takes no long time."""
    out = {}
    for outcome in outcomes:
        plan = outcome.plan
        if plan is None or plan.certificate.lower_bound_s is None or not _small(plan):
            continue
        began = time.perf_counter()
        verdict = verify(plan.problem, plan)
        items = tuple((one.name, one.ok if one.checked else None, one.detail) for one in verdict.checks)
        out[outcome.strategy] = Checked(verdict.ok, items, time.perf_counter() - began)
    return out


def _small(plan: Plan) -> bool:
    problem = plan.problem
    return len(problem.layers) * len(problem.devices) * problem.microbatches <= CHECKED


def versions(profile: Profile | None) -> list[tuple[str, str]]:
    """Which versions measured and ran it: (what, version)."""
    out = [("skyctl", __version__)]
    if profile is not None:
        torches = sorted({node.torch for node in profile.nodes})
        pythons = sorted({node.python for node in profile.nodes})
        out += [("torch on the nodes", ", ".join(torches)), ("Python on the nodes", ", ".join(pythons))]
        out.append(("profile measured", profile.created))
    return out


def plot_links(links: LinkMap, path: str | Path) -> Path:
    """The report's map of links as a PNG.

    Raises:
        SkyctlError: matplotlib is missing, or the file can't be written.
    """
    itself = Square(None, "black", ("·",))
    squares = [
        [itself if cell is None else Square(cell.shade, cell.ink, cell.words) for cell in row]
        for row in links.cells
    ]
    title = "Links by site" if links.by_site else "Links"
    return plot_heat(links.names, squares, f"{title}: rows send, columns receive", links.key, path)
