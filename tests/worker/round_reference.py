"""Rounds in one process, with torch's own tools: what pipelines that average their weights must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from skyctl.schedule.rounds import clients_of_round
from skyctl.worker.pipeline.layer_seeder import LayerSeeder
from skyctl.workload.recipe import microbatch_sizes
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import WorkloadSpec


@dataclass
class Rounds:
    """By round, the loss, and by owner the loss, the local steps; the last weights by parameter.

    ``buffers``: by pipeline, its own buffers, which are not averaged here.
    """

    losses: list[float] = field(default_factory=list)
    own_losses: list[list[float | None]] = field(default_factory=list)
    steps_made: list[list[int]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: list[dict[str, torch.Tensor]] = field(default_factory=list)


def train(
    spec: dict[str, Any],
    microbatches: int,
    steps: Sequence[int],
    rounds: int,
    *,
    shares: Sequence[int] | None = None,
    owners: Sequence[str] | None = None,
    mu: float = 0.0,
    clients: int | None = None,
    drop: bool = False,
    step_budget: Callable[[str, int], int] | None = None,
    clip_norm: float | None = None,
    outer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Rounds:
    """Trains all pipelines in turn.

    ``shares``: each pipeline's microbatches of common batches; ``owners``: each has batches of its own;
    ``outer`` makes the optimizer whose gradient is what a round changes.
    """
    torch.set_num_threads(1)
    sizes = microbatch_sizes(spec["batch_size"], microbatches)
    members: list[_Member] = []
    first = 0
    for number, asked in enumerate(steps):
        loaded = WorkloadSpec.from_dict(spec)
        if owners is not None:
            loaded = replace(loaded, owner=owners[number])
            members.append(
                _Member(load_workload(loaded), sizes, (0, sum(sizes)), asked, number * microbatches)
            )
            continue
        assert shares is not None
        stop = first + shares[number]
        samples = (sum(sizes[:first]), sum(sizes[:stop]))
        members.append(_Member(load_workload(loaded), sizes[first:stop], samples, asked, first))
        first = stop
    common = [torch.nn.Parameter(p.detach().clone()) for p in members[0].parameters]
    steps_outside = None if outer is None else outer(common)
    outcome = Rounds()
    seed = WorkloadSpec.from_dict(spec).seed
    for number in range(rounds):
        start = [p.detach().clone() for p in members[0].parameters]
        chosen = clients_of_round(len(members), clients, seed, number)
        counts: list[int] = []
        own: list[float | None] = []
        did: list[int] = []
        for index, member in enumerate(members):
            wanted = member.asked if index in chosen else 0
            if wanted and step_budget is not None and owners is not None:
                wanted = min(wanted, step_budget(owners[index], number))
            dropped = drop and wanted < member.asked
            if dropped:
                wanted = 0
            own.append(member.run(number, wanted, start, mu, clip_norm) if wanted else None)
            did.append(wanted)
            counts.append(wanted * sum(member.sizes))
            if owners is not None:
                member.optimizer.state.clear()
        total = sum(counts)
        with torch.no_grad():
            for place, before in enumerate(start):
                parts = (n * m.parameters[place] for n, m in zip(counts, members, strict=True) if n)
                mean = sum(parts, torch.zeros_like(before)) / total if total else before
                if steps_outside is None:
                    common[place].copy_(mean)
                common[place].grad = before - mean
            if steps_outside is not None and total:
                steps_outside.step()
            for member in members:
                for own_weight, weight in zip(member.parameters, common, strict=True):
                    own_weight.copy_(weight)
        parts_of_loss = (n * loss / total for n, loss in zip(counts, own, strict=True) if loss is not None)
        outcome.losses.append(sum(parts_of_loss) if total else [0.0, *outcome.losses][-1])
        outcome.own_losses.append(own)
        outcome.steps_made.append(did)
    outcome.buffers = [
        {f"{i}.{name}": b.clone() for i, layer in enumerate(m.layers) for name, b in layer.named_buffers()}
        for m in members
    ]
    outcome.weights = {
        f"{i}.{name}": p.detach().clone()
        for i, layer in enumerate(members[0].layers)
        for name, p in layer.named_parameters()
    }
    return outcome


class _Member:
    """One pipeline, or one owner."""

    def __init__(
        self, loaded: Workload, sizes: Sequence[int], samples: tuple[int, int], asked: int, first: int
    ) -> None:
        self.loaded, self.sizes, self.samples, self.asked = loaded, list(sizes), samples, asked
        self.layers = loaded.build(0, loaded.layers, "cpu")
        parameters = {id(p): p for layer in self.layers for p in layer.parameters() if p.requires_grad}
        self.parameters = list(parameters.values())
        self.optimizer = loaded.optimizer(self.parameters)
        self.seeder = LayerSeeder(loaded._spec.seed, 0, torch.device("cpu"), first)

    def run(
        self, number: int, wanted: int, start: Sequence[torch.Tensor], mu: float, clip_norm: float | None
    ) -> float:
        stream = self.loaded.batches(number * self.asked, *self.samples)
        total = 0.0
        for step, (inputs, targets) in enumerate(islice(stream, wanted)):
            self.seeder.step = number * self.asked + step
            parts = zip(self.sizes, inputs.split(self.sizes), targets.split(self.sizes), strict=True)
            for microbatch, (n, x, y) in enumerate(parts):
                value: Any = x
                for position, layer in enumerate(self.layers):
                    self.seeder(microbatch, position)
                    value = layer(value)
                loss = self.loaded.loss(value, y) * (n / sum(self.sizes))
                loss.backward()
                total += loss.item()
            for parameter, before in zip(self.parameters, start, strict=True):
                if mu and parameter.grad is not None:
                    parameter.grad += mu * (parameter.detach() - before)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.parameters, clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return total / wanted
