"""Whether the layers that a workload is cut into train what the user's own objects train in plain torch.

Both begin with the same weights and draw the same numbers: a generator is seeded before each microbatch, and
goes from layer to layer. If more than rounding differs, the workload is refused. How much rounding comes to
is measured: the plain model is trained once more from weights that are off by the last bit.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.errors import SkyctlError, WorkloadError
from skyctl.worker.cut_check.cut_trial import EXECUTIONS, Execution, cut_trial, layer_prefixes
from skyctl.worker.cut_check.differences import (
    ROUNDINGS,
    DiffersError,
    Kind,
    TrialComparison,
    are_equal,
)
from skyctl.worker.cut_check.module_outputs import ModuleOutputs
from skyctl.worker.cut_check.plain_trial import PlainModel, plain_trial
from skyctl.worker.cut_check.trial import Batches, OutOfTimeError, Trial, held_tensors
from skyctl.workload.python_state import BUFFER, AttributeLines, changed_value, snapshot
from skyctl.workload.structures import unflatten_value
from skyctl.workload.user_code import describe_exception, locate_error
from skyctl.workload.workload import Workload

SAME, UNREPEATABLE, NOT_COMPARED = "same", "unrepeatable", "not compared"

_CAUSES: dict[Kind, str] = {
    "outputs": "a context around the forward, a module called with other parameters, or a value of another "
    "run that the cut has kept",
    "later outputs": "a value outside of torch that changes from call to call (a counter, a list, a global): "
    "keep it in a buffer",
    "gradients": "a hook, or a context that changes gradients, that belongs to no single layer",
    "parameters": "an optimizer that tells parameters apart by their place in the list, draws random numbers "
    "in step(), which are others on each machine, or looks at several parameters together: let it treat each "
    "by itself and by its name (a norm of all: --clip-norm)",
    "buffers": "a buffer that several layers write to, or one that is written to outside of a module",
    "eval outputs": "something that eval() switches outside of the modules of one layer",
}


@dataclass(frozen=True)
class ComparedCut:
    """The outcome of the comparison.

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


def compare_cut(
    workload: Workload, device: str | torch.device = "cpu", samples: int = 2, limit_s: float = math.inf
) -> ComparedCut:
    """Trains a workload whole and cut, each for two steps, and compares all that can be seen.

    Args:
        samples: of a microbatch; a step has two.
        limit_s: after so many seconds no further training is begun.

    Raises:
        WorkloadError: the cut trains something else; names the first layer or parameter that differs and the
            likely cause.
    """
    began = time.monotonic()
    with _kept_generators():
        try:
            compared = _compare(workload, Batches(workload, samples, torch.device(device), began + limit_s))
        except OutOfTimeError:
            compared = ComparedCut(NOT_COMPARED, f"it takes more than {limit_s:.0f} s")
    return ComparedCut(compared.verdict, compared.reason, time.monotonic() - began)


def _compare(workload: Workload, batches: Batches) -> ComparedCut:
    models = [PlainModel.make(workload, seed) for seed in (1, 2)]
    weights = dict(held_tensors(list(zip(layer_prefixes(workload), _layers(workload, "cpu"), strict=True))))
    weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
    _compare_beginnings(workload, models, weights)
    counter = _find_counter(workload, models[1], batches)
    del models
    try:
        plain, again, shaken = (
            _plain(workload, weights, batches, shake=shake) for shake in (False, False, True)
        )
    except (SkyctlError, MemoryError, torch.OutOfMemoryError, OutOfTimeError):
        raise
    except Exception as exc:
        raise WorkloadError(
            f"{workload.model.source_name}: it fails in plain torch, without skyctl, on random inputs like "
            f"those of its first batch: {_words(workload, exc)}",
            hint="see that two steps of its own loop run; --no-compare tries it all the same",
        ) from exc
    if not all(map(math.isfinite, plain.losses)):
        return ComparedCut(NOT_COMPARED, "its loss on random inputs is not finite")
    comparison = TrialComparison(plain, shaken, weights)
    try:
        comparison.check_repeated(again)
    except DiffersError as differs:
        if counter is not None:
            raise counter from None
        return ComparedCut(UNREPEATABLE, f"plain torch gives other numbers each time ({differs.what} then)")
    for how in EXECUTIONS:
        _compare_execution(workload, how, batches, comparison, weights, counter)
    return ComparedCut(SAME)


def _compare_execution(
    workload: Workload,
    how: Execution,
    batches: Batches,
    comparison: TrialComparison,
    weights: Mapping[str, Tensor],
    counter: WorkloadError | None,
) -> None:
    """Trains the layers, run in one way; WorkloadError where they train something else or fail.

    Args:
        counter: what a difference is put down to.
    """
    who = workload.model.source_name
    try:
        comparison.check_cut(cut_trial(workload, _layers(workload, batches.device), how, batches))
    except DiffersError as differs:
        if counter is not None:
            raise counter from None
        place = workload.model.place_of("optimizer" if differs.kind == "parameters" else "model")
        if differs.kind in ("outputs", "later outputs", "eval outputs"):
            module = _first_other_module(workload, how, batches, weights)
            place = f"{module} is the first; {place}" if module else place
        raise WorkloadError(
            f"{who}: cut into layers it trains something else than in plain torch: {differs.what} with "
            f"{how.name} ({place})",
            hint=f"likely cause: {how.cause or _CAUSES[differs.kind]}. --no-compare trains it all the same",
        ) from None
    except (SkyctlError, MemoryError, torch.OutOfMemoryError, OutOfTimeError):
        raise
    except Exception as exc:
        raise WorkloadError(
            f"{who}: it runs in plain torch, but not cut into layers, with {how.name}: "
            f"{_words(workload, exc)}",
            hint="change that line, or let model() give a list of layers (docs/workloads.md)",
        ) from exc


def _first_other_module(
    workload: Workload, how: Execution, batches: Batches, weights: Mapping[str, Tensor]
) -> str | None:
    """Both once more, to find the first module that gives something else; None: it isn't known."""
    with suppress(Exception):  # the difference is told in any case
        model, layers = PlainModel.make(workload, 3), _layers(workload, batches.device)
        model.begin_with(weights)
        plain = ModuleOutputs(model.modules)
        cut = ModuleOutputs(list(zip(layer_prefixes(workload), layers, strict=True)))
        plain_trial(model.to(batches.device), workload, batches, weights.keys())
        cut_trial(workload, layers, how, batches)
        return plain.first_other(cut)
    return None


def _find_counter(workload: Workload, model: PlainModel, batches: Batches) -> WorkloadError | None:
    """Calls a model alike three times, which it is not used after.

    Returns:
        The error if the third call changes a number of Python's that the second has changed: it may do no
        harm (a log), so it is raised only where something differs.
    """
    folder = workload.model.path.parent if workload.model.path is not None else None
    if folder is None:
        return None
    lines, kept = AttributeLines(folder), []
    root = nn.ModuleList(module for _, module in model.to(batches.device).modules)
    codes = [workload.model.functions[name] for name in ("loss",) if name in workload.model.functions]
    with lines.noted(), suppress(Exception):  # what fails here fails below, and is told there
        model.train(mode=True)
        for _ in range(3):
            ((tensors, targets), *_) = batches.step(0)
            batches.seed(0, 0)
            workload.loss(model(unflatten_value(tensors, workload.structure(0))), targets)
            kept.append(snapshot(list(root.modules()), folder, codes))
    changed = changed_value(kept[1], kept[2], root, lines, codes) if len(kept) == 3 else None
    if changed is None:
        return None
    line, what = changed
    return WorkloadError(
        f"{line or workload.model.source_name}: {what}: it is another on another machine, in a recomputed "
        "layer or after a resume",
        hint=BUFFER,
    )


def _layers(workload: Workload, device: str | torch.device) -> Any:
    return workload.build(0, workload.layers, device)


def _plain(workload: Workload, weights: Mapping[str, Tensor], batches: Batches, *, shake: bool) -> Trial:
    """A trial of what model() gives, made just before: an optimizer() may look for the newest in a global."""
    model = PlainModel.make(workload, 3)
    model.begin_with(_shaken(weights) if shake else weights)
    return plain_trial(model.to(batches.device), workload, batches, weights.keys())


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
    tensors, other = (model.tensors() for model in models)
    who = workload.model.source_name
    placed = {
        id(tensors[name]) for name in tensors if name in weights
    }  # a tied one may have another name there
    missing = next(
        (name for name, t in tensors.items() if isinstance(t, nn.Parameter) and id(t) not in placed), None
    )
    if missing is not None:
        raise WorkloadError(f"{who}: cut into layers it lacks the parameter {missing} that model() makes")
    by_sum: dict[Any, list[str]] = {}
    for name in (name for name in tensors if name in weights and name in other):
        a, b, mine = tensors[name].detach(), other[name].detach(), weights[name]
        if are_equal(a, b):
            if not _are_alike(a, mine):
                raise WorkloadError(
                    f"{who}: {name} begins with other values than model() gives it in plain torch",
                    hint="give it its values with torch's own functions, within model()",
                )
            continue
        if a.is_sparse or a.is_quantized or a.numel() < _COPIES_FROM:
            continue
        alike = by_sum.setdefault((a.dtype, a.shape, float(a.double().sum())), [])
        first = next((other for other in alike if are_equal(tensors[other], a)), None)
        alike.append(name)
        if first is not None and not _are_alike(weights[first], mine):
            raise WorkloadError(
                f"{who}: {name} begins as a copy of {first} in plain torch, and with other values here",
                hint="copy the module or its weights within model()",
            )


_COPIES_FROM = 2
"""Tensors of so many elements that are equal by chance are none."""


def _are_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal but for rounding: a weight may be computed from others."""
    if not a.is_floating_point() or a.shape != b.shape or a.dtype != b.dtype:
        return are_equal(a, b)
    return are_equal(a, b) or torch.allclose(a, b, rtol=ROUNDINGS * torch.finfo(a.dtype).eps, atol=0.0)


@contextmanager
def _kept_generators() -> Iterator[None]:
    """Inside, torch's and Python's generators may be seeded; afterwards they are as before."""
    state = random.getstate()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(state)
