"""The weights and the optimizer's state that a new member is given by those that have them.

Each holder gives some of the layers, as the shards that checkpoints are made of (``checkpoint.node.shards``),
over its line to the new member. They are of the first step of the generation that has the new member: no
later one takes effect before its vote, so weights stay as they are meanwhile. The state that ranks share
for their sums comes from the first holder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from skyctl.checkpoint.node import layout
from skyctl.checkpoint.node.shards import StageState
from skyctl.errors import RunError
from skyctl.transport.transfer_errors import PeerProtocolError
from skyctl.worker.checkpointer import ShardOrigin
from skyctl.worker.elastic.membership import Membership
from skyctl.worker.member_messages import Generation, StatePart
from skyctl.worker.rank_order import JoinOrder, ResumePoint

PART_BYTES = 1 << 18
"""Small enough for a sign of life to come between two parts, large enough not to count."""
MOST_SHARED_BYTES = 1 << 20
_LOOK_S = 0.2


def holder_of(generation: Generation, layer: int) -> int:
    """Which member gives a layer to those that are new."""
    return generation.holders[layer % len(generation.holders)]


class StateGiver:
    """A holder's part: ``give`` for each generation with new members.

    Args:
        rank: this one's.
        folder: for the shards, as long as they are sent.
        state: of this rank's layers, which are all of the model's.

    Attributes:
        shared: gives what ranks share for their sums; set before the first step.
    """

    def __init__(self, rank: int, folder: Path, state: StageState, origin: ShardOrigin) -> None:
        self._rank, self._folder, self._state, self._origin = rank, folder, state, origin
        self.shared: Callable[[], bytes] = bytes

    def give(self, members: Membership, generation: Generation) -> None:
        """Sends this rank's part, until all is there or there is a newer generation."""
        if not members.wait_begun(generation):
            return
        step, origin = generation.first_step, self._origin
        if self._rank == generation.holders[0]:
            shared = self.shared()
            for rank in generation.new:
                members.send_part(rank, StatePart(generation.number, None, len(shared)), shared)
        for position, layer in enumerate(range(origin.start, origin.stop)):
            if holder_of(generation, layer) != self._rank:
                continue
            path = layout.make_folder(self._folder) / f"given-{generation.number}-{layer}.safetensors"
            try:
                digest = self._state.write(position, path, origin.stamp(step, layer))
                for rank in generation.new:
                    if not self._send(members, rank, generation.number, layer, path, digest.sha256):
                        return
            finally:
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def _send(self, members: Membership, rank: int, number: int, layer: int, path: Path, sha256: str) -> bool:
        left = path.stat().st_size
        with path.open("rb") as file:
            while left and members.generation.number == number:
                data = file.read(PART_BYTES)
                left -= len(data)
                part = StatePart(number, layer, len(data), None if left else sha256)
                if not members.send_part(rank, part, data):
                    return False
        return not left


class StateReceiver:
    """A new member's part: ``take`` each part that comes, ``wait`` for all of them.

    Args:
        layers: how many the model has.
    """

    def __init__(self, order: JoinOrder, layers: int) -> None:
        self._order, self._layers = order, layers
        self._lock = threading.Lock()
        self._number = -1
        self._got: dict[int, tuple[int, str]] = {}
        self._sizes: dict[int, int] = {}
        self._shared: tuple[int, bytes] | None = None

    def take(self, rank: int, part: StatePart, data: bytes) -> None:
        """One part, from that rank. Raises PeerProtocolError where it can't be one."""
        with self._lock:
            if part.number < self._number:
                return
            if part.number > self._number:
                self._number, self._got, self._sizes, self._shared = part.number, {}, {}, None
            if part.layer is None:
                if len(data) > MOST_SHARED_BYTES or self._shared is not None:
                    raise _fault(rank, "tells twice what ranks share, or too much")
                self._shared = rank, data
                return
            layer = part.layer
            size = self._sizes.get(layer, 0) + len(data)
            if layer >= self._layers or size > self._order.most_bytes.get(layer, 0) or layer in self._got:
                raise _fault(rank, f"gives {size} bytes of layer {layer}, which it can't have")
            path = self._path(layer)
            try:
                layout.make_folder(path.parent)
                with path.open("ab" if layer in self._sizes else "wb") as file:
                    file.write(data)
            except OSError as exc:
                raise RunError(f"{path} can't be written: {exc.strerror or exc}") from exc
            self._sizes[layer] = size
            if part.sha256 is not None:
                self._got[layer] = rank, part.sha256

    def wait(self, members: Membership) -> tuple[ResumePoint, bytes]:
        """Waits for all of it; returns where it lies, and what ranks share for their sums.

        Raises:
            PeerProtocolError: a part is not from the rank that was to give it.
            RunError: the members that are left may not go on.
        """
        while True:
            generation = members.look(_LOOK_S)
            with self._lock:
                is_whole = self._number == generation.number and len(self._got) == self._layers
                if is_whole and self._shared is not None:
                    return self._check(generation), self._shared[1]

    def _check(self, generation: Generation) -> ResumePoint:
        assert self._shared is not None
        if self._shared[0] != generation.holders[0]:
            raise _fault(self._shared[0], "tells what ranks share, which is not for it to tell")
        digests = {}
        step, folder = generation.first_step, self._order.folder
        layout.make_step_folder(folder, step)
        for layer, (rank, sha256) in self._got.items():
            path = self._path(layer)
            if rank != holder_of(generation, layer):
                raise _fault(rank, f"gives layer {layer}, which is not for it to give")
            path.replace(layout.layer_path(folder, step, layer))
            digests[layer] = sha256
        return ResumePoint(step, folder, digests)

    def _path(self, layer: int) -> Path:
        return self._order.folder / f"incoming-{layer}"


def _fault(rank: int, what: str) -> PeerProtocolError:
    return PeerProtocolError(f"rank {rank} {what}", peer_rank=rank)
