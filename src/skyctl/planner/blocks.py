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
from skyctl.planner.assemble import certificate, prediction
from skyctl.planner.grid import grid
from skyctl.planner.model import Model, Piece
from skyctl.records.plan import Plan, Stage
from skyctl.records.problem import Layer, LayerTimes, Problem

BLOCK = re.compile(r"(?:^|\.)(?:blocks?|layers?|h)\.(\d+)(?:\.|$)")
NAMES = {
    "embedding": {"embedding", "embeddings", "tok_embeddings", "word_embeddings", "embed_tokens", "wte"},
    "norm": {"norm", "final_norm", "final_layernorm", "ln_f"},
    "head": {"head", "output", "output_layer", "lm_head", "classifier"},
}
ORDER = ("embedding", "block", "norm", "head")


class Part(NamedTuple):
    """What a layer belongs to: ``kind`` is one of ``ORDER``; ``number`` the block's, from 0 (else −1)."""

    kind: str
    number: int = -1

    def __str__(self) -> str:
        return f"block {self.number}" if self.kind == "block" else f"the {self.kind}"


def parts(problem: Problem) -> tuple[Part, ...]:
    """One per layer.

    Raises:
        InputError: a name that says nothing, no embedding, block or head, or parts in another order.
    """
    found = tuple(_part(i, layer) for i, layer in enumerate(problem.layers))
    for (i, before), (j, after) in pairwise(enumerate(found)):
        if not _follows(before, after):
            raise InputError(
                f"layer {j} ({problem.layers[j].name!r}) follows layer {i} ({problem.layers[i].name!r}): "
                "expected are an embedding, blocks 0, 1, 2, … and a head, in this order"
            )
    for kind in ("embedding", "block", "head"):
        if kind not in {part.kind for part in found}:
            raise InputError(f"no layer's name says that it is the {kind}", hint=_HINT)
    return found


def _follows(before: Part, after: Part) -> bool:
    ahead = ORDER.index(after.kind) - ORDER.index(before.kind)
    if ahead == 0:
        return after.number in (before.number, before.number + 1)
    return ahead > 0 and after.number in (-1, 0)


_HINT = "layers are known by their names: embedding, block.0.attention, block.0.mlp, …, head"


def _part(index: int, layer: Layer) -> Part:
    block = BLOCK.search(layer.name)
    if block is not None:
        return Part("block", int(block[1]))
    last = layer.name.rpartition(".")[2]
    for kind, names in NAMES.items():
        if last in names:
            return Part(kind)
    raise InputError(
        f"layer {index} ({layer.name!r}): its name does not say whether it is the embedding, the head, "
        "or a part of which block",
        hint=_HINT,
    )


def with_norm_in_head(found: tuple[Part, ...]) -> tuple[Part, ...]:
    """The same with the final norm as a part of the head."""
    return tuple(Part("head") if part.kind == "norm" else part for part in found)


def inside(found: tuple[Part, ...], cut: int) -> Part | None:
    """The part that a cut before layer ``cut`` divides, or None."""
    return found[cut] if found[cut - 1] == found[cut] else None


def whole_blocks(problem: Problem, plan: Callable[[Problem], Plan]) -> Plan:
    """``plan``'s answer among the plans that cut between blocks only, as a plan for ``problem``.

    A block is planned as one layer: times, flops, state and activations summed, the largest workspace, the
    last output; so memory and times are those of the whole problem (nobody recomputes: that keeps the
    inputs of layers, not of blocks). The bound holds among such plans only: the certificate says
    ``feasible``, and its method what is proved of them.

    Raises:
        InputError: see ``parts``; and what ``plan`` raises.
    """
    coarse, starts = _merged(problem)
    found = plan(coarse)
    model = Model(problem)
    pieces = [
        Piece(model.index(stage.replicas[0].device), starts[stage.start], starts[stage.stop])
        for stage in found.stages
    ]
    said = prediction(model, pieces, grid(Model(coarse), found)[1])
    proof = found.certificate
    bound = "" if proof.lower_bound_s is None else f", bound {proof.lower_bound_s:.6g} s"
    return Plan(
        strategy=found.strategy,
        problem=problem,
        stages=tuple(
            Stage(start=p, stop=q, replicas=stage.replicas)
            for stage, (_, p, q) in zip(found.stages, pieces, strict=True)
        ),
        unused=found.unused,
        predicted=said,
        certificate=certificate(
            said.iteration_s if model.by_iteration else said.bottleneck_s,
            None,
            proved=False,
            method=f"whole blocks only; among such plans {proof.status}{bound}: {proof.method}",
            wall_s=proof.wall_s,
        ),
    )


def _merged(problem: Problem) -> tuple[Problem, list[int]]:
    """The problem with a layer a part, and where each part starts (and the last one stops)."""
    found = with_norm_in_head(parts(problem))
    groups = [[i for i, _ in group] for _, group in groupby(enumerate(found), key=lambda pair: pair[1])]

    def total(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sum(values[i] for i in group) for group in groups)

    layers = tuple(_one([problem.layers[i] for i in group], found[group[0]]) for group in groups)
    times = {
        device: LayerTimes(
            forward_s=total(known.forward_s),
            backward_s=total(known.backward_s),
            optimizer_s=total(known.optimizer_s),
            weight_s=None if known.weight_s is None else total(known.weight_s),
        )
        for device, known in problem.times.items()
    }
    coarse = problem.model_copy(update={"layers": layers, "times": times, "recompute": False})
    return coarse, [*(group[0] for group in groups), len(problem.layers)]


def _one(layers: list[Layer], part: Part) -> Layer:
    return Layer(
        name=str(part),
        flops=sum(layer.flops for layer in layers),
        state_bytes=sum(layer.state_bytes for layer in layers),
        activation_bytes=sum(layer.activation_bytes for layer in layers),
        output_bytes=layers[-1].output_bytes,
        workspace_bytes=max(layer.workspace_bytes for layer in layers),
        deferred_bytes=sum(layer.deferred_bytes for layer in layers),
    )
