"""The state of an attempt: what its ranks have said, and what follows from it. It does no I/O.

A rank's messages are read (``read``), written down by whoever asks, and accepted in their turn (``accept``).
While ranks come together it goes to ``come_together``, then to ``report``: both say what is to be done.

At each checkpoint, sketches show whether pipelines side by side still hold the same parameters. They start
alike and add the same sums, to the last bit; only their optimizers may differ in last bits, by processor. So
sketches are compared with a tolerance: far more than rounding ever comes to, far less than one update that
only one of them has made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from skyctl.agent.task_events import LogEvent
from skyctl.checkpoint.node.replicator_events import ShardDigest
from skyctl.errors import ProtocolError, RunError, SkyctlError, WorkloadError
from skyctl.records.cluster import Node
from skyctl.remote.awake_clock import awake_s
from skyctl.remote.remote_task import TaskError, TaskExit, TaskMessage
from skyctl.run.batch_check import REPEATS, same_tensors, step_fault
from skyctl.run.callbacks import StepProgress
from skyctl.run.journal import EventHistory
from skyctl.run.key_exchange import KeyExchange
from skyctl.run.rank_failure import LOG_TAIL_LINES, EarlyEnd, FailureReport, RankState, accused_rank
from skyctl.run.rank_messages import RankMessageReader, admission_keys
from skyctl.run.rank_spec import RankSpec, holding_specs, last_ranks, owners_of
from skyctl.run.step_collector import StepCollector
from skyctl.run.sum_claims import Claims, describe_claim, wrong_ranks
from skyctl.worker.elastic.witness import QuorumWitness
from skyctl.worker.rank_events import (
    CONNECT_PHASE,
    CheckpointEvent,
    EnvironmentEvent,
    HeartbeatEvent,
    KeyWantedEvent,
    LayerSketches,
    MembersEvent,
    RankEvent,
    RankResult,
    ReadyEvent,
    RoomEvent,
    StepEvent,
    StoredEvent,
    TensorSketch,
    ValidationEvent,
    WitnessAskedEvent,
)
from skyctl.worker.rank_order import RankOrder
from skyctl.worker.rank_requests import (
    AdmitRequest,
    BuildRequest,
    EnterRequest,
    StartRequest,
    StoredRequest,
    WitnessRequest,
)

DRIFT_TOLERANCE = 5e-3
"""How far two copies of a parameter may be apart, relative to its norm; they are compared in float32."""


@dataclass(frozen=True)
class Tell:
    """The launcher is to send ``request`` to the rank of number ``rank``."""

    rank: int
    request: AdmitRequest | BuildRequest | EnterRequest | StartRequest | StoredRequest | WitnessRequest


@dataclass(frozen=True)
class NodesSeen:
    """Every rank has said what is on its node (``facts``, by rank); none goes on before that is judged."""

    facts: Mapping[int, EnvironmentEvent]


@dataclass(frozen=True)
class NodeEnters:
    """A rank that is to enter has said what is on its node: it is told to build once that is judged."""

    rank: int
    facts: EnvironmentEvent


@dataclass(frozen=True)
class CheckpointWritten:
    """Every rank has written its layers after ``step`` steps; by layer, its file."""

    step: int
    shards: Mapping[int, ShardDigest]


@dataclass(frozen=True)
class Remark:
    """A line to show to the user: a note, or a warning (``is_warning``)."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True)
class MembersChanged:
    """The attempt goes on with these ranks alone, of which the first one writes checkpoints."""

    members: tuple[int, ...]


News = Tell | MembersChanged | NodesSeen | NodeEnters | CheckpointWritten | Remark | StepProgress


class AttemptState:
    """The launcher's knowledge of an attempt, from its ranks' first word to their last.

    Attributes:
        specs: of its ranks, by rank.
        ranks: how each of them is.
        collected: the figures of its steps.
        failure: what is known of its end beside the error, once there is one.

    Args:
        nodes: by name, those that have a rank.
        first: the first step that the ranks make.
    """

    def __init__(self, specs: list[RankSpec], nodes: Mapping[str, Node], *, first: int = 0) -> None:
        self.specs = specs
        self.ranks = [RankState(spec) for spec in specs]
        self._first, self._steps = first, specs[0].order.steps
        planned = [spec for spec in specs if not spec.joins]
        self.collected = StepCollector(
            len(holding_specs(planned)),
            self._steps,
            first=first,
            last_ranks=last_ranks(planned),
            owners=owners_of(specs),
            unit="round" if specs[0].rounds is not None else "step",
            is_elastic=specs[0].is_elastic,
        )
        self.failure: FailureReport | None = None
        self._told = 0
        self._readers = [self._reader(spec, nodes[spec.node]) for spec in planned]
        self._planned = len(planned)
        self._facts: dict[int, EnvironmentEvent] = {}
        self._entered: set[int] = set()
        self._ready: dict[int, ReadyEvent] = {}
        self._keys = KeyExchange()
        self._drifted: set[int] = set()
        self._witness = QuorumWitness()
        self._generation = 0
        self._is_adopted = False
        self._may_end_early = False
        if specs[0].may_stop_early:
            self.let_end_early()
        for spec in specs[len(planned) :]:
            self._admit(spec, nodes[spec.node])

    @property
    def is_starting(self) -> bool:
        """Whether some rank has not said yet that it is ready to start (``ReadyEvent``)."""
        return len(self._ready) < self._planned

    @property
    def has_returned(self) -> bool:
        """Whether every rank has sent its result, and so has ended well."""
        ended = [rank for rank in self.ranks if rank.result is not None]
        return len(ended) == len(self.ranks) or (
            bool(ended) and all(rank.result is not None or self.goes_on_without(rank) for rank in self.ranks)
        )

    def goes_on_without(self, rank: RankState) -> bool:
        """Whether the attempt goes on, or may yet, though that rank has failed or is left out."""
        order = rank.spec.order
        if not isinstance(order, RankOrder) or order.elastic is None or not self.has_started:
            return False
        if rank.is_out or rank.is_joining:
            return True
        if accused_rank(rank) is not None:  # it may be right: those that are left could train on another sum
            return False
        return (
            rank.failure is not None and len({r.spec.pipeline for r in self.members}) >= order.elastic.least
        )

    @property
    def members(self) -> list[RankState]:
        """The ranks that make steps, as far as is known: those of pipelines that are there in full."""
        away = [r for r in self.ranks if r.failure is not None or r.is_out or r.is_joining]
        torn = {r.spec.pipeline for r in away}
        return [r for r in self.ranks if r.spec.pipeline not in torn]

    @property
    def results(self) -> dict[int, RankResult]:
        """By rank, what it returned, as far as it has."""
        return {rank.spec.rank: rank.result for rank in self.ranks if rank.result}

    @property
    def has_stopped_early(self) -> bool:
        """Whether a rank has ended the run, as validations were no better."""
        return any(result.stopped_early for result in self.results.values())

    @property
    def has_started(self) -> bool:
        """Whether the ranks were told to start."""
        return self._is_adopted or not self.is_starting

    @property
    def has_begun(self) -> bool:
        """Whether a step of the attempt has ended."""
        return self.collected.reported > self.collected.first

    # --- ranks that enter

    def admit(self, spec: RankSpec, node: Node) -> None:
        """A rank of the next number is started: all others let it in."""
        self.specs.append(spec)
        self.ranks.append(RankState(spec))
        self._admit(spec, node)

    def lacks_keys(self, number: int) -> set[int]:
        """The ranks that have not said yet where they listen for one that is to enter."""
        hosts = self.specs[number].order.world.hosts
        return {r for r in hosts if not all(map(self._keys.has, admission_keys(r, number)))}

    def leave_out(self, number: int, why: SkyctlError | None = None) -> None:
        """That rank is not one of those that make steps, and does not become one; ``why``: it is given up."""
        rank = self.ranks[number]
        rank.is_joining, rank.is_out, rank.failure = False, True, rank.failure or why

    def _admit(self, spec: RankSpec, node: Node) -> None:
        for reader in self._readers:
            reader.admit(spec.rank)
        self._readers.append(self._reader(spec, node))
        self._readers[-1].may_end_early = self._may_end_early
        self.ranks[spec.rank].is_joining = True
        self.collected.admit(spec.rank)

    def _reader(self, spec: RankSpec, node: Node) -> RankMessageReader:
        return RankMessageReader(spec, node, len(self.specs), self._first, self._steps)

    # --- what comes of a rank

    def read(self, number: int, message: Mapping[str, Any]) -> TaskMessage | None:
        """A message of a rank as its record; None where no rank says that, or this one said such before."""
        rank = self.ranks[number]
        if isinstance(rank.failure, ProtocolError):
            return None
        rank.heard_at = awake_s()
        try:
            return self._readers[number].read(message)
        except ProtocolError as exc:
            rank.failure = exc
            return None

    def accept(
        self, number: int, event: RankEvent | LogEvent | TaskError | TaskExit
    ) -> RankEvent | LogEvent | None:
        """Takes an event of a rank in its turn; None where it ends the rank, whose ``failure`` it is then."""
        rank, reader = self.ranks[number], self._readers[number]
        try:
            reader.accept(event)
        except ProtocolError as exc:
            rank.failure = exc
            return None
        if isinstance(event, RankResult) and event.ended_by is not None and reader.is_early(event):
            rank.failure = EarlyEnd(event.steps, event.ended_by)
            return None
        if isinstance(event, TaskError | TaskExit):
            rank.failure = rank.failure or event
            return None
        if isinstance(event, LogEvent):
            rank.tail = (rank.tail + event.text.splitlines())[-LOG_TAIL_LINES:]
        return event

    def replay(self, past: EventHistory, told: int) -> Iterator[News]:
        """Takes in what another process had heard and written down; yields the steps that it had not told of.

        Args:
            told: steps that it had told of.
        """
        self._told, self._is_adopted = told, True
        for number, message in past:
            rank = self.ranks[number]
            event = self._readers[number].read_again(message)
            if isinstance(event, TaskError | TaskExit | ProtocolError):
                rank.failure = rank.failure or event
            elif event is not None:
                yield from self.report(number, event, tell=False)

    def let_end_early(self) -> None:
        """The run may end before its last step from now on: somebody has asked for that."""
        self._may_end_early = True
        for reader in self._readers:
            reader.may_end_early = True

    def note_phase(self, number: int, event: HeartbeatEvent) -> None:
        """A rank that waits for its peers to connect only waits, whatever it says.

        One that enters is given its weights meanwhile.
        """
        rank = self.ranks[number]
        waiting = event.waiting or (event.phase == CONNECT_PHASE and not rank.spec.joins)
        rank.enter_phase(event.phase, waiting=waiting)

    # --- while the ranks come together

    def come_together(self, number: int, event: RankEvent | LogEvent) -> Iterator[News]:
        """Takes in one event of a rank that starts, and says whom to tell what.

        Raises:
            WorkloadError: two ranks that hold a layer begin with other weights.
            ProtocolError: a rank says what is wrong of the gradients that it sums.
            RunError: ranks do not say the same of these, and nothing tells who is wrong.
        """
        rank = self.ranks[number]
        if isinstance(event, EnvironmentEvent):
            self._facts[number] = event
            rank.enter_phase("telling what is here", waiting=True)
            if len(self._facts) == len(self.ranks):
                yield NodesSeen(self._facts)
                yield from self._let_build()
        elif isinstance(event, RoomEvent):
            if event.place:
                yield Remark(f"{rank.name} waits for memory that other runs hold, as number {event.place}")
            else:
                self._entered.add(number)
                rank.enter_phase("waiting to build", waiting=True)
                yield from self._let_build()
        elif isinstance(event, StoredEvent | KeyWantedEvent):
            for other, answer in self._keys.answers(number, event):
                yield Tell(other, answer)
        elif isinstance(event, ReadyEvent):
            self._ready[number] = event
            rank.enter_phase(CONNECT_PHASE, waiting=True)
            if not self.is_starting:
                self.check_beginnings({number: ready.sketches for number, ready in self._ready.items()})
                yield from self._start_all()

    def _let_build(self) -> Iterator[News]:
        """Has the next rank ask for its memory; once none is left that asks for it, all build.

        Every launcher goes through devices in the order of their ids: no two runs wait for each other's.
        """
        asking = [r for r in self.ranks if r.spec.asks_room and r.spec.rank not in self._entered]
        if asking:
            following = min(asking, key=lambda r: (r.spec.device, r.spec.rank))
            yield Tell(following.spec.rank, EnterRequest())
            following.enter_phase("waiting for memory")
            return
        for rank in self.ranks:
            yield Tell(rank.spec.rank, BuildRequest())
            rank.enter_phase("build")

    def check_beginnings(self, sketches: Mapping[int, LayerSketches]) -> None:
        """Compares the weights that ranks begin with, before they are told to start.

        Args:
            sketches: by rank, of the layers that it holds.

        Raises:
            WorkloadError: two ranks hold a layer, and with other weights.
        """
        for layer, rank, first in self._unlike(sketches):
            here, there = self.specs[rank].device, self.specs[first].device
            error = WorkloadError(
                f"layer {layer} begins with other weights on {here} than on {there}: model() takes "
                "numbers that no seed fixes, or files that differ",
                hint="draw from torch's, NumPy's or Python's own generator, which skyctl seeds, and "
                "not from numpy.random.default_rng() or the clock; or begin with --init-from FILE",
            )
            raise self._final(error)

    def _start_all(self) -> Iterator[News]:
        """Tells all to start; helpers hear how many numbers the others sum, who must all say the same."""
        claims = {spec.rank: self._ready[spec.rank].sums for spec in holding_specs(self.specs)}
        agreed = claims[0]
        if len(claims) < len(self.specs) and (agreed is None or len(set(claims.values())) > 1):
            raise self._sums_error(claims)
        for rank in self.ranks:
            yield Tell(rank.spec.rank, StartRequest(agreed if rank.spec.helps else None))
            rank.enter_phase(f"{self.collected.unit} {self.collected.first}")

    def _sums_error(self, claims: Claims) -> SkyctlError:
        """The error where ranks do not say the same of what they sum: who is wrong, if that can be known."""
        first = {claim: rank for rank, claim in reversed(list(claims.items()))}
        texts = [f"{self.ranks[rank].name} sums {describe_claim(claim)}" for claim, rank in first.items()]
        if wrong := wrong_ranks(claims, self.specs):
            liar = self.specs[wrong[0]]
            self.failure = FailureReport("lost", (liar.node,), (liar.rank,), self.collected.reported)
            return ProtocolError(
                f"node {liar.node} says what is wrong of the gradients that it sums: {'; '.join(texts)}",
                node=liar.node,
            )
        nodes = ", ".join(dict.fromkeys(self.specs[rank].node for rank in claims))
        error = RunError(
            f"nodes {nodes} hold the same layers and do not say the same of what they sum, and nothing tells "
            f"which of them is wrong: {'; '.join(texts)}",
            hint="plan it without a helper, or leave one of these nodes out: --limit",
        )
        return self._final(error)

    # --- while they train

    def report(self, number: int, event: RankEvent | LogEvent, *, tell: bool = True) -> Iterator[News]:
        """Takes in one event of a running rank, and says what is to be told of it.

        Args:
            tell: False: another process has told of it, but for the steps that it had not come to.

        Raises:
            RunError: the run's figures show that it can't go on.
        """
        rank = self.ranks[number]
        if isinstance(event, StepEvent):
            self.collected.add(number, event)
            rank.enter_phase(f"{self.collected.unit} {event.step + 1}")
            yield from self._ended_steps(tell)
        elif isinstance(event, ValidationEvent):
            if not math.isfinite(event.loss):
                error = RunError(
                    f"the validation loss after {self.collected.unit} {event.step + 1} is {event.loss}",
                    hint="the training loss is finite: look at what validation() gives, and at layers that "
                    "behave differently in eval()",
                )
                raise self._final(error)
            self.collected.add_validation(number, event)
            yield from self._ended_steps(tell)
        elif isinstance(event, CheckpointEvent):
            if event.error and tell:
                yield Remark(f"{rank.name} could not write its checkpoint: {event.error}", is_warning=True)
            shards = self.collected.add_checkpoint(number, event)
            if shards is not None and tell:
                yield from self._drift(self.collected.checkpoint_events(event.step))
                yield CheckpointWritten(event.step, shards)
        elif isinstance(event, MembersEvent):
            if not rank.is_joining:  # the others say so, too
                yield from self._change_members(event, tell)
        elif isinstance(event, WitnessAskedEvent):
            answer = self._witness.answer(event)
            if tell:
                yield Tell(number, answer)
        elif isinstance(event, RankResult):
            rank.result = event
        elif isinstance(event, StoredEvent | KeyWantedEvent):
            for other, stored in self._keys.answers(number, event):
                if tell:
                    yield Tell(other, stored)
        elif isinstance(event, EnvironmentEvent) and rank.is_joining and tell:
            yield NodeEnters(number, event)
        elif isinstance(event, ReadyEvent) and rank.is_joining:
            rank.enter_phase("entering")

    def _change_members(self, event: MembersEvent, tell: bool) -> Iterator[News]:
        """Ranks go on without others, or with more: says so once, whoever of them tells it first."""
        if event.number <= self._generation:
            return
        self._generation = event.number
        gone = [r for r in self.ranks if not (r.is_out or r.is_joining) and r.spec.rank not in event.members]
        entered = [r for r in self.ranks if r.is_joining and r.spec.rank in event.members]
        for rank in gone:
            rank.is_out = True
        for rank in entered:
            rank.is_joining = False
        self.collected.change_members(event.members, event.step)
        yield MembersChanged(event.members)
        unit = self.collected.unit
        if tell and entered:
            names = ", ".join(rank.name for rank in entered)
            yield Remark(f"entered in {unit} {event.step + 1}: {names}; {len(event.members)} make it now")
        if tell and gone:
            names = ", ".join(rank.name for rank in gone)
            yield Remark(
                f"lost in {unit} {event.step + 1}: {names}; those that are left ({len(event.members)}) end "
                f"that {unit}, and go on",
                is_warning=True,
            )
        yield from self._ended_steps(tell)

    def _ended_steps(self, tell: bool) -> Iterator[News]:
        for progress in self.collected.complete():
            events = self.collected.events_of(progress.step)
            specs = [self.specs[rank] for rank in self.collected.ranks_at(progress.step)]
            if fault := step_fault(progress.step, progress.loss, events, specs):
                raise self._final(fault)
            if tell and events[0].batch is not None and events[0].batch.repeats:
                yield Remark(REPEATS)
            if tell or progress.step >= self._told:
                yield progress

    def _drift(self, events: Mapping[int, CheckpointEvent]) -> Iterator[News]:
        """A warning, once, of each device whose parameters are not those of the first that has the layer."""
        sketches = {rank: event.sketches for rank, event in events.items()}
        for layer, rank, first in self._unlike(sketches):
            if rank in self._drifted:
                continue
            self._drifted.add(rank)
            here, there = self.specs[rank].device, self.specs[first].device
            yield Remark(
                f"after {events[rank].step} steps layer {layer} on {here} has drifted from that on {there}, "
                "which is kept: an optimizer that draws random numbers, or a layer's own state, may "
                "make their updates differ",
                is_warning=True,
            )

    @staticmethod
    def _unlike(sketches: Mapping[int, LayerSketches]) -> Iterator[tuple[int, int, int]]:
        """(layer, rank, first rank that holds it) where these two hold other parameters."""
        firsts: dict[int, tuple[int, tuple[TensorSketch, ...]]] = {}
        for rank, layers in sorted(sketches.items()):
            for layer, mine in sorted(layers.items()):
                first, expected = firsts.setdefault(layer, (rank, mine))
                if not same_tensors(expected, mine, DRIFT_TOLERANCE):
                    yield layer, rank, first

    def _final(self, error: SkyctlError) -> SkyctlError:
        """The error of what would come again however often it was tried."""
        self.failure = FailureReport("raised", step=self.collected.reported, final=True)
        return error
