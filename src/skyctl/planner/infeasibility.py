"""Why no plan fits, in words: the layer that fits nowhere, the total shortage, or what would be enough."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence

from skyctl.errors import InfeasibleError
from skyctl.planner.bottleneck import device_subsets
from skyctl.planner.cost_model import CostModel, Placement
from skyctl.planner.evaluation import StageExecution
from skyctl.planner.stage_memory import fits_device, human_bytes
from skyctl.records.problem import Schedule

PRECISION = 1e-4
EXACT_DEVICES = 10
FEW_STATES = 1 << 11
FRUGAL: tuple[Schedule, ...] = ("1f1b", "sequential")
"""Schedules that keep fewer microbatches in flight than others, the faster one first."""
MOST_NAMED = 3
"""Devices that a message names, at most."""
SECONDS = 1.0
"""Time to find what would be enough; when it is over, fewer devices are looked at."""


def raise_infeasible(model: CostModel, *, proved: bool) -> None:
    """Raises InfeasibleError with the plainest reason that holds.

    Args:
        proved: by the caller; without it this raises only where one of its own reasons is a proof.
    """
    _no_first_or_last(model)
    _layer_that_fits_nowhere(model)
    _one_for_all(model)
    _total_shortage(model)
    if proved:
        hints = [hint for hint in (_other_schedule(model), _enough(model)) if hint]
        raise InfeasibleError(
            "no order of the devices and no cut fits in their memory" + _pin_words(model),
            hint="; or ".join(hints) or None,
        )


def _pin_words(model: CostModel) -> str:
    pinned = len(model.may_be_first) < model.devices or len(model.may_be_last) < model.devices
    return " with the devices that may be first and last" if pinned else ""


def _names(model: CostModel, devices: frozenset[int]) -> str:
    return ", ".join(model.ids[d] for d in sorted(devices))


def _no_first_or_last(model: CostModel) -> None:
    for names, where in ((model.may_be_first, "first"), (model.may_be_last, "last")):
        if not names:
            raise InfeasibleError(f"no device is allowed to hold the {where} stage ({where}_stage is empty)")
    if model.max_stages == 1 and not model.may_be_first & model.may_be_last:
        only = "one layer makes" if model.layers == 1 else "one device holds"
        raise InfeasibleError(
            f"{only} one stage, first and last at once, and no device may be both: "
            f"first may be {_names(model, model.may_be_first)}; "
            f"last may be {_names(model, model.may_be_last)}"
        )


def _alone_bytes(model: CostModel, layer: int) -> float:
    """The fewest bytes that a stage with that layer needs on any device."""
    need = (
        model.state_bytes[layer + 1]
        - model.state_bytes[layer]
        + model.activation_bytes[layer + 1]
        - model.activation_bytes[layer]
    )
    return need + model.problem.layers[layer].workspace_bytes


def _layer_that_fits_nowhere(model: CostModel) -> None:
    for i, layer in enumerate(model.problem.layers):
        allowed, words = frozenset(range(model.devices)), "no device"
        for at, pinned, where in (
            (0, model.may_be_first, "first"),
            (model.layers - 1, model.may_be_last, "last"),
        ):
            if i == at and not allowed <= pinned:
                allowed, words = allowed & pinned, f"no device that may be {where}"
        need = _alone_bytes(model, i)
        roomiest = max(sorted(allowed), key=lambda d: model.available_bytes[d])
        most = model.available_bytes[roomiest]
        if need > most:
            raise InfeasibleError(
                f"layer {layer.name!r} fits on {words}: alone it needs {human_bytes(need)}; "
                f"the most any has is {human_bytes(max(0.0, most))} ({model.ids[roomiest]})",
                hint="smaller microbatches, or a device with more memory",
            )


def _one_for_all(model: CostModel) -> None:
    """Raises where one device must be both first and last, so hold every layer, and can't."""
    if model.may_be_first != model.may_be_last or len(model.may_be_first) != 1:
        return
    (only,) = model.may_be_first
    need = model.need_bytes(0, model.layers, model.least_in_flight(0, 1))
    if need > model.available_bytes[only]:
        raise InfeasibleError(
            f"only {model.ids[only]} may hold the first stage and only it the last, and a device holds one "
            f"stage: it must hold every layer, which needs {human_bytes(need)}; it has "
            f"{human_bytes(max(0.0, model.available_bytes[only]))}",
            hint="; or ".join(
                hint for hint in (_other_schedule(model), "allow another device to be first or last") if hint
            ),
        )


def _total_shortage(model: CostModel) -> None:
    need = model.state_bytes[-1] + model.activation_bytes[-1]
    roomiest = heapq.nlargest(model.max_stages, (max(0.0, x) for x in model.available_bytes))
    have = math.fsum(roomiest)
    if need > have:
        few = f"the {model.max_stages} roomiest" if model.max_stages < model.devices else "all"
        raise InfeasibleError(
            f"the model needs at least {human_bytes(need)}, {few} devices together have {human_bytes(have)}: "
            f"{human_bytes(need - have)} short ({_room_words(model)})",
            hint="; or ".join(filter(None, (_enough(model), "smaller microbatches, or more devices"))),
        )


def _room_words(model: CostModel) -> str:
    """The memory that the roomiest devices have for layers, of all that they have, in words."""
    named = heapq.nsmallest(MOST_NAMED, range(model.devices), key=lambda d: (-model.available_bytes[d], d))
    words = []
    for d in named:
        device, room = model.problem.devices[d], max(0.0, model.available_bytes[d])
        whole = f" of its {human_bytes(device.memory_bytes)}" if device.memory_bytes is not None else ""
        words.append(f"{device.id} has {human_bytes(room)}{whole} for layers")
    if model.devices > MOST_NAMED:
        words.append(f"{model.devices - MOST_NAMED} others have no more")
    return ", ".join(words)


def _other_schedule(model: CostModel) -> str | None:
    """A hint: a schedule that keeps less in flight and fits, where one is found."""
    for schedule in FRUGAL:
        if schedule == model.schedule or (schedule == "1f1b" and model.chooses_depth):
            continue
        changed = CostModel(model.problem.model_copy(update={"schedule": schedule}))
        if _all_subsets(changed):
            fits = device_subsets.placement_within(changed, math.inf) is not None
        else:
            fits = _any_order_fits(changed)
        if fits:
            return f"--schedule {schedule} fits"
    return None


def _all_subsets(model: CostModel) -> bool:
    """Whether all subsets of devices can be looked at quickly."""
    return device_subsets.subsets_are_few(model) and (
        model.devices <= EXACT_DEVICES or device_subsets.DeviceGroups(model).states <= FEW_STATES
    )


def _enough(model: CostModel) -> str | None:
    """A hint: memory that, added to one device, makes a plan fit.

    The least where all subsets of devices can be looked at, else some amount that a plan was found for.
    """
    groups = device_subsets.DeviceGroups(model)
    exact = _all_subsets(model)

    def fits(device: int, more_bytes: float) -> bool:
        changed = _with_more(model, device, more_bytes)
        return (
            device_subsets.placement_within(changed, math.inf) is not None
            if exact
            else _any_order_fits(changed)
        )

    # Devices that are alike get the same answer: one of each is tried, the roomiest first.
    kinds = [members[0] for members in groups.members if model.available_bytes[members[0]] < math.inf]
    best = _least_added(model, sorted(kinds, key=lambda d: (-model.available_bytes[d], d)), fits)
    if best is None:
        return None
    words = "would be enough" if exact else "would be enough (less may do)"
    return f"{_rounded_up(best[0])} more on {model.ids[best[1]]} {words}"


def _with_more(model: CostModel, device: int, more_bytes: float) -> CostModel:
    devices = list(model.problem.devices)
    has = devices[device].memory_bytes
    assert has is not None
    devices[device] = devices[device].model_copy(update={"memory_bytes": has + more_bytes})
    return CostModel(model.problem.model_copy(update={"devices": tuple(devices)}))


def _least_added(
    model: CostModel, devices: Sequence[int], fits: Callable[[int, float], bool]
) -> tuple[float, int] | None:
    """(bytes, device) by bisection, each device in turn while there is time."""
    best: tuple[float, int] | None = None
    top = (
        model.need_bytes(0, model.layers, model.microbatches) + sum(model.output_bytes) * model.receive_window
    )
    deadline = time.perf_counter() + SECONDS
    for d in devices:
        if time.perf_counter() > deadline:
            break
        low, high = 0.0, top + max(0.0, -model.available_bytes[d])
        if best is not None:
            high = best[0] * (1 - PRECISION)
        if not fits(d, high):
            continue
        while high - low > PRECISION * high and time.perf_counter() < deadline:
            middle = (low + high) / 2
            if fits(d, middle):
                high = middle
            else:
                low = middle
        best = (high, d)
    return best


def _rounded_up(count_bytes: float) -> str:
    """Bytes in words, rounded up."""
    unit = next((u for u in (2**40, 2**30, 2**20, 2**10) if count_bytes >= u), 1)
    digits = 0 if unit == 1 else max(0, 2 - math.floor(math.log10(count_bytes / unit)))
    scale = 10.0**digits
    return human_bytes(math.ceil(count_bytes / unit * scale) / scale * unit)


def _any_order_fits(model: CostModel) -> bool:
    """Whether some good order of devices, filled one after the other, holds all layers; no is no proof."""
    return any(_fill(model, order) for order in _orders(model))


def _orders(model: CostModel) -> Iterator[list[int]]:
    """Orders to try: most memory first, last, and as given; the largest devices where there are too many."""
    roomy = sorted(range(model.devices), key=lambda d: (-min(model.available_bytes[d], 1e300), d))
    for count in range(model.max_stages, 0, -1):
        if count < model.max_stages and count not in (model.max_stages * 3 // 4, model.max_stages // 2, 1):
            continue
        some = roomy[:count]
        for order in (some, some[::-1], sorted(some)):
            placed = _placed(model, order)
            if placed is not None:
                yield placed


def _placed(model: CostModel, order: Sequence[int]) -> list[int] | None:
    """The order with allowed devices moved to its start and end; None: there are none."""
    if len(order) == 1:
        return list(order) if order[0] in model.may_be_first & model.may_be_last else None
    for first in (d for d in order if d in model.may_be_first):
        for last in (d for d in reversed(order) if d in model.may_be_last and d != first):
            return [first, *(d for d in order if d not in (first, last)), last]
    return None


def _fill(model: CostModel, order: Sequence[int]) -> bool:
    """Whether the order holds all layers, each device taking as many as fit, one left for each later one."""
    start, count = 0, len(order)
    for s, d in enumerate(order):
        most = model.layers - (count - s - 1)
        in_flight = model.least_in_flight(s, count)
        low, high = start, most + 1  # low fits (nothing), high does not
        while high - low > 1:
            middle = (low + high) // 2
            if model.fits(d, start, middle, in_flight):
                low = middle
            else:
                high = middle
        if low <= start:
            return False
        start = low
    return start == model.layers


def require_allowed(model: CostModel, placement: Placement, execution: StageExecution, what: str) -> None:
    """Raises InfeasibleError naming the device that is too small, or where it may not be.

    ``what``: how the message calls the placement.
    """
    problem = model.problem
    for stage, k, deferred, recompute in zip(placement, *execution, strict=True):
        device = problem.devices[stage.device]
        need = model.device_bytes(stage, k, deferred, recompute=recompute)
        if not fits_device(need, device):
            assert device.memory_bytes is not None
            raise InfeasibleError(
                f"{what} gives {device.id} layers [{stage.start}, {stage.stop}), which need "
                f"{human_bytes(need)}; "
                f"it has {human_bytes(device.memory_bytes)}",
                hint="another strategy may fit: heuristic or optimal",
            )
    for names, d, where in (
        (problem.first_stage, placement[0].device, "first"),
        (problem.last_stage, placement[-1].device, "last"),
    ):
        if names is not None and model.ids[d] not in names:
            allowed = ", ".join(names) if names else "none"
            raise InfeasibleError(
                f"{what} puts {model.ids[d]} at the {where} stage; allowed there: {allowed}",
                hint="another strategy may fit: heuristic or optimal",
            )
