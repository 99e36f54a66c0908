"""Whether the layers that a workload is cut into train what the user's own objects train in plain torch.

Both begin with the same weights and draw the same numbers: a generator is seeded before each microbatch, and
goes from layer to layer. What differs by more than rounding refuses the workload. How much rounding comes to is
measured: the plain model is trained once more from weights that are off by the last bit.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from skyctl.errors import SkyctlError, WorkloadError
from skyctl.worker.cut_check.cut_trial import EXECUTIONS, cut_trial, layer_prefixes
from skyctl.worker.cut_check.plain_trial import PlainModel, plain_trial
from skyctl.worker.cut_check.trial import Batches, Trial, held_tensors
from skyctl.workload.user_code import describe_exception, locate_error
from skyctl.workload.workload import Workload

SAME, UNREPEATABLE, NOT_COMPARED = "same", "unrepeatable", "not compared"
LOSS_TOLERANCE = 1e-5
ROUNDINGS = 100
"""Tensors may be apart by so many roundings of their dtype, relative to their norm."""
NOISE = 10
"""And by so many times what one last bit of each weight comes to."""

_STATE = (
    "a value outside of torch that changes from call to call (a counter, a list, a global): keep it in a buffer"
)
_CAUSES = {
    "outputs": "a context around the forward, a module called with other parameters, or a value of another run "
    "that the cut has kept",
    "later outputs": _STATE,
    "gradients": "a hook, or a context that changes gradients, that belongs to no single layer",
    "parameters": "an optimizer whose step() looks at several parameters together: give --clip-norm, or let it "
    "treat each parameter by itself",
    "buffers": "a buffer that several layers write to, or one that is written to outside of a module",
    "eval outputs": "something that eval() switches outside of the modules of one layer",
}


@dataclass(frozen=True)
class CutComparison:
    """What came of it.

    Attributes:
        verdict: ``SAME``, ``UNREPEATABLE`` (plain torch gives other numbers each time, so that nothing can
            be told) or ``NOT_COMPARED``.
        reason: why not ``SAME``, in words.
        seconds: what it took.
    """

    verdict: str
    reason: str | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


class _DiffersError(Exception):
    """The first thing that differs. ``kind``: a key of ``_CAUSES``; ``what``: it, in words."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind, self.what = kind, what


def compare_cut(workload: Workload, device: str | torch.device = "cpu", samples: int = 2) -> CutComparison:
    """Trains a workload whole and cut, each for two steps, and compares all that can be seen.

    Args:
        samples: of a microbatch; a step has two.

    Raises:
        WorkloadError: the cut trains something else; names the first layer or parameter that differs and the
            likely cause.
    """
    began = time.monotonic()
    with _kept_generators():
        found = _compare(workload, Batches(workload, samples, torch.device(device)))
    return CutComparison(found.verdict, found.reason, time.monotonic() - began)


def _compare(workload: Workload, batches: Batches) -> CutComparison:
    models = [PlainModel.make(workload, seed) for seed in (1, 2)]
    weights = dict(held_tensors(list(zip(layer_prefixes(workload), _layers(workload, "cpu"), strict=True))))
    weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
    _compare_beginnings(workload, models, weights)
    try:
        plain, again, shaken = (
            _plain(workload, model, weights, batches, shake=shake)
            for model, shake in zip([*models, None], (False, False, True), strict=True)
        )
    except (SkyctlError, MemoryError):
        raise
    except Exception as exc:
        raise WorkloadError(
            f"{workload.model.source_name}: it fails in plain torch, without skyctl, on random inputs like those "
            f"of its first batch: {_words(workload, exc)}",
            hint="see that two steps of its own loop run; --no-compare tries it all the same",
        ) from exc
    if not all(map(math.isfinite, plain.losses)):
        return CutComparison(NOT_COMPARED, "its loss on random inputs is not finite")
    try:
        _compare_trials(plain, again, None, weights)
    except _DiffersError as differs:
        return CutComparison(UNREPEATABLE, f"plain torch gives other numbers each time: {differs.what}")
    for how in EXECUTIONS:
        try:
            layers = _layers(workload, batches.device)
            _compare_trials(plain, cut_trial(workload, layers, how, batches), shaken, weights)
        except _DiffersError as differs:
            raise WorkloadError(
                f"{workload.model.source_name}: cut into layers it trains something else than in plain torch: "
                f"{differs.what} ({how.name})",
                hint=f"likely cause: {_CAUSES[differs.kind]}. --no-compare trains it all the same",
            ) from None
        except SkyctlError:
            raise
        except Exception as exc:
            raise WorkloadError(
                f"{workload.model.source_name}: it runs in plain torch, but not cut into layers ({how.name}): "
                f"{_words(workload, exc)}",
                hint="change that line, or let model() give a list of layers (docs/workloads.md)",
            ) from exc
    return CutComparison(SAME)


def _layers(workload: Workload, device: str | torch.device) -> Any:
    return workload.build(0, workload.layers, device)


def _plain(
    workload: Workload, model: PlainModel | None, weights: Mapping[str, Tensor], batches: Batches, *, shake: bool
) -> Trial:
    made = model or PlainModel.make(workload, 3)
    made.begin_with(_shaken(weights) if shake else weights)
    return plain_trial(made.to(batches.device), workload, batches)


def _shaken(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with each float off by about its last bit."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: w * (1 + torch.finfo(w.dtype).eps * torch.randn(w.shape, generator=generator, dtype=w.dtype))
        if w.is_floating_point() and w.device.type == "cpu"
        else w
        for name, w in weights.items()
    }


def _words(workload: Workload, exc: BaseException) -> str:
    path = workload.model.path
    line = locate_error(exc, path) if path is not None else None
    return describe_exception(exc) + (f" ({line})" if line else "")


def _compare_beginnings(
    workload: Workload, models: Sequence[PlainModel], weights: Mapping[str, Tensor]
) -> None:
    """Compares the initial values with those of model() in plain torch, as far as these are not random.

    Raises:
        WorkloadError: what model() gives alike whatever the seed is another here, or copies differ.
    """
    if workload.model.make is None or workload.model.values is not None:
        return
    one, other = (model.tensors() for model in models)
    who = workload.model.source_name
    missing = next((name for name in one if name not in weights and isinstance(one[name], torch.nn.Parameter)), None)
    if missing is not None:
        raise WorkloadError(f"{who}: cut into layers it lacks the parameter {missing} that model() makes")
    first_of: dict[bytes, str] = {}
    for name in (name for name in one if name in weights and name in other):
        a, b, mine = one[name].detach(), other[name].detach(), weights[name]
        if _equal(a, b):
            if not _equal(a, mine):
                raise WorkloadError(
                    f"{who}: {name} begins with other values than model() gives it in plain torch",
                    hint="give it its values with torch's own functions, within model()",
                )
            continue
        if a.is_sparse or a.is_quantized or a.numel() < _COPIES_FROM:
            continue
        first = first_of.setdefault(a.contiguous().view(torch.uint8).numpy().tobytes(), name)
        if first != name and a.shape == one[first].shape and not _equal(weights[first], mine):
            raise WorkloadError(
                f"{who}: {name} begins as a copy of {first} in plain torch, and with other values here",
                hint="copy the module or its weights within model()",
            )


_COPIES_FROM = 2
"""Tensors of so many elements that are equal by chance are none."""


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, 0, 0, equal_nan=True)))


def _compare_trials(
    plain: Trial, other: Trial, shaken: Trial | None, weights: Mapping[str, Tensor]
) -> None:
    """Compares two trials in the order in which a difference would come about.

    Args:
        shaken: of last bits that are off; None: the two are to be equal to the bit.

    Raises:
        _DiffersError: the first difference.
    """
    for number, seen in enumerate(zip(plain.outputs, other.outputs, strict=True)):
        kind = ("outputs", "later outputs")[min(number, 1)] if number < 2 else "parameters"
        noise = None if shaken is None else shaken.outputs[number]
        if number == 2:
            _compare_named("gradients", "the gradient of {}", plain.gradients, other.gradients, shaken and shaken.gradients)
        what = f"the outputs of microbatch {number % 2 + 1} of step {number // 2 + 1}"
        _compare_all(kind, what, *seen, noise)
        _compare_loss(plain, other, shaken, number)
    _compare_named(
        "parameters", "{} after two steps", plain.parameters, other.parameters, shaken and shaken.parameters, weights
    )
    _compare_named("buffers", "{} after two steps", plain.buffers, other.buffers, shaken and shaken.buffers)
    _compare_all("eval outputs", "the outputs in eval()", plain.evaluated, other.evaluated, shaken and shaken.evaluated)


def _compare_loss(plain: Trial, other: Trial, shaken: Trial | None, number: int) -> None:
    a, b = plain.losses[number], other.losses[number]
    allowed = 0.0 if shaken is None else LOSS_TOLERANCE * abs(a) + NOISE * abs(shaken.losses[number] - a)
    if not abs(a - b) <= allowed:
        raise _DiffersError("outputs", f"the loss of microbatch {number + 1} is {b:.7g}, {a:.7g} in plain torch")


def _compare_all(
    kind: str, what: str, plain: Sequence[Tensor], other: Sequence[Tensor], shaken: Sequence[Tensor] | None
) -> None:
    if len(plain) != len(other):
        raise _DiffersError(kind, f"{what} are {len(other)} tensors, {len(plain)} in plain torch")
    for number, (a, b) in enumerate(zip(plain, other, strict=True)):
        _compare_tensor(kind, what, a, b, None if shaken is None else shaken[number], None)


def _compare_named(
    kind: str,
    what: str,
    plain: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    shaken: Mapping[str, Tensor] | None,
    before: Mapping[str, Tensor] | None = None,
) -> None:
    for name, tensor in plain.items():
        if name not in other:
            if kind == "gradients":
                raise _DiffersError(kind, f"{name} gets no gradient")
            continue
        start = None if before is None else before.get(name)
        noise = None if shaken is None else shaken.get(name)
        _compare_tensor(kind, what.format(name), tensor, other[name], noise, start)
    if kind == "gradients" and (more := next((name for name in other if name not in plain), None)):
        raise _DiffersError(kind, f"{more} gets a gradient, and none in plain torch")


def _compare_tensor(
    kind: str, what: str, plain: Tensor, other: Tensor, shaken: Tensor | None, before: Tensor | None
) -> None:
    """Compares two tensors by rounding.

    Args:
        before: what a parameter began with: its update is compared.
    """
    if plain.shape != other.shape or plain.dtype != other.dtype:
        raise _DiffersError(kind, f"{what} have another shape or dtype")
    if plain.layout is not torch.strided:
        plain, other = plain.to_dense(), other.to_dense()
        shaken = None if shaken is None else shaken.to_dense()
    if _equal(plain, other):
        return
    if not (plain.is_floating_point() or plain.is_complex()) or shaken is None:
        raise _DiffersError(kind, f"{what} differ")
    eps = torch.finfo(plain.dtype).eps
    norm = float(plain.double().norm())
    update = norm if before is None else float((plain.double() - before.to(plain.device).double()).norm())
    off = float((plain.double() - other.double()).norm())
    noise = float((plain.double() - shaken.double()).norm())
    if math.isfinite(noise) and not off <= ROUNDINGS * eps * update + 2 * eps * norm + NOISE * noise:
        raise _DiffersError(kind, f"{what} off by {off / update if update else math.inf:.2g} of its norm")


@contextmanager
def _kept_generators() -> Iterator[None]:
    """Inside, torch's and Python's generators may be seeded; afterwards they are as before."""
    state = random.getstate()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(state)
