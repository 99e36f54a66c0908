"""Runs a sweep's trials on the cluster's devices until each has ended.

Every trial is the user's script as one process, started as ``skyctl run`` starts ranks. A trial's state is
written down whenever it changes, and counts as ended once what it wrote is here, if it is the best.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from skyctl.agent.task_events import LogEvent
from skyctl.agent.task_orders import write_order, write_request
from skyctl.errors import NodeError, ProtocolError, SkyctlError
from skyctl.records.base import timestamp
from skyctl.records.cluster import Cluster
from skyctl.records.sweep import KEPT, SweepRequest, TrialState, TrialStatus, best_trial
from skyctl.remote.agent_session import Session
from skyctl.remote.awake_clock import awake_s
from skyctl.remote.remote_task import TaskError, TaskExit, read_task_message, task_failure_error
from skyctl.remote.task_group import GroupEvent, TaskGroup
from skyctl.run.scripts.rank_orders import RankOrders
from skyctl.run.scripts.script_attempt import SCRIPT_KINDS, SCRIPT_MODULE, TAIL_LINES
from skyctl.run.scripts.script_outputs import WHOLE_FOLDER, ScriptOutputs
from skyctl.script.script_events import ScriptIdle, ScriptReady, ScriptResult, ScriptStarted
from skyctl.script.script_orders import BeginScript, ScriptOrder, Workplace
from skyctl.sweep.metric_reports import LearningCurves, read_report
from skyctl.sweep.optuna_sampler import OptunaSampler
from skyctl.sweep.parameters import script_words
from skyctl.sweep.running_trial import RunningTrial, only_rank, workplace_name
from skyctl.sweep.sweep_folder import SweepFolder
from skyctl.sweep.sweep_outcome import SweepCallbacks, SweepOutcome
from skyctl.sweep.trial_devices import TrialDevice
from skyctl.sweep.trial_queue import TrialQueue
from skyctl.sweep.trial_times import TimedTrial

TICK_S = 0.5
"""At least so often it is looked whether a trial hangs, or one that takes long frees no device."""
HERE = "127.0.0.1"


@dataclass
class SweepRunner:
    """Plays a sweep; make one for each, and call ``run`` once.

    Args:
        files: the script's folder, as it is sent.
        sessions: by node, those that answered. The caller that opened them closes them.
        sampler: draws what is not given; None: all trials are written down already.
    """

    folder: SweepFolder
    request: SweepRequest
    cluster: Cluster
    devices: Sequence[TrialDevice]
    files: dict[str, bytes]
    sessions: Mapping[str, Session]
    callbacks: SweepCallbacks = field(default_factory=SweepCallbacks)
    sampler: OptunaSampler | None = None

    def __post_init__(self) -> None:
        self.trials = {trial.number: trial for trial in self.folder.read_trials()}
        """By number, where each trial stands."""
        self._by_id = {device.id: device for device in self.devices}
        self._queue = TrialQueue({d.id: d.speed for d in self.devices}, self.request.per_device)
        self._curves = LearningCurves(self.request.mode, self.request.grace)
        self._events: TaskGroup[int] = TaskGroup("trial")
        self._begun = 0
        self._running: dict[int, RunningTrial] = {}
        self._fetches: deque[RunningTrial] = deque()
        self._fetching: RunningTrial | None = None
        self._lost: dict[str, SkyctlError] = {}
        self._trees: dict[str, str] = {}
        self._left_copies: dict[str, list[str]] = {node: [] for node in self.sessions}

    def run(self) -> SweepOutcome:
        """Runs all trials that have not ended for good.

        Raises:
            NodeError: no node is left.
            SkyctlError: the system refuses to write.
            KeyboardInterrupt: as it came; trials that ran are written down as waiting.
        """
        began = time.monotonic()
        self._take_up()
        self._ship()
        try:
            while self._queue.waiting or self._queue.running or self._fetching or self._left_to_draw:
                self._start_trials()
                came = self._events.receive(TICK_S)
                if came is not None:
                    self._take(came)
                self._end_stalled()
        finally:
            self._events.kill_all()
            self._put_back_all()
        trials = [self.trials[number] for number in sorted(self.trials)]
        best = best_trial(tuple(trials), self.request.mode)
        lost = {node: error.message for node, error in self._lost.items()}
        return SweepOutcome(trials, best, lost, time.monotonic() - began)

    # --- before

    def _take_up(self) -> None:
        """Trials that have ended for good count; all others are to run, from the beginning."""
        self.folder.settle_best(list(self.trials.values()))
        for trial in list(self.trials.values()):
            if trial.status not in KEPT:
                self._settle(TrialState(number=trial.number, parameters=trial.parameters))
                self._queue.add(trial.number, trial.parameters)
                continue
            self._count(trial)
            with suppress(OSError), self.folder.log(trial.number).open(errors="replace") as lines:
                for line in lines if self.request.metric is not None else ():
                    if (report := read_report(line, self.request.metric or "")) is not None:
                        self._curves.add(trial.number, report)

    def _ship(self) -> None:
        """Sends the script's folder to all nodes; those that can't take it are left out."""
        self.callbacks.phase(f"sending {len(self.files)} files to {len(self.sessions)} nodes")

        def push(node: str) -> str | SkyctlError:
            try:
                return self.sessions[node].push_tree(self.files)
            except SkyctlError as exc:
                return exc

        with ThreadPoolExecutor(max_workers=len(self.sessions)) as pool:
            for node, came in zip(self.sessions, pool.map(push, self.sessions), strict=True):
                if isinstance(came, SkyctlError):
                    self._lose(node, came)
                else:
                    self._trees[node] = came

    # --- trials begin

    @property
    def _left_to_draw(self) -> int:
        return self.request.trials - len(self.trials) if self.sampler is not None else 0

    def _start_trials(self) -> None:
        if self.sampler is not None:
            while self._left_to_draw and self._queue.waiting < self._queue.free:
                number = max(self.trials, default=0) + 1
                drawn = TrialState(number=number, parameters=self.sampler.ask(number))
                self._settle(drawn)
                self._queue.add(number, drawn.parameters)
        for number, device in self._queue.start(time.monotonic()):
            if self._by_id[device].node in self._lost:  # lost as the one before was started
                self._queue.put_back(number)
            else:
                self._start(self.trials[number], self._by_id[device])

    def _start(self, trial: TrialState, device: TrialDevice) -> None:
        node = device.node
        begun = TrialState(
            number=trial.number,
            parameters=trial.parameters,
            status="running",
            device=device.id,
            began=timestamp(),
        )
        self._curves.forget(trial.number)
        running = RunningTrial(begun, device, self.folder.log(trial.number))
        self._begun += 1
        self._running[self._begun] = running
        self._settle(begun)
        order = write_order(self._order(begun, device))
        self._left_copies[node].clear()
        name = workplace_name(trial.number)
        try:
            running.task = self.sessions[node].start_task(SCRIPT_MODULE, order, name=name)
        except SkyctlError as exc:
            self._lose(node, exc)
            return
        self._events.follow(self._begun, running.task)

    def _order(self, trial: TrialState, device: TrialDevice) -> ScriptOrder:
        node = self.cluster.node(device.node)
        script = self.request.script
        words = (*script.words, *script_words(trial.parameters))
        env = {**device.environment, **script.env}
        orders = RankOrders(
            script.model_copy(update={"words": words, "env": env}),
            self.request.sweep_id,
            restarts=0,
            shares=None,
            speeds=None,
            times_steps=False,
            secret=secrets.token_hex(32) if self.cluster.backend == "skyctl" else None,
        )
        at_once = Counter(one.node for one in self.devices)[node.name] * self.request.per_device
        return replace(
            orders.order(only_rank(node.name), node, self._workplace(trial.number, node.name), None),
            rank=trial.number,  # names what is the process's own on its node
            local_ranks=at_once,
            threads=None if node.threads is None else max(1, node.threads // at_once),
            ended=tuple(self._left_copies[node.name]),
        )

    def _workplace(self, number: int, node: str) -> Workplace:
        return Workplace(self._trees[node], output=WHOLE_FOLDER, name=workplace_name(number))

    # --- what they say

    def _take(self, came: GroupEvent[int]) -> None:
        if came.task is None:
            self._fetched(came)
            return
        running = self._running.get(came.key)
        if running is None or running.task is None:  # of a node that was lost meanwhile
            return
        node = running.device.node
        if came.error is not None:
            error = came.error
            self._lose(node, error if isinstance(error, SkyctlError) else _lost_error(node, error))
        elif came.ended:
            self._ended(came.key)
        else:
            try:
                event = read_task_message(SCRIPT_KINDS, self.cluster.node(node), came.value).event
            except ProtocolError as exc:
                self._lose(node, exc)
                return
            self._take_event(running, event)

    def _take_event(self, running: RunningTrial, event: object) -> None:
        heard = running.heard
        if isinstance(event, ScriptReady):
            assert running.task is not None
            begin = BeginScript({"MASTER_ADDR": HERE, "MASTER_PORT": str(event.port)})
            with suppress(SkyctlError):  # its node is lost, which comes as an event
                running.task.send(write_request(begin))
        elif isinstance(event, ScriptStarted):
            running.began()
        elif isinstance(event, ScriptResult):
            heard.result = event
            running.ended()
        elif isinstance(event, TaskError | TaskExit):
            heard.failure = event
        elif isinstance(event, ScriptIdle):
            heard.idle_since = None if event.idle_s == 0 else awake_s() - event.idle_s
        elif isinstance(event, LogEvent):
            heard.printed_at = awake_s()
            lines = event.text.splitlines()
            heard.tail = (heard.tail + lines)[-TAIL_LINES:]
            if running.read_lines(lines, self.request.metric, self._curves):
                self.trials[running.number] = running.trial
                self._stop_if_behind(running)

    def _stop_if_behind(self, running: RunningTrial) -> None:
        if self.request.stop is not None and self._curves.is_behind(running.number):
            step = running.trial.step
            self._kill(running, "stopped", f"worse than the median of the others at step {step}")

    def _end_stalled(self) -> None:
        limit_s = self.request.script.stall_s
        for running in self._running.values():
            if limit_s and running.ending is None and running.heard.stalled_s() >= limit_s:
                self._kill(running, "failed", f"has printed nothing and used no processor for {limit_s:g} s")

    def _kill(self, running: RunningTrial, status: TrialStatus, why: str) -> None:
        running.ending = status, why
        if running.task is not None:
            with suppress(SkyctlError):
                running.task.kill()

    # --- they end

    def _ended(self, key: int) -> None:
        running = self._running.pop(key)
        running.close()
        failure, node = running.heard.failure, running.device.node
        if isinstance(failure, TaskError | TaskExit) and not (running.heard.started or running.ending):
            self._put_back(running)
            self._lose(node, task_failure_error(self.cluster.node(node), failure))
            return
        self._queue.end(running.number)
        running.trial = running.final()
        if self._is_best(running.trial):
            self._fetches.append(running)
            self._fetch_next()
        else:
            self._conclude(running)

    def _conclude(self, running: RunningTrial) -> None:
        """A trial has ended for good."""
        trial = running.trial
        self._left_copies[running.device.node].append(workplace_name(trial.number))
        self._settle(trial)
        self._count(trial)

    def _count(self, trial: TrialState) -> None:
        """Takes in what an ended trial says about others."""
        if trial.status == "done" and trial.seconds is not None and trial.device is not None:
            self._queue.add_timed(TimedTrial(trial.parameters, trial.device, trial.seconds))
        if trial.status == "failed":
            self._curves.forget(trial.number)
        if self.sampler is not None:
            self.sampler.tell(trial)

    def _is_best(self, trial: TrialState) -> bool:
        others = [other for other in self.trials.values() if other.number != trial.number]
        return best_trial((*others, trial), self.request.mode) == trial

    def _settle(self, trial: TrialState) -> None:
        self.trials[trial.number] = trial
        self.folder.write_trial(trial)
        self.callbacks.changed(trial)

    # --- the best one's files

    def _fetch_next(self) -> None:
        while self._fetches and self._fetching is None:
            running = self._fetches.popleft()
            if not self._is_best(running.trial):  # another one was better meanwhile
                self._conclude(running)
                continue
            self._fetching = running
            self._events.run(0, partial(self._fetch, running))

    def _fetch(self, running: RunningTrial) -> list[str]:
        """In a thread: brings home what the trial wrote; what could not be brought."""
        node, warnings = running.device.node, list[str]()
        here = self.folder.clear_next_best()
        outputs = ScriptOutputs(here, self._workplace(running.number, node), warnings.append)
        outputs.note_shipped(self.files)
        outputs.gather([only_rank(node)], {node: self.sessions[node]})
        return warnings

    def _fetched(self, came: GroupEvent[int]) -> None:
        running, self._fetching = self._fetching, None
        assert running is not None
        node, metric = running.device.node, self.request.metric
        if came.error is not None and not isinstance(came.error, SkyctlError):
            raise came.error
        warnings = came.value if came.error is None else [str(came.error)]
        if warnings and self.sessions[node].lost is not None:
            self._queue.add(running.number, running.trial.parameters)
            self._settle(TrialState(number=running.number, parameters=running.trial.parameters))
        else:
            for warning in warnings:
                self.callbacks.warn(f"trial {running.number}: {warning}")
            assert metric is not None, "without one no trial is the best"
            self.folder.note_next_best(running.trial, metric)
            self._conclude(running)
            self.folder.settle_best(list(self.trials.values()))
        self._fetch_next()

    # --- lost nodes

    def _lose(self, node: str, error: SkyctlError) -> None:
        """Leaves a node out; its trials run elsewhere. Raises the error where no device is left."""
        if node in self._lost:
            return
        self._lost[node] = error
        self.callbacks.warn(f"node {node} is left out, its trials run elsewhere: {error.message}")
        self._queue.lose(device.id for device in self.devices if device.node == node)
        for key, running in list(self._running.items()):
            if running.device.node == node:
                if running.heard.result is not None:
                    self._ended(key)
                    continue
                del self._running[key]
                if running.task is not None:
                    with suppress(SkyctlError):
                        running.task.kill()
                self._put_back(running)
        if not self._queue.devices:
            raise error

    def _put_back(self, running: RunningTrial) -> None:
        running.close()
        self._queue.put_back(running.number)
        self._settle(TrialState(number=running.number, parameters=running.trial.parameters))

    def _put_back_all(self) -> None:
        """Puts back each trial that has not ended, to run once more: none, where all have ended."""
        for running in [*self._running.values(), *self._fetches, *filter(None, [self._fetching])]:
            running.close()
            self._settle(TrialState(number=running.number, parameters=running.trial.parameters))


def _lost_error(node: str, error: BaseException) -> NodeError:
    return NodeError(f"node {node} was lost: {error}", node=node)
