"""A problem with fewer devices, or with fewer layers, some of them several layers joined into one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from skyctl.records.cluster import node_of
from skyctl.records.problem import Layer, LayerTimes, Problem, SharedResource, Tie


def with_devices(problem: Problem, ids: Collection[str]) -> Problem:
    """The problem with only those of its devices, and what it says of them; a pin may be left without any.

    An owner of data stays if all of its nodes do; otherwise it leaves, and its data with it.
    """
    update: dict[str, Any] = {
        "devices": tuple(device for device in problem.devices if device.id in ids),
        "times": {name: times for name, times in problem.times.items() if name in ids},
        "links": tuple(link for link in problem.links if link.source in ids and link.target in ids),
        "shared": tuple(shared_among(problem.shared, ids)),
    }
    for field in ("first_stage", "last_stage", "helpers"):
        named: Sequence[str] | None = getattr(problem, field)
        update[field] = None if named is None else tuple(name for name in named if name in ids)
    if problem.owners is not None:
        nodes = {node_of(name) for name in ids}
        kept = [number for number, owner in enumerate(problem.owners) if nodes >= set(owner)]
        update |= _owners_left(problem, kept)
    return problem.model_copy(update=update)


def _owners_left(problem: Problem, kept: Sequence[int]) -> dict[str, Any]:
    """Owners, and the rhythm's numbers for them, where only some are left."""
    assert problem.owners is not None
    rhythm = problem.rhythm
    steps, clients = rhythm.local_steps, rhythm.clients_per_round
    if isinstance(steps, tuple):
        steps = tuple(steps[number] for number in kept)
    if clients is not None:
        clients = max(1, min(clients, len(kept)))
    return {
        "owners": tuple(problem.owners[number] for number in kept),
        "rhythm": rhythm.model_copy(update={"local_steps": steps, "clients_per_round": clients}),
    }


def shared_among(resources: Sequence[SharedResource], ids: Collection[str]) -> list[SharedResource]:
    """Those that links among these devices share, with these links only."""
    shared = []
    for resource in resources:
        pairs = tuple(pair for pair in resource.links if pair[0] in ids and pair[1] in ids)
        if pairs:
            shared.append(resource.model_copy(update={"links": pairs}))
    return shared


def with_layers_joined(problem: Problem, groups: Sequence[Sequence[int]], names: Sequence[str]) -> Problem:
    """The problem with each group of layers as one layer, so that no plan cuts within a group.

    Times, flops, state and activations are summed; the workspace is the largest, the output the last one's.
    Nobody recomputes: that keeps the inputs of layers, not of groups. Ties within one group are gone.

    Args:
        groups: the layers of each group, ascending; together all layers in their order.
        names: by group, what the layer is called.
    """

    def total(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(values[i] for i in group) for group in groups)

    times = {
        device: LayerTimes(
            forward_s=total(layer_times.forward_s),
            backward_s=total(layer_times.backward_s),
            optimizer_s=total(layer_times.optimizer_s),
            weight_s=None if layer_times.weight_s is None else total(layer_times.weight_s),
            split_s=None if layer_times.split_s is None else total(layer_times.split_s),
        )
        for device, layer_times in problem.times.items()
    }
    layers = tuple(
        _joined_layer([problem.layers[i] for i in group], name)
        for group, name in zip(groups, names, strict=True)
    )
    group_of = {layer: number for number, group in enumerate(groups) for layer in group}
    among = [(sorted({group_of[layer] for layer in tie.layers}), tie.bytes) for tie in problem.ties]
    ties = tuple(Tie(layers=tuple(which), bytes=size) for which, size in among if len(which) > 1)
    return problem.model_copy(update={"layers": layers, "times": times, "recompute": False, "ties": ties})


def _joined_layer(layers: Sequence[Layer], name: str) -> Layer:
    return Layer(
        name=name,
        flops=sum(layer.flops for layer in layers),
        state_bytes=sum(layer.state_bytes for layer in layers),
        activation_bytes=sum(layer.activation_bytes for layer in layers),
        output_bytes=layers[-1].output_bytes,
        workspace_bytes=max(layer.workspace_bytes for layer in layers),
        deferred_bytes=sum(layer.deferred_bytes for layer in layers),
    )
