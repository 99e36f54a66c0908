"""Sums over routes: partial sums go up a tree to its root, and the sum comes down one, chunk by chunk.

A rank adds its children's chunks to its own in a fixed order, so the same plan gives the same bits. The root
encodes the sum once and takes its own encoding (``sum_codecs``), so that every rank ends with the same bytes.
A chunk is sent once the rank's own numbers are there, so a sum goes on beside whatever makes the numbers of
later buckets. Two threads a route, one for each direction. Chunks are added in host memory, in parts so small
that torch uses one thread for them: the others are the layers'.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from skyctl.errors import RunError
from skyctl.transport.transfer_errors import SpoiltPartError, SpoiltSumError
from skyctl.transport.work import Work
from skyctl.worker.peer import FIRST_SUM_TAG, Peer
from skyctl.worker.rank_order import RoutePlace, SumGroupOrder
from skyctl.worker.sums.sum_codecs import SumCodec, is_finite, make_sum_codec
from skyctl.worker.sums.sum_messages import (
    AGREEMENT,
    DOWN,
    UP,
    IncomingMessages,
    OutgoingMessages,
    SumMessage,
    SumStamp,
    messages_under_way,
)
from skyctl.worker.sums.sum_work import SumWork

Tensor = torch.Tensor
_PostedAgreement = tuple[SumMessage, Work, Peer]


class RouteSum:
    """One rank's part in the sums of one group; ``begin`` then ``SumWork.wait``, one sum at a time.

    Attributes:
        ended_by: the rank that was first to say, in the first byte that is agreed on, that the run ends;
            None: nobody has, or this rank has itself.

    Args:
        group: the group's number in the plan.
        routes: this rank's place on each of its routes, in the plan's order.
        peers: by rank, each that a route joins this one with.
        first_tag: the first of ``2 + 2 * len(routes)`` tags that no other group has.
        agreement: the place on the tree over which ranks agree; None: that on the first route.
        add_up: sums a flat tensor over all ranks in place, by a collective of the backend's own that does in
            one call what equal shares of a ring do; None: chunks go over the routes.
    """

    def __init__(
        self,
        group: int,
        routes: Sequence[RoutePlace],
        peers: Mapping[int, Peer],
        first_tag: int = FIRST_SUM_TAG,
        agreement: RoutePlace | None = None,
        add_up: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.routes = tuple(routes)
        self._agreement = agreement or self.routes[0]
        self._group, self._peers, self._first_tag = group, peers, first_tag
        self._inboxes: list[queue.SimpleQueue[SumWork | None]] = []
        self._sum_work: SumWork | None = None
        self._agreements: list[_PostedAgreement] = []
        self._agreed: _PostedAgreement | None = None
        self.ended_by: int | None = None
        self._has_ended = False
        self._threads: list[threading.Thread] = []
        self._add_up = add_up
        if add_up is not None:
            self._start_thread(self._sum_buckets, 0, "ring")
        for number, route in enumerate(routes if add_up is None else ()):
            if route.adds or not peers:
                self._start_thread(self._sum_up, number, "up")
            if route.down_parent is not None:
                self._start_thread(self._take_down, number, "down")

    @classmethod
    def from_order(cls, group: SumGroupOrder, peers: Mapping[int, Peer]) -> RouteSum:
        """A rank's part in the sums of one group of its order.

        Args:
            peers: by rank, at least those that a route joins this one with.
        """
        add_up = cast("Any", dist.group.WORLD).sum_in_ring if group.ring is not None else None
        first_tag = FIRST_SUM_TAG + group.first_tag
        return cls(group.number, group.routes, peers, first_tag, group.agreement, add_up)

    def begin(self, sum_work: SumWork, agreed_bytes: int = 0) -> None:
        """Begins a sum; its buckets may come later.

        Args:
            agreed_bytes: how many bytes ``agree`` will be given in this sum; 0: it will not be called.
        """
        self._sum_work = sum_work
        sum_work.begin(len(self._inboxes))
        if agreed_bytes:
            route = self._agreement
            nbytes = agreed_bytes + 1  # whether somebody's numbers are not tame
            self._agreements = [self._post_agreement(child, UP, nbytes) for child in route.up_children]
            if route.down_parent is not None:
                self._agreed = self._post_agreement(route.down_parent, DOWN, nbytes)
        for inbox in self._inboxes:
            inbox.put(sum_work)

    def agree(self, own: bytes, largest: int = 1) -> bytes:
        """The maximum of all ranks' bytes, place by place; a helper's are all 0.

        All of this rank's own buckets must be there.

        Args:
            largest: no rank's bytes are larger.

        Raises:
            RunError: a peer is gone, or has sent something else; or what ended the sum.
        """
        assert self._sum_work is not None, "begin() first"
        try:
            return self._agree(own, largest)
        except RunError:
            error = self._sum_work.error
            if error is None:
                raise
        raise error  # not in the handler: where it is the same one, it would be its own cause

    def agree_later(self, own: bytes, largest: int = 1) -> None:
        """As ``agree``, in the background: ``SumWork.wait`` waits for it, too."""
        assert self._sum_work is not None, "begin() first"
        sum_work = self._sum_work
        sum_work.add_thread()

        def run() -> None:
            try:
                sum_work.agreed = self._agree(own, largest)
                sum_work.agreed_at = time.perf_counter()
            except BaseException as exc:  # noqa: BLE001 — raised where the sum is waited for
                self._fail(sum_work, exc)
            sum_work.finish_thread()

        threading.Thread(target=run, daemon=True, name=f"agreement group {self._group}").start()

    def close(self) -> None:
        """Ends the threads, once their connections are closed."""
        if self._sum_work is not None:
            self._sum_work.fail(RunError("the sum was given up"))
        for inbox in self._inboxes:
            inbox.put(None)
        self._inboxes.clear()

    def join(self) -> None:
        """After ``close``: until the threads have ended, which close connections where a sum has failed."""
        for thread in self._threads:
            thread.join()

    def _agree(self, codes: bytes, largest: int) -> bytes:
        route, sum_work = self._agreement, self._sum_work
        assert sum_work is not None
        codes += bytes([not sum_work.is_tame])
        self._note_end(codes, None)
        for child, posted in zip(route.up_children, self._agreements, strict=True):
            codes = bytes(map(max, codes, self._receive_agreement(posted, UP, largest)))
            self._note_end(codes, child)
        works = []
        if route.up_parent is not None:
            works.append(self._send_agreement(route.up_parent, UP, codes))
        if self._agreed is not None:
            codes = self._receive_agreement(self._agreed, DOWN, largest)
            self._note_end(codes, route.down_parent)
        works += [self._send_agreement(child, DOWN, codes) for child in route.down_children]
        for _, work in works:
            work.wait()
        self._agreements, self._agreed = [], None
        sum_work.all_tame = not codes[-1]
        return codes[:-1]

    def _note_end(self, codes: bytes, by: int | None) -> None:
        if codes[0] and not self._has_ended:
            self._has_ended, self.ended_by = True, by

    def _post_agreement(self, rank: int, direction: int, nbytes: int) -> _PostedAgreement:
        message, peer = SumMessage(nbytes), self._peers[rank]
        return message, peer.recv(message.tensor, self._first_tag + direction), peer

    def _send_agreement(self, rank: int, direction: int, codes: bytes) -> tuple[SumMessage, Work]:
        message = SumMessage(len(codes))
        message.fill(codes)
        message.stamp(self._agreement_stamp(direction, len(codes)))
        return message, self._peers[rank].send(message.tensor, self._first_tag + direction)

    def _receive_agreement(self, posted: _PostedAgreement, direction: int, largest: int) -> bytes:
        message, work, peer = posted
        work.wait()
        expected = self._agreement_stamp(direction, message.nbytes)
        message.check(expected, peer)
        payload = message.payload_bytes
        if max(payload) > largest:
            raise peer.protocol_error(f"sent {expected} with bytes above {largest}")
        return payload

    def _agreement_stamp(self, direction: int, nbytes: int) -> SumStamp:
        assert self._sum_work is not None
        return SumStamp(AGREEMENT, self._sum_work.step, self._group, 0, direction, 0, nbytes)

    # --- the threads

    def _start_thread(self, part: Callable[[SumWork, int], None], number: int, way: str) -> None:
        inbox: queue.SimpleQueue[SumWork | None] = queue.SimpleQueue()
        self._inboxes.append(inbox)

        def run() -> None:
            while (sum_work := inbox.get()) is not None:
                try:
                    part(sum_work, number)
                except BaseException as exc:  # noqa: BLE001 — raised where the sum is waited for
                    self._fail(sum_work, exc)
                sum_work.finish_thread()

        name = f"sums group {self._group} route {number} {way}"
        thread = threading.Thread(target=run, daemon=True, name=name)
        self._threads.append(thread)
        thread.start()

    def _fail(self, sum_work: SumWork, error: BaseException) -> None:
        sum_work.fail(error)
        for peer in self._peers.values():  # whoever waits for this rank is to know
            peer.close()

    def _sum_up(self, sum_work: SumWork, number: int) -> None:
        """Adds up every chunk of a route: sends it on, or, at the root, keeps it and sends it down."""
        route, chunks = self.routes[number], sum_work.layout.routes[number]
        if not chunks:
            return
        codec = make_sum_codec(sum_work.format)
        direction = DOWN if route.up_parent is None else UP
        targets = route.down_children if route.up_parent is None else (route.up_parent,)
        stamps = self._stamps(sum_work, number, direction, codec)
        children = [self._incoming(sum_work, number, UP, child, codec) for child in route.up_children]
        outgoing = OutgoingMessages(
            [self._peers[rank] for rank in targets],
            self._tag(number, direction),
            under_way=messages_under_way(stamps),
        )
        for chunk, stamp in zip(chunks, stamps, strict=True):
            sum_work.wait_bucket(chunk.bucket)
            message = outgoing.take(stamp.nbytes)
            total = codec.total(message.payload, chunk.numel)
            sum_work.gather(chunk, total)
            for child in children:
                received = child.take()
                codec.add(total, received.payload)
                child.release(received)
            codec.encode(total, message.payload)
            if route.up_parent is None or sum_work.errors is not None:
                decoded = codec.decode(message.payload, chunk.numel)
                if route.up_parent is None:
                    sum_work.scatter(chunk, decoded)
                if sum_work.errors is not None:
                    sum_work.keep_error(chunk, total.sub_(decoded))
            message.stamp(stamp)
            outgoing.send(message)
        outgoing.drain()

    def _sum_buckets(self, sum_work: SumWork, _number: int) -> None:
        """Sums bucket after bucket by the backend's own collective."""
        assert self._add_up is not None
        for bucket in range(sum_work.layout.buckets):
            sum_work.wait_bucket(bucket)
            bucket_sum = sum_work.sum_bucket(bucket, self._add_up)
            if not is_finite(bucket_sum):
                problem = f"the sum of step {sum_work.step}, group {self._group}, bucket {bucket} is not "
                problem += "finite, and what ranks add up is"
                sum_work.doubt(SpoiltSumError(problem, peer_rank=None))

    def _take_down(self, sum_work: SumWork, number: int) -> None:
        """Takes every chunk's sum of a route, and sends it on as it is."""
        route, chunks = self.routes[number], sum_work.layout.routes[number]
        if not chunks:
            return
        assert route.down_parent is not None
        codec = make_sum_codec(sum_work.format)
        parent = self._incoming(sum_work, number, DOWN, route.down_parent, codec)
        targets = [self._peers[rank] for rank in route.down_children]
        tag = self._tag(number, DOWN)
        outgoing = OutgoingMessages(targets, tag, parent.release, under_way=max(2, parent.under_way // 2))
        for chunk in chunks:
            sum_work.wait_bucket(chunk.bucket)
            message = parent.take()
            sum_work.scatter(chunk, codec.decode(message.payload, chunk.numel))
            outgoing.send(message)
        outgoing.drain()

    def _incoming(
        self, sum_work: SumWork, number: int, direction: int, rank: int, codec: SumCodec
    ) -> IncomingMessages:
        stamps, chunks = self._stamps(sum_work, number, direction, codec), sum_work.layout.routes[number]
        peer = self._peers[rank]

        def fault(place: int, payload: Tensor) -> str | None:
            numel = chunks[place].numel
            if (flaw := codec.fault(payload, numel)) is None and not codec.is_finite(payload, numel):
                problem = f"sent {stamps[place]} with NaN or infinity, and what ranks add up is finite"
                kind = SpoiltPartError if direction == UP else SpoiltSumError
                sum_work.doubt(kind(f"{peer.name} {problem}", peer_rank=rank))
            return flaw

        return IncomingMessages(peer, self._tag(number, direction), stamps, fault)

    def _stamps(self, sum_work: SumWork, number: int, direction: int, codec: SumCodec) -> list[SumStamp]:
        """The stamps that the messages of a route's chunks must have."""
        return [
            SumStamp(
                sum_work.kind, sum_work.step, self._group, number, direction, place, codec.nbytes(chunk.numel)
            )
            for place, chunk in enumerate(sum_work.layout.routes[number])
        ]

    def _tag(self, number: int, direction: int) -> int:
        return self._first_tag + 2 + 2 * number + direction
