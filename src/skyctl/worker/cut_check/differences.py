"""The differences of two trials beyond rounding, in the order in which they would come about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from skyctl.worker.cut_check.trial import MICROBATCHES, Trial

LOSS_TOLERANCE = 1e-5
ROUNDINGS = 100
"""Tensors may be apart by so many roundings of their dtype, relative to their norm."""
NOISE = 10
"""And by so many times what one last bit of each weight comes to."""

Kind = Literal["outputs", "later outputs", "gradients", "parameters", "buffers", "eval outputs"]


class DiffersError(Exception):
    """The first thing that differs. ``kind``: where it shows; ``what``: it, in words."""

    def __init__(self, kind: Kind, what: str) -> None:
        super().__init__(what)
        self.kind: Kind = kind
        self.what = what


class TrialComparison:
    """Compares others with what plain torch came to.

    Args:
        shaken: the same from weights that were off by the last bit, so that it shows what rounding comes to.
        weights: what all began with, by name.
    """

    def __init__(self, plain: Trial, shaken: Trial, weights: Mapping[str, Tensor]) -> None:
        self._plain, self._shaken, self._weights = plain, shaken, weights

    def check_repeated(self, again: Trial) -> None:
        """Compares with a repetition, bit by bit; DiffersError where they are not equal."""
        self._check(again, exact=True)

    def check_cut(self, cut: Trial) -> None:
        """Compares with the layers; DiffersError for the first difference that is more than rounding."""
        self._check(cut, exact=False)

    def _check(self, other: Trial, *, exact: bool) -> None:
        plain, shaken = self._plain, self._shaken
        for number in range(len(plain.outputs)):
            if number == MICROBATCHES:
                self._check_gradients(other, exact=exact)
                self._check_parameters(other, exact=exact)
            kind: Kind = "later outputs" if number else "outputs"
            what = f"microbatch {number % MICROBATCHES + 1} of step {number // MICROBATCHES + 1}"
            tensors = plain.outputs[number], other.outputs[number], shaken.outputs[number]
            self._check_all(kind, f"the outputs of {what}", *tensors, exact=exact)
            losses = plain.losses[number], other.losses[number], shaken.losses[number]
            _check_loss(f"the loss of {what}", *losses, exact=exact)
        for name, tensor in plain.buffers.items():
            if name in other.buffers and name in shaken.buffers:
                mine, noise, what = other.buffers[name], shaken.buffers[name], f"{name} after two steps"
                _check_tensor("buffers", what, tensor, mine, noise, exact=exact)
        tensors = plain.evaluated, other.evaluated, shaken.evaluated
        self._check_all("eval outputs", "the outputs in eval()", *tensors, exact=exact)

    def _check_gradients(self, other: Trial, *, exact: bool) -> None:
        plain, shaken = self._plain.gradients, self._shaken.gradients
        for name, tensor in plain.items():
            if name not in other.gradients:
                raise DiffersError("gradients", f"{name} gets no gradient, but one in plain torch,")
            what, mine = f"the gradient of {name}", other.gradients[name]
            _check_tensor("gradients", what, tensor, mine, shaken.get(name, tensor), exact=exact)
        more = next((name for name in other.gradients if name not in plain), None)
        if more is not None:
            raise DiffersError("gradients", f"{more} gets a gradient, but none in plain torch,")

    def _check_parameters(self, other: Trial, *, exact: bool) -> None:
        for name, tensor in self._plain.parameters.items():
            if name in other.parameters:
                what, start = f"{name} after two steps", self._weights.get(name)
                mine, noise = other.parameters[name], self._shaken.parameters[name]
                _check_tensor("parameters", what, tensor, mine, noise, start, exact=exact)

    def _check_all(
        self,
        kind: Kind,
        what: str,
        plain: Sequence[Tensor],
        other: Sequence[Tensor],
        shaken: Sequence[Tensor],
        *,
        exact: bool,
    ) -> None:
        if len(plain) != len(other):
            raise DiffersError(kind, f"{what} are {len(other)} tensors, {len(plain)} in plain torch,")
        for expected, actual, noise in zip(plain, other, shaken, strict=True):
            _check_tensor(kind, what, expected, actual, noise, exact=exact)


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the bit; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return bool(torch.equal(a, b)) or (
        a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )


def _check_loss(what: str, plain: float, other: float, shaken: float, *, exact: bool) -> None:
    allowed = 0.0 if exact else LOSS_TOLERANCE * abs(plain) + NOISE * abs(shaken - plain)
    if not abs(plain - other) <= allowed:
        raise DiffersError("outputs", f"{what} is {other:.7g}, and {plain:.7g} in plain torch,")


def _check_tensor(
    kind: Kind,
    what: str,
    plain: Tensor,
    other: Tensor,
    shaken: Tensor,
    before: Tensor | None = None,
    *,
    exact: bool,
) -> None:
    """Compares two tensors.

    Args:
        before: what a parameter began with: its update is compared.
    """
    if are_equal(plain, other):
        return
    if plain.shape != other.shape or plain.dtype != other.dtype:
        raise DiffersError(kind, f"{what}: of another shape or dtype,")
    reference, compared, noisy = (
        t.to_dense() if t.layout is not torch.strided else t for t in (plain, other, shaken)
    )
    if exact or not (plain.is_floating_point() or plain.is_complex()):
        raise DiffersError(kind, f"{what}: other numbers,")
    wide = torch.complex128 if plain.is_complex() else torch.float64
    reference, compared, noisy = reference.to(wide), compared.to(wide), noisy.to(wide)
    eps, norm = torch.finfo(plain.dtype).eps, float(reference.norm())
    update = norm if before is None else float((reference - before.to(reference.device, wide)).norm())
    off, noise = float((reference - compared).norm()), float((reference - noisy).norm())
    if not off <= ROUNDINGS * eps * update + 2 * eps * norm + NOISE * noise:
        share = f"{off / update:.1%}" if update else "all"
        raise DiffersError(
            kind, f"{what}: off by {share} of {'its norm' if before is None else 'the update'},"
        )
