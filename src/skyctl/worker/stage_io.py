"""What connects a stage to its neighbours: their connections, and the four message streams over them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from skyctl.transport import clock_offset
from skyctl.transport.peer_connection import PeerConnection
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.worker.messages import MessageReceiver, MessageSender, MessageSpecs, message_bytes
from skyctl.worker.receive_window import receive_window
from skyctl.worker.trace_recorder import TraceRecorder

CONNECT_TIMEOUT_S = 60.0
"""For a connection to a neighbour that listens already."""

PEER_READY_TIMEOUT_S = 3600.0
"""For a neighbour to build its stage and connect; the launcher watches it, so this is only a last resort."""

DEFAULT_TRANSFER_TIMEOUT_S = 1800.0
"""For one transfer, waiting for the peer included, where the payload gives no ``timeout_s``."""


@dataclass
class StageIO:
    """A stage's four message streams; None at the pipeline's ends, and where nothing is differentiable."""

    inputs: MessageReceiver | None = None
    outputs: MessageSender | None = None
    output_gradients: MessageReceiver | None = None
    input_gradients: MessageSender | None = None

    @property
    def receivers(self) -> list[MessageReceiver]:
        """The streams that this stage receives from."""
        return [stream for stream in (self.inputs, self.output_gradients) if stream is not None]

    @property
    def senders(self) -> list[MessageSender]:
        """The streams that this stage sends to."""
        return [stream for stream in (self.outputs, self.input_gradients) if stream is not None]


@dataclass
class Neighbour:
    """The connection to a neighbouring rank, and the seconds that a message takes over it (one way)."""

    connection: PeerConnection
    latency_s: float = 0.0


class NeighbourConnections:
    """The connections of one rank to the ranks before and after it in the pipeline.

    Args:
        payload: the rank's payload (``worker.rank``).
        recorder: given the clock offset to the rank before, where a trace is recorded.
    """

    def __init__(
        self, payload: Mapping[str, Any], device: torch.device, recorder: TraceRecorder | None = None
    ) -> None:
        self._payload, self._device, self._recorder = payload, device, recorder
        self.previous = self._make("previous")
        self.following = self._make("next")

    def connect(
        self, announce: Callable[[int, str], None], next_address: Callable[[], tuple[str, int]]
    ) -> None:
        """Connects to both neighbours at the same time.

        Args:
            announce: told the port and the address on which this rank waits for the one after it.
            next_address: waits for the host and port of the rank before it.

        Raises:
            PeerUnreachableError: a neighbour can't be reached, or did not come in time.
            RunError: the interface named has no address.
        """
        accepted: Future[None] | None = None
        interface = self._payload.get("interface")
        if self.following is not None:
            connection = self.following.connection
            address = connection.own_address(self._payload["next"]["host"], interface)
            port = connection.listen(address)
            announce(port, address)
            accepted = run_in_thread(self._accept)
        if self.previous is not None:
            host, port = next_address()
            connection = self.previous.connection
            connection.connect(host, port, connection.own_address(host, interface), CONNECT_TIMEOUT_S)
            self.previous.latency_s = connection.measure_round_trip_s() / 2
            self._record_clock_offset("start", connection)
        if accepted is not None:
            accepted.result()

    def compare_clocks(self) -> None:
        """Compares the clocks again at the run's end, so that their drift is known; no-op without a trace."""
        if self._recorder is None:
            return
        answered: Future[None] | None = None
        if self.following is not None:
            connection = self.following.connection
            answered = run_in_thread(lambda: clock_offset.answer_clock_requests(connection))
        if self.previous is not None:
            self._record_clock_offset("end", self.previous.connection)
        if answered is not None:
            answered.result()

    def close(self, *, graceful: bool = False) -> None:
        """Closes both connections; whatever waits on them ends.

        Args:
            graceful: only once the peer closes too.
        """
        for neighbour in (self.previous, self.following):
            if neighbour is not None:
                neighbour.connection.close(graceful=graceful)

    def make_stage_io(self, inputs: MessageSpecs, outputs: MessageSpecs, microbatches: int) -> StageIO:
        """The message streams over the connections.

        Args:
            inputs, outputs: the tensors at the stage's two ends, by microbatch.
            microbatches: how many a step has.
        """
        stage_io = StageIO()
        link_dtypes = self._payload.get("link_dtypes") or {}

        def receiver(
            neighbour: Neighbour, specs: MessageSpecs, link: str, *, backward: bool
        ) -> MessageReceiver:
            return MessageReceiver(
                neighbour.connection,
                specs,
                backward=backward,
                microbatches=microbatches,
                window=self._window(specs, microbatches),
                device=self._device,
                latency_s=neighbour.latency_s,
                link_dtype=link_dtypes.get(link),
            )

        def sender(
            neighbour: Neighbour, specs: MessageSpecs, link: str, *, backward: bool, bounded: bool
        ) -> MessageSender:
            return MessageSender(
                neighbour.connection,
                specs,
                backward=backward,
                microbatches=microbatches,
                window=self._window(specs, microbatches) if bounded else None,
                link_dtype=link_dtypes.get(link),
            )

        if self.previous is not None:
            stage_io.inputs = receiver(self.previous, inputs, "from_previous", backward=False)
            gradients = _requiring_grad(inputs)
            if gradients(0):
                stage_io.input_gradients = sender(
                    self.previous, gradients, "to_previous", backward=True, bounded=True
                )
        if self.following is not None:
            gradients = _requiring_grad(outputs)
            # a gradient that comes back confirms its activation; where none does, the number is bounded
            stage_io.outputs = sender(
                self.following, outputs, "to_next", backward=False, bounded=not gradients(0)
            )
            if gradients(0):
                stage_io.output_gradients = receiver(self.following, gradients, "from_next", backward=True)
        return stage_io

    def _make(self, side: str) -> Neighbour | None:
        peer = self._payload[side]
        if peer is None:
            return None
        return Neighbour(
            PeerConnection(
                f"rank {peer['rank']} ({peer['host']})",
                float(self._payload.get("timeout_s") or DEFAULT_TRANSFER_TIMEOUT_S),
                secret=str(self._payload["secrets"][side]),
                peer_rank=int(peer["rank"]),
                device=self._device,
                identity=TlsIdentity.from_credentials(self._payload.get("tls")),
            )
        )

    def _accept(self) -> None:
        assert self.following is not None
        connection = self.following.connection
        connection.accept(PEER_READY_TIMEOUT_S)
        self.following.latency_s = connection.measure_round_trip_s() / 2
        if self._recorder is not None:
            clock_offset.answer_clock_requests(connection)

    def _record_clock_offset(self, when: str, connection: PeerConnection) -> None:
        if self._recorder is not None:
            self._recorder.record_clock_offset(when, clock_offset.measure_clock_offset(connection))

    def _window(self, specs: MessageSpecs, microbatches: int) -> int:
        asked = int(self._payload.get("receive_window") or 0)
        return receive_window(asked, microbatches, message_bytes(specs(0)))


def _requiring_grad(specs: MessageSpecs) -> MessageSpecs:
    return lambda microbatch: [spec for spec in specs(microbatch) if spec.requires_grad]


def run_in_thread(action: Callable[[], None]) -> Future[None]:
    """Runs it in a daemon thread: a failure elsewhere must not wait for it."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            action()
            future.set_result(None)
        except BaseException as exc:  # noqa: BLE001 — raised where the result is asked for
            future.set_exception(exc)

    threading.Thread(target=run, daemon=True, name="accepts a peer").start()
    return future
