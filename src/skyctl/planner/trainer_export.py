"""A plan's stages as other trainers' settings: torchtitan and Megatron-core.

torchtitan (v0.2.0 on, ``torchtitan/distributed/pipeline_parallel.py``): ``module_fqns_per_model_part``, a
list of module names per stage: ``tok_embeddings``, ``layers.N``, ``norm``, ``output``. Modules that no stage
names are dropped, so all are named; versions after v0.2.2 call ``output`` ``lm_head``.

Megatron-core (0.13 on, ``megatron/core/transformer/pipeline_parallel_layer_layout.py``): the string of
``--pipeline-model-parallel-layout``: ``E`` embedding, ``t`` transformer layer, ``t*3`` three of them, ``L``
final norm, output and loss, ``|`` between stages.

In both, pipeline rank i holds stage i, so the order of the devices is part of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from skyctl.errors import InputError
from skyctl.planner.transformer_blocks import ModelPart, model_parts, part_divided_by, with_norm_in_head
from skyctl.records.plan import Plan


@dataclass(frozen=True)
class TrainerExport:
    """A plan's stages as one trainer's setting.

    ``setting``: what its configuration calls ``value``; ``text``: the value as it is typed there;
    ``devices``: who is pipeline rank 0, 1, …; ``notes``: what else to set, and what differs there.
    """

    format: str
    setting: str
    value: str | list[list[str]]
    text: str
    devices: tuple[str, ...]
    notes: tuple[str, ...]

    def document(self) -> dict[str, object]:
        """The export as the values of a JSON document."""
        return {
            "format": self.format,
            "setting": self.setting,
            "value": self.value,
            "devices": list(self.devices),
            "notes": list(self.notes),
        }


def export_plan(plan: Plan, to: str) -> TrainerExport:
    """``plan`` for the trainer ``to``: ``torchtitan`` or ``megatron``.

    Raises:
        InputError: an unknown trainer, several pipelines, layers whose names do not say what they are,
            or a stage that ends inside a block.
    """
    if to not in FORMATS:
        raise InputError(f"--export {to!r} is not one of {', '.join(FORMATS)}")
    if len(plan.pipelines) != 1:
        raise InputError(
            f"the plan has {len(plan.pipelines)} pipelines; {to} takes the cuts of one, and gives all "
            "replicas of it these cuts and as many samples",
            hint="plan one: --parallel pipeline",
        )
    return FORMATS[to](plan, tuple(stage.device for stage in plan.placed_stages))


def _torchtitan(plan: Plan, devices: tuple[str, ...]) -> TrainerExport:
    parts = model_parts(plan.problem)
    _refuse_cuts(plan, parts, "torchtitan")
    norm = any(part.kind == "norm" for part in parts)
    names = {
        "embedding": ["tok_embeddings"],
        "norm": ["norm"],
        "head": ["output"] if norm else ["norm", "output"],
    }
    value = [
        [
            name
            for part, _ in groupby(parts[stage.start : stage.stop])
            for name in names.get(part.kind, [f"layers.{part.number}"])
        ]
        for stage in plan.placed_stages
    ]
    schedule = {"1f1b": "1F1B", "gpipe": "GPipe"}.get(plan.problem.schedule)
    notes = [
        f"torchtitan v0.2: pipeline_parallel_degree = {len(devices)}, "
        f'pipeline_parallel_schedule = "{schedule or "1F1B"}"; later versions call "output" "lm_head"',
        _microbatches(plan, "pipeline_parallel_microbatch_size", "local_batch_size"),
    ]
    if schedule is None:
        notes.append(_other_schedule(plan, "torchtitan has no such schedule"))
    text = "[\n" + ",\n".join(f"  {json.dumps(stage)}" for stage in value) + "\n]"
    return TrainerExport("torchtitan", "module_fqns_per_model_part", value, text, devices, tuple(notes))


def _megatron(plan: Plan, devices: tuple[str, ...]) -> TrainerExport:
    # The final norm goes with the head: Megatron-core has no letter for it.
    parts = with_norm_in_head(model_parts(plan.problem))
    _refuse_cuts(plan, parts, "Megatron-core")
    stages = []
    for stage in plan.placed_stages:
        here = [part for part, _ in groupby(parts[stage.start : stage.stop])]
        blocks = sum(part.kind == "block" for part in here)
        text = "E" if here[0].kind == "embedding" else ""
        text += "t" if blocks == 1 else f"t*{blocks}" if blocks else ""
        stages.append(text + ("L" if here[-1].kind == "head" else ""))
    layout = "|".join(stages)
    count = sum(part.kind == "block" for part, _ in groupby(parts))
    notes = [
        f"Megatron-core 0.13 or newer: --num-layers {count} --pipeline-model-parallel-size {len(devices)} "
        f"--pipeline-model-parallel-layout '{layout}'",
        _microbatches(plan, "--micro-batch-size", "--global-batch-size"),
    ]
    if plan.problem.schedule != "1f1b":
        notes.append(_other_schedule(plan, "Megatron-core runs 1F1B"))
    return TrainerExport(
        "megatron", "--pipeline-model-parallel-layout", layout, layout, devices, tuple(notes)
    )


FORMATS: dict[str, Callable[[Plan, tuple[str, ...]], TrainerExport]] = {
    "torchtitan": _torchtitan,
    "megatron": _megatron,
}


def _refuse_cuts(plan: Plan, parts: tuple[ModelPart, ...], trainer: str) -> None:
    """Raises InputError naming the stages that end inside a block."""
    layers = plan.problem.layers
    broken = [
        f"stage {number} ends inside {part}, after {layers[stage.stop - 1].name!r}"
        for number, stage in enumerate(plan.placed_stages[:-1])
        if (part := part_divided_by(parts, stage.stop)) is not None
    ]
    if broken:
        more = f"; so do {len(broken) - 3} more" if len(broken) > 3 else ""
        raise InputError(
            f"{trainer} cuts a model between blocks only; {'; '.join(broken[:3])}{more}",
            hint="--whole-blocks looks for the best plan that cuts between blocks only",
        )


def _microbatches(plan: Plan, size: str, batch: str) -> str:
    m = plan.problem.microbatches
    words = f"the plan is made for {m} microbatches a step: "
    if plan.workload is None:
        return words + f"{size} is {batch} / {m}"
    samples = plan.workload.batch_size
    if samples % m:
        return words + f"equal ones are needed there, and {samples} samples do not divide by {m}"
    return words + f"{batch} {samples}, {size} {samples // m}"


def _other_schedule(plan: Plan, why: str) -> str:
    return f"the plan is made for {plan.problem.schedule}; {why}: its predicted time does not hold there"
