"""The connection of a stage to its neighbours: the four message streams to and from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from skyctl.worker.peer import Neighbours, Peer
from skyctl.worker.pipeline.messages import MessageReceiver, MessageSender, MessageSpecs, message_bytes
from skyctl.worker.pipeline.receive_window import receive_window
from skyctl.worker.rank_order import LinkDtypes


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


def make_stage_io(
    neighbours: Neighbours,
    inputs: MessageSpecs,
    outputs: MessageSpecs,
    *,
    microbatches: int,
    device: torch.device,
    link_dtypes: LinkDtypes,
    asked_window: int = 0,
) -> StageIO:
    """A stage's message streams.

    Args:
        inputs, outputs: the tensors at the stage's two ends, by microbatch.
        microbatches: how many a step has.
        device: where received tensors are to be.
        link_dtypes: what floats of each stream are sent as.
        asked_window: how many receives are posted ahead; 0: as many as fit (``receive_window``).
    """
    stage_io = StageIO()

    def window(specs: MessageSpecs) -> int:
        return receive_window(asked_window, microbatches, message_bytes(specs(0)))

    def receiver(peer: Peer, specs: MessageSpecs, dtype: str | None, *, backward: bool) -> MessageReceiver:
        return MessageReceiver(
            peer,
            specs,
            backward=backward,
            microbatches=microbatches,
            window=window(specs),
            device=device,
            link_dtype=dtype,
        )

    def sender(
        peer: Peer, specs: MessageSpecs, dtype: str | None, *, backward: bool, bounded: bool
    ) -> MessageSender:
        return MessageSender(
            peer,
            specs,
            backward=backward,
            microbatches=microbatches,
            window=window(specs) if bounded else None,
            link_dtype=dtype,
        )

    previous, following = neighbours
    dtypes = link_dtypes
    if previous is not None:
        stage_io.inputs = receiver(previous, inputs, dtypes.from_previous, backward=False)
        gradients = _requiring_grad(inputs)
        if gradients(0):
            stage_io.input_gradients = sender(
                previous, gradients, dtypes.to_previous, backward=True, bounded=True
            )
    if following is not None:
        gradients = _requiring_grad(outputs)
        # a gradient that comes back confirms its activation; where none does, the number is bounded
        stage_io.outputs = sender(
            following, outputs, dtypes.to_next, backward=False, bounded=not gradients(0)
        )
        if gradients(0):
            stage_io.output_gradients = receiver(following, gradients, dtypes.from_next, backward=True)
    return stage_io


def _requiring_grad(specs: MessageSpecs) -> MessageSpecs:
    return lambda microbatch: [spec for spec in specs(microbatch) if spec.requires_grad]
