"""A workload's layers at every microbatch size: what they cost, and which of them are alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skyctl.records.profile import LayerCosts, Profile, ShapeProfile

if TYPE_CHECKING:
    from skyctl.workload.workload import Workload, WorkloadSpec


def shapes_of(workload: Workload, spec: WorkloadSpec, choices: Sequence[int]) -> list[ShapeProfile]:
    """The workload's layers at the larger microbatch size of each choice."""
    from skyctl.workload.costs import costs
    from skyctl.workload.split import sizes

    by_size: dict[int, tuple[LayerCosts, ...]] = {}
    shapes = []
    for microbatches in sorted(set(choices)):
        size = sizes(spec.batch_size, microbatches)[0]
        if size not in by_size:
            by_size[size] = tuple(
                LayerCosts(
                    name=cost.name,
                    signature=cost.signature,
                    flops=float(cost.flops),
                    state_bytes=float(cost.state_bytes),
                    activation_bytes=float(cost.activation_bytes),
                    output_bytes=float(cost.output_bytes),
                    workspace_bytes=float(cost.workspace_bytes),
                    deferred_bytes=float(cost.deferred_bytes),
                )
                for cost in costs(workload, size)
            )
        shapes.append(ShapeProfile(microbatch_size=size, microbatches=microbatches, layers=by_size[size]))
    return shapes


def distinct(shapes: Sequence[ShapeProfile]) -> list[dict[str, Any]]:
    """The first layer of each kind, in order, with its signature and needs by microbatch size."""
    found: dict[int, dict[str, Any]] = {}
    seen: set[tuple[int, str]] = set()
    for shape in shapes:
        size = shape.microbatch_size
        for index, layer in enumerate(shape.layers):
            if (size, layer.signature) in seen:
                continue
            seen.add((size, layer.signature))
            empty = {"index": index, "name": layer.name, "flops": 0.0, "signatures": {}, "needs_bytes": {}}
            entry = found.setdefault(index, empty)
            entry["flops"] += layer.flops
            entry["signatures"][str(size)] = layer.signature
            entry["needs_bytes"][str(size)] = (
                layer.state_bytes + layer.activation_bytes + layer.workspace_bytes + 2 * layer.output_bytes
            )
    return [found[index] for index in sorted(found)]


def kinds_of(shapes: Sequence[ShapeProfile], layers: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """By microbatch size: which of the distinct layers each layer of the model is like."""
    found = {}
    for shape in shapes:
        size = str(shape.microbatch_size)
        numbers = {row["signatures"][size]: n for n, row in enumerate(layers) if size in row["signatures"]}
        found[size] = [numbers[layer.signature] for layer in shape.layers]
    return found


def layer_names(profile: Profile) -> dict[str, str]:
    """By signature, the name of the first layer that has it, and how many have: ``block.0.mlp ×12``."""
    if profile.workload is None or not profile.workload.shapes:
        return {}
    first: dict[str, str] = {}
    count: dict[str, int] = {}
    for shape in profile.workload.shapes:
        seen: Mapping[str, int] = dict(count)
        for layer in shape.layers:
            first.setdefault(layer.signature, layer.name)
            if layer.signature not in seen:
                count[layer.signature] = count.get(layer.signature, 0) + 1
    return {s: name + (f" ×{count[s]}" if count[s] > 1 else "") for s, name in first.items()}
