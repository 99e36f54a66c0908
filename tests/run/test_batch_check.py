"""The faults of a step that end a run: unequal batches at both ends, and losses that are no numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from skyctl.agent.task_events import read_event, to_message
from skyctl.errors import RunError, WorkloadError
from skyctl.jobs.sum_benchmark import gradients_source
from skyctl.run.batch_check import step_fault
from skyctl.worker.batches.batch_sketch import sketch_batch
from skyctl.worker.rank_events import BatchSketch, StepEvent
from skyctl.workload.workload_spec import WorkloadSpec

from ..helpers.events import step_event, step_message
from ..helpers.orders import rank_order, rank_spec

SPECS = [rank_spec(i, node) for i, node in enumerate("abc")]
INPUTS, TARGETS = torch.randn(8, 3), torch.arange(8)
SKETCH = replace(sketch_batch((INPUTS, TARGETS), 0, "x"), epoch=0, index=0, length=5)
OTHER = replace(sketch_batch((INPUTS.flip(0), TARGETS.flip(0)), 0, "x"), epoch=0, index=0, length=5)


def fault(first: BatchSketch | None, last: BatchSketch | None, loss: float = 1.0, **more: object):
    events = [step_event(2, batch=first, **more), step_event(2), step_event(2, batch=last)]
    return step_fault(2, loss, events, SPECS)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (
            OTHER,
            r"data\(\) gives other batches on rank 2 .* than on rank 0 .*: in step 3 the inputs",
        ),
        (replace(SKETCH, targets=OTHER.targets), "in step 3 the targets differ"),
        (replace(SKETCH, inputs=OTHER.inputs), "in step 3 the inputs differ"),
        (replace(SKETCH, inputs=SKETCH.inputs * 2), "in step 3 the inputs differ"),
        (
            replace(SKETCH, length=6),
            r"gives 5 batches an epoch on rank 0 \(node a\) and 6 on rank 2 \(node c\)",
        ),
        (replace(OTHER, epoch=1), "step 3 has batch 1 of epoch 1 on rank 0 .*, batch 1 of epoch 2 on rank 2"),
    ],
)
def test_ends_that_differ_are_named_with_the_usual_causes(last: BatchSketch, words: str) -> None:
    found = fault(SKETCH, last)
    assert isinstance(found, WorkloadError)
    with pytest.raises(WorkloadError, match=words):
        raise found
    for cause in ("SystemRandom", "os.listdir", "a set", "files that differ", "workers", "--pin-first"):
        assert cause in str(found.hint)


def test_each_pipelines_ends_are_compared_and_the_pipelines_with_the_first() -> None:
    """Of whole batches all contents; of parts, which are other samples, those of a pipeline's ends alone."""
    rows = [rank_spec(i, f"n{i}", rank_order(i % 2, 2, pipeline=i // 2)) for i in range(4)]

    def found(*sketches: BatchSketch) -> str:
        error = step_fault(2, 1.0, [step_event(2, batch=sketch) for sketch in sketches], rows)
        return "" if error is None else str(error)

    assert found(SKETCH, SKETCH, SKETCH, SKETCH) == ""
    said = found(SKETCH, SKETCH, OTHER, OTHER)
    assert "other batches on rank 2 (node n2) than on rank 0" in said
    assert "parts of one batch" in said
    said = found(SKETCH, SKETCH, SKETCH, OTHER)
    assert "other batches on rank 3 (node n3) than on rank 2" in said
    assert "targets that are not theirs" in said
    part, rest = replace(SKETCH, is_part=True), replace(OTHER, is_part=True)
    assert found(part, part, rest, rest) == ""
    assert "other batches on rank 3 (node n3) than on rank 2" in found(part, part, rest, part)
    assert "6 on rank 2 (node n2)" in found(part, part, replace(rest, length=6), replace(rest, length=6))


def test_ends_that_agree_or_do_not_say_are_left_alone() -> None:
    assert fault(SKETCH, SKETCH) is None
    assert fault(SKETCH, replace(SKETCH, length=None)) is None
    assert fault(SKETCH, replace(SKETCH, inputs=(), targets=())) is None
    assert fault(None, None) is None
    assert fault(SKETCH, None) is None
    assert step_fault(0, 1.0, [step_event(0, batch=SKETCH)], SPECS[:1]) is None


def test_held_out_batches_are_compared_too() -> None:
    events = [step_event(0, validation_batch=SKETCH), step_event(0, validation_batch=OTHER)]
    found = step_fault(0, 1.0, events, SPECS[:2])
    assert "validation() gives other inputs and targets on rank 1 (node b)" in str(found)


def test_a_loss_that_is_no_number_says_whether_the_data_was() -> None:
    nan = float("nan")
    found = fault(replace(SKETCH, finite_inputs=False), SKETCH, loss=nan)
    assert isinstance(found, WorkloadError)
    assert "the loss of step 3 is nan: the inputs that data() gave (batch 1 of epoch 1) have NaN" in str(
        found
    )
    assert "the targets that" in str(fault(SKETCH, replace(SKETCH, finite_targets=False), loss=nan))
    found = fault(SKETCH, SKETCH, loss=nan)
    assert isinstance(found, RunError)
    assert "training has diverged, and what data() gave is finite" in str(found)
    assert "--learning-rate" in str(found)
    first = step_fault(0, nan, [step_event(0)], SPECS[:1])
    assert "no weight has changed yet" in str(first)


def test_sums_without_a_model_do_not_diverge() -> None:
    """``bench-sync`` has no learning rate, and no model() or data() of the user's."""
    workload = WorkloadSpec(gradients_source(400))
    specs = [rank_spec(i, node, rank_order(pipeline=i, workload=workload)) for i, node in enumerate("ab")]
    nan = float("nan")
    for step in (0, 2):
        found = step_fault(step, nan, [step_event(step, loss=0.0), step_event(step, loss=nan)], specs)
        assert isinstance(found, RunError)
        assert f"the loss of step {step + 1} is nan on rank 1 (node b) alone: " in found.message
        assert "a device or a sum has made wrong numbers" in found.message
        assert "--limit" in str(found.hint)


def test_the_pipelines_that_have_no_loss_are_named_unless_all_have_none() -> None:
    nan = float("nan")
    parts = [step_event(2, loss=0.5), step_event(2, loss=nan), step_event(2, loss=None)]
    assert "the loss of step 3 is nan on rank 1 (node b) alone: training" in str(
        step_fault(2, nan, parts, SPECS)
    )
    parts = [step_event(2, loss=nan), step_event(2, loss=nan), step_event(2, loss=None)]
    assert "the loss of step 3 is nan: training" in str(step_fault(2, nan, parts, SPECS))


def test_a_sketch_comes_over_the_wire_as_it_was() -> None:
    message = step_message(2, batch=SKETCH)
    read = read_event(StepEvent, message, "a")
    assert read.batch == SKETCH
    assert to_message(read) == message
    assert "batch" not in step_message(2)
