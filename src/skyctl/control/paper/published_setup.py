"""The experiment's model, devices and ways to run them, from what the authors have published.

Source: the paper and its code (github.com/hpcaitech/SkyComputing: ``experiment/config.py``,
``scaelum/stimulator``, ``scaelum/builder/module_wrapper.py``, ``scaelum/dynamics``), read, not copied.

- BERT-large's sizes, batches of 32 samples of 128 tokens; an encoder is cut into three layers; there are
  an embedding, a pooler and a classifier, too.
- Of N nodes the first coordinates and holds no layers: N − 1 workers.
- A worker of slowdown s sleeps s times what it has just computed, forward and backward: it takes 1 + s times
  as long. s is drawn whole from 1 to 6 with seed 35.
- Trained with SGD: 8 bytes a parameter, weights and gradients. Ours to assume: 16 GB cards (the interface
  that the configuration names is a Cray's).
- The code has a second set of factors: from [1, 2) with seed 32 for times, from [1, 3) with seed 22 for
  memory. It scales what the allocator is told, not how long workers take; here it is used in the formulas.

Transfers are left out: a boundary's 17 MB take milliseconds on such a machine's network, a stage a third of a
second. Only ratios of times matter in what follows; ``FLOPS_PER_S`` makes them seconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from skyctl.compare.paper.paper_result import Execution
from skyctl.records.problem import Device, Layer, Problem

HIDDEN, HEADS, TOKENS, BATCH = 1024, 16, 128, 32
VOCABULARY, CLASSES = 30522, 3
STATE_BYTES = 8.0
"""A parameter and its gradient in float32; SGD keeps nothing more."""

FLOPS_PER_S = 5e12
"""Of a worker that is not slowed down: about half of what a P100 can at most."""

CARD_BYTES = (16_280 - 500) * 2.0**20
"""A 16 GB card's memory less what the published code leaves free."""

SIZES = tuple((nodes, encoders) for nodes in (16, 32, 64) for encoders in (40, 80, 160))
LARGEST = (64, 160)

_SLOWDOWN_SEED, _TOLD_SEED = 35, 32


def slowdown_factors(nodes: int) -> list[float]:
    """How many times as long each worker takes: whole numbers from 2 to 7."""
    drawn: npt.NDArray[Any] = np.random.default_rng(_SLOWDOWN_SEED).integers(low=1, high=7, size=nodes)
    return [1.0 + float(s) for s in drawn[1:]]


def allocator_factors(nodes: int) -> list[float]:
    """The factors that the published allocator is told, from [1, 2)."""
    drawn: npt.NDArray[Any] = np.random.default_rng(_TOLD_SEED).random(nodes)
    return [1.0 + float(x) for x in drawn[1:]]


def paper_devices(nodes: int, memory_scale: float | None = 1.0) -> tuple[Device, ...]:
    """The workers, in the order of their ranks. ``memory_scale``: of a card (None: without limit)."""
    return tuple(
        Device(
            id=f"n{rank}/cuda:0",
            flops_per_s=FLOPS_PER_S / factor,
            memory_bytes=None if memory_scale is None else memory_scale * CARD_BYTES,
        )
        for rank, factor in enumerate(slowdown_factors(nodes), start=1)
    )


def bert_layers(encoders: int, samples: int = BATCH) -> tuple[Layer, ...]:
    """3 · encoders + 3 layers, for microbatches of ``samples``. Backward takes twice the forward.

    Activations: what autograd keeps of each layer in float32, a layer's input counted with it.
    """
    h, t = HIDDEN, TOKENS
    scores = HEADS * t / h  # attention's t × t numbers a head, in units of t × h
    tensor = 4.0 * samples * t * h
    # name, forward flops a sample, parameters, kept tensors of t × h numbers
    attention = ("attention", 8.0 * t * h**2 + 4.0 * t**2 * h, 4.0 * h**2, 7.0 + 2.0 * scores)
    body = ("body", 8.0 * t * h**2, 4.0 * h**2, 9.0)
    tail = ("tail", 8.0 * t * h**2, 4.0 * h**2, 7.0)
    parts = [("embedding", 10.0 * t * h, float((VOCABULARY + 512) * h), 3.0)]
    for i in range(encoders):
        parts += [(f"encoder.{i}.{part[0]}", *part[1:]) for part in (attention, body, tail)]
    parts += [("pooler", 2.0 * h**2, float(h**2), 3.0 / t)]
    parts += [("classifier", 2.0 * CLASSES * h, float(CLASSES * h), 1.0 / t)]
    return tuple(
        Layer(
            name=name,
            flops=3.0 * samples * flops,
            state_bytes=STATE_BYTES * parameters,
            activation_bytes=kept * tensor,
            output_bytes=tensor,
        )
        for name, flops, parameters, kept in parts
    )


def paper_problem(
    nodes: int, encoders: int, execution: Execution, memory_scale: float | None = 1.0
) -> Problem:
    """What the planner is asked for one size and one way to run it."""
    chained = execution in ("chain", "chain-sum")
    return Problem(
        layers=bert_layers(encoders, BATCH if chained else 1),
        devices=paper_devices(nodes, memory_scale),
        microbatches=1 if chained else BATCH,
        schedule="sequential" if chained else "1f1b",
        objective="bottleneck" if execution in ("chain", "steady") else "iteration",
    )
