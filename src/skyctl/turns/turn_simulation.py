"""Runs on the same devices, step after step, played on numbers by the arbiter that ranks ask.

The model of one run's step is the contract's (``schedule.simulation``), with two things more: before an
action its device's turn is waited for, and who waits for a message has no turn. The time of an action beside
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
from skyctl.turns.turn_policy import IDLE_S, SLICE_S, JobAccount

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
        arrival_s: when it comes.
        load: the part of a device that an action uses. Actions that run at once, and use more than all of
            it together, are slowed down alike.
    """

    pipelines: tuple[PlacedPipeline, ...]
    steps: int
    sync_s: float = 0.0
    priority: int = 0
    arrival_s: float = 0.0
    load: float = 1.0

    @property
    def actions(self) -> int:
        """Forwards and backwards of a step, on all its devices."""
        return sum(2 * len(placed.devices) * placed.pipeline.microbatches for placed in self.pipelines)


def step_ends(runs: Sequence[SharedRun], kind: str, *, slice_s: float = SLICE_S) -> list[list[float]]:
    """By run, when each of its steps ends, in seconds.

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


class _Device:
    """``stages``: of runs that have come and not ended, by the arbiter's numbers."""

    def __init__(self, kind: str) -> None:
        self.arbiter = TurnArbiter(kind)
        self.stages: dict[int, _Stage] = {}

    @property
    def running(self) -> list[_Stage]:
        return [stage for stage in self.stages.values() if stage.left_s is not None]

    @property
    def idle_holders(self) -> list[_Stage]:
        """Stages that have the turn, and nothing to do in it yet."""
        return [s for s in self.stages.values() if s.left_s is None and s.account.holds]

    def rate(self) -> float:
        """How fast each action runs, of alone."""
        return 1.0 / max(1.0, sum(stage.load for stage in self.running))


@dataclass
class _Stage:
    """One stage of a run on its device, and where it is in its step.

    Attributes:
        arrived: by kind of action that needs messages, when each has come, by microbatch.
        sends: by kind of action that sends, to whom. ``sent_at``: when the last one has left.
        overhead_s: of each forward and each backward, what it takes beside its layers.
        at: its next action; that after its last one while it has nothing to do.
        idle_since: when its last action ended.
        rested_at: when the next action could begin if its input were there.
        left_s: of the action that runs; None: none does.
    """

    order: list[Action]
    times: StageTimes
    device: _Device
    load: float
    overhead_s: float
    arrived: dict[str, list[float]] = field(default_factory=dict)
    sends: dict[str, tuple[_Stage, MessageTimes]] = field(default_factory=dict)
    sent_at: dict[str, float] = field(default_factory=dict)
    at: int = 0
    idle_since: float = 0.0
    rested_at: float = 0.0
    number: int = -1
    granted_at: float = 0.0
    begun_at: float = 0.0
    left_s: float | None = None

    @property
    def account(self) -> JobAccount:
        return self.device.arbiter.jobs[self.number]

    @property
    def is_done(self) -> bool:
        return self.at == len(self.order)

    @property
    def device_s(self) -> float:
        """Seconds of its device that a step takes."""
        return sum(self.seconds(action) for action in self.order)

    def seconds(self, action: Action) -> float:
        times = self.times
        whole = {FORWARD: times.forward_s, WEIGHT_GRADIENTS: times.weight_s, OPTIMIZER: times.optimizer_s}
        return whole.get(action.kind, times.backward_s - times.weight_s)

    def begin_step(self, now: float) -> None:
        self.at = 0
        for arrivals in self.arrived.values():
            arrivals.clear()
        self.rest(now)

    def rest(self, now: float) -> None:
        """Nothing is done on the device for as long as the next action takes beside its layers."""
        has_layers = not self.is_done and self.order[self.at].kind in (FORWARD, BACKWARD)
        self.rested_at = now + (self.overhead_s if has_layers else 0.0)

    def ready_at(self) -> float:
        """When it can begin its next action; infinite while it has none, or what that needs was not sent."""
        if self.is_done:
            return math.inf
        kind, m = self.order[self.at]
        arrivals = self.arrived.get(kind)
        if arrivals is None:
            return self.rested_at
        return max(self.rested_at, arrivals[m] + self.overhead_s) if m < len(arrivals) else math.inf

    def begin(self, now: float) -> None:
        self.begun_at, self.left_s = now, self.seconds(self.order[self.at])

    def end(self, now: float) -> None:
        """Its action has ended; what that has made is sent."""
        action, account, arbiter = self.order[self.at], self.account, self.device.arbiter
        arbiter.use(self.number, account.used_s + (now - self.begun_at), account.turns + 1)
        arbiter.tell(self.number, max(0.0, account.remaining_s - self.seconds(action)), None)
        self.left_s = None
        self._send(action.kind, now)
        self.at += 1
        self.idle_since = now
        self.rest(now)

    def _send(self, kind: str, now: float) -> None:
        if kind in self.sends:
            target, message = self.sends[kind]
            self.sent_at[kind] = (
                max(self.sent_at.get(kind, 0.0), now) + message.unqueued_s - message.latency_s
            )
            target.arrived[kind].append(self.sent_at[kind] + message.latency_s)

    def connect(self, kind: str, target: _Stage, message: MessageTimes) -> None:
        """Routes the results of that kind of action to the target's action of the same kind."""
        self.sends[kind], target.arrived[kind] = (target, message), []


class _PlayedRun:
    """``begins_at``: its next step; infinite while one is under way, and when it has made all."""

    def __init__(self, name: str, run: SharedRun, devices: dict[str, _Device]) -> None:
        self.name, self.run = name, run
        self.ends: list[float] = []
        self.begins_at = run.arrival_s
        self.stages: list[_Stage] = []
        for placed in run.pipelines:
            given, before = placed.pipeline, len(self.stages)
            for s, device in enumerate(placed.devices):
                times = given.layer_times(s)
                order = actions(
                    given.schedule, given.microbatches, given.in_flight[s], given.deferred_weights[s]
                )
                order += [Action(OPTIMIZER, 0)] if times.optimizer_s > 0 else []
                stage = _Stage(order, times, devices[device], run.load, given.stage_overhead_s(s))
                self.stages.append(stage)
            of_it = self.stages[before:]
            for (stage, after), boundary in zip(pairwise(of_it), given.boundaries, strict=True):
                stage.connect(FORWARD, after, boundary.forward)
                after.connect(BACKWARD, stage, boundary.backward)

    def begin_step(self, now: float) -> None:
        self.begins_at = math.inf
        if not self.ends:
            self._come(now)
        for stage in self.stages:
            stage.begin_step(now)

    def end_step(self, now: float) -> None:
        self.ends.append(now + self.run.sync_s)
        if len(self.ends) < self.run.steps:
            self.begins_at = self.ends[-1]
            return
        for stage in self.stages:
            stage.device.arbiter.close(stage.number)
            del stage.device.stages[stage.number]

    def _come(self, now: float) -> None:
        alone_s = max(placed.pipeline.simulate().iteration_s for placed in self.run.pipelines)
        alone_s += self.run.sync_s
        for stage in self.stages:
            arbiter = stage.device.arbiter
            stage.number = arbiter.open(now, self.name, priority=self.run.priority)
            stage.device.stages[stage.number] = stage
            demand = min(1.0, stage.device_s / alone_s) if alone_s > 0 else 1.0
            arbiter.tell(stage.number, stage.device_s * self.run.steps, self.run.load * demand)


class _Player:
    def __init__(self, runs: Sequence[SharedRun], kind: str, slice_s: float) -> None:
        self.slice_s, self.now = slice_s, 0.0
        used = {name for run in runs for placed in run.pipelines for name in placed.devices}
        devices = {name: _Device(kind) for name in sorted(used)}
        self.devices = list(devices.values())
        in_order = sorted(range(len(runs)), key=lambda number: runs[number].arrival_s)
        names = {number: f"{place:06}" for place, number in enumerate(in_order)}
        self.runs = [_PlayedRun(names[number], run, devices) for number, run in enumerate(runs)]

    def play(self) -> list[list[float]]:
        while any(len(played.ends) < played.run.steps for played in self.runs):
            at = self._next_time()
            if at == math.inf:
                raise ValueError("the stages wait for each other for ever")
            self._run_until(at)
            for played in self.runs:
                if played.begins_at <= at + SAME_TIME_S:
                    played.begin_step(at)
            for device in self.devices:
                self._serve(device)
        return [played.ends for played in self.runs]

    def _next_time(self) -> float:
        times = [played.begins_at for played in self.runs]
        for device in self.devices:
            rate = device.rate()
            if device.arbiter.waiting:
                times += [stage.idle_since + IDLE_S for stage in device.idle_holders]
            for stage in device.stages.values():
                if stage.left_s is not None:
                    times.append(self.now + stage.left_s / rate)
                elif (ready := stage.ready_at()) > self.now:
                    times.append(ready)
        return max(self.now, min(times))

    def _run_until(self, at: float) -> None:
        for device in self.devices:
            rate = device.rate()
            for stage in device.running:
                assert stage.left_s is not None
                stage.left_s -= (at - self.now) * rate
        self.now = at
        for played in self.runs:
            ended = [one for one in played.stages if one.left_s is not None and one.left_s <= SAME_TIME_S]
            for stage in ended:
                stage.end(at)
            if ended and all(stage.is_done for stage in played.stages):
                played.end_step(at)

    def _serve(self, device: _Device) -> None:
        """Has its stages ask for turns, go on, or give them back, as ranks do."""
        arbiter = device.arbiter
        for stage in device.stages.values():
            waits = stage.account.asked_at is not None
            if waits or stage.left_s is not None or stage.ready_at() > self.now + SAME_TIME_S:
                continue
            if stage.account.holds:
                if not arbiter.waiting or self.now - stage.granted_at < self.slice_s - SAME_TIME_S:
                    stage.begin(self.now)
                    continue
                arbiter.give(stage.number, self.now)
            arbiter.ask(stage.number, self.now)
        for stage in device.idle_holders:
            if arbiter.waiting and self.now >= stage.idle_since + IDLE_S - SAME_TIME_S:
                arbiter.give(stage.number, self.now)
        for number in arbiter.grant(self.now):
            stage = device.stages[number]
            stage.granted_at = self.now
            stage.begin(self.now)
