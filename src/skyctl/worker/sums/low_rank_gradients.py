"""Sums of gradients as products of two thin matrices (PowerSGD, Vogels et al. 2019, arXiv 1905.13727).

R is the rank of the products; replicas sum. A parameter of two dimensions or more is seen as a matrix of n
rows (its first dimension) and m columns. If R · (n + m) < n · m it is summed in two passes: first P, the
sum of all replicas' M Q, whose columns are then made orthonormal; then Q, the sum of their Mᵀ P. The gradient
is P Qᵀ on every replica. M is a replica's own gradient plus its residual, what all sums before have left out;
the next step begins with this step's Q. Everything else is summed whole in the first pass.

P and P Qᵀ have the same bits on any processor (``fixed_order``). M Q and Mᵀ P are a replica's own, of which
only the sums are shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skyctl.schedule.seeds import splitmix64
from skyctl.worker.sums.fixed_order import multiply, orthonormal
from skyctl.worker.sums.summed_gradients import FloatGradients, TrainedParameter, check_dense

Tensor = torch.Tensor


@dataclass
class _Factors:
    """One compressed parameter: ``residual`` n × m (None: zeros), ``q`` m × R, of this step ``p`` n × R."""

    rows: int
    columns: int
    seed: int
    residual: Tensor | None = None
    q: Tensor | None = None
    p: Tensor | None = None
    summed_q: Tensor | None = None
    """Of this step: first this replica's own, then the sum."""

    def project(self, basis: Tensor) -> None:
        """With that P: this replica's own Q, and as residual what their product leaves out."""
        assert self.residual is not None
        self.p = basis.to(self.residual.device)
        self.summed_q = self.residual.t() @ self.p
        self.residual.addmm_(self.p, self.summed_q.t(), alpha=-1)

    def reset_residuals(self) -> None:
        self.residual = self.q = None


class LowRankGradients(FloatGradients):
    """A group's gradients, compressed to ``rank`` from step ``uncompressed_steps`` on.

    A parameter that no replica has a gradient for keeps its residual. One whose sum is not finite gets a
    gradient of NaN on every replica, and loses its residual.

    Args:
        seeds: by parameter, of its first Q; the same on every replica.
    """

    def __init__(
        self,
        parameters: Sequence[TrainedParameter],
        rank: int,
        seeds: Sequence[int],
        uncompressed_steps: int = 0,
    ) -> None:
        super().__init__(parameters)
        self._rank, self._uncompressed_steps = rank, uncompressed_steps
        self._factors: list[_Factors | None] = []
        for parameter, seed in zip(parameters, seeds, strict=True):
            rows, columns = matrix_size(parameter.master.shape)
            fits = is_compressed(rows, columns, rank)
            self._factors.append(_Factors(rows, columns, seed) if fits else None)
        self._compresses = False

    def begin(self, step: int) -> None:
        self._compresses = step >= self._uncompressed_steps

    def take(self, place: int) -> Tensor:
        """A compressed parameter's P; the gradient is from then on part of the residual."""
        factors = self._factors[place] if self._compresses else None
        if factors is None:
            return super().take(place)
        assert place == len(self._taken)
        master = self._masters[place]
        gradient = master.grad
        if factors.residual is None:
            factors.residual = torch.zeros(
                factors.rows, factors.columns, dtype=torch.float32, device=master.device
            )
        if factors.q is None:
            factors.q = first_factor(factors.columns, self._rank, factors.seed).to(master.device)
        if gradient is not None:
            check_dense(master, gradient)
            factors.residual.add_(gradient.detach().reshape(factors.rows, factors.columns))
        factors.p = factors.residual @ factors.q
        flat = factors.p.view(-1)
        self._taken.append((flat, gradient is not None))
        return flat

    def second_pass(self, codes: bytes) -> list[Tensor]:
        """This replica's Mᵀ P of each compressed parameter, flat, once all P are summed."""
        all_factors: list[_Factors] = []
        of_rows: dict[int, list[_Factors]] = {}
        for factors, code in zip(self._factors, codes, strict=True) if self._compresses else ():
            if factors is None:
                continue
            assert factors.p is not None, "take() comes first"
            all_factors.append(factors)
            if code and bool(factors.p.isfinite().all()):
                of_rows.setdefault(factors.rows, []).append(factors)
            else:  # told by what all replicas have, so all do so
                factors.summed_q = factors.p.new_zeros(factors.columns, self._rank)
        for alike in of_rows.values():
            bases = orthonormal(torch.stack([factors.p for factors in alike if factors.p is not None]))
            for factors, basis in zip(alike, bases, strict=True):
                factors.project(basis)
        return [factors.summed_q.view(-1) for factors in all_factors if factors.summed_q is not None]

    def finish(self, codes: bytes) -> None:
        """Compressed gradients become P Qᵀ, of rank R; residuals what that leaves out."""
        if not self._compresses:
            super().finish(codes)
            return
        taken = self._taken
        for place, (factors, code) in enumerate(zip(self._factors, codes, strict=True)):
            if factors is None:
                self._put(place, *taken[place], present=bool(code))
                continue
            if code:
                self._set_product(place, factors)
            factors.p = factors.summed_q = None
        self._taken = []

    def reset_residuals(self) -> None:
        """Drops residuals and Q, as a run that resumes here has none."""
        for factors in self._factors:
            if factors is not None:
                factors.reset_residuals()

    def _set_product(self, place: int, factors: _Factors) -> None:
        master = self._masters[place]
        p, q = factors.p, factors.summed_q
        assert p is not None
        assert q is not None, "second_pass() comes first"
        if master.grad is None:
            master.grad = torch.empty_like(master, memory_format=torch.contiguous_format)
        if not bool(p.isfinite().all() & q.isfinite().all()):
            master.grad.detach().fill_(torch.nan)
            factors.reset_residuals()
            return
        gradient = master.grad.detach()
        if gradient.is_contiguous() and gradient.dtype == torch.float32:
            multiply(p, q, gradient.view(factors.rows, factors.columns))
        else:
            product = torch.empty(factors.rows, factors.columns, dtype=torch.float32, device=p.device)
            multiply(p, q, product)
            gradient.copy_(product.view(gradient.shape))
        factors.q = q


def matrix_size(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a parameter of that shape, seen as a matrix; a vector has one column."""
    rows = shape[0] if shape else 1
    return rows, math.prod(shape[1:])


def is_compressed(rows: int, columns: int, rank: int) -> bool:
    """Whether two thin matrices have fewer numbers than the matrix."""
    return rank * (rows + columns) < rows * columns


def pass_numels(shape: Sequence[int], rank: int) -> tuple[int, int]:
    """How many numbers of a parameter of that shape are summed in each pass."""
    rows, columns = matrix_size(shape)
    return (rank * rows, rank * columns) if is_compressed(rows, columns, rank) else (rows * columns, 0)


def seed_of(seed: int, start: int, parameter: TrainedParameter, trained: Sequence[TrainedParameter]) -> int:
    """Of a parameter's first Q: from the run's seed and the parameter's place in the model.

    Args:
        start: of the stage, whose trained parameters are ``trained``.
    """
    same_layer = [other for other in trained if other.layer == parameter.layer]
    place = next(number for number, other in enumerate(same_layer) if other is parameter)
    return splitmix64(seed, start + parameter.layer, place)


def first_factor(columns: int, rank: int, seed: int) -> Tensor:
    """The Q that a parameter begins with: uniform in [-1, 1), the same on every processor."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(columns, rank, generator=generator, dtype=torch.float32) * 2 - 1
