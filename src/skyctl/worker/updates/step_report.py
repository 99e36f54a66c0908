"""The times and the outcome of one step of one stage."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StepReport:
    """One step of one stage; a step's events are made of it (``training_loop``).

    Attributes:
        forward_s, backward_s, optimizer_s: the layers' own time (the loss's counts as forward).
        weight_s: the part of ``backward_s`` that was deferred (W of ``zero-bubble``).
        idle_s, transfer_s: waiting for a neighbour, and for the network (see ``messages``).
        sync_s: where pipelines sum their gradients, from this stage's last backward to the end of the sum
            that is then waited for; also in ``idle_s`` (until all have begun it) and ``transfer_s``.
        loss: on the last stage, the mean over the batch, or this pipeline's part of it.
        grad_norm: where gradients are clipped, the global norm before; of the last ones that were applied.
        ahead: with a parameter server, by how many clocks it was ahead of the slowest when it might go on.
        is_last: the pipeline ends with this step.
        is_applied: the step's own gradients are applied at its end; with a delay they may not be yet.
        repeats: how often its microbatches were made again (``gradient_sync``); all other figures are of all.
        local_steps, samples, own_loss: of a round (``local_rounds``), the steps that were made in it, the
            samples that count, and on the last stage the mean loss of this pipeline alone.
        total_samples: that count of all pipelines.
        input_messages_s, gradient_messages_s: of the messages that were waited for from before their start,
            the seconds on the way.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    optimizer_s: float = 0.0
    idle_s: float = 0.0
    transfer_s: float = 0.0
    sync_s: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    ahead: int | None = None
    is_last: bool = False
    is_applied: bool = True
    repeats: int = 0
    local_steps: int | None = None
    samples: int | None = None
    total_samples: int | None = None
    own_loss: float | None = None
    input_messages_s: list[float] = field(default_factory=list)
    gradient_messages_s: list[float] = field(default_factory=list)
