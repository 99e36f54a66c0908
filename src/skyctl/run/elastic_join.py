"""Devices that enter an attempt under way: those that come, are back, or stand by once somebody is lost.

One at a time, and only where the steps that are left gain more than it costs: its node is prepared beside
training, and then a step waits until it was given its weights. If that fails, the attempt goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from skyctl.errors import InputError, ProtocolError, SkyctlError
from skyctl.planning.steps_without import RemainingSteps
from skyctl.records.cluster import node_of
from skyctl.records.plan import Plan
from skyctl.records.plan_nodes import nodes_of
from skyctl.records.problem import Problem
from skyctl.remote.awake_clock import awake_s
from skyctl.run.attempt import Attempt
from skyctl.run.attempt_orders import AttemptOrders, NodeToEnter, OrderMaker
from skyctl.run.elastic_spec import memory_to_enter
from skyctl.run.joined_node import with_node
from skyctl.run.live_run import LiveRun
from skyctl.run.plan_update import OBSERVED_STEPS, worth_moving
from skyctl.run.rank_failure import RankState
from skyctl.run.run_nodes import HEARD_AGAIN_S, RunNodes
from skyctl.run.run_options import RunOptions
from skyctl.run.step_collector import StepCollector

MAX_TRIES = 3
"""So often a device that was lost enters an attempt again, or fails to."""
PAUSE_S = 5.0
"""Before a device that was lost is tried again, doubled each time."""
START_S = 5.0
"""From a decision to the step with which a device enters, where none was measured."""
LEAST_STEPS = 3
"""With fewer that were seen, a step takes what is predicted."""


@dataclass(frozen=True)
class EntryGain:
    """The gain, and the cost, of letting a device enter.

    Attributes:
        step: done when it does, about.
        left: steps that are left then.
        now_s, then_s: seconds of a step without it and with it.
        transfer_s: for which a step waits while it is given its weights.
    """

    step: int
    left: int
    now_s: float
    then_s: float
    transfer_s: float

    @property
    def pays(self) -> bool:
        """Whether clearly more is gained than it costs: the transfer, and about a step to begin with."""
        return worth_moving(self.now_s, self.then_s, self.left, self.transfer_s + self.now_s)

    @property
    def text(self) -> str:
        """The figures, for people."""
        saved_s = max(0.0, self.now_s - self.then_s) * self.left
        waits = f"; a step waits {self.transfer_s:.2g} s for its weights" if self.transfer_s else ""
        return (
            f"steps take {self.then_s:.3g} s instead of {self.now_s:.3g} s, which saves {saved_s:.3g} s of "
            f"{self.now_s * self.left:.3g} s{waits}"
        )


def entry_gain(
    plan: Plan,
    problem: Problem,
    members: Sequence[str],
    device: str,
    *,
    seen_s: float | None,
    done: int,
    steps: int,
    start_s: float,
) -> EntryGain:
    """The gain if a device enters.

    Args:
        problem: the plan's, with that device.
        members: the ids of devices that make steps now.
        seen_s: seconds of a step as it was measured; None: it takes what is predicted.
        done, steps: of the run.
        start_s: until it enters.
    """
    planned = {stage.device for stage in plan.placed_stages}
    away, new = planned - set(members), [member for member in members if member not in planned]
    model = RemainingSteps(plan, problem)
    before_s, after_s = model.step_s(away, new), model.step_s(away, [*new, device])
    if before_s is None or after_s is None or len(members) >= problem.microbatches:
        before_s = after_s = 1.0  # nothing is left to deal
    now_s = before_s if seen_s is None else seen_s
    then_s = now_s * after_s / before_s if before_s > 0 else now_s
    rates = [
        link.bandwidth_bytes_per_s
        for link in problem.links
        if link.target == device and link.source in members
    ]
    state_bytes = sum(layer.state_bytes for layer in problem.layers)
    step = min(steps, done + (round(start_s / now_s) if now_s > 0 else 0))
    return EntryGain(step, steps - step, now_s, then_s, state_bytes / max(rates) if rates else 0.0)


@dataclass
class _Candidate:
    """A device that may enter. ``judged``: the members for which it was said that it does not pay."""

    device: str
    why: str
    tries: int = 0
    next_try: float = 0.0
    judged: tuple[str, ...] | None = None

    def note_try(self) -> None:
        """It was lost, or could not enter: it is tried again later."""
        self.next_try = time.monotonic() + PAUSE_S * 2.0**self.tries
        self.tries, self.judged = self.tries + 1, None


class _Preparing(threading.Thread):
    """Prepares a node, beside training."""

    def __init__(self, candidate: _Candidate, gain: EntryGain, maker: OrderMaker, plan: Plan, run: LiveRun):
        super().__init__(name="prepares a node", daemon=True)
        self.candidate, self.gain = candidate, gain
        self._maker, self._plan, self._sessions = maker, plan, dict(run.sessions)
        self.outcome: NodeToEnter | SkyctlError | None = None
        maker.files_to_ship()

    def run(self) -> None:
        """Sets ``outcome``."""
        try:
            self.outcome = self._maker.prepare(self._plan, node_of(self.candidate.device), self._sessions)
        except SkyctlError as exc:
            self.outcome = exc


@dataclass(frozen=True)
class _Entering:
    """A rank on its way in."""

    rank: int
    candidate: _Candidate
    began: float
    limit_s: float


class ElasticJoins:
    """Has devices enter one attempt: ``update`` regularly, in the supervising thread.

    Attributes:
        plan: the attempt's; its problem has all devices that may enter.

    Args:
        nodes: the run's: those with ranks that are lost are given up there.
        known: a problem that has devices of nodes which the plan's lacks.
    """

    def __init__(
        self,
        run: LiveRun,
        nodes: RunNodes,
        attempt: Attempt,
        orders: AttemptOrders,
        maker: OrderMaker,
        options: RunOptions,
        known: Problem | None = None,
    ) -> None:
        self._run, self._nodes, self._attempt = run, nodes, attempt
        self._orders, self._maker, self._options = orders, maker, options
        self.plan = orders.plan
        self._candidates: dict[str, _Candidate] = {}
        self._noted: set[int] = set()
        self._preparing: _Preparing | None = None
        self._entering: _Entering | None = None
        self._start_s = START_S
        for name in () if known is None else nodes_of(known):
            if known is not None and name in run.sessions and name not in nodes_of(self.plan.problem):
                self.offer(name, known, f"node {name} is there")

    def offer(self, node: str, problem: Problem, why: str) -> None:
        """A node has come; its devices may enter.

        Args:
            problem: of the plan's layers, with these devices.
        """
        if node not in nodes_of(self.plan.problem):
            merged = with_node(self.plan.problem, problem, node)
            self.plan = self.plan.model_copy(update={"problem": merged})
        for device in self._ids:
            if node_of(device) == node:
                known = self._candidates.setdefault(device, _Candidate(device, why))
                known.why, known.judged, known.tries, known.next_try = why, None, 0, 0.0

    def update(self) -> None:
        """Goes on with what is under way, or begins the next; does not wait."""
        self._note_losses()
        if self._entering is not None:
            self._watch(self._entering)
        elif self._preparing is None:
            self._begin_next()
        elif not self._preparing.is_alive():
            done, self._preparing = self._preparing, None
            self._admit(done)

    # --- who is lost

    @property
    def _ids(self) -> list[str]:
        return [device.id for device in self.plan.problem.devices]

    @property
    def _collected(self) -> StepCollector:
        return self._attempt.state.collected

    def _note_losses(self) -> None:
        state = self._attempt.state
        there = {rank.spec.node for rank in state.members}
        lost = [rank for rank in state.ranks if rank.is_out or rank.failure is not None]
        for rank in lost:
            if rank.spec.rank not in self._noted and not rank.is_joining:
                self._noted.add(rank.spec.rank)
                self._note_loss(rank)
        for name in {rank.spec.node for rank in lost} - there:
            session = self._run.sessions.get(name)
            if session is None or (
                self._entering is not None and node_of(self._entering.candidate.device) == name
            ):
                continue
            if session.lost is not None:
                self._nodes.give_up(name, session.lost.message, self.plan)
            elif session.silent_s > self._options.deadlines.node_timeout_s:
                why = f"node {name} has not been heard for {session.silent_s:.0f} s"
                self._nodes.give_up(name, why, self.plan)

    def _note_loss(self, rank: RankState) -> None:
        device, node = rank.spec.device, rank.spec.node
        self._attempt.end_rank(rank.spec.rank)  # it may stand still
        for other in self._ids:  # those that stand by
            self._candidates.setdefault(other, _Candidate(other, f"{other} stands by"))
        candidate = self._candidates.setdefault(device, _Candidate(device, ""))
        candidate.why = f"{device} is there again"
        candidate.note_try()
        if isinstance(rank.failure, ProtocolError):
            candidate.tries = MAX_TRIES + 1
            if node in self._run.sessions:
                self._nodes.give_up(node, rank.failure.message, self.plan, trusted=False)

    # --- who enters

    def _begin_next(self) -> None:
        attempt, collected = self._attempt, self._collected
        members = attempt.state.members
        if attempt.is_ending or not attempt.may_grow or any(rank.result for rank in members) or not members:
            return
        names = tuple(rank.spec.device for rank in members)
        for candidate in self._candidates.values():
            session = self._run.sessions.get(node_of(candidate.device))
            if session is None or not session.has_answered(HEARD_AGAIN_S) or candidate.device in names:
                continue
            if (
                candidate.tries > MAX_TRIES
                or time.monotonic() < candidate.next_try
                or candidate.judged == names
            ):
                continue
            candidate.judged = names
            gain = self._gain(candidate, names)
            if gain is None:
                continue
            if gain.pays:
                step = f"{collected.unit} ~{gain.step + 1}"
                self._run.callbacks.note(f"{candidate.why}: it enters at {step}: {gain.text}")
                self._preparing = _Preparing(candidate, gain, self._maker, self._orders.plan, self._run)
                self._preparing.start()
                return
            self._run.callbacks.note(
                f"{candidate.why}; it stays on standby, as entering would not pay: {gain.text}"
            )

    def _gain(self, candidate: _Candidate, members: Collection[str]) -> EntryGain | None:
        """The gain if the device enters; None: it can't enter, which is said."""
        name = candidate.device
        room = next(d.memory_bytes for d in self.plan.problem.devices if d.id == name)
        need = memory_to_enter(self._orders.plan)
        if room is not None and room < need:
            self._run.callbacks.note(f"{name} stays on standby: it has no room for all layers")
            return None
        try:
            return entry_gain(
                self._orders.plan,
                self.plan.problem,
                list(members),
                name,
                seen_s=self._seen_s(),
                done=self._collected.reported,
                steps=self._options.steps,
                start_s=self._start_s,
            )
        except InputError as exc:
            self._run.callbacks.note(f"{name} stays on standby: {exc.message}")
            return None

    def _seen_s(self) -> float | None:
        """The median of the last steps of those that make them now."""
        collected = self._collected
        first = max(collected.members_since + 1, collected.oldest, collected.reported - OBSERVED_STEPS)
        steps = range(first, collected.reported)
        return median(map(collected.iteration_s, steps)) if len(steps) >= LEAST_STEPS else None

    def _admit(self, prepared: _Preparing) -> None:
        candidate, outcome = prepared.candidate, prepared.outcome
        node = node_of(candidate.device)
        members = {rank.spec.rank: rank.spec.node for rank in self._attempt.state.members}
        if isinstance(outcome, NodeToEnter) and node in self._run.sessions:
            if self._attempt.is_ending or not outcome.addresses.keys() >= set(members.values()):
                candidate.judged = None  # somebody has come meanwhile
                return
            model = RemainingSteps(self._orders.plan, self.plan.problem)
            pace_s = model.microbatch_s(candidate.device)
            spec = self._maker.entering(self._orders, candidate.device, members, outcome, pace_s)
            limit_s = (
                self._options.deadlines.start_s + 10 * prepared.gain.transfer_s + 50 * prepared.gain.now_s
            )
            self._entering = _Entering(spec.rank, candidate, time.monotonic(), limit_s)
            self._attempt.admit(spec, outcome.addresses[node], limit_s)
            return
        why = outcome.message if isinstance(outcome, SkyctlError) else "its node is gone"
        self._failed(candidate, why)

    def _watch(self, entering: _Entering) -> None:
        """How a rank that enters gets on."""
        state, number = self._attempt.state, entering.rank
        rank, limits = state.ranks[number], self._options.deadlines
        if rank.is_out or rank.failure is not None:
            self._attempt.leave_out(number)
            self._noted.add(number)
            self._entering = None
            self._failed(entering.candidate, _why(rank))
            if isinstance(rank.failure, ProtocolError):
                self._note_loss(rank)
            return
        took_s = time.monotonic() - entering.began
        if not rank.is_joining:
            self._start_s, self._entering = took_s, None
            return
        heard_s = 0.0 if rank.heard_at is None else awake_s() - rank.heard_at
        gone = {
            host for host in state.lacks_keys(number) if state.ranks[host].is_out or state.ranks[host].failure
        }
        if gone and rank.phase != "starting":
            self._attempt.leave_out(number, SkyctlError("a rank was lost that it was to connect to"))
            entering.candidate.tries -= 1
        elif heard_s > limits.silence_s or took_s > entering.limit_s:
            self._attempt.leave_out(number, SkyctlError(f"it has not entered within {took_s:.0f} s"))

    def _failed(self, candidate: _Candidate, why: str) -> None:
        candidate.note_try()
        later = "" if candidate.tries > MAX_TRIES else "; it is tried again"
        self._run.callbacks.warn(f"{candidate.device} could not enter: {why}{later}")


def _why(rank: RankState) -> str:
    failure = rank.failure
    if failure is None:
        return "the others go on without it"
    return str(getattr(failure, "message", None) or getattr(failure, "signal", None) or "it has ended")
