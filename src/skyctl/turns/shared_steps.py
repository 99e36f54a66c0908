"""Runs of pipelines on the same devices, step after step, played on numbers by the arbiter that ranks ask.

The model of one run's step is the contract's (``schedule.simulation``), with two things more: before an
action its device's turn is waited for, and who waits for a message has no turn. What an action takes beside
its layers is spent without a turn, before it. A switch takes no time.
Messages of one link queue behind each other; what runs share of the network is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean

from skyctl.schedule.actions import BACKWARD, FORWARD, OPTIMIZER, WEIGHT_GRADIENTS, Action, actions
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import MessageTimes, StageTimes
from skyctl.turns.turn_arbiter import TurnArbiter
from skyctl.turns.turn_policy import IDLE_S, SLICE_S

SAME_TIME_S = 1e-9
MOST_ACTIONS, LEAST_STEPS = 20_000, 3


@dataclass(frozen=True)
class PlacedPipeline:
    """``devices``: of each stage."""

    pipeline: SimulationInput
    devices: tuple[str, ...]


@dataclass(frozen=True)
class SharedRun:
    """A run that takes turns.

    Attributes:
        pipelines: side by side; all begin a step together.
        sync_s: seconds from their last action to the next step in which no device is used: sums.
        steps: how many it makes yet.
        priority: the highest goes first, under that policy.
    """

    pipelines: tuple[PlacedPipeline, ...]
    steps: int
    sync_s: float = 0.0
    priority: int = 0

    @property
    def actions(self) -> int:
        """Forwards and backwards of a step, on all its devices."""
        return sum(2 * len(placed.devices) * placed.pipeline.microbatches for placed in self.pipelines)


@dataclass
class _Stage:
    """One stage of a run on its device, and where it is in its step.

    Attributes:
        inputs, gradients: by microbatch, when it arrives; of a stage at an end of its pipeline, none.
        overhead_s: of each forward and each backward, what it takes beside its layers.
        idle_since: when its last action ended.
        rested_at: when the next action could begin if its input were there.
        number: the arbiter's.
        left_s: of the action that runs; None: none does.
    """

    run: int
    order: list[Action]
    times: StageTimes
    device: _Device
    overhead_s: float = 0.0
    before: _Stage | None = None
    after: _Stage | None = None
    ahead: MessageTimes | None = None
    back: MessageTimes | None = None
    inputs: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    sent_ahead_at: float = 0.0
    sent_back_at: float = 0.0
    at: int = 0
    idle_since: float = 0.0
    rested_at: float = 0.0
    number: int = -1
    granted_at: float = 0.0
    left_s: float | None = None
    waits: bool = False
    is_done: bool = False

    def begin_step(self, now: float) -> None:
        self.inputs, self.gradients, self.at, self.is_done = [], [], 0, False
        self.rest(now)

    def rest(self, now: float) -> None:
        """Nothing is done on the device for as long as the next action takes beside its layers."""
        has_layers = self.at < len(self.order) and self.order[self.at].kind in (FORWARD, BACKWARD)
        self.rested_at = now + (self.overhead_s if has_layers else 0.0)

    @property
    def device_s(self) -> float:
        """Seconds of its device that a step takes."""
        return sum(self.seconds(action) for action in self.order)

    def seconds(self, action: Action) -> float:
        times = self.times
        whole = {FORWARD: times.forward_s, WEIGHT_GRADIENTS: times.weight_s, OPTIMIZER: times.optimizer_s}
        return whole.get(action.kind, times.backward_s - times.weight_s)

    def ready_at(self) -> float:
        """When it can begin its next action; infinite while nobody has sent what that needs."""
        kind, m = self.order[self.at]
        arrivals = self.inputs if kind == FORWARD and self.before is not None else None
        if kind == BACKWARD and self.after is not None:
            arrivals = self.gradients
        if arrivals is None:
            return self.rested_at
        return max(self.rested_at, arrivals[m] + self.overhead_s) if m < len(arrivals) else math.inf

    def send(self, action: Action, now: float) -> None:
        """Sends what the action has made to the neighbour that waits for it."""
        if action.kind == FORWARD and self.after is not None and self.ahead is not None:
            self.sent_ahead_at = max(self.sent_ahead_at, now) + self.ahead.unqueued_s - self.ahead.latency_s
            self.after.inputs.append(self.sent_ahead_at + self.ahead.latency_s)
        elif action.kind == BACKWARD and self.before is not None and self.back is not None:
            self.sent_back_at = max(self.sent_back_at, now) + self.back.unqueued_s - self.back.latency_s
            self.before.gradients.append(self.sent_back_at + self.back.latency_s)


class _Device:
    def __init__(self, kind: str) -> None:
        self.arbiter = TurnArbiter(kind)
        self.stages: list[_Stage] = []

    @property
    def running(self) -> list[_Stage]:
        return [stage for stage in self.stages if stage.left_s is not None]

    @property
    def idle_holders(self) -> list[_Stage]:
        """Stages that have the turn, and nothing to do in it yet."""
        return [s for s in self.stages if s.left_s is None and self.arbiter.jobs[s.number].holds]

    def rate(self) -> float:
        """How fast each action runs, of alone: those that run at once share the device alike."""
        return 1.0 / max(1, len(self.running))


def step_ends(runs: Sequence[SharedRun], kind: str, *, slice_s: float = SLICE_S) -> list[list[float]]:
    """By run, when each of its steps ends, in seconds from when all of them began.

    Args:
        kind: of the turns: ``fifo``, ``fair``, ``srtf``, ``pack`` or ``priority``.
        slice_s: so long a stage keeps its turn from action to action while others wait.

    Raises:
        ValueError: stages wait for each other for ever.
    """
    return _Player(runs, kind, slice_s).play()


def brief(runs: Sequence[SharedRun]) -> list[SharedRun]:
    """The same runs with fewer steps, in the same proportion, where playing all would take seconds."""
    played = sum(run.steps * run.actions for run in runs)
    part = min(1.0, MOST_ACTIONS / max(1, played))
    return [replace(run, steps=max(LEAST_STEPS, math.ceil(part * run.steps))) for run in runs]


def shared_step_s(runs: Sequence[SharedRun], kind: str, *, slice_s: float = SLICE_S) -> list[float]:
    """By run, the mean seconds of its steps while all of them run; not of its first one where it has more."""
    ends = step_ends(runs, kind, slice_s=slice_s)
    together_s = min(of_run[-1] for of_run in ends)
    means = []
    for of_run in ends:
        inside = [end for end in of_run if end <= together_s + SAME_TIME_S] or of_run[:1]
        gaps = [after - before for before, after in pairwise(inside)]
        means.append(fmean(gaps) if gaps else inside[0])
    return means


class _Player:
    def __init__(self, runs: Sequence[SharedRun], kind: str, slice_s: float) -> None:
        self.runs, self.kind, self.slice_s = runs, kind, slice_s
        self.now = 0.0
        self.devices: dict[str, _Device] = {}
        self.stages = [self._stages_of(number, run) for number, run in enumerate(runs)]
        self.ends: list[list[float]] = [[] for _ in runs]
        self.begins: list[float | None] = [0.0] * len(runs)
        for number, stages in enumerate(self.stages):
            alone_s = self._alone_s(number)
            for stage in stages:
                arbiter = stage.device.arbiter
                stage.number = arbiter.open(0.0, str(number), priority=runs[number].priority)
                demand = min(1.0, stage.device_s / alone_s) if alone_s > 0 else 1.0
                arbiter.tell(stage.number, stage.device_s * runs[number].steps, demand)

    def play(self) -> list[list[float]]:
        while any(len(ends) < run.steps for ends, run in zip(self.ends, self.runs, strict=True)):
            at = self._next_time()
            if at == math.inf:
                raise ValueError("the stages wait for each other for ever")
            self._run_until(at)
            for number, begin in enumerate(self.begins):
                if begin is not None and begin <= self.now + SAME_TIME_S:
                    self._begin_step(number)
            for device in self.devices.values():
                self._serve(device)
        return self.ends

    def _stages_of(self, number: int, run: SharedRun) -> list[_Stage]:
        made = []
        for placed in run.pipelines:
            given, before = placed.pipeline, None
            for s, name in enumerate(placed.devices):
                times = given.layer_times(s)
                order = actions(
                    given.schedule, given.microbatches, given.in_flight[s], given.deferred_weights[s]
                )
                order += [Action(OPTIMIZER, 0)] if times.optimizer_s > 0 else []
                device = self.devices.setdefault(name, _Device(self.kind))
                stage = _Stage(number, order, times, device, given.stage_overhead_s(s), before)
                if before is not None:
                    before.after, before.ahead = stage, given.boundaries[s - 1].forward
                    stage.back = given.boundaries[s - 1].backward
                device.stages.append(stage)
                made.append(stage)
                before = stage
        return made

    def _alone_s(self, number: int) -> float:
        run = self.runs[number]
        played = [placed.pipeline.simulate().iteration_s for placed in run.pipelines]
        return max(played, default=0.0) + run.sync_s

    def _next_time(self) -> float:
        times = [begin for begin in self.begins if begin is not None]
        for device in self.devices.values():
            rate = device.rate()
            if device.arbiter.waiting:
                times += [stage.idle_since + IDLE_S for stage in device.idle_holders]
            for stage in device.stages:
                if stage.left_s is not None:
                    times.append(self.now + stage.left_s / rate)
                elif not stage.waits and self._is_open(stage) and (ready := stage.ready_at()) > self.now:
                    times.append(ready)
        return max(self.now, min(times, default=math.inf))

    def _is_open(self, stage: _Stage) -> bool:
        """It has an action to do in the step under way."""
        return self.begins[stage.run] is None and not stage.is_done

    def _run_until(self, at: float) -> None:
        ended = []
        for device in self.devices.values():
            rate = device.rate()
            for stage in device.running:
                assert stage.left_s is not None
                stage.left_s -= (at - self.now) * rate
                if stage.left_s <= SAME_TIME_S:
                    ended.append(stage)
        self.now = at
        for stage in ended:
            self._end_action(stage)

    def _begin_step(self, number: int) -> None:
        self.begins[number] = None
        for stage in self.stages[number]:
            stage.begin_step(self.now)

    def _end_action(self, stage: _Stage) -> None:
        action, arbiter = stage.order[stage.at], stage.device.arbiter
        job = arbiter.jobs[stage.number]
        seconds = stage.seconds(action)
        arbiter.use(stage.number, job.used_s + seconds, job.turns + 1)
        arbiter.tell(stage.number, max(0.0, job.remaining_s - seconds), None)
        stage.left_s = None
        stage.send(action, self.now)
        stage.at += 1
        stage.idle_since = self.now
        stage.rest(self.now)
        stage.is_done = stage.at == len(stage.order)
        number = stage.run
        if all(one.is_done for one in self.stages[number]):
            self.ends[number].append(self.now + self.runs[number].sync_s)
            if len(self.ends[number]) < self.runs[number].steps:
                self.begins[number] = self.ends[number][-1]

    def _serve(self, device: _Device) -> None:
        """Has its stages ask for turns, go on, or give them back, as ranks do."""
        arbiter = device.arbiter
        for stage in device.stages:
            ready = self._is_open(stage) and stage.ready_at() <= self.now + SAME_TIME_S
            if not ready or stage.waits or stage.left_s is not None:
                continue
            if arbiter.jobs[stage.number].holds:
                if not arbiter.waiting or self.now - stage.granted_at < self.slice_s - SAME_TIME_S:
                    self._begin(stage)
                    continue
                arbiter.give(stage.number)
            arbiter.ask(stage.number, self.now)
            stage.waits = True
        for stage in device.idle_holders:
            if arbiter.waiting and self.now >= stage.idle_since + IDLE_S - SAME_TIME_S:
                arbiter.give(stage.number)
        granted = set(arbiter.grant(self.now))
        for stage in device.stages:
            if stage.number in granted:
                stage.waits, stage.granted_at = False, self.now
                self._begin(stage)

    def _begin(self, stage: _Stage) -> None:
        stage.left_s = stage.seconds(stage.order[stage.at])
