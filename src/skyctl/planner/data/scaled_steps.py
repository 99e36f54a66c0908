"""A plan's step with other times of its devices and links, for the interval of its prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from skyctl.planner.data.data_placement import processor_byte_s
from skyctl.planner.data.data_plan import read_data_placement
from skyctl.planner.data.holder_costs import DataModel
from skyctl.planner.data.route_layouts import busiest_byte_s
from skyctl.records.plan import Plan
from skyctl.records.problem import Device, Link


class TimeFactors(NamedTuple):
    """By draw, what times are multiplied by.

    Attributes:
        layers: of a device's layers, its optimizer, and its processor's work on gradients.
        overhead: of what a device does beside its layers.
        link: of a link's seconds; None: no link is given.
    """

    layers: Callable[[Device], Sequence[float]]
    overhead: Callable[[Device], Sequence[float]]
    link: Callable[[Link | None], Sequence[float]]


def scaled_steps_s(plan: Plan, factors: TimeFactors, draws: int) -> Iterator[float]:
    """The plan's step in seconds, draw by draw; its shares and routes stay as they are.

    Raises:
        InputError: see ``api.predict``.
    """
    model = DataModel(plan.problem)
    placed = read_data_placement(model, plan)
    group = placed.group
    links = {(link.source, link.target): link for link in plan.problem.links}
    of_link = {(a, b): factors.link(links.get((model.ids[a], model.ids[b]))) for a, b in group.use.links}
    devices = [plan.problem.devices[d] for d in group.holders]
    own = [factors.layers(device) for device in devices]
    more = [factors.overhead(device) for device in devices]
    processor_s = [processor_byte_s(model, group.use, d) * model.total_bytes for d in group.holders]
    helping = [
        (processor_byte_s(model, group.use, d), factors.layers(plan.problem.devices[d]))
        for d in group.helpers
    ]
    columns = list(zip(group.costs, placed.shares, processor_s, group.extra_s, own, more, strict=True))
    for draw in range(draws):
        drawn = {pair: values[draw] for pair, values in of_link.items()}
        byte_s = max(
            busiest_byte_s(group.use, model.byte_s, model.shared, drawn.__getitem__),
            *(seconds * factor[draw] for seconds, factor in helping),
            0.0,
        )
        ends, optimizers = [], []
        delayed_ends = []
        for cost, share, busy_s, extra_s, layers, overhead in columns:
            factor = layers[draw]
            each_s = factor * cost.layers_s + overhead[draw] * (cost.microbatch_s - cost.layers_s)
            # backward that takes ``factor`` times as long hides gradients as if they were as much smaller
            exposed_s = factor * cost.exposure.at(byte_s / factor)
            ends.append(share * each_s + max(exposed_s, factor * busy_s))
            optimizers.append(factor * cost.optimizer_s)
            delayed_ends.append(share * each_s + factor * extra_s)
        if group.delayed:
            summed_s = byte_s * model.total_bytes + group.fill_s + group.use.latency_s
            yield max(*delayed_ends, summed_s)
            continue
        yield max(ends) + group.fill_s + group.use.latency_s + max(optimizers)
