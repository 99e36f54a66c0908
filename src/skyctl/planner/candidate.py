"""How a candidate plan's stages run, what a search returns, and reading both from a plan record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from skyctl.planner.cost_model import CostModel, Placement, StageAssignment
from skyctl.planner.verification.verification import read_stages
from skyctl.records.plan import Plan, Witness


class StageExecution(NamedTuple):
    """How stages run, one entry per stage.

    Attributes:
        in_flight: microbatches kept between forward and backward.
        deferred: by how many microbatches weight gradients follow the backward (``zero-bubble``).
        recompute: whether it keeps only its layers' inputs and computes activations again in the backward.
    """

    in_flight: tuple[int, ...]
    deferred: tuple[int, ...]
    recompute: tuple[bool, ...]

    @classmethod
    def plain(cls, in_flight: Sequence[int]) -> StageExecution:
        """With these numbers in flight; nothing is deferred or recomputed."""
        return cls(tuple(in_flight), (0,) * len(in_flight), (False,) * len(in_flight))


NO_EXECUTION = StageExecution((), (), ())


@dataclass(frozen=True)
class SearchResult:
    """The best plan found and what is proved of it, both in seconds of the problem's objective.

    ``bound_s`` None: no bound is claimed. ``proved``: no plan is better by more than 1e-9, relative. An empty
    placement that is proved: no plan fits. ``witness``: prices that prove the bound, where prices do.
    """

    placement: Placement
    execution: StageExecution
    value_s: float
    bound_s: float | None
    proved: bool
    method: str
    witness: Witness | None = None


class BoundKind(Enum):
    """What proves a lower bound on the slowest stage; the values are how a certificate's method names it."""

    VOLUME = "volume"
    PRICES = "prices"
    PRICES_BY_PLACE = "prices by place"
    EDGES = "periodic edges (exact)"
    EDGES_BY_CP_SAT = "periodic edges (exact, CP-SAT)"
    CP_SAT = "CP-SAT"

    @property
    def by_prices(self) -> bool:
        """Whether dual prices prove it, so that other prices may prove a little less."""
        return self in (BoundKind.PRICES, BoundKind.PRICES_BY_PLACE)


def read_placement(model: CostModel, plan: Plan) -> tuple[Placement, StageExecution]:
    """The placement of a plan record with one replica per stage, and how its stages run.

    Raises:
        InputError: the plan names devices the problem lacks, covers other layers, or has several replicas.
    """
    stages = read_stages(model.problem, plan)
    execution = StageExecution(
        tuple(stage.in_flight for stage in stages),
        tuple(stage.weights_behind for stage in stages),
        tuple(stage.recompute for stage in stages),
    )
    return tuple(StageAssignment(stage.device, stage.start, stage.stop) for stage in stages), execution
