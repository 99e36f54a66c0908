"""Whether a step was trained on data that belongs together: both ends' batches, and the loss. Pure.

``data()`` runs at both ends of the pipeline. If no seed fixes its order, inputs would be trained on
other samples' targets, and the loss would say so only much later, if ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from skyctl.errors import RunError, SkyctlError, WorkloadError
from skyctl.run.rank_spec import RankSpec
from skyctl.worker.rank_events import BatchSketch, StepEvent, TensorSketch

TOLERANCE = 2e-2
"""How far floats of two processors may be apart, as a part of a tensor's norm: where each value is rounded to
bfloat16 at one end, a sum with random signs is off by about 0.2% of the norm, and seldom by 1%; samples in
another order make about 100%."""

REPEATS = (
    "data() gives the same first batch for the next seed: every epoch repeats the same order. To shuffle "
    "anew, make its generator of its argument seed"
)
CAUSES = (
    "the same seed must give the same batches on every node. Usual causes: numbers that no seed fixes "
    "(numpy.random, random.SystemRandom, an unseeded torch.Generator), the order of os.listdir or of a set "
    "(sort it), files that differ between the nodes, DataLoader workers with seeds of their own. Nodes that "
    "have only their own half of the data: --pin-first and --pin-last"
)


_ALONG = "inputs would be trained on targets that are not theirs"
_BESIDE = "what the pipelines train on would not be parts of one batch"


def step_fault(
    step: int, loss: float, events: Sequence[StepEvent], specs: Sequence[RankSpec]
) -> SkyctlError | None:
    """Why the run must end with this step, which would come again however often it was tried; None: go on.

    Args:
        step: counted from 0.
        events: of this step, by rank.
    """
    first_ranks: dict[int, int] = {}
    for rank, other in enumerate(events):
        pipeline = specs[rank].pipeline or 0
        reference = first_ranks.setdefault(pipeline, rank)
        beside = reference == rank  # with the first pipeline, and within each one with its first rank
        if beside:
            reference = 0
        first = events[reference]
        one, two = specs[reference], specs[rank]
        where = f"rank {one.rank} (node {one.node})", f"rank {two.rank} (node {two.node})"
        fault = _fault_of_batches(step, first.batch, other.batch, where, beside=beside)
        if fault is None:
            what = _different_sides(first.validation_batch, other.validation_batch)
            fault = f"validation() gives other {what} on {where[1]} than on {where[0]}" if what else None
        if fault is not None:
            return WorkloadError(fault, hint=CAUSES)
    if math.isfinite(loss):
        return None
    from skyctl.jobs.sum_benchmark import sums_alone  # with all that plans sums: seldom needed here

    if sums_alone(specs[0].source or ""):
        return RunError(
            f"the loss of step {step + 1} is {loss}{_whose_loss(events, specs)}: what bench-sync sums "
            "can't diverge, so a device or a sum has made wrong numbers",
            hint="leave out one node after the other (--limit), to find the one that is wrong",
        )
    batches = [event.batch for event in events if event.batch is not None]
    return _fault_of_loss(step, loss, batches, _whose_loss(events, specs))


def _whose_loss(events: Sequence[StepEvent], specs: Sequence[RankSpec]) -> str:
    """Which of several pipelines the loss is not finite on, to follow it; empty where it is so on all."""
    parts = [(specs[rank], event.loss) for rank, event in enumerate(events) if event.loss is not None]
    odd = [f"rank {spec.rank} (node {spec.node})" for spec, part in parts if not math.isfinite(part)]
    return f" on {', '.join(odd)} alone" if 0 < len(odd) < len(parts) else ""


def _fault_of_batches(
    step: int, first: BatchSketch | None, last: BatchSketch | None, where: tuple[str, str], *, beside: bool
) -> str | None:
    """The difference between the batches of two ranks, in words; None where they are the same.

    Args:
        beside: they are in two pipelines, and not at the ends of one.
    """
    if first is None or last is None:
        return None
    so = _BESIDE if beside else _ALONG
    if first.length is not None and last.length is not None and first.length != last.length:
        return (
            f"data() gives {first.length} batches an epoch on {where[0]} and {last.length} on {where[1]}: "
            f"{so}"
        )
    if (first.epoch, first.index) != (last.epoch, last.index):
        return (
            f"data() has ended an epoch on one rank and not on the other: step {step + 1} has "
            f"{_place(first)} on {where[0]}, {_place(last)} on {where[1]}"
        )
    what = _different_sides(first, last)
    if not what or (beside and first.is_part):  # the samples of each are others
        return None
    return (
        f"data() gives other batches on {where[1]} than on {where[0]}: in step {step + 1} the {what} differ, "
        f"so {so}"
    )


def _place(sketch: BatchSketch) -> str:
    if sketch.epoch is None or sketch.index is None:
        return "a batch of no known place"
    return f"batch {sketch.index + 1} of epoch {sketch.epoch + 1}"


def _different_sides(first: BatchSketch | None, last: BatchSketch | None) -> str:
    """``inputs``, ``targets``, both or neither: what is not the same, as far as both ends have said."""
    if first is None or last is None:
        return ""
    inputs = not _agree(first.inputs, last.inputs)
    targets = not _agree(first.targets, last.targets)
    return " and ".join(["inputs"] * inputs + ["targets"] * targets)


def _agree(first: Sequence[TensorSketch], last: Sequence[TensorSketch]) -> bool:
    return not first or not last or same_tensors(first, last, TOLERANCE)


def same_tensors(first: Sequence[TensorSketch], last: Sequence[TensorSketch], tolerance: float) -> bool:
    """Whether these may be sketches of the same tensors, on two processors.

    Args:
        tolerance: how far floats may be apart, as a part of a tensor's norm; whole numbers are to be equal.
    """
    return len(first) == len(last) and all(
        _same_tensor(mine, theirs, tolerance) for mine, theirs in zip(first, last, strict=True)
    )


def _same_tensor(first: TensorSketch, last: TensorSketch, tolerance: float) -> bool:
    if first.whole != last.whole or len(first.sums) != len(last.sums):
        return False
    allowed = tolerance * max(first.norm, last.norm)
    pairs = zip((first.norm, *first.sums), (last.norm, *last.sums), strict=True)
    return all(abs(mine - theirs) <= allowed for mine, theirs in pairs)


def _fault_of_loss(step: int, loss: float, batches: Sequence[BatchSketch], where: str) -> SkyctlError:
    """The error for a loss that is no number: data() gave none, or training has diverged.

    Args:
        where: as ``_whose_loss`` says it.
    """
    sides = ["inputs"] * (not all(batch.finite_inputs for batch in batches))
    sides += ["targets"] * (not all(batch.finite_targets for batch in batches))
    if sides:
        sketch = batches[0]
        place = f" ({_place(sketch)})" if sketch.index is not None else ""
        return WorkloadError(
            f"the loss of step {step + 1} is {loss}{where}: the {' and '.join(sides)} that data() "
            f"gave{place} have NaN or infinite values in them",
            hint="leave such samples out, or replace the values, in data()",
        )
    given = ", and what data() gave is finite" if batches else ""
    return RunError(
        f"the loss of step {step + 1} is {loss}{where}: training has diverged{given}",
        hint="try a lower --learning-rate"
        if step
        else "no weight has changed yet: look at model() and data()",
    )
