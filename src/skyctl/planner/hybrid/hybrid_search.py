"""Good hybrids of many devices: sets of devices for pipelines, improved device by device, then cut by cut.

A choice of sets gets shares by water-filling, and a good pipeline for each set (``PipelineChoice``); what
counts is the whole step, sums included. Moves are counted and drawn from a fixed seed, so that the same
problem has the same plan where the time suffices.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from itertools import combinations, islice

from skyctl.planner.cost_model import Placement, StageAssignment
from skyctl.planner.data.replica_costs import ReplicaCosts
from skyctl.planner.data.set_search import search_greedy
from skyctl.planner.evaluation import step_lower_bound_s
from skyctl.planner.hybrid.aligned_drafts import aligned_drafts
from skyctl.planner.hybrid.device_partitions import Sets, normal, speed_of, starting_sets
from skyctl.planner.hybrid.draft_changes import changed_drafts
from skyctl.planner.hybrid.exact_hybrids import HybridSearch
from skyctl.planner.hybrid.hybrid_model import Draft, HybridModel, draft_of
from skyctl.planner.hybrid.pipeline_choice import PipelineChoice
from skyctl.planner.rhythms import Step
from skyctl.schedule.batch_shares import best_shares

SEED = 24
BETTER = 1e-9
STARTS_IMPROVED = 8
"""Best starts of which each is improved."""
MOST_MOVES, MOST_QUICK_MOVES = 4_000, 200
"""Moves of devices that are looked at, from each start; the second before a search of everything."""
MOST_LISTED = 5_000
"""Of each kind of move those that are listed at once: all, for a hundred devices."""
MOST_POLISHED, MOST_QUICK_POLISHED = 40_000, 2_000
"""Changes of cuts and shares that are looked at."""
DATA_SHARE, ALIGNED_SHARE, STARTS_SHARE, MOVES_SHARE = 0.2, 0.3, 0.45, 0.65
"""Of the time, until when the replicas of all layers, pipelines cut alike, other starts, and moves of devices
are looked at."""
MOST_CHANGES = 20_000
"""Changes of one step's cuts and shares that are listed at once; those of shares and cuts come first."""
STEPS_POLISHED = 12
"""Best steps with different sets whose cuts and shares are changed."""


def search_hybrids(model: HybridModel, deadline: float, *, quick: bool = False) -> HybridSearch:
    """A good hybrid; none where nothing that fits was found.

    Args:
        deadline: when to take the best so far, in seconds of ``time.perf_counter``.
        quick: with few moves only, as a start.
    """
    search = _ImprovementSearch(model, deadline)
    search.look_at_starts()
    search.improve(MOST_QUICK_MOVES if quick else MOST_MOVES)
    search.polish(MOST_QUICK_POLISHED if quick else MOST_POLISHED)
    words = (
        f"clusters and equal parts of the devices, improved: {len(search.seen)} choices of sets, "
        f"{model.plays} pipelines, {search.polished} changes of cuts and shares"
    )
    return HybridSearch(search.best, False, words)


class _ImprovementSearch:
    """The best step so far, and the choices of sets that were looked at, with the step of each."""

    def __init__(self, model: HybridModel, deadline: float) -> None:
        self.model, self.deadline = model, deadline
        self.began = time.perf_counter()
        self.pipelines = PipelineChoice(model)
        self.best: Step | None = None
        self.seen: dict[Sets, float] = {}
        self.steps: dict[Sets, Step] = {}
        self.polished = 0
        self._random = random.Random(SEED)  # noqa: S311 - a search, no secrets

    def _over(self, share: float = 1.0) -> bool:
        return time.perf_counter() > self.began + share * (self.deadline - self.began)

    def _keep(self, step: Step | None) -> float:
        if step is None:
            return math.inf
        sets = normal([stage.device for stage in placement] for placement in step.candidate.placements)
        if sets not in self.steps or step.iteration_s < self.steps[sets].iteration_s:
            self.steps[sets] = step
        if self.best is None or step.iteration_s < self.best.iteration_s * (1 - BETTER):
            self.best = step
        return step.iteration_s

    def look_at_starts(self) -> None:
        """Data parallelism's best replicas, clusters and equal parts, and pipelines that are cut alike."""
        self._look_at_replicas()
        self._look_at_aligned()
        for sets in starting_sets(self.model.base, self.model.microbatches):
            if self._over(STARTS_SHARE) and self.best is not None:
                return
            self.step_s(sets)
        if self.best is None:
            self._look_for_room()

    def _look_for_room(self) -> None:
        """Two pipelines, one of them with as few microbatches in flight and on as few devices as may be."""
        base, m = self.model.base, self.model.microbatches
        ranked = sorted(
            range(self.model.devices), key=lambda d: (base.available_bytes[d], -speed_of(base, d))
        )
        share = 1
        while share < m and self.best is None:
            count = 1
            while count < len(ranked) and self.best is None and not self._over(STARTS_SHARE):
                sets = (tuple(sorted(ranked[:-count])), tuple(sorted(ranked[-count:])))
                pair = self.pipelines.best(sets[1], share), self.pipelines.best(sets[0], m - share)
                if pair[0] is not None and pair[1] is not None:
                    self._keep(self.model.step(Draft((pair[1], pair[0]), (m - share, share))))
                count += max(1, count // 4)
            share *= 2

    def _look_at_replicas(self) -> None:
        until = self.began + DATA_SHARE * (self.deadline - self.began)
        placed = search_greedy(ReplicaCosts(self.model.problem, self.model.base), until).best
        if placed is not None and len(placed.replicas) > 1:
            whole = tuple((StageAssignment(d, 0, self.model.layers),) for d in placed.replicas)
            self._keep(self.model.step(Draft(whole, placed.shares)))
            self.step_s(normal((d,) for d in placed.replicas))

    def _look_at_aligned(self) -> None:
        for draft in aligned_drafts(self.model):
            if self._over(ALIGNED_SHARE):
                return
            limit_s = self._best_s()
            least_s = (
                step_lower_bound_s(self.model.costs(share), placement)
                for placement, share in zip(*draft, strict=True)
            )
            if max(least_s) < limit_s:
                self._keep(self.model.step(draft, limit_s))

    def _best_s(self) -> float:
        return math.inf if self.best is None else self.best.iteration_s

    def step_s(self, sets: Sets) -> float:
        """Seconds of a good step with these sets; infinite where none that fits was found."""
        if sets not in self.seen:
            self.seen[sets] = self._looked_at(sets)
        return self.seen[sets]

    def _looked_at(self, sets: Sets) -> float:
        """With shares by the devices' speeds, then by what the pipelines so chosen take."""
        model, m = self.model, self.model.microbatches
        if len(sets) > m or any(len(devices) > model.layers for devices in sets):
            return math.inf
        about_s = [1 / sum(speed_of(model.base, d) for d in devices) for devices in sets]
        shares = best_shares(m, [0.0] * len(sets), about_s)
        best_s = math.inf
        for _ in range(2):
            placed = [
                self.pipelines.best(devices, share) for devices, share in zip(sets, shares, strict=True)
            ]
            placements = tuple(placement for placement in placed if placement is not None)
            if len(placements) < len(sets):
                return best_s
            best_s = min(best_s, self._keep(model.step(Draft(placements, shares))))
            again = self._shares_of(placements, shares)
            if again is None or again == shares:
                return best_s
            best_s = min(best_s, self._keep(model.step(Draft(placements, again))))
            shares = again
        return best_s

    def _shares_of(
        self, placements: tuple[Placement, ...], shares: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        """Shares that level the pipelines' floors, as straight lines through two of their plays."""
        slopes, extras = [], []
        for placement, share in zip(placements, shares, strict=True):
            other = share // 2 if share > 1 else 2
            plays = self.model.play(placement, share), self.model.play(placement, other)
            if plays[0] is None or plays[1] is None:
                return None
            slope = max(0.0, (plays[0].floor_s - plays[1].floor_s) / (share - other))
            slopes.append(slope)
            extras.append(plays[0].floor_s - share * slope)
        return best_shares(self.model.microbatches, extras, slopes)

    def improve(self, most: int) -> None:
        """From each of the best starts to better sets, one move of devices at a time."""
        ranked = sorted((step_s, sets) for sets, step_s in self.seen.items() if step_s < math.inf)
        for step_s, start in ranked[:STARTS_IMPROVED]:
            sets, at_s, looked = start, step_s, 0
            improved = True
            while improved and looked < most and not self._over(MOVES_SHARE):
                improved = False
                for other in self._moves(sets):
                    if self._over(MOVES_SHARE) or looked >= most:
                        return
                    if other in self.seen:
                        continue
                    looked += 1
                    other_s = self.step_s(other)
                    if other_s < at_s * (1 - BETTER):
                        sets, at_s, improved = other, other_s, True
                        break

    def _moves(self, sets: Sets) -> Iterator[Sets]:
        """Sets joined, divided or left out; a device moved to another set; two exchanged; in random order."""
        count = len(sets)
        unused = tuple(sorted(set(range(self.model.devices)) - {d for devices in sets for d in devices}))
        places = (*sets, unused)
        moves: list[Sets] = []
        for i, j in self._few(list(combinations(range(count), 2))) if count > 2 else ():
            rest = [devices for k, devices in enumerate(sets) if k not in (i, j)]
            moves.append(normal([*rest, (*sets[i], *sets[j])]))
        for i in range(count):
            rest = [devices for k, devices in enumerate(sets) if k != i]
            if count > 2:
                moves.append(normal(rest))
            if len(sets[i]) > 1:
                moves.append(normal([*rest, sets[i][::2], sets[i][1::2]]))
        home = {d: i for i, devices in enumerate(places) for d in devices}
        for d, j in self._few([(d, j) for d in home for j in range(count + 2)]):
            i = home[d]
            if j > count and (i == count or len(places[i]) > 1):
                moves.append(normal([*(tuple(x for x in s if x != d) for s in sets), (d,)]))
            elif j <= count and i != j and (j < count or i < count):
                moves.append(self._moved(places, ((d, i, j),)))
        for a, b in self._few(list(combinations(home, 2))):
            if home[a] != home[b]:
                moves.append(self._moved(places, ((a, home[a], home[b]), (b, home[b], home[a]))))
        moves = [move for move in dict.fromkeys(moves) if len(move) > 1]
        self._random.shuffle(moves)
        yield from moves

    def _few(self, all_of: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """All of these, but of very many some, drawn at random."""
        return all_of if len(all_of) <= MOST_LISTED else self._random.sample(all_of, MOST_LISTED)

    @staticmethod
    def _moved(places: Sets, moves: tuple[tuple[int, int, int], ...]) -> Sets:
        """With devices moved from one set to another; the last of the sets are the unused ones."""
        changed = [set(devices) for devices in places]
        for device, source, target in moves:
            changed[source].discard(device)
            changed[target].add(device)
        return normal(changed[:-1])

    def polish(self, most: int) -> None:
        """The best steps' cuts, orders and shares, changed one at a time while the step gets shorter."""
        ranked = sorted(self.steps.values(), key=lambda step: step.iteration_s)
        for number, start in enumerate(ranked[:STEPS_POLISHED], start=1):
            done = 1 - 0.5**number  # each may take a half of what is left
            self._polish(start, int(most * done), MOVES_SHARE + (1 - MOVES_SHARE) * done)

    def _polish(self, step: Step, most: int, share: float) -> None:
        improved = True
        while improved:
            improved = False
            drafts = changed_drafts(self.model, draft_of(step.candidate), self._random)
            changes = list(islice(drafts, MOST_CHANGES))
            self._random.shuffle(changes)
            for draft in changes:
                if self.polished >= most or self._over(share):
                    return
                self.polished += 1
                better = self.model.step(draft, step.iteration_s * (1 - BETTER))
                if better is not None:
                    step, improved = better, True
                    self._keep(step)
                    break
