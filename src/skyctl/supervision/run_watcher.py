"""A run's figures as they come, read from its folder alone; nothing of the run is touched.

The contents of its files came from other machines. A line that is not what skyctl writes is left out.
"""

from __future__ import annotations

import json
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from skyctl.agent.task_events import read_event
from skyctl.compare.run_figures import DeviceTimes, RunFigures, RunNote, SeriesPoint
from skyctl.errors import ProtocolError, SkyctlError
from skyctl.files import RunPaths, read_record
from skyctl.records.measurement import median
from skyctl.records.plan import Plan
from skyctl.records.run_state import RunState
from skyctl.run.journal import read_validation
from skyctl.run.rank_spec import rank_of_task
from skyctl.supervision.run_logs import FileTail, MetricsFollower, parse_supervisor_line, remaining_s
from skyctl.supervision.run_status import InspectedRun, inspect_run
from skyctl.worker.rank_events import StepEvent

MOST_POINTS = 400
"""Of a curve; of a longer run each point stands for several steps."""
RECENT_STEPS = 20
"""Steps over which devices' times, and the pace, are averaged."""
KEPT_NOTES = 100


@dataclass
class StepSeries:
    """A figure by step, in at most ``MOST_POINTS`` points: each the mean of ``width`` steps or fewer."""

    width: int = 1
    _parts: list[tuple[int, int, float]] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Adds a later step's figure."""
        if self._parts and self._parts[-1][1] < self.width:
            first, count, total = self._parts[-1]
            self._parts[-1] = (first, count + 1, total + value)
            return
        self._parts.append((step, 1, value))
        if len(self._parts) > MOST_POINTS:
            self.width *= 2
            pairs = zip(self._parts[::2], [*self._parts[1::2], (0, 0, 0.0)], strict=False)
            self._parts = [(left[0], left[1] + right[1], left[2] + right[2]) for left, right in pairs]

    def points(self) -> tuple[SeriesPoint, ...]:
        """The points, from the first step to the newest."""
        return tuple(
            SeriesPoint(first + (count - 1) / 2 + 1, total / count) for first, count, total in self._parts
        )


class RunWatcher:
    """Reads what is new of a run each time that it is asked. For one thread at a time."""

    def __init__(self, run: InspectedRun) -> None:
        self._run = run
        self._attempt = 0
        self._plan: Plan | None = None
        self._events: FileTail | None = None
        self._devices: dict[int, deque[StepEvent]] = {}
        self._said = FileTail(run.paths.supervisor_log, KEPT_NOTES)
        self._notes: deque[RunNote] = deque(maxlen=KEPT_NOTES)
        self._begin_metrics()

    def figures(self) -> RunFigures:
        """The run as its files have it now. Raises InputError: its state can't be read any more."""
        # The state first: once it says that the run has ended, the other files are as they will stay.
        run = inspect_run(self._run.paths.run_id)
        state = run.state
        if state.attempts and state.attempts[-1].number != self._attempt:
            self._begin_attempt(state)
        self._read_metrics(state)
        self._read_events()
        self._read_notes()
        newest, plan = self._newest, self._plan
        rate, pace_s = newest.get("samples_per_s"), median(self._pace) if self._pace else None
        return RunFigures(
            state=state,
            status=run.status,
            detail=_detail(run),
            unit="step" if plan is None else plan.problem.rhythm.unit,
            loss=self._loss.points(),
            validation=self._validation.points(),
            seconds=self._seconds.points(),
            point_steps=self._loss.width,
            last_loss=newest.get("loss"),
            pace_s=pace_s,
            samples_per_s=rate if isinstance(rate, float) else None,
            left_s=None if pace_s is None else remaining_s({**newest, "iteration_s": pace_s}, state),
            predicted_s=state.attempts[-1].predicted_iteration_s if state.attempts else None,
            interval=None if plan is None else plan.predicted.interval,
            devices=self._device_times(state),
            notes=tuple(self._notes),
        )

    def _begin_metrics(self) -> None:
        self._metrics, self._inode = MetricsFollower(self._run.paths), self._metrics_inode()
        self._loss, self._seconds, self._validation = StepSeries(), StepSeries(), StepSeries()
        self._newest: dict[str, Any] = {}
        self._pace: deque[float] = deque(maxlen=RECENT_STEPS)

    def _begin_attempt(self, state: RunState) -> None:
        """Follows the newest attempt's events, from not long before now."""
        self._attempt = state.attempts[-1].number
        paths = RunPaths(state.run_id, self._attempt)
        ranks = len(state.attempts[-1].devices)
        self._events = FileTail(paths.events, 4 * RECENT_STEPS * max(1, ranks))
        self._devices = {}
        self._plan = None
        with suppress(SkyctlError):  # a script has none
            self._plan = read_record(Plan, paths.plan)

    def _read_metrics(self, state: RunState) -> None:
        if self._metrics_inode() != self._inode:  # steps are done again: the file is another one
            self._begin_metrics()
        warm_ups = {attempt.from_step for attempt in state.attempts}
        for line in self._new_steps():
            with suppress(KeyError, TypeError, ValueError, OverflowError):
                step, loss, took_s = int(line["step"]), float(line["loss"]), float(line["iteration_s"])
                validated = read_validation(line)
                self._newest = {**line, "step": step, "loss": loss}
                self._loss.add(step, loss)
                if step not in warm_ups:
                    self._seconds.add(step, took_s)
                    self._pace.append(took_s)
                if validated is not None:
                    self._validation.add(step, validated.loss)

    def _metrics_inode(self) -> int:
        with suppress(OSError):
            return self._run.paths.metrics.stat().st_ino
        return 0

    def _new_steps(self) -> list[dict[str, Any]]:
        try:
            return self._metrics.lines()
        except (ValueError, KeyError, TypeError):
            return []

    def _read_events(self) -> None:
        for text in self._events.lines() if self._events is not None else ():
            with suppress(ValueError, ProtocolError, RecursionError):
                event = json.loads(text)
                if not isinstance(event, dict) or event.get("event") != StepEvent.kind:
                    continue
                rank = rank_of_task(str(event.get("who")))
                if rank is not None:
                    kept = self._devices.setdefault(rank, deque(maxlen=RECENT_STEPS))
                    kept.append(read_event(StepEvent, event, str(event.get("node"))))

    def _read_notes(self) -> None:
        for said in map(parse_supervisor_line, self._said.lines()):
            if not said.kind and self._notes:  # it goes on with what was said before
                before = self._notes.pop()
                self._notes.append(replace(before, text=f"{before.text}\n{said.text.strip()}"))
            else:
                self._notes.append(RunNote(said.at, said.kind, said.text))

    def _device_times(self, state: RunState) -> tuple[DeviceTimes, ...]:
        """The times of the newest attempt's devices, without its first step, a warm-up, if there are more."""
        if not state.attempts:
            return ()
        attempt, predicted = state.attempts[-1], {}
        if self._plan is not None and self._plan.predicted.iteration_s > 0:
            whole_s = self._plan.predicted.iteration_s
            predicted = {step.device: step.compute_s / whole_s for step in self._plan.predicted.replicas}
        times = []
        for rank, events in sorted(self._devices.items()):
            steps = [event for event in events if event.step > attempt.from_step] or list(events)
            if rank < len(attempt.devices) and steps:
                device = attempt.devices[rank]
                times.append(
                    DeviceTimes(
                        device,
                        compute_s=fmean(step.compute_s for step in steps),
                        transfer_s=fmean(step.transfer_s for step in steps),
                        idle_s=fmean(step.idle_s for step in steps),
                        steps=len(steps),
                        predicted_share=predicted.get(device),
                    )
                )
        return tuple(times)


def _detail(run: InspectedRun) -> str | None:
    if run.status == "unsupervised":
        return f"its supervisor is gone; go on with it: skyctl attach {run.paths.run_id}"
    return run.detail
