"""A workload's layers at every microbatch size: what they cost, and which of them are alike."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyctl.probe.node.probe_requests import DistinctLayer
from skyctl.records.problem import Tie
from skyctl.records.profile import LayerCosts, Profile, ShapeProfile

if TYPE_CHECKING:
    from skyctl.workload.workload import Workload
    from skyctl.workload.workload_spec import WorkloadSpec


def shape_profiles(workload: Workload, spec: WorkloadSpec, choices: Sequence[int]) -> list[ShapeProfile]:
    """The workload's layers at the larger microbatch size of each choice."""
    from skyctl.workload.costs import count_layer_costs
    from skyctl.workload.recipe import microbatch_sizes

    by_size: dict[int, tuple[LayerCosts, ...]] = {}
    shapes = []
    for microbatches in sorted(set(choices)):
        size = microbatch_sizes(spec.batch_size, microbatches)[0]
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
                    gradient_bytes=float(cost.gradient_bytes),
                    gradient_matrices=cost.gradient_matrices,
                    full_state_bytes=cost.full_state_bytes,
                )
                for cost in count_layer_costs(workload, size)
            )
        shapes.append(ShapeProfile(microbatch_size=size, microbatches=microbatches, layers=by_size[size]))
    return shapes


def find_ties(workload: Workload) -> tuple[Tie, ...]:
    """Which of the workload's layers share trained parameters: one for each set of layers."""
    shared_bytes: dict[tuple[int, ...], int] = {}
    for shared in workload.shared_parameters:
        if shared.gradient_bytes:
            shared_bytes[shared.layers] = shared_bytes.get(shared.layers, 0) + shared.gradient_bytes
    return tuple(Tie(layers=layers, bytes=float(nbytes)) for layers, nbytes in shared_bytes.items())


def distinct_layers(shapes: Sequence[ShapeProfile]) -> list[DistinctLayer]:
    """The first layer of each kind, in order, with its signature and needs by microbatch size."""
    names: dict[int, str] = {}
    signatures: defaultdict[int, dict[int, str]] = defaultdict(dict)
    needs_bytes: defaultdict[int, dict[int, float]] = defaultdict(dict)
    seen: set[tuple[int, str]] = set()
    for shape in shapes:
        size = shape.microbatch_size
        for index, layer in enumerate(shape.layers):
            if (size, layer.signature) in seen:
                continue
            seen.add((size, layer.signature))
            names.setdefault(index, layer.name)
            signatures[index][size] = layer.signature
            needs_bytes[index][size] = (
                layer.state_bytes + layer.activation_bytes + layer.workspace_bytes + 2 * layer.output_bytes
            )
    return [
        DistinctLayer(index, names[index], signatures[index], needs_bytes[index]) for index in sorted(names)
    ]


def layer_kinds(
    shapes: Sequence[ShapeProfile], layers: Sequence[DistinctLayer]
) -> dict[int, tuple[int, ...]]:
    """By microbatch size: which of the distinct layers each layer of the model is like."""
    kinds = {}
    for shape in shapes:
        size = shape.microbatch_size
        numbers = {row.signatures[size]: n for n, row in enumerate(layers) if size in row.signatures}
        kinds[size] = tuple(numbers[layer.signature] for layer in shape.layers)
    return kinds


def first_layer_names(profile: Profile) -> dict[str, str]:
    """By signature, the name of the first layer that has it."""
    names: dict[str, str] = {}
    for shape in profile.workload.shapes if profile.workload is not None else ():
        for layer in shape.layers:
            names.setdefault(layer.signature, layer.name)
    return names


def layer_names(profile: Profile) -> dict[str, str]:
    """By signature, the first layer that has it and how many have, for people: ``block.0.mlp ×12``."""
    count: dict[str, int] = {}
    for shape in profile.workload.shapes if profile.workload is not None else ():
        for signature, number in Counter(layer.signature for layer in shape.layers).items():
            count.setdefault(signature, number)
    names = first_layer_names(profile)
    return {s: name + (f" ×{count[s]}" if count[s] > 1 else "") for s, name in names.items()}
