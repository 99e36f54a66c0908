"""The form of a batch: from the user's example() or data(), or as it is known of a built-in model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from skyctl.errors import WorkloadError
from skyctl.workload import builtin, user_code
from skyctl.workload.data import BatchExample, UserData, check_batch
from skyctl.workload.layered_model import LayeredModel
from skyctl.workload.workload_spec import ModelSource, WorkloadSpec


def find_example(model: LayeredModel, source: ModelSource, spec: WorkloadSpec) -> BatchExample:
    """The form of the workload's batches: as the spec has it, or from the first one.

    Raises:
        WorkloadError: neither example() nor data() gives one; names the line of the user's file.
    """
    if spec.example is not None:
        return BatchExample.from_dict(spec.example)
    if model.hub is not None and spec.records is not None:
        from skyctl.workload.datasets.record_batches import make_record_example

        settings = model.hub.settings
        packing = bool(spec.records["packing"])
        return make_record_example(settings.context, settings.vocabulary, packing=packing)
    if model.hub is not None:
        from skyctl.workload.hf import token_data as hub_text

        return hub_text.make_batch_example(model.hub.settings)
    if source.path is None:
        text = bytes(range(256)) * (2 * source.sizes["context"] // 256 + 2)
        batch = builtin.draw_samples(source.kind, source.sizes, text, 1, 0, 0, 0, 1)
        top = 255 if source.kind == "gpt" else builtin.CLASSES - 1
        example = BatchExample.of(batch)
        return replace(
            example,
            inputs=(replace(example.inputs[0], low=0, high=255, ranges=()),),
            targets=(replace(example.targets[0], low=0, high=top, ranges=()),),
        )
    if "example" in model.functions:
        with user_code.user_errors(source.path, "example()"):
            return BatchExample.of(
                check_batch(model.functions["example"](spec.batch_size), f"{model.source_name}: example()")
            )
    try:
        with user_code.user_errors(source.path, "data()"):
            return BatchExample.of(next(make_user_data(model, spec).batches(0, 0, spec.batch_size)))
    except WorkloadError as exc:
        here = "where this machine has no data, define example(batch_size) to give the shapes"
        exc.hint = f"{exc.hint}; {here}" if exc.hint else here
        raise


def make_user_data(model: LayeredModel, spec: WorkloadSpec) -> UserData:
    """The batches of the user's data(); WorkloadError where the file defines none."""
    function: Callable[..., Any] | None = model.functions.get("data")
    if function is None:
        what = "neither data() nor example()" if spec.random_inputs else "no data()"
        raise WorkloadError(
            f"{model.source_name} defines {what}, so there is nothing to train on",
            hint="def data(batch_size, seed): yield inputs, targets; or, to try a model on random inputs, "
            "def example(batch_size): return inputs, targets and --random-inputs",
        )
    return UserData(function, f"{model.source_name}: data()", spec.batch_size, spec.seed, spec.owner)
