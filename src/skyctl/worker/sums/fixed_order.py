"""Linear algebra on thin matrices: the same bits on any processor, with any number of threads.

Libraries add up in an order that depends on the processor. Here additions are either single ones in a fixed
order, or of whole numbers so small that float64 holds every sum exactly.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

_PART_NUMEL = 65_536
"""Numbers multiplied at a time, so that intermediate results stay in a processor's cache."""
_HALF = 2.0**13
"""Each half of a number has 13 bits: products have 26, and 2**27 of them add up exactly."""
_DEPENDENT = 1e-12
"""A column of whose square less than this is left is taken for a combination of those before it."""


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal bases that span the columns of matrices, (…, n, R) with R < n, float32, in host memory.

    Cholesky QR, twice, in float64. A column that depends on those before it gives way to a random one: else
    what it stands for would never be sent.
    """
    rows = columns.detach().to("cpu", torch.float64).transpose(-1, -2).contiguous()
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        while True:
            rows = _rounded(rows)
            factor, dependent = _cholesky(_squares(rows))
            if not bool(dependent.any()):
                break
            drawn = torch.rand(rows.shape[-2:], generator=generator, dtype=torch.float64) * 2 - 1
            rows = torch.where(dependent.unsqueeze(-1), drawn, rows)
        _divide(rows, factor)
    return rows.transpose(-1, -2).to(torch.float32).contiguous()


def multiply(p: Tensor, q: Tensor, out: Tensor) -> None:
    """out = p qᵀ in float32: (n × R, m × R) → n × m."""
    lines = q.t().contiguous()
    step = max(1, _PART_NUMEL // max(1, out.shape[1]))
    scratch = torch.empty(min(step, len(out)), out.shape[1], dtype=torch.float32, device=out.device)
    for start in range(0, len(out), step):
        part, rows = out[start : start + step], p[start : start + step]
        product = scratch[: len(part)]
        torch.mul(rows[:, :1], lines[0], out=part)
        for k in range(1, len(lines)):
            part.add_(torch.mul(rows[:, k : k + 1], lines[k], out=product))


def _rounded(rows: Tensor) -> Tensor:
    """Rows scaled so that their largest is in [1/2, 1), and rounded to whole multiples of 2**-26."""
    _, exponents = torch.frexp(rows.abs().amax(-1, keepdim=True))
    scale = ((1023 - exponents.to(torch.int64)) << 52).view(torch.float64)  # 2 ** -exponents
    return (rows * scale).mul_(_HALF * _HALF).round_().mul_(1 / (_HALF * _HALF))


def _squares(rows: Tensor) -> Tensor:
    """X Xᵀ of rounded rows: products and sums are exact, until three parts are added."""
    high = (rows * _HALF).round_()
    low = (rows * _HALF - high).mul_(_HALF)
    turned = low.transpose(-1, -2)
    mixed = high @ turned
    parts = high @ high.transpose(-1, -2) + (mixed + mixed.transpose(-1, -2)) * (1 / _HALF)
    return (parts + (low @ turned) * (1 / (_HALF * _HALF))) * (1 / (_HALF * _HALF))


def _cholesky(squares: Tensor) -> tuple[Tensor, Tensor]:
    """(L with L Lᵀ = squares; which rows depend on those before them: there L says nothing)."""
    left, factor = squares.clone(), torch.zeros_like(squares)
    whole = squares.diagonal(dim1=-2, dim2=-1)
    dependent = torch.zeros(whole.shape, dtype=torch.bool)
    for k in range(squares.shape[-1]):
        pivot = left[..., k, k]
        dependent[..., k] = pivot <= _DEPENDENT * whole[..., k]
        root = torch.where(dependent[..., k], 1.0, pivot).sqrt()
        column = left[..., k:, k] / root.unsqueeze(-1)
        factor[..., k:, k] = column
        rest = column[..., 1:]
        left[..., k + 1 :, k + 1 :] -= rest.unsqueeze(-1) * rest.unsqueeze(-2)
    return factor, dependent


def _divide(rows: Tensor, factor: Tensor) -> None:
    """L⁻¹ X in the place of X, row by row."""
    for k in range(factor.shape[-1]):
        row = rows[..., k, :]
        row.div_(factor[..., k, k].unsqueeze(-1))
        rows[..., k + 1 :, :] -= factor[..., k + 1 :, k].unsqueeze(-1) * row.unsqueeze(-2)
