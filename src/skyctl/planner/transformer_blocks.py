"""Which layers make up one transformer block, read from their names, and plans that keep blocks whole.

Known names: ``embedding`` (also ``tok_embeddings``, ``embed_tokens``, ``wte``, …); ``block.N`` or
``block.N.PART`` (also ``blocks``, ``layers``, ``layer``, ``h``, with anything before it); ``norm``; ``head``
(also ``output``, ``lm_head``, …). Other programs cut models only between these.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import NamedTuple

from skyctl.errors import InputError
from skyctl.planner.candidate import Candidate
from skyctl.planner.cost_model import CostModel, StageAssignment
from skyctl.planner.plan_record import make_certificate, read_candidate
from skyctl.planner.problem_parts import with_layers_joined
from skyctl.planner.step import play, predict_step
from skyctl.planner.step_costs import StepCosts
from skyctl.records.pipeline import Pipeline
from skyctl.records.plan import Plan, WholeBlocksProof
from skyctl.records.problem import Layer, Problem

BLOCK = re.compile(r"(?:^|\.)(?:blocks?|layers?|h)\.(\d+)(?:\.|$)")
NAMES = {
    "embedding": {"embedding", "embeddings", "tok_embeddings", "word_embeddings", "embed_tokens", "wte"},
    "norm": {"norm", "final_norm", "final_layernorm", "ln_f"},
    "head": {"head", "output", "output_layer", "lm_head", "classifier"},
}
ORDER = ("embedding", "block", "norm", "head")


class ModelPart(NamedTuple):
    """A layer's part of the model: ``kind`` is one of ``ORDER``; ``number`` the block's, from 0 (else −1)."""

    kind: str
    number: int = -1

    def __str__(self) -> str:
        return f"block {self.number}" if self.kind == "block" else f"the {self.kind}"


def model_parts(problem: Problem) -> tuple[ModelPart, ...]:
    """One per layer.

    Raises:
        InputError: a name that says nothing, no embedding, block or head, or parts in another order.
    """
    parts = tuple(_model_part(i, layer) for i, layer in enumerate(problem.layers))
    for (i, before), (j, after) in pairwise(enumerate(parts)):
        if not _follows(before, after):
            raise InputError(
                f"layer {j} ({problem.layers[j].name!r}) follows layer {i} ({problem.layers[i].name!r}): "
                "expected are an embedding, blocks 0, 1, 2, … and a head, in this order"
            )
    for kind in ("embedding", "block", "head"):
        if kind not in {part.kind for part in parts}:
            raise InputError(f"no layer's name says that it is the {kind}", hint=_HINT)
    return parts


def _follows(before: ModelPart, after: ModelPart) -> bool:
    ahead = ORDER.index(after.kind) - ORDER.index(before.kind)
    if ahead == 0:
        return after.number in (before.number, before.number + 1)
    return ahead > 0 and after.number in (-1, 0)


_HINT = "layers are known by their names: embedding, block.0.attention, block.0.mlp, …, head"


def _model_part(index: int, layer: Layer) -> ModelPart:
    block = BLOCK.search(layer.name)
    if block is not None:
        return ModelPart("block", int(block[1]))
    last = layer.name.rpartition(".")[2]
    for kind, names in NAMES.items():
        if last in names:
            return ModelPart(kind)
    raise InputError(
        f"layer {index} ({layer.name!r}): its name does not say whether it is the embedding, the head, "
        "or a part of which block",
        hint=_HINT,
    )


def with_norm_in_head(parts: tuple[ModelPart, ...]) -> tuple[ModelPart, ...]:
    """The same with the final norm as a part of the head."""
    return tuple(ModelPart("head") if part.kind == "norm" else part for part in parts)


def part_divided_by(parts: tuple[ModelPart, ...], cut: int) -> ModelPart | None:
    """The part that a cut before layer ``cut`` divides, or None."""
    return parts[cut] if parts[cut - 1] == parts[cut] else None


def plan_whole_blocks(problem: Problem, plan: Callable[[Problem], Plan]) -> Plan:
    """``plan``'s answer among the plans that cut between blocks only, as a plan for ``problem``.

    A block is planned as one layer: times, flops, state and activations summed, the largest workspace, the
    last output; so memory and times are those of the whole problem (nobody recomputes: that keeps the
    inputs of layers, not of blocks). The bound holds among such plans only: the certificate says
    ``feasible``, and its ``whole_blocks`` what is proved of them.

    Raises:
        InputError: see ``model_parts``; and what ``plan`` raises.
    """
    coarse, starts = _merged(problem)
    planned = plan(coarse)
    model = CostModel(problem)
    placement = tuple(
        StageAssignment(model.index(stage.device), starts[stage.start], starts[stage.stop])
        for stage in planned.placed_stages
    )
    costs, coarse_costs = StepCosts(problem), StepCosts(coarse)
    executed = read_candidate(coarse_costs, planned).pipelines[0]._replace(placement=placement)
    predicted = predict_step(costs, play(costs, Candidate((executed,))))
    proof = planned.certificate
    bound = "" if proof.lower_bound_s is None else f", bound {proof.lower_bound_s:.6g} s"
    certificate = make_certificate(
        predicted.iteration_s if model.by_iteration else predicted.bottleneck_s,
        None,
        proved=False,
        method=f"whole blocks only; among such plans {proof.status}{bound}: {proof.method}",
        wall_s=proof.wall_s,
    )
    stages = tuple(
        stage.model_copy(update={"start": p, "stop": q})
        for stage, (_, p, q) in zip(planned.placed_stages, placement, strict=True)
    )
    among_them = WholeBlocksProof(status=proof.status, lower_bound_s=proof.lower_bound_s, method=proof.method)
    return Plan(
        strategy=planned.strategy,
        problem=problem,
        pipelines=(Pipeline(stages=stages, microbatches=problem.microbatches),),
        unused=planned.unused,
        predicted=predicted,
        certificate=certificate.model_copy(update={"whole_blocks": among_them}),
    )


def _merged(problem: Problem) -> tuple[Problem, list[int]]:
    """The problem with a layer a part, and where each part starts (and the last one stops)."""
    parts = with_norm_in_head(model_parts(problem))
    groups = [[i for i, _ in group] for _, group in groupby(enumerate(parts), key=lambda pair: pair[1])]
    coarse = with_layers_joined(problem, groups, [str(parts[group[0]]) for group in groups])
    return coarse, [*(group[0] for group in groups), len(problem.layers)]
