"""Even, heuristic and optimal side by side: planned on one profile, and run for real where asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from skyctl.compare.rows import Outcome
from skyctl.control.choosing import AUTO
from skyctl.control.connect import Connected
from skyctl.control.planning import PlanOptions, plan_profile
from skyctl.control.probing import find_profile, probe_cluster
from skyctl.control.request import Request
from skyctl.control.running import RunOptions, run_plan
from skyctl.errors import InfeasibleError, InputError, RunError, UndecidedError
from skyctl.launch.events import Watcher
from skyctl.records.cluster import Cluster
from skyctl.records.plan import WorkloadRef
from skyctl.records.profile import Profile
from skyctl.remote.session import Session
from skyctl.workload.workload import Workload

STRATEGIES = ("even", "heuristic", "optimal")


@dataclass(frozen=True)
class Comparing:
    """What is compared: one workload on one cluster, by some strategies."""

    cluster: Cluster
    request: Request
    workload: Workload
    options: PlanOptions
    strategies: Sequence[str] = STRATEGIES
    run: RunOptions = field(default_factory=lambda: RunOptions(weights=False))

    def known_profile(self, given: str | None) -> Profile:
        """The profile the user named, or the newest that fits (InputError where there is none)."""
        return find_profile(self.cluster, given, self.request, self.workload)[0]

    def plans(self, profile: Profile) -> list[Outcome]:
        """What is predicted, one outcome a strategy."""
        return plan_all(profile, self.options, self.request.ref(self.workload), self.strategies)

    def profile(
        self, links: Connected, given: str | None, on_progress: Callable[[str], None], *, fresh: bool = False
    ) -> Profile:
        """As ``known_profile``, but a cluster that has none (or where ``fresh``) is probed."""
        if not fresh:
            try:
                return self.known_profile(given)
            except InputError:
                if given is not None:
                    raise
        made, _ = probe_cluster(
            self.cluster,
            links,
            self.request,
            self.workload,
            on_progress,
            refresh=fresh,
            encrypt=self.request.encrypt,
        )
        return made

    def measured(
        self,
        outcomes: list[Outcome],
        links: Connected,
        watcher_for: Callable[[str], Watcher],
        on_outcome: Callable[[Outcome], None] = lambda _outcome: None,
    ) -> list[Outcome]:
        """The same outcomes, each run for real."""
        return measure_all(
            outcomes, self.cluster, self.request, links.sessions, self.run, watcher_for, on_outcome
        )


def plan_all(
    profile: Profile, options: PlanOptions, ref: WorkloadRef, strategies: Sequence[str] = STRATEGIES
) -> list[Outcome]:
    """One outcome per strategy, in the order given; one that does not fit says why.

    Where the number of microbatches or the schedule is left to the planner, the best strategy's choice is
    used for all, so that the rows answer the same problem.

    Raises:
        InfeasibleError, UndecidedError: none of them has a plan.
    """
    return some_plan(outcomes_of(profile, options, ref, strategies))


def outcomes_of(
    profile: Profile, options: PlanOptions, ref: WorkloadRef, strategies: Sequence[str] = STRATEGIES
) -> list[Outcome]:
    """As ``plan_all``, also where none of them has a plan."""
    outcomes = [_outcome(profile, replace(options, strategy=s), ref) for s in strategies]
    made = [outcome.plan for outcome in outcomes if outcome.plan is not None]
    if (options.microbatches is None or options.schedule in (None, AUTO)) and made:
        chosen = min(made, key=lambda plan: plan.predicted.iteration_s).problem
        for i, outcome in enumerate(outcomes):
            if outcome.plan is None or outcome.plan.problem != chosen:
                alike = replace(
                    options,
                    strategy=outcome.strategy,
                    microbatches=chosen.microbatches,
                    schedule=chosen.schedule,
                )
                outcomes[i] = _outcome(profile, alike, ref)
    return outcomes


def some_plan(outcomes: list[Outcome]) -> list[Outcome]:
    """The same. Raises InfeasibleError or UndecidedError where there is no plan among them."""
    if all(outcome.plan is None for outcome in outcomes):
        proved = not any(outcome.undecided for outcome in outcomes)
        raise (InfeasibleError if proved else UndecidedError)(
            "no strategy gives a plan that fits:"
            + "".join(f"\n  {outcome.strategy}: {outcome.error}" for outcome in outcomes),
            hint="add memory or a machine, or use more microbatches (smaller ones)",
        )
    return outcomes


def _outcome(profile: Profile, options: PlanOptions, ref: WorkloadRef) -> Outcome:
    try:
        return Outcome(options.strategy, plan_profile(profile, options, ref))
    except (InfeasibleError, UndecidedError) as exc:
        return Outcome(options.strategy, error=exc.message, undecided=isinstance(exc, UndecidedError))


def measure_all(
    outcomes: list[Outcome],
    cluster: Cluster,
    request: Request,
    sessions: Mapping[str, Session],
    options: RunOptions,
    watcher_for: Callable[[str], Watcher],
    on_outcome: Callable[[Outcome], None] = lambda _outcome: None,
) -> list[Outcome]:
    """Runs every plan there is; equal plans run once and share their measurement.

    A run that fails is an outcome that says why: it takes nothing of the others away. ``on_outcome`` is told
    of each as it comes.
    """
    measured: list[Outcome] = []
    for outcome in outcomes:
        measured.append(_measured(outcome, measured, cluster, request, sessions, options, watcher_for))
        on_outcome(measured[-1])
    return measured


def _measured(
    outcome: Outcome,
    earlier: Sequence[Outcome],
    cluster: Cluster,
    request: Request,
    sessions: Mapping[str, Session],
    options: RunOptions,
    watcher_for: Callable[[str], Watcher],
) -> Outcome:
    """One outcome, run, or with the measurement of an earlier one of the same plan."""
    if outcome.plan is None:
        return outcome
    twin = next((m for m in earlier if m.plan is not None and m.plan.stages == outcome.plan.stages), None)
    if twin is not None and twin.measurement is not None:
        shared = twin.measurement.model_copy(update={"strategy": outcome.strategy})
        return replace(outcome, measurement=shared)
    try:
        got, _ = run_plan(outcome.plan, cluster, request, sessions, options, watcher_for(outcome.strategy))
        return replace(outcome, measurement=got)
    except RunError as exc:
        return replace(outcome, error=str(exc))
