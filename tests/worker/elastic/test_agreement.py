"""No matter who leaves, and when: no two members apply other sums of a step, and those that may go on do."""

from __future__ import annotations

import json
import random

import pytest
from tests.worker.elastic.simulated_members import Simulation

from skyctl.agent.message_fields import write_fields
from skyctl.transport.transfer_errors import PeerProtocolError
from skyctl.worker.elastic.agreement import MOST_EARLY_BYTES, Agreement, OwnWork
from skyctl.worker.member_messages import Generation, Vote

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


@pytest.mark.parametrize("stages", [2, 3])
def test_a_pipeline_without_a_stage_leaves_and_its_stages_were_always_at_one_mind(stages: int) -> None:
    for seed in range(2 * SEEDS):
        draw = random.Random(f"{stages} {seed}")
        simulation = Simulation(seed, 3 * stages, is_dynamic=draw.random() < 0.5, stages=stages)
        for torn in draw.sample(range(3), draw.randint(0, 2)):
            simulation.run(draw.randrange(150))
            victim = stages * torn + draw.randrange(stages)
            if draw.random() < 0.5:
                simulation.kill(victim)
            else:
                simulation.cut_line(victim, draw.choice([r for r in range(3 * stages) if r != victim]))
        simulation.run(4000)
        assert max(member.step for member in simulation.members.values()) > 10, seed
        staying = {r for r in simulation.alive() if not simulation.members[r].agreement.is_left_out}
        for told in simulation.firsts.values():
            by_pipeline = {}
            for rank, is_first in told.items():
                head = rank - rank % stages
                assert by_pipeline.setdefault(head, is_first) == is_first, seed
            assert sum(is_first and head in staying for head, is_first in by_pipeline.items()) <= 1, seed


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("pipelines", [2, 3])
def test_who_leaves_may_not_be_heard_out_and_the_others_end_or_go_on_together(
    stages: int, pipelines: int
) -> None:
    """The one that has the others agree may be among those that leave, and be heard by some of them only."""
    for seed in range(2 * SEEDS):
        draw = random.Random(f"heard out {stages} {pipelines} {seed}")
        members, has_witness = stages * pipelines, draw.random() < 0.7
        simulation = Simulation(seed, members, has_witness=has_witness, stages=stages)
        for victim in draw.sample(range(members), draw.randint(1, pipelines - 1)):
            simulation.run(draw.randrange(120))
            simulation.leave(victim)
        simulation.run(2000)
        there = simulation.alive()
        before = {rank: simulation.members[rank].step for rank in there}
        simulation.run(2000)
        numbers = {simulation.members[rank].agreement.generation.number for rank in there}
        assert len(numbers) <= 1, (seed, numbers)
        assert all(simulation.members[rank].step > before[rank] + 5 for rank in there), (seed, before)
        assert there or not has_witness or pipelines > 2, seed


def test_ranks_join_and_leave_and_each_sum_is_of_all_microbatches() -> None:
    """A rank that joins may be lost before it has weights, or right after."""
    for seed in range(2 * SEEDS):
        draw = random.Random(f"join {seed}")
        simulation = Simulation(seed, 3, is_dynamic=draw.random() < 0.5)
        for _ in range(4):
            simulation.run(draw.randrange(250))
            joined = simulation.join()
            simulation.run(draw.randrange(250))
            victim = joined if draw.random() < 0.4 else draw.choice(simulation.alive())
            if draw.random() < 0.7 and simulation.can_lose(victim):
                if draw.random() < 0.7:
                    simulation.kill(victim)
                else:
                    simulation.isolate({victim})
                    simulation.isolated.add(victim)
        before = max(member.step for member in simulation.members.values())
        simulation.run(4000)
        there = set(simulation.alive()) - simulation.isolated
        alive = [rank for rank in there if not simulation.members[rank].agreement.is_left_out]
        ends = {rank: simulation.members[rank].step for rank in alive}
        assert min(ends.values()) > before + 5, (seed, ends)


def test_of_a_generation_that_nobody_knows_some_messages_are_kept_and_no_more() -> None:
    """A bound in bytes limits the messages that are kept, for each rank by itself."""
    agreement = Agreement(0, Generation(0, (0, 1, 2), {0: (0, 8)}), 8, lambda: OwnWork(0, None), pipelines={})
    digests = dict.fromkeys(range(100), "0" * 32)
    vote = Vote(7, 3, digests)
    size = len(json.dumps(write_fields(vote)))
    for _ in range(MOST_EARLY_BYTES // size):
        agreement.handle(1, vote)
    with pytest.raises(PeerProtocolError, match=r"rank 1 sends \d+ bytes") as caught:
        agreement.handle(1, vote)
    assert caught.value.peer_rank == 1
    agreement.handle(2, vote)
