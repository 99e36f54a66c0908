"""How a plan's pipelines sum their gradients: in a sentence, and beside the other ways to do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from skyctl.compare.number_format import UNKNOWN, format_estimate, format_seconds
from skyctl.compare.outcome import StrategyOutcome, device_labels, summarize_outcomes
from skyctl.compare.rhythm_summary import describe_rounds, describe_stale
from skyctl.planner.api import predict
from skyctl.planner.data.replica_costs import ReplicaCosts
from skyctl.planner.plan_record import read_candidate
from skyctl.planner.routes.route_layouts import busiest_byte_s, device_routes, use_of
from skyctl.planner.routes.route_names import RoutesKind, RoutesName, name_routes
from skyctl.planner.stage_memory import human_bytes
from skyctl.records.base import Count, Record, Seconds
from skyctl.records.interval import Interval
from skyctl.records.plan import Plan
from skyctl.records.rhythm import Rhythm
from skyctl.records.sync import Sync
from skyctl.records.sync_format import ROUNDED_FORMATS, powersgd_rank

NOTABLY_LONGER = 1.05
"""A ring that takes less than that many times as long is not worth a word."""
MAX_NAMES = 8
"""Devices of a ring, or roots, that are named at most."""
MAX_GROUPS = 4
"""Groups of layers whose routes are named, at most."""
SyncChoice = Literal["ring", "star", "trees", "server"]
SYNC_CHOICES: tuple[SyncChoice, ...] = ("ring", "star", "trees")
"""Those that every comparison has; ``server``, a star at a helper, where its own plan is one."""
_CHOICE_OF: dict[RoutesKind, SyncChoice] = {"ring": "ring", "star": "star"}
"""The choice that asks for routes of that kind; ``trees`` for all others."""


class SyncRates(NamedTuple):
    """Of a plan's routes, seconds a byte of gradient.

    Attributes:
        byte_s: over these routes.
        least_byte_s: what no routes among the holders can be under (proved); None: nothing is known.
        ring_byte_s: over the fastest ring one way.
        total_bytes: of gradients a step, as they are sent.
    """

    byte_s: float
    least_byte_s: float | None
    ring_byte_s: float
    total_bytes: float


def sync_rates(plan: Plan) -> SyncRates:
    """How fast a plan's gradients are summed; the plan must have several pipelines."""
    model = ReplicaCosts(plan.problem)
    (group,) = read_candidate(model, plan).sums
    devices = {stage.device for stage in plan.placed_stages}
    witness = plan.certificate.witness
    least = [
        prices.byte_s
        for prices in (witness.route_prices if witness is not None else ())
        if set(prices.devices) == devices and prices.byte_s > 0
    ]
    ring_s = model.layouts.best_ring_byte_s(group.replicas)
    return SyncRates(group.routed.byte_s, least[0] if least else None, ring_s, model.total_bytes)


def describe_sync(plan: Plan) -> str:
    """Over which routes gradients are summed, how fast that is, and how fast any routes can be.

    An empty text where nothing is summed.
    """
    if plan.sync is None:
        return ""
    if plan.problem.rhythm.is_rounds:
        return "; ".join(describe_rounds(plan))
    if plan.predicted.stale is not None:
        return describe_stale(plan, plan.predicted.stale)
    if plan.problem.parallel == "hybrid":
        return _describe_groups(plan, plan.sync)
    rates = sync_rates(plan)
    routes = plan.sync.groups[0].routes
    name = name_routes(routes)
    labels = device_labels(plan.problem)
    text = f"sync: {_name_words(name, len(routes), labels)}"
    if name.devices == plan.helpers:
        text += ", a helper"
    elif plan.helpers:
        text += f" helped by {', '.join(labels[device] for device in plan.helpers)}"
    if rates.byte_s > 0:
        most = "" if rates.least_byte_s is None else f" of at most {_mbit(rates.least_byte_s)}"
        proved = "" if rates.least_byte_s is None else " (proved)"
        text += f", {_mbit(rates.byte_s)}{most} Mbit/s{proved}"
    if name.kind != "ring" and rates.byte_s > 0 and rates.ring_byte_s >= rates.byte_s * NOTABLY_LONGER:
        text += f"; a one-way ring would take {rates.ring_byte_s / rates.byte_s:.2g} times as long"
    took = format_seconds(rates.byte_s * rates.total_bytes)
    seen = format_seconds(plan.predicted.sync_s)
    what = f"{human_bytes(rates.total_bytes)} of gradients as {plan.sync.format}{_rounds(plan.sync)}"
    if plan.problem.rhythm.delay:
        return f"{text}; {what} take {took} {_delayed_sum_text(plan)}"
    return f"{text}; {what} take {took}, and are summed {seen} after the last backward"


def _describe_groups(plan: Plan, sync: Sync) -> str:
    """The same of several pipelines: by group of layers, which are summed as soon as each is released."""
    model = ReplicaCosts(plan.problem)
    index = {name: number for number, name in enumerate(model.ids)}
    labels = device_labels(plan.problem)
    words = []
    for group in sync.groups[:MAX_GROUPS]:
        use = use_of(device_routes(group.routes, index), model.latency_s)
        byte_s = busiest_byte_s(use, model.byte_s, model.shared)
        rate = f", {_mbit(byte_s)} Mbit/s" if byte_s > 0 else ""
        size = human_bytes(sum(model.layer_bytes[group.start : group.stop]))
        name = _name_words(name_routes(group.routes), len(group.routes), labels)
        words.append(f"layers {group.start}:{group.stop} ({size}) {name}{rate}")
    more = f"; and {len(sync.groups) - MAX_GROUPS} more" if len(sync.groups) > MAX_GROUPS else ""
    count = "one group" if len(sync.groups) == 1 else f"{len(sync.groups)} groups"
    seen = format_seconds(plan.predicted.sync_s)
    when = _delayed_sum_text(plan) if plan.problem.rhythm.delay else f"{seen} after the last backward"
    return (
        f"sync: {count} of layers: {'; '.join(words)}{more}; {human_bytes(model.total_bytes)} of gradients "
        f"as {sync.format}{_rounds(sync)} are summed {when}"
    )


def _delayed_sum_text(plan: Plan) -> str:
    """When gradients are summed that are applied a step later."""
    waited = format_seconds(plan.predicted.sync_s)
    plain = plan.problem.model_copy(update={"rhythm": Rhythm()})
    step = format_seconds(predict(plain, plan).iteration_s)
    return (
        f"beside the next step, which waits {waited} for them (a delay of one step: changes training; "
        f"without it a step of this plan would take {step})"
    )


def _rounds(sync: Sync) -> str:
    if powersgd_rank(sync.format) is not None:
        first = f"; the first {sync.uncompressed_steps} steps in float32" if sync.uncompressed_steps else ""
        return f" (compressed with error feedback: changes training{first})"
    return " (rounded on each hop: changes training)" if sync.format in ROUNDED_FORMATS else ""


def _mbit(byte_s: float) -> str:
    return f"{8e-6 / byte_s:.3g}" if byte_s > 8e-9 else f"{8e-6 / byte_s:.0f}"


def _name_words(name: RoutesName, routes: int, labels: dict[str, str]) -> str:
    """A ring in its order, a star at its root, or how many routes."""
    devices = [labels[device] for device in name.devices]
    if name.kind in ("ring", "two-way ring"):
        ways = " both ways" if name.kind == "two-way ring" else ""
        if len(devices) > MAX_NAMES:
            return f"a ring{ways} of {len(devices)}, in the order of the devices"
        return f"a ring{ways}, {' → '.join([*devices, devices[0]])}"
    if name.kind == "star":
        return f"a star at {devices[0]}"
    if name.kind == "stars":
        more = f" and {len(devices) - MAX_NAMES} more" if len(devices) > MAX_NAMES else ""
        return f"{routes} stars, at {', '.join(devices[:MAX_NAMES])}{more}"
    return f"a tree to {devices[0]}" if name.kind == "tree" else f"{routes} routes"


class SyncRow(Record):
    """The best plan whose gradients are summed one way, in figures.

    Attributes:
        sync: the way that was asked for.
        kind: what its routes are; None: one device trains alone, or there is no plan.
        routes: how many there are.
        layers: who takes how many microbatches.
        byte_s: seconds that a byte of gradient takes on the busiest link, or on what several share.
        predicted_sync_s: of the step, what summing takes after the last backward.
        chosen: the comparison's own plan is this one, and so was measured if any was.
        error: why there is no plan.
    """

    sync: SyncChoice
    kind: RoutesKind | None = None
    routes: Count | None = None
    layers: str = ""
    byte_s: Seconds | None = None
    predicted_s: Seconds | None = None
    predicted_interval: Interval | None = None
    predicted_sync_s: Seconds | None = None
    measured_s: Seconds | None = None
    measured_sync_s: Seconds | None = None
    chosen: bool = False
    error: str | None = None


def sync_choice(plan: Plan) -> SyncChoice | None:
    """Which way a plan sums its gradients; None where it sums none."""
    if plan.sync is None:
        return None
    routes = plan.sync.groups[0].routes
    if plan.helpers and len(routes) == 1 and name_routes(routes).kind == "star":
        return "server"
    if len(plan.pipelines) == len(routes) == 2 and len({route.root for route in routes}) == 2:
        return "ring"  # of two, whose routes are stars as well
    return _CHOICE_OF.get(name_routes(routes).kind, "trees")


def sync_rows(by_sync: dict[SyncChoice, StrategyOutcome], chosen: SyncChoice) -> list[SyncRow]:
    """A row for each way; ``chosen``: that of the comparison's own plan."""
    rows = []
    for (sync, outcome), row in zip(by_sync.items(), summarize_outcomes(list(by_sync.values())), strict=True):
        plan = outcome.plan
        routes = plan.sync.groups[0].routes if plan is not None and plan.sync is not None else ()
        rows.append(
            SyncRow(
                sync=sync,
                kind=name_routes(routes).kind if routes else None,
                routes=len(routes) or None,
                layers=row.layers,
                byte_s=sync_rates(plan).byte_s if plan is not None and routes else None,
                predicted_s=row.predicted_s,
                predicted_interval=row.predicted_interval,
                predicted_sync_s=row.predicted_sync_s,
                measured_s=row.measured_s,
                measured_sync_s=row.measured_sync_s,
                chosen=sync == chosen,
                error=outcome.error,
            )
        )
    return rows


def sync_table(rows: Sequence[SyncRow]) -> tuple[list[str], list[list[str]]]:
    """(headings, cells) of these rows; ``*`` marks the comparison's own."""
    measured = any(row.measured_s is not None for row in rows)
    heads = ["sync", "predicted", "after the last backward", "Mbit/s"]
    heads += ["measured", "after the last backward"] if measured else []
    lines = []
    for row in rows:
        rate = UNKNOWN if not row.byte_s else _mbit(row.byte_s)
        line = [
            row.sync + ("*" if row.chosen else ""),
            format_estimate(row.predicted_s, row.predicted_interval),
            format_seconds(row.predicted_sync_s),
            rate,
        ]
        line += [format_seconds(row.measured_s), format_seconds(row.measured_sync_s)] if measured else []
        lines.append([*line, _routes_text(row)])
    return [*heads, "routes"], lines


def _routes_text(row: SyncRow) -> str:
    """The text on the routes that were found where that way was asked for."""
    if row.error is not None:
        return row.error
    if row.kind is None or row.routes is None:
        return "none: one device alone is as fast"
    if row.sync != "trees":
        return f"{row.routes}" if row.routes > 1 else "one"
    trees = row.kind in ("tree", "trees", "stars", "two-way ring")
    return f"{row.routes}" if trees else f"{row.kind}: trees are no faster"
