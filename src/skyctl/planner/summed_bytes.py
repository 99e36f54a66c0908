"""The bytes that summing gradients sends, keeps and computes, by layer and format (``docs/contract.md``).

``powersgd:R`` sends a layer's gradients in two passes, one after the other: of a matrix of n × m numbers,
where R · (n + m) < n · m, R · n and then R · m; everything else whole in the first.
"""

from __future__ import annotations

from typing import NamedTuple

from skyctl.records.problem import Layer, Problem
from skyctl.records.sync_format import powersgd_rank

SENT_SHARE = {"float32": 1.0, "fixed32": 1.0, "bfloat16": 0.5, "int8": 33 / 128}
"""By format, bytes sent for a byte of float32; of int8 with a scale of 4 bytes for 128 numbers."""
_NUMBER_BYTES = 4.0
COMPRESSING, PREDICTING = 3.0, 3.0
"""How often a byte could be added while it is compressed (for each of R + 1), or while a byte of weights is
predicted."""


class SummedBytes(NamedTuple):
    """Of one layer.

    Attributes:
        first, second: as they are sent, pass by pass.
        kept: what a replica keeps beside gradients: integers, residuals and factors, or with a delay the
            gradients and the weights of the step before.
        added: what else its processor does, as bytes that would take as long to add: compressing, or with a
            delay predicting weights.
    """

    first: float
    second: float = 0.0
    kept: float = 0.0
    added: float = 0.0


def gradient_bytes(layer: Layer) -> float:
    """Of its gradients in float32, or of its trained parameters: as many."""
    return layer.state_bytes / 4 if layer.gradient_bytes is None else layer.gradient_bytes


def summed_bytes(problem: Problem) -> list[SummedBytes]:
    """By layer of the problem, what its gradients take in the problem's ``sync_format``; in bytes."""
    rank = powersgd_rank(problem.sync_format)
    if rank is not None:
        return [_compressed(layer, rank) for layer in problem.layers]
    share = SENT_SHARE[problem.sync_format]
    sizes = [gradient_bytes(layer) for layer in problem.layers]
    if problem.rhythm.delay:
        return [SummedBytes(share * size, kept=2 * size, added=PREDICTING * size) for size in sizes]
    keeps = problem.sync_format == "fixed32"
    return [SummedBytes(share * size, kept=size if keeps else 0.0) for size in sizes]


def _compressed(layer: Layer, rank: int) -> SummedBytes:
    whole = rows = columns = 0
    for n, m in layer.gradient_matrices or ():
        if rank * (n + m) < n * m:
            whole, rows, columns = whole + n * m, rows + n, columns + m
    rest = gradient_bytes(layer) - _NUMBER_BYTES * whole
    return SummedBytes(
        first=rest + _NUMBER_BYTES * rank * rows,
        second=_NUMBER_BYTES * rank * columns,
        kept=_NUMBER_BYTES * (whole + rank * (rows + 2 * columns)),
        added=COMPRESSING * (rank + 1) * _NUMBER_BYTES * whole,
    )


def with_added_work(problem: Problem) -> Problem:
    """The problem in which optimizers of known times also take what sums need beside adding and sending."""
    sizes = [layer_bytes.added for layer_bytes in summed_bytes(problem)]
    if not any(sizes):
        return problem
    times = dict(problem.times)
    for device in problem.devices:
        if device.id in times:
            layer_times = times[device.id]
            longer = (
                o + device.reduce_byte_s * s for o, s in zip(layer_times.optimizer_s, sizes, strict=True)
            )
            times[device.id] = layer_times.model_copy(update={"optimizer_s": tuple(longer)})
    return problem.model_copy(update={"times": times})
