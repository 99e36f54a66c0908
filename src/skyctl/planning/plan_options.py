"""How to plan: everything that commands may ask of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from skyctl.planning.link_dtypes import LinkChoice
from skyctl.planning.parallelism_choice import DATA, PIPELINE, ParallelChoice
from skyctl.planning.schedule_choice import AUTO, ScheduleChoice
from skyctl.records.backend import BackendChoice, BackendRequest
from skyctl.records.problem import Objective, Parallel, SyncRoutes
from skyctl.records.rhythm import Rhythm
from skyctl.records.sync_format import SyncFormat


@dataclass(frozen=True)
class PlanOptions:
    """How to plan. None: the default, or with a problem file what that says.

    Attributes:
        schedule: the default for what was measured is ``auto`` (see ``schedule_choice.py``).
        parallel: one pipeline; ``data``: every device that takes part holds all layers; ``hybrid``: several
            pipelines; ``auto``: whichever is the simplest of those that are hardly slower than the fastest.
        sync_format: what gradients are summed in, where there are several pipelines.
        uncompressed_steps: with ``powersgd:R``, how many of a run's first steps are summed in float32.
        sync: over which routes they are.
        rhythm: when the sums take effect.
        owners: with local steps, the nodes of each owner of data; ``all``: each node is one.
        helpers: nodes or devices that hold nothing and may only help with that, with ``data``.
        assign: the user's own ranges, (device or node, start, stop) in pipeline order.
        assign_shares: the user's own shares with ``data``, (device or node, microbatches).
        whole_blocks: cut between transformer blocks only.
        named: refuse layers whose names do not say what they are, before any search.
        learn: use what runs have observed since the probe.
        backend: what is to carry tensors between ranks; a choice: the one made for other plans of the same
            comparison; None: the plan does not say, and reckons with what messages cost over ``skyctl``.
        beside_pipeline: where every device holds all layers, look at a pipeline for the same batch, too.
        left_out: parallelisms that ``auto`` does not look at, and why.
    """

    strategy: str = "optimal"
    parallel: ParallelChoice | None = None
    sync_format: SyncFormat | None = None
    uncompressed_steps: int | None = None
    sync: SyncRoutes | None = None
    rhythm: Rhythm | None = None
    owners: Sequence[Sequence[str]] | Literal["all"] | None = None
    helpers: Sequence[str] | None = None
    schedule: ScheduleChoice | None = None
    objective: Objective | None = None
    microbatches: int | None = None
    first_stage: Sequence[str] | None = None
    last_stage: Sequence[str] | None = None
    only_nodes: Sequence[str] | None = None
    time_limit_s: float = 30.0
    assign: Sequence[tuple[str, int, int]] | None = None
    assign_shares: Sequence[tuple[str, int]] | None = None
    whole_blocks: bool = False
    named: bool = False
    link_dtype: Sequence[LinkChoice] = ()
    learn: bool = True
    backend: BackendRequest | BackendChoice | None = None
    beside_pipeline: bool = False
    left_out: Mapping[Parallel, str] = field(default_factory=dict)

    @property
    def assigned(self) -> bool:
        """Whether the plan is the user's own."""
        return self.assign is not None or self.assign_shares is not None

    def with_chosen_schedule(self) -> PlanOptions:
        """The same, the schedule left to the planner where it is not given and there is one to choose."""
        if self.schedule is None and self.parallel != DATA:
            return replace(self, schedule=AUTO)
        return self

    def resolved_parallelism(self) -> PlanOptions:
        """The same, with a parallelism in place of ``auto`` where what else is asked for leaves only one."""
        if self.parallel in (None, AUTO) and self.rhythm is not None and self.rhythm.is_rounds:
            return replace(self, parallel=DATA)
        if self.parallel != AUTO:
            return self
        if self.assign_shares is not None:
            return replace(self, parallel=DATA)
        # even and alone are what needs no choice: one pipeline, and one device
        one_pipeline = self.assign is not None or self.strategy in ("even", "alone")
        return replace(self, parallel=PIPELINE) if one_pipeline else self

    def without_sums(self) -> PlanOptions:
        """The same without what is asked of sums, for a plan that makes none or is to be plain."""
        return replace(
            self, sync_format=None, uncompressed_steps=None, sync=None, rhythm=None, owners=None, helpers=None
        )

    def sum_options(self) -> list[str]:
        """The options given that say how gradients are summed."""
        sums = {
            "--sync-format": self.sync_format,
            "--uncompressed-steps": self.uncompressed_steps,
            "--sync": self.sync,
        }
        return [name for name, value in sums.items() if value is not None] + rhythm_options(self.rhythm)


def rhythm_options(rhythm: Rhythm | None) -> list[str]:
    """The options that ask for this rhythm; none where each sum is applied before the next step."""
    if rhythm is None or rhythm.is_synchronous:
        return []
    if rhythm.is_stale:
        return ["--staleness"]
    return ["--local-steps"] if rhythm.is_rounds else ["--sync-delay"]
