"""A process group of anybody's own script: ``init_process_group("skyctl")``, each rank connected to each.

Every pair proves a secret that all ranks have been given, before anything else is said. Collectives run in
the order in which they are called, in a thread of the group's own: all ranks must call the same ones.

A group may get other members without new processes (``reconfigure``), by the experimental contract of torch
since 2.14. A member's handle says where it listens, and has a random part that tells it from all others.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from skyctl.agent.network_interfaces import local_address_towards
from skyctl.errors import RunError
from skyctl.transport.collectives import CollectiveWork, reduce_into, reduction_of
from skyctl.transport.group_secret import secret_of_process
from skyctl.transport.peer_connection import PeerConnection
from skyctl.transport.planned_process_group import PairOptions, Store
from skyctl.transport.process_group import SkyctlProcessGroup, read_address, read_listening, run_in_thread
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.transport.work import Work

Tensor = torch.Tensor

COLLECTIVE_TAG = 8
"""Of the connection's own tags (``peer_connection.FIRST_TAG``), that of all collectives."""
_PIECE_BYTES = 1 << 20
"""Of a ring's messages: while one is added, the next is on its way."""


@dataclass(frozen=True)
class MeshOptions:
    """The ``pg_options`` of ``init_process_group("skyctl", …)`` in a script of one's own.

    Attributes:
        secret: what all ranks share, and nobody else; None: the environment says where it is.
        address: at which the others reach this rank; None: the one on the route to ``MASTER_ADDR``, and on
            loopback without one.
        identity: the TLS certificate of all ranks; None: nothing is encrypted.
        interface: the network interface to use; None: the one on the route to each peer.
        store: where ranks find each other; None: in torch's own.
        enable_reconfigure: nothing connects before the first ``reconfigure``, as with torch's own option of
            that name (2.14).
    """

    secret: bytes | None = None
    address: str | None = None
    identity: TlsIdentity | None = None
    interface: str | None = None
    store: Store | None = None
    enable_reconfigure: bool = False


class MeshProcessGroup(SkyctlProcessGroup):
    """All ranks of a group, each connected to each: ``send``, ``recv`` and collectives.

    Args:
        rank, size: of this process, and of all.
        pairs: by rank, the connection to each other one.
        timeout: for each transfer, waiting for the peer included.
        options: what is needed to ``reconfigure``.

    Attributes:
        rehearses: nothing is exchanged, and each rank counts as having what this one has: a user's code is
            tried out, perhaps on tensors without values, and not by all ranks alike. So it is with one rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        pairs: Mapping[int, PeerConnection],
        timeout: timedelta,
        options: MeshOptions | None = None,
    ) -> None:
        super().__init__(rank, size, pairs)
        self._rank, self._size = rank, size
        self.rehearses = size == 1
        self._timeout = timeout
        self._options = options or MeshOptions()
        self._handle = ""
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_calls, daemon=True, name="collectives")
        self._thread.start()

    def rank(self) -> int:
        """This process's rank among the group's present members."""
        return self._rank

    def size(self) -> int:
        """How many members the group has at present."""
        return self._size

    @classmethod
    def meet(cls, request: Any, options: MeshOptions) -> MeshProcessGroup:
        """The group that torch wants made, once all of its ranks are connected.

        Args:
            request: torch's ``DistributedBackendOptions``.

        Raises:
            RunError: there is no secret, or a rank did not come in time, or has another one.
        """
        rank, size = int(request.group_rank), int(request.group_size)
        names = list(request.global_ranks_in_group) or list(range(size))
        pairs: dict[int, PeerConnection] = {}
        hosts: dict[int, str] = {}
        store: Store = options.store or request.store
        if options.enable_reconfigure:
            return cls(rank, size, {}, request.timeout, options)
        if size > 1:
            secret = options.secret or secret_of_process()
            address = options.address or _own_address(os.environ)
            store.set(f"address/{rank}", address)
            for peer in range(size):
                if peer == rank:
                    continue
                hosts[peer] = read_address(store.get(f"address/{peer}"), names[peer])
                low, high = sorted((rank, peer))
                pairs[peer] = PeerConnection(
                    f"rank {names[peer]} ({hosts[peer]})",
                    request.timeout.total_seconds(),
                    secret=hmac.new(
                        secret, f"{request.group_id} {low} {high}".encode(), hashlib.sha256
                    ).hexdigest(),
                    peer_rank=names[peer],
                    identity=options.identity,
                )
        group = cls(rank, size, pairs, request.timeout, options)
        pair_options = PairOptions(hosts, {}, options.interface, ready_s=request.timeout.total_seconds())
        group.connect(store, pair_options)
        return group

    def shutdown(self) -> None:
        """Closes the group, for ``dist.destroy_process_group``: what was sent still arrives."""
        self.close(graceful=True)
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()  # at the interpreter's end torch aborts a process whose thread is in it

    # --- other members, as torch.distributed asks for them since 2.14

    supports_reconfigure = True

    def get_reconfigure_handle(self) -> str:
        """The handle that others need to ``reconfigure``: which member this is, and where it now listens.

        Raises:
            RunError: there is no secret, or no address to listen on, or the group is closed.
        """
        with self._changing:
            if self._is_closed:
                raise RunError("the group is closed, and gets no other members")
            if not self._handle:
                address = self._options.address or _own_address(os.environ, self._options.interface)
                opener = PeerConnection("the other ranks", secret=self._secret().hex())
                listener = opener.open_listener(address)
                self._listeners = {listener: []}
                self._keeps_listening = True
                self._handle = f"{address}:{listener.port}/{secrets.token_hex(8)}"
            return self._handle

    def reconfigure(self, opts: Any) -> CollectiveWork:
        """Makes the members with these handles the group's, and this one's rank its handle's place.

        All of them call it, with the same number and handles. All work under way ends at once, and
        fails. ``rank`` and ``size`` are the new ones once the work is done. If it fails, all connections are
        closed, and it may be called again with another number; so it may be after ``abort``.

        Args:
            opts: torch's ``ReconfigureOptions``: ``uuid``, not used before; ``handles``, in the order of
                ranks; ``timeout`` or None, the group's own.

        Raises:
            RunError: the handles are none, or this member's is not among them. The work raises
                ``NumberUsedError`` where the number was used before, and what ``reconnect`` raises.
        """
        own, handles = self.get_reconfigure_handle(), [str(handle) for handle in opts.handles]
        where = {rank: _read_handle(handle, rank) for rank, handle in enumerate(handles)}
        if handles.count(own) != 1 or len(set(handles)) < len(handles):
            raise RunError(
                f"this member's handle is {own}, and it is there {handles.count(own)} times among "
                f"{', '.join(handles)}",
                hint="each member's get_reconfigure_handle(), once",
            )
        rank, limit = handles.index(own), opts.timeout or self._timeout
        pairs = {peer: self._pair_of(rank, peer, handles, where[peer]) for peer in where if peer != rank}

        def change() -> None:
            emptied: Future[None] = Future()
            self._calls.put((lambda: None, emptied))
            emptied.result()  # what was called before fails: its connections are closed
            self._rank, self._size, self.rehearses = rank, len(handles), len(handles) == 1
            self.peers, self._pairs, self._where = sorted(pairs), pairs, where
            [listener] = self._listeners
            self._listeners = {listener: [peer for peer in pairs if peer > rank]}

        work = partial(self._reconnect, opts.uuid, pairs.keys(), limit.total_seconds(), change)
        return CollectiveWork(run_in_thread(work), [], timedelta())

    def _pair_of(
        self, rank: int, peer: int, handles: Sequence[str], where: tuple[str, int]
    ) -> PeerConnection:
        """The connection to another member, which takes the same handles for the group's."""
        low, high = sorted((rank, peer))
        of_these = f"reconfigure {low} {high} {' '.join(handles)}".encode()
        return PeerConnection(
            f"rank {peer} ({where[0]})",
            self._timeout.total_seconds(),
            secret=hmac.new(self._secret(), of_these, hashlib.sha256).hexdigest(),
            peer_rank=peer,
            identity=self._options.identity,
        )

    def _secret(self) -> bytes:
        return self._options.secret or secret_of_process()

    # --- collectives, as torch.distributed calls them: the parameters' names are torch's

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> CollectiveWork:  # type: ignore[override]
        """As ``dist.all_reduce``: a ring, in which each rank reduces its part, so all get the same bits."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._call(lambda: self._reduce_in_ring(tensors[0], op), tensors)

    def barrier(self, opts: Any = None) -> CollectiveWork:  # type: ignore[override]  # noqa: ARG002
        """As ``dist.barrier``."""
        return self.allreduce([torch.zeros(self.size(), dtype=torch.uint8)])

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> CollectiveWork:  # type: ignore[override]
        """As ``dist.broadcast``: the root sends to each."""
        return self.scatter(tensors, [[tensors[0]] * self.size()], opts)

    def scatter(  # type: ignore[override]
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> CollectiveWork:
        """As ``dist.scatter``."""
        root, own = int(opts.rootRank), self.rank()
        if own == root:
            return self._exchange(dict(enumerate(inputs[0])), {root: outputs[0]})
        return self._exchange({}, {root: outputs[0]})

    def gather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> CollectiveWork:
        """As ``dist.gather``."""
        root, own = int(opts.rootRank), self.rank()
        return self._exchange({root: inputs[0]}, dict(enumerate(outputs[0])) if own == root else {})

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> CollectiveWork:  # type: ignore[override]
        """As ``dist.reduce``: the root reduces in the order of ranks."""
        root, op = int(opts.rootRank), opts.reduceOp
        if self.rank() != root:
            return self._exchange({root: tensors[0]}, {})
        parts = [torch.empty_like(tensors[0]) for _ in range(self.size())]
        return self._exchange(
            {root: tensors[0]}, dict(enumerate(parts)), lambda: reduce_into(tensors[0], parts, op)
        )

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> CollectiveWork:
        """As ``dist.all_gather``."""
        return self.alltoall(outputs[0], [inputs[0]] * self.size(), opts)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:
        """As ``dist.all_gather_into_tensor``."""
        return self.allgather([output.view(-1).tensor_split(self.size())], [own.view(-1)], opts)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> CollectiveWork:
        """As ``dist.reduce_scatter``: each rank reduces its part in the order of ranks."""
        parts = [torch.empty_like(outputs[0]) for _ in range(self.size())]
        return self._exchange(
            dict(enumerate(inputs[0])),
            dict(enumerate(parts)),
            lambda: reduce_into(outputs[0], parts, opts.reduceOp),
        )

    def reduce_scatter_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:
        """As ``dist.reduce_scatter_tensor``."""
        return self.reduce_scatter([output.view(-1)], [own.view(-1).tensor_split(self.size())], opts)

    def alltoall(  # type: ignore[override]
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> CollectiveWork:
        """As ``dist.all_to_all``."""
        return self._exchange(dict(enumerate(inputs)), dict(enumerate(outputs)))

    def all_to_all_single(
        self, output: Tensor, own: Tensor, output_sizes: Sequence[int], sizes: Sequence[int], opts: Any = None
    ) -> Any:
        """As ``dist.all_to_all_single``."""
        outputs, inputs = (
            torch.split(tensor, list(parts)) if parts else tensor.tensor_split(self.size())
            for tensor, parts in ((output, output_sizes), (own, sizes))
        )
        return self.alltoall(outputs, inputs, opts)

    # the names of torch before 2.13
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def refused(self, name: str) -> RunError:
        """As ``PlannedProcessGroup.refused``: a collective that this backend has not got."""
        return RunError(f"the backend skyctl has no {name}", hint='init_process_group("gloo") may have it')

    def no_peer(self, rank: int) -> RunError:
        """As ``PlannedProcessGroup.no_peer``."""
        if not self.peers and self._size > 1:
            return RunError(
                f"rank {self._rank} is not connected to rank {rank} yet",
                hint="this group connects with its first reconfigure()",
            )
        return RunError(f"rank {rank} is no other of this group's {self._size} ranks")

    def _exchange(
        self,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
        then: Callable[[], None] = lambda: None,
    ) -> CollectiveWork:
        """Sends and receives a tensor by rank, this one included, all at the same time."""

        own = self.rank()

        def run() -> None:
            if self.rehearses:
                for tensor in received.values():
                    tensor.copy_(sent.get(own, tensor))
                then()
                return
            landing = {
                rank: tensor if tensor.is_contiguous() else tensor.contiguous()
                for rank, tensor in received.items()
            }
            works = [self._start_receive(rank, tensor) for rank, tensor in landing.items() if rank != own]
            works += [self._start_send(rank, tensor) for rank, tensor in sent.items() if rank != own]
            if own in sent and own in landing:
                landing[own].copy_(sent[own])
            for work in works:
                work.wait(self._timeout)
            for rank, tensor in received.items():
                if tensor is not landing[rank]:
                    tensor.copy_(landing[rank])
            then()

        return self._call(run, list(received.values()))

    def _reduce_in_ring(self, tensor: Tensor, op: Any) -> None:
        """Each rank's part goes round and is reduced by all in turn; then the reduced parts go round."""
        if self.rehearses:
            reduce_into(tensor, [tensor.clone() for _ in range(self.size())], op)
            return
        size, rank = self.size(), self.rank()
        following, before = (rank + 1) % size, (rank - 1) % size
        flat = tensor.contiguous().view(-1)
        reduce, parts = reduction_of(op), flat.tensor_split(size)
        for turn in range(2 * (size - 1)):
            is_reduced = turn >= size - 1
            sent, received = (parts[(rank - turn - back) % size] for back in (0, 1))
            landing = received if is_reduced else torch.empty_like(received)
            pieces = list(zip(_pieces(received), _pieces(landing), strict=True))
            arriving = [self._start_receive(before, piece) for _, piece in pieces]
            leaving = [self._start_send(following, piece) for piece in _pieces(sent)]
            for (own, other), work in zip(pieces, arriving, strict=True):
                work.wait(self._timeout)
                if not is_reduced:
                    reduce(own, other)
            for work in leaving:
                work.wait(self._timeout)
            if turn == size - 2 and op == dist.ReduceOp.AVG:
                received.div_(size)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def _start_send(self, rank: int, tensor: Tensor) -> Work:
        return self._pair(rank).send(tensor, COLLECTIVE_TAG)

    def _start_receive(self, rank: int, tensor: Tensor) -> Work:
        return self._pair(rank).recv(tensor, COLLECTIVE_TAG)

    def _call(self, action: Callable[[], None], result: Sequence[Tensor]) -> CollectiveWork:
        """Has the group's thread do that once the calls before it are done."""
        if self._meeting.locked():
            raise RunError("the group is being reconfigured", hint="reconfigure(…).wait() first")
        future: Future[None] = Future()
        if self.rehearses:  # here: modes such as that of tensors without values are a thread's own
            action()
            future.set_result(None)
        else:
            self._calls.put((action, future))
        return CollectiveWork(future, result, self._timeout)

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            action, future = call
            try:
                action()
                future.set_result(None)
            except BaseException as exc:  # noqa: BLE001 — raised by whoever waits
                future.set_exception(exc)
                self._close_pairs()  # what the others do next would meet the rest of this


def _own_address(environment: Mapping[str, str], interface: str | None = None) -> str:
    """This machine's address on the route to rank 0's, or that of the interface."""
    name = environment.get("MASTER_ADDR") or "127.0.0.1"
    try:
        return local_address_towards(socket.gethostbyname(name), interface)
    except OSError as exc:
        raise RunError(f"MASTER_ADDR is {name}, which has no IPv4 address: {exc.strerror or exc}") from exc


def _read_handle(handle: str, rank: int) -> tuple[str, int]:
    """The host and port at which the member listens that a handle is of."""
    return read_listening(handle.partition("/")[0].encode(), rank)


def _pieces(flat: Tensor) -> Sequence[Tensor]:
    return torch.split(flat, max(1, _PIECE_BYTES // flat.element_size()))
