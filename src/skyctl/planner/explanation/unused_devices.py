"""Why a device stays unused: what is known, and the cost of the cheapest way found to add it to the plan.

That cost is an upper bound: another plan with the device may cost less. So a reason says what was found, and
"proved" only where the plan is. Tried are the places before and after each stage, with 1, 2, 4, … layers of
that stage: for ``bottleneck`` all of them, as arrays; for ``iteration``, and where stages may recompute, the
most promising ones one by one, as many as ``ACTIONS`` allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from skyctl.planner.cost_model import CostModel, Placement, StageAssignment
from skyctl.planner.pipeline_depth import choose_execution
from skyctl.planner.stage_memory import human_bytes
from skyctl.records.plan import Certificate, Strategy

ACTIONS = 200_000
"""Forwards and backwards simulated for all reasons together, about 0.1 s."""
MOST_SIMULATIONS = 200
TABLES = 2_000_000
"""Stages × layers from which on nothing is simulated: the prefix sums as lists would fill the memory."""
NOTABLE = 0.0005
SAID: Mapping[Strategy, str] = {"alone": "one device trains alone", "assigned": "not assigned"}
"""The strategies that alone say why a device is unused."""
PROVED_AMONG_WHOLE_BLOCKS = "proved: the best plan of whole blocks does without it"

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def explain_unused(
    model: CostModel,
    strategy: Strategy,
    placement: Placement,
    proof: Certificate,
    *,
    whole_blocks: bool = False,
) -> dict[int, str]:
    """By device that holds no stage, why.

    ``whole_blocks``: the problem's layers are whole transformer blocks, and what is proved holds among such
    plans only.
    """
    used = {stage.device for stage in placement}
    idle = [d for d in range(model.devices) if d not in used]
    if not idle:
        return {}
    if model.layers <= len(placement):
        return dict.fromkeys(idle, "only 1 layer" if model.layers == 1 else f"only {model.layers} layers")
    if strategy in SAID:
        return dict.fromkeys(idle, SAID[strategy])
    claim = known_without(proof, "no faster plan with it was found")
    if proof.status == "optimal" and whole_blocks:
        claim = PROVED_AMONG_WHOLE_BLOCKS
    least = min(x.state_bytes + x.activation_bytes + x.workspace_bytes for x in model.problem.layers)
    reasons = {d: _kept_out(model, d, least) for d in idle}
    alike: dict[object, list[int]] = {}
    for d in idle:
        if reasons[d] is None:
            alike.setdefault(_alike_key(model, d), []).append(d)
    places = _InsertionPlaces(model, placement)
    simulations = ACTIONS // (2 * model.microbatches * (len(placement) + 1))
    if not _needs_simulation(model) or len(placement) * model.layers > TABLES:
        simulations = 0
    for number, group in enumerate(alike.values()):
        share = min(MOST_SIMULATIONS, max(simulations // (len(alike) - number), min(simulations, 1)))
        cost, played = places.cheapest(group[0], share)
        simulations -= played
        possible = places.possible(group[0])
        reasons.update(dict.fromkeys(group, _reason(model, proof, claim, possible, cost)))
    return {d: reasons[d] or "" for d in idle}


def known_without(proof: Certificate, otherwise: str = "no faster plan was found") -> str:
    """Whether any plan with an unused device may be better, in words."""
    return "the plan is proved best without it" if proof.status == "optimal" else otherwise


def _needs_simulation(model: CostModel) -> bool:
    """Whether a plan's objective is more than its stages' largest sum of times."""
    return model.by_iteration or model.may_recompute


def _alike_key(model: CostModel, device: int) -> object:
    """A key that is the same for devices which a reason can't tell apart."""
    kind = (
        model.timing_class[device],
        model.available_bytes[device],
        device in model.may_be_first,
        device in model.may_be_last,
    )
    linked = model.by_iteration and (model.problem.links or model.problem.shared)
    return (*kind, device) if linked else kind


def _kept_out(model: CostModel, device: int, least_alone: float) -> str | None:
    """A fact that keeps the device out of every plan: pins, or memory too small for any one layer.

    ``least_alone``: what the smallest layer needs anywhere.
    """
    if len(model.may_be_first) == 1 and model.may_be_first == model.may_be_last:
        (only,) = model.may_be_first
        return f"the pins leave it no place: {model.ids[only]} must hold both the first and the last stage"
    if model.available_bytes[device] == np.inf:
        return None
    described = model.problem.devices[device]
    if described.memory_bytes is not None and described.reserved_bytes > described.memory_bytes:
        return (
            f"it can hold nothing: {human_bytes(described.reserved_bytes)} of its "
            f"{human_bytes(described.memory_bytes)} are reserved"
        )
    if model.available_bytes[device] < least_alone:
        return "its memory is too small for any of the layers"
    return None


def _reason(model: CostModel, proof: Certificate, claim: str, possible: bool, cost: float | None) -> str:
    """Why a device stays unused, in words.

    Args:
        claim: what is known of plans with the device.
        possible: whether there is any place for it.
        cost: the least objective found with it in the plan, in seconds; None: not looked for.
    """
    if proof.value_s <= 0:
        return "nothing would be gained"
    if not possible:
        return f"{claim}; no way was found to fit it into this one"
    if cost is None:
        return claim
    change = cost / proof.value_s - 1
    what = "is" if model.by_iteration else "makes the slowest stage"
    if change > NOTABLE:
        return f"{claim}; the best way found to add it {what} {percent_text(change)} slower"
    if change < -NOTABLE and proof.status != "optimal":  # the search had stopped before
        return f"found only after the search had ended: adding it {what} {percent_text(-change)} faster"
    return f"{claim}; the best way found to add it gains nothing"


def percent_text(share: float) -> str:
    """A share in per cent, with two digits at least: ``0.12%``, ``3.4%``, ``56%``."""
    percent = share * 100
    return f"{percent:.0f}%" if percent >= 9.5 else f"{percent:.2g}%"


class _InsertionPlaces:
    """Every way to add one more device to a plan, as arrays, whichever device it is.

    A place: the new device takes layers [start, stop) of stage ``host``, its first ones (``before``) or its
    last ones; the host keeps the rest.
    """

    def __init__(self, model: CostModel, placement: Placement) -> None:
        self.model = model
        self.placement = placement
        rows = []
        for s, (_, p, q) in enumerate(placement):
            size = 1
            while size < q - p:
                rows += [(s, p, p + size, p + size, q, 1), (s, q - size, q, p, q - size, 0)]
                size *= 2
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 6)
        self.host, self.start, self.stop, self.rest_start, self.rest_stop, before = table.T
        self.before = before.astype(bool)
        self._memory()
        self.others_s = self._others(model.work_s.of(placement))

    def _memory(self) -> None:
        """Which places the others' memory allows, and what the new stage needs there."""
        model, count = self.model, len(self.placement)
        in_flight = [model.least_in_flight(s, count + 1) for s in range(count + 1)]
        ahead = [model.fits(d, p, q, in_flight[s]) for s, (d, p, q) in enumerate(self.placement)]
        later = [model.fits(d, p, q, in_flight[s + 1]) for s, (d, p, q) in enumerate(self.placement)]
        allowed, need = [], []
        broken = next((s for s, ok in enumerate(ahead) if not ok), count)  # none before the host may be
        sound = next((s for s in range(count - 1, -1, -1) if not later[s]), -1)  # none after it
        for s, start, stop, rest_start, rest_stop, before in zip(
            self.host.tolist(),
            self.start.tolist(),
            self.stop.tolist(),
            self.rest_start.tolist(),
            self.rest_stop.tolist(),
            self.before.tolist(),
            strict=True,
        ):
            mine, rest = (s, s + 1) if before else (s + 1, s)
            fits = broken >= s and sound <= s
            fits = fits and model.fits(self.placement[s].device, rest_start, rest_stop, in_flight[rest])
            allowed.append(fits)
            need.append(self._least_bytes(start, stop, in_flight[mine]) if fits else np.inf)
        self.allowed: Mask = np.array(allowed, dtype=bool)
        self.need_bytes: Array = np.array(need, dtype=np.float64)

    def _least_bytes(self, start: int, stop: int, in_flight: int) -> float:
        """Bytes that [start, stop) needs, recomputing where that is allowed and less."""
        need = self.model.need_bytes(start, stop, in_flight)
        return (
            min(need, self.model.need_bytes(start, stop, in_flight, recompute=True))
            if self.model.may_recompute
            else need
        )

    def _others(self, busy_s: Sequence[float]) -> Array:
        """By place, the slowest stage but the new one, in seconds."""
        ranked = sorted(range(len(busy_s)), key=lambda s: -busy_s[s])
        largest, second = busy_s[ranked[0]], busy_s[ranked[1]] if len(ranked) > 1 else 0.0
        rest = np.empty(len(self.host))
        for s, stage in enumerate(self.placement):
            here = self.host == s
            if here.any():
                work = self.model.work_s.array(stage.device)
                rest[here] = work[self.rest_stop[here]] - work[self.rest_start[here]]
        others = np.where(self.host == ranked[0], second, largest)
        out: Array = np.maximum(rest, others)
        return out

    def _open(self, device: int) -> Mask:
        """The places where ``device`` may be."""
        model, last = self.model, len(self.placement) - 1
        room = model.available_bytes[device]
        out: Mask = self.allowed & ((self.need_bytes <= room) | (room == np.inf))
        if device not in model.may_be_first:
            out &= ~(self.before & (self.host == 0))
        if device not in model.may_be_last:
            out &= self.before | (self.host != last)
        return out

    def possible(self, device: int) -> bool:
        """Whether there is any place for the device."""
        return bool(self._open(device).any())

    def cheapest(self, device: int, simulations: int) -> tuple[float | None, int]:
        """(the least objective found with the device in the plan, simulations spent); None: not looked."""
        at = np.flatnonzero(self._open(device))
        if not len(at):
            return None, 0
        work = self.model.work_s.array(device)
        largest = np.maximum(work[self.stop[at]] - work[self.start[at]], self.others_s[at])
        if not _needs_simulation(self.model):
            return float(largest.min()), 0
        if not simulations:
            return None, 0
        near = at[np.argsort(largest, kind="stable")][: 4 * simulations].tolist()
        near.sort(key=lambda i: self._slowest_s(device, i, work))
        tried = [self._with(device, i) for i in near[:simulations]]
        return min(choose_execution(self.model, placement)[0] for placement in tried), len(tried)

    def _with(self, device: int, place: int) -> Placement:
        s = int(self.host[place])
        mine = StageAssignment(device, int(self.start[place]), int(self.stop[place]))
        rest = StageAssignment(
            self.placement[s].device, int(self.rest_start[place]), int(self.rest_stop[place])
        )
        both = (mine, rest) if self.before[place] else (rest, mine)
        return (*self.placement[:s], *both, *self.placement[s + 1 :])

    def _slowest_s(self, device: int, place: int, work: Array) -> float:
        """The slowest of all stages and of the links to and from the new one."""
        mine = float(work[self.stop[place]] - work[self.start[place]])
        slowest = max(mine, float(self.others_s[place]))
        s = int(self.host[place])
        placement = self._with(device, place)[max(0, s - 1) : s + 3]
        for a, b in pairwise(placement):
            if device in (a.device, b.device):
                there, _ = self.model.occupancy_s(a.device, b.device, a.stop)
                back, _ = self.model.occupancy_s(b.device, a.device, a.stop)
                slowest = max(slowest, there, back)
        return slowest
