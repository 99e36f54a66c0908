"""The bytes that a format of sums sends, keeps and computes, counted anew from records for ``verify``."""

from __future__ import annotations

from skyctl.records.problem import Problem
from skyctl.records.sync_format import powersgd_rank

_NUMBER_BYTES = {"float32": 4.0, "fixed32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / 128}
"""By format, for each number of a gradient."""


class FormatBytes:
    """By layer of a problem.

    Attributes:
        floats: bytes of trained weights in float32.
        passes: how many sums, one after another, a step has.
        first, second: bytes as they are sent, pass by pass.
        kept: bytes that a replica keeps beside gradients.
        added: what else a replica's processor does, as bytes that would take as long to add: compressing
            gradients, or with a delay predicting weights.
    """

    def __init__(self, problem: Problem) -> None:
        self.floats = floats = [
            x.gradient_bytes if x.gradient_bytes is not None else x.state_bytes / 4 for x in problem.layers
        ]
        none = [0.0] * len(floats)
        self.second, self.kept, self.added = none, none, none
        rank = powersgd_rank(problem.sync_format)
        if rank is None:
            each = _NUMBER_BYTES[problem.sync_format]
            self.first = [x / 4.0 * each for x in floats]
            if problem.rhythm.delay == 1:  # what is summed meanwhile, and weights that were
                self.kept, self.added = [2 * x for x in floats], [3.0 * x for x in floats]
            elif problem.sync_format == "fixed32":  # integers
                self.kept = floats
        else:
            thin = [
                [(n, m) for n, m in x.gradient_matrices or () if n * m > rank * (n + m)]
                for x in problem.layers
            ]
            whole = [4.0 * sum(n * m for n, m in shapes) for shapes in thin]
            self.added = [3.0 * (rank + 1) * x for x in whole]
            self.second = [4.0 * rank * sum(m for _, m in shapes) for shapes in thin]
            tall = [4.0 * rank * sum(n for n, _ in shapes) for shapes in thin]
            self.first = [x - c + t for x, c, t in zip(floats, whole, tall, strict=True)]
            self.kept = [c + t + 2 * s for c, t, s in zip(whole, tall, self.second, strict=True)]
        self.passes = 2 if any(self.second) else 1

    def late(self, start: int, stop: int) -> list[float]:
        """Bytes of layers [start, stop) that are summed together.

        The second pass is the first layer's, whose gradients come last.
        """
        sizes = self.first[start:stop]
        sizes[0] += sum(self.second[start:stop])
        return sizes

    def both(self) -> list[float]:
        """Bytes of both passes, by layer."""
        return [a + b for a, b in zip(self.first, self.second, strict=True)]
