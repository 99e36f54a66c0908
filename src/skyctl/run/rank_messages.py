"""Reads what one rank sends, and refuses what that rank can't say then: its node counts as lost.

A message must be of a kind that ranks send, each field with a value that it can have
(``agent.message_fields``), and it must come in its turn: what a rank finds, once; what it stores for others;
that it is ready, once; then its steps one by one, those of a pipeline's last rank with a loss, of the first
pipeline's with validations, and checkpoints of its own layers after them; its result after its last step.
One that enters an attempt under way says with which step it does. Whether figures are true can't be told
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyctl.agent.task_events import LogEvent
from skyctl.errors import InputError, ProtocolError
from skyctl.records.cluster import Node
from skyctl.remote.remote_task import TaskError, TaskExit, TaskMessage, read_task_message
from skyctl.run.expert_figures import read_figures
from skyctl.run.rank_spec import RankSpec
from skyctl.worker.rank_events import (
    RANK_EVENTS,
    CheckpointEvent,
    EnvironmentEvent,
    HeartbeatEvent,
    KeyWantedEvent,
    MembersEvent,
    RankEvent,
    RankResult,
    ReadyEvent,
    RoomEvent,
    StepEvent,
    StoredEvent,
    ValidationEvent,
    WitnessAskedEvent,
)
from skyctl.worker.rank_order import MEMBER_PURPOSE, SUM_PURPOSE

RANK_KINDS: Mapping[str, type] = {cls.kind: cls for cls in (*RANK_EVENTS, LogEvent)}
"""By ``event``, the records of what ranks send."""
MAX_NOTES = 1000
"""Of what a rank says about its checkpoints in an attempt, each once."""
MAX_KEYS, MAX_KEYS_BY_RANK = 64, 8
"""Of the store over which ranks find each other a rank may use so many, and so many more for each rank."""
MAX_PLACE = 10_000
"""No rank waits behind so many others for its memory."""
_START = (EnvironmentEvent, RoomEvent, StoredEvent, KeyWantedEvent, ReadyEvent)


def admission_keys(rank: int, joining: int) -> frozenset[str]:
    """The keys that a rank sets for one that is to enter: where it listens for it."""
    return frozenset(f"{purpose}-listening/{rank}/{joining}" for purpose in (MEMBER_PURPOSE, SUM_PURPOSE))


def own_key_fault(key: str, rank: int) -> str | None:
    """Why a rank may not set a key; None where it may: the second part of its own keys is its number."""
    return None if key.split("/")[1:2] == [str(rank)] else f"{key!r:.80} is not its own to set"


class RankMessageReader:
    """The messages of one rank, in their order: ``read``, then, where it was not heard before, ``accept``.

    ``may_end_early``: the run may have been told to end before its last step.

    Args:
        ranks: how many there are.
        first, steps: the attempt makes steps [first, steps).
    """

    def __init__(self, spec: RankSpec, node: Node, ranks: int, first: int, steps: int) -> None:
        self.may_end_early = False
        self._spec, self._node, self._steps = spec, node, steps
        owned = spec.owner is not None  # then each validates on its own
        # of ranks that may leave any may come to be the first, which validates and writes for all
        self._validating = spec.is_last and (owned or spec.pipeline == 0 or spec.is_elastic)
        self._first, self._next_step = first, first
        self._checkpoint = first
        self._has_entered = not spec.joins
        self._admission_keys: set[str] = set()
        self._notes = self._keys = 0
        self._place = MAX_PLACE
        self._own_keys: set[str] = set()
        self._most_keys = MAX_KEYS + MAX_KEYS_BY_RANK * ranks
        self._validates: int | None = None
        self._seen: set[type] = set()
        self._peers = set(spec.order.world.hosts)

    def admit(self, rank: int) -> None:
        """The rank is told to let another one in, of the next number."""
        self._peers.add(rank)
        self._admission_keys |= admission_keys(self._spec.rank, rank)

    def read(self, message: Mapping[str, Any]) -> TaskMessage:
        """The message as its record. Raises ProtocolError: no rank sends that."""
        return read_task_message(RANK_KINDS, self._node, message)

    def read_again(
        self, message: Mapping[str, Any]
    ) -> RankEvent | TaskError | TaskExit | ProtocolError | None:
        """The event of a message that was written down before, or what is wrong with it; None: a log line."""
        try:
            event: RankEvent | LogEvent | TaskError | TaskExit = self.read(message).event
            self.accept(event)
        except ProtocolError as exc:
            return exc
        return None if isinstance(event, LogEvent) else event

    def accept(self, event: Any) -> None:
        """Takes an event that was read, once, in its turn.

        Raises:
            ProtocolError: it is not this event's turn, or none of this rank's.
        """
        fault = self._fault(event)
        if fault is not None:
            kind = event.event if isinstance(event, TaskError | TaskExit) else event.kind
            raise ProtocolError(
                f"node {self._node.name} sent {kind!r} for rank {self._spec.rank}, but {fault}",
                node=self._node.name,
            )
        if isinstance(event, MembersEvent) and not self._has_entered:
            self._has_entered = True
            self._next_step = self._checkpoint = event.step
        if isinstance(event, StoredEvent) and ReadyEvent in self._seen:
            self._admission_keys.discard(event.key)
            return
        self._seen.add(type(event))
        self._keys += isinstance(event, StoredEvent | KeyWantedEvent)
        if isinstance(event, StoredEvent):
            self._own_keys.add(event.key)
        if isinstance(event, RoomEvent):
            self._place = event.place
        elif isinstance(event, StepEvent):
            self._next_step = event.step + 1
            self._validates = event.step if event.validates else None
        elif isinstance(event, ValidationEvent):
            self._validates = None
        elif isinstance(event, CheckpointEvent):
            self._checkpoint = event.step
            self._notes += len(event.notes)

    def _fault(self, event: Any) -> str | None:
        """Why the rank can't say that now, or None."""
        if isinstance(event, LogEvent | HeartbeatEvent):
            return None
        if self._seen & {TaskError, TaskExit}:
            return "it had failed before"
        if isinstance(event, TaskError | TaskExit):
            accused = event.peer_rank if isinstance(event, TaskError) else None
            return None if accused is None or accused in self._peers else f"rank {accused} sends it nothing"
        if RankResult in self._seen:
            return "it had ended before"
        if isinstance(event, _START):
            return self._fault_of_start(event)
        if ReadyEvent not in self._seen:
            return "it is not ready yet"
        if self._spec.helps:
            return self._fault_of_helper(event)
        if not (self._has_entered or isinstance(event, MembersEvent)):
            return "it has not entered yet"
        if isinstance(event, StepEvent):
            return self._fault_of_step(event)
        if isinstance(event, ValidationEvent):
            expected = self._validating and event.step == self._validates
            return None if expected else f"there is none after step {event.step}"
        if isinstance(event, CheckpointEvent):
            return self._fault_of_checkpoint(event)
        if isinstance(event, MembersEvent | WitnessAskedEvent):
            return self._fault_of_members(event)
        try:
            read_figures(event.experts, self._spec.experts, self._steps)
        except InputError as exc:
            return exc.message
        if event.steps != self._next_step:
            return f"it has told of {self._next_step} steps, not of {event.steps}"
        if self._lacks_validation:
            return f"not of the validation after step {self._validates}"
        if event.stopped_early and not (self._spec.rank == 0 and self._spec.may_stop_early):
            return "it has not to decide that the run ends"
        if self.is_early(event) and event.ended_by not in self._peers:
            return f"the run has {self._steps} steps, not {event.steps}"
        return None

    def is_early(self, result: RankResult) -> bool:
        """Whether the rank has ended before the run's last step, and nobody had asked for that."""
        return result.steps < self._steps and not self.may_end_early

    def _fault_of_helper(self, event: RankEvent) -> str | None:
        """Of a rank that holds no layers: it tells of its end alone."""
        if not isinstance(event, RankResult):
            return "it holds no layers"
        if event.steps > self._steps or (self.is_early(event) and event.ended_by not in self._peers):
            return f"the run has {self._steps} steps, not {event.steps}"
        return None

    def _fault_of_start(self, event: RankEvent) -> str | None:
        if ReadyEvent in self._seen:
            is_asked = isinstance(event, StoredEvent) and event.key in self._admission_keys
            return None if is_asked else "it is ready already"
        if isinstance(event, StoredEvent | KeyWantedEvent):
            if self._keys >= self._most_keys:
                return f"it has used {self._most_keys} keys, the most"
            return self._fault_of_key(event.key) if isinstance(event, StoredEvent) else None
        if isinstance(event, RoomEvent):
            is_asked = self._spec.asks_room and EnvironmentEvent in self._seen
            return None if is_asked and event.place < self._place else f"its place can't be {event.place}"
        return "it had said so before" if type(event) in self._seen else None

    def _fault_of_key(self, key: str) -> str | None:
        fault = own_key_fault(key, self._spec.rank)
        return fault or ("it had set that key before" if key in self._own_keys else None)

    def _fault_of_step(self, event: StepEvent) -> str | None:
        if event.step != self._next_step:
            return f"step {self._next_step} comes next, not step {event.step}"
        if event.step >= self._steps:
            return f"the run has {self._steps} steps"
        if self._lacks_validation:
            return f"not the validation after step {self._validates}"
        if event.validates and self._spec.is_last and not self._validating:
            return "the first pipeline validates"
        return "it has no loss" if self._spec.is_last and event.loss is None else None

    def _fault_of_members(self, event: MembersEvent | WitnessAskedEvent) -> str | None:
        if not self._spec.is_elastic:
            return "its attempt ends where a rank is lost"
        if isinstance(event, WitnessAskedEvent):
            return (
                None if (event.prepare is None) != (event.accept is None) else "it asks for nothing, or twice"
            )
        everybody = {self._spec.rank, *self._peers}
        if self._spec.rank not in event.members or not everybody.issuperset(event.members):
            return f"its members are ranks {', '.join(map(str, event.members))[:80]}"
        if not (self._has_entered or self._first <= event.step < self._steps):
            return f"it enters with step {event.step}"
        return None

    @property
    def _lacks_validation(self) -> bool:
        return self._validating and self._validates is not None

    def _fault_of_checkpoint(self, event: CheckpointEvent) -> str | None:
        if event.step != self._next_step or event.step <= self._checkpoint:
            return f"it has told of {self._next_step} steps, not of {event.step}"
        if self._notes + len(event.notes) > MAX_NOTES:
            return f"it has {MAX_NOTES} notes at most"
        own = self._spec.layers
        if set(event.sketches) - set(own):
            return f"its layers are [{own.start}, {own.stop})"
        if self._spec.is_elastic and not event.layers:
            return None
        if self._spec.pipeline != 0 and not self._spec.is_elastic:
            return "the first pipeline writes its layers" if event.layers else None
        if event.error is None and set(event.layers) != set(own):
            return f"its layers are [{own.start}, {own.stop})"
        for layer, shard in event.layers.items():
            limit = self._spec.shard_limits.get(layer)
            if limit is not None and shard.bytes > limit:
                return f"layer {layer} has {limit} bytes at most, not {shard.bytes}"
        return None
