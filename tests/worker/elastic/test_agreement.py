"""Whoever leaves, and whenever: no two members apply other sums of a step, and those that may go on do."""

from __future__ import annotations

import random

import pytest
from tests.worker.elastic.simulated_members import Simulation

SEEDS = 20


@pytest.mark.parametrize("kind", ["killed", "cut off", "one line cut"])
@pytest.mark.parametrize("members", [2, 3, 4, 5])
def test_one_sum_of_each_step_takes_effect(kind: str, members: int) -> None:
    for seed in range(SEEDS):
        draw = random.Random(f"{kind} {members} {seed}")
        has_witness = draw.random() < 0.5
        most = members // 2 if has_witness and members % 2 == 0 else (members - 1) // 2
        is_dynamic = draw.random() < 0.5
        simulation = Simulation(seed, members, has_witness=has_witness, is_dynamic=is_dynamic)
        for victim in draw.sample(range(members), draw.randint(0, most)):
            simulation.run(draw.randrange(120))
            if kind == "killed":
                simulation.kill(victim)
            elif kind == "cut off":
                simulation.isolate({victim})
            elif members > 2:
                simulation.cut_line(victim, draw.choice([r for r in range(members) if r != victim]))
        simulation.run(2500)
        ends = {rank: len(simulation.members[rank].applied) for rank in simulation.alive()}
        assert max(ends.values()) > 15, (seed, ends)


@pytest.mark.parametrize("witness_with", [0, 1, None])
def test_of_two_halves_one_at_most_goes_on(witness_with: int | None) -> None:
    """Two and two: only the half that reaches the witness goes on; without one nobody does."""
    for seed in range(SEEDS):
        simulation = Simulation(seed, 4, has_witness=witness_with is not None)
        simulation.run(60 + seed)
        halves = ({0, 1}, {2, 3})
        simulation.isolate(set(halves[0]))
        for rank in halves[1 - witness_with] if witness_with is not None else ():
            simulation.cut_line(rank, -1)
        before = [simulation.least_applied(sorted(half)) for half in halves]
        simulation.run(2500)
        gained = [
            simulation.least_applied(sorted(half)) - had for half, had in zip(halves, before, strict=True)
        ]
        for number, gain in enumerate(gained):
            assert (gain > 5) == (number == witness_with) or (gain <= 1), (seed, gained)
        if witness_with is not None:
            assert gained[witness_with] > 5, (seed, gained)
