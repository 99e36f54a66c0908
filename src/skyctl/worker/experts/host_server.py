"""A host of experts on the network: ranks come in, and their requests to the one thread that computes.

The listener refuses strangers (``transport.handshake``). A rank that sends what nobody would send is let go.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from skyctl.device.device_timer import DeviceTimer
from skyctl.experts.host_gate import HostGate
from skyctl.experts.host_messages import TRUNK_REQUESTS, HostAnswer, read_message, to_header
from skyctl.experts.message_link import MessageLink
from skyctl.worker.expert_orders import ExpertHostOrder, handshake_purpose
from skyctl.worker.experts.expert_host import ExpertHost
from skyctl.worker.rank_environment import use_device
from skyctl.workload.workload import load_workload


class HostServer:
    """Listens at once; ``run`` computes until ``stop``, then ``close``.

    Raises:
        SkyctlError: the address is not this machine's; the workload's own errors.
    """

    def __init__(self, order: ExpertHostOrder) -> None:
        if order.threads is not None:
            torch.set_num_threads(order.threads)
        device = use_device(order.device)
        torch.manual_seed(order.workload.seed)
        timer = DeviceTimer(order.slowdown, single_thread=torch.get_num_threads() == 1, device=device)
        self._node = order.node
        self._events: queue.Queue[tuple[int, Any, list[Tensor]] | None] = queue.Queue()
        self._links: dict[int, MessageLink] = {}
        self._host = ExpertHost(
            load_workload(order.workload),
            order.recipe,
            order.steps,
            device,
            timer,
            order.trunks,
            self._send,
            self._refuse,
        )
        self._gate = HostGate(
            order.address,
            {rank: order.secrets[rank] for rank in order.trunks},
            purpose=handshake_purpose(order.run_id, order.node),
            identity=order.tls,
            admit=self._admit,
        )
        self.address, self.port = self._gate.address, self._gate.port

    def run(self) -> None:
        """Answers requests until ``stop``."""
        while (event := self._events.get()) is not None:
            rank, request, tensors = event
            if request is None:
                self._host.leave(rank)
            else:
                self._host.handle(rank, request, tensors)

    def stop(self) -> None:
        """Ends ``run`` after what it is at; in any thread."""
        self._events.put(None)

    def close(self) -> None:
        """Stops listening, and ends every connection. Idempotent."""
        self._gate.close()
        for link in list(self._links.values()):
            link.close()

    def _admit(self, rank: int, link: MessageLink) -> None:
        if rank in self._links:  # a rank connects once: there is no second one with its secret
            link.close()
            return
        self._links[rank] = link
        link.start(partial(self._take, rank), partial(self._end, rank))

    def _take(self, rank: int, header: dict[str, Any], tensors: list[Tensor]) -> None:
        self._events.put((rank, read_message(TRUNK_REQUESTS, header), tensors))

    def _end(self, rank: int, reason: str) -> None:
        self._log(f"the connection with rank {rank} has ended: {reason}")
        self._events.put((rank, None, []))

    def _send(self, rank: int, answer: HostAnswer, tensors: Sequence[Tensor]) -> None:
        if (link := self._links.get(rank)) is not None:
            link.send(to_header(answer), tensors)

    def _refuse(self, rank: int, reason: str) -> None:
        self._log(f"rank {rank} is let go: {reason}")
        if (link := self._links.get(rank)) is not None:
            link.close()

    def _log(self, line: str) -> None:
        print(f"the experts of {self._node}: {line}", file=sys.stderr, flush=True)
