"""A comparison of strategies: planned on one profile, and run for real where asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from skyctl.compare.conclusion import is_same_plan
from skyctl.compare.outcome import ALONE, BASELINE, SYNCHRONOUS, StrategyOutcome
from skyctl.compare.sync_summary import SYNC_CHOICES, SyncRow, sync_choice, sync_rows
from skyctl.errors import InfeasibleError, InputError, RunError, UndecidedError
from skyctl.jobs.form_trial import contenders, fastest_tried, with_tried_forms
from skyctl.jobs.node_sessions import NodeSessions
from skyctl.jobs.profiles import find_profile, probe_cluster
from skyctl.jobs.training_request import TrainingRequest
from skyctl.planning.backend_choice import measures_gloo
from skyctl.planning.parallelism_choice import (
    DATA,
    HYBRID,
    PARALLELISMS,
    PIPELINE,
    ParallelismResult,
    choose_among,
)
from skyctl.planning.plan_creation import parallelisms_left_out
from skyctl.planning.plan_from_profile import plan_profile
from skyctl.planning.plan_options import PlanOptions
from skyctl.planning.schedule_choice import AUTO
from skyctl.records.backend import AUTO as ANY_BACKEND
from skyctl.records.cluster import Cluster
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan, WorkloadRef
from skyctl.records.problem import Parallel
from skyctl.records.profile import Profile
from skyctl.records.rhythm import Rhythm
from skyctl.workload.workload import Workload

STRATEGIES = (BASELINE, ALONE, "heuristic", "optimal")

RunOnePlan = Callable[[str, Plan], Measurement]
"""Runs the plan of the strategy that is named, for real."""
OnProgress = Callable[[str], None]
LEAST_SEARCH_S = 1.0
"""So long a search may take at each point of a sweep, however many there are."""


@dataclass(frozen=True)
class ComparisonJob:
    """One workload on one cluster, to be compared by some strategies.

    ``other_form``: the best plans of other forms, a pipeline's or data parallelism's, have rows, too. If the
    form is ``auto``, the strategies' rows are pipelines and every form has a row. The last row, the best
    strategy's, is the plan that is taken of these. A rhythm is compared with the plan that has none.
    """

    cluster: Cluster
    request: TrainingRequest
    workload: Workload
    options: PlanOptions
    strategies: Sequence[str] = STRATEGIES
    other_form: bool = False

    def known_profile(self, given: str | None) -> Profile:
        """The profile the user named, or the newest that fits (InputError where there is none)."""
        return find_profile(self.cluster, given, self.request, self.workload.digest)[0]

    def plans(self, profile: Profile) -> list[StrategyOutcome]:
        """Each strategy's outcome, planned and not run."""
        options = of_strategies(self.options)
        made = plan_strategies(profile, options, self._ref, self.strategies)
        return self.with_rows_beside(profile, self.options, made)

    def with_backend(self, profile: Profile) -> ComparisonJob:
        """The same, with one backend for all plans: the one that a quick plan of all devices comes to.

        Else rows would differ in what carries their tensors, too. If there is no such plan, each row has
        its own.
        """
        if self.options.backend != ANY_BACKEND:
            return self
        quick = replace(self.options, strategy="heuristic", assign=None, assign_shares=None)
        try:
            chosen = plan_profile(profile, quick, self._ref).backend
        except (InfeasibleError, UndecidedError):
            return self
        return replace(self, options=replace(self.options, backend=chosen))

    @property
    def _ref(self) -> WorkloadRef:
        return self.request.ref(self.workload.digest)

    @property
    def _best_strategy(self) -> str:
        return "optimal" if "optimal" in self.strategies else "heuristic"

    def with_rows_beside(
        self, profile: Profile, options: PlanOptions, outcomes: Sequence[StrategyOutcome]
    ) -> list[StrategyOutcome]:
        """The same and, before the last, the best plans of other forms, and of no rhythm, under their names.

        Forms have rows where that was asked for, and ``synchronous`` where a rhythm was. They take whichever
        measured number of microbatches and schedule are fastest there, with ``auto``, and without the rhythm,
        of those that ``options`` leave.
        """
        with_forms = self._with_forms(profile, options, outcomes)
        if not with_forms or _is_plain(options):
            return with_forms
        *before, last = with_forms
        return [*before, self._synchronous(profile, options, last.plan), last]

    def _synchronous(self, profile: Profile, options: PlanOptions, best: Plan | None) -> StrategyOutcome:
        """The best strategy's plan without the rhythm: of the form of ``best``, where that has it.

        Owners of data, which is theirs alone, average after every step there.
        """
        form = options.parallel
        if form == AUTO and best is not None and not best.problem.rhythm.is_synchronous:
            form = best.problem.parallel
        plain = replace(options, strategy=self._best_strategy, parallel=form, rhythm=plain_rhythm(options))
        return replace(_outcome(profile, plain, self._ref), strategy=SYNCHRONOUS)

    def _with_forms(
        self, profile: Profile, options: PlanOptions, outcomes: Sequence[StrategyOutcome]
    ) -> list[StrategyOutcome]:
        if options.parallel == AUTO:
            return self._with_all_forms(profile, options, outcomes)
        if not self.other_form:
            return list(outcomes)
        forms = {DATA: [PIPELINE], HYBRID: [PIPELINE, DATA]}.get(options.parallel or PIPELINE, [DATA])
        free = replace(options.without_sums(), strategy=self._best_strategy, schedule=AUTO, microbatches=None)
        *before, last = outcomes
        return [*before, *(_form_outcome(profile, free, self._ref, form) for form in forms), last]

    def _with_all_forms(
        self, profile: Profile, options: PlanOptions, outcomes: Sequence[StrategyOutcome]
    ) -> list[StrategyOutcome]:
        """The strategies' pipelines, each form's best plan, and which of these is the best strategy's own.

        The best pipeline is what that strategy had. Forms that do not go with what is asked for have no row.
        """
        best = self._best_strategy
        pipeline = next((outcome for outcome in outcomes if outcome.strategy == best), None)
        if pipeline is None:
            return list(outcomes)
        left_out = parallelisms_left_out(options)
        options = replace(options, strategy=best)
        rows = {PIPELINE: replace(pipeline, strategy=PIPELINE)}
        rows |= {
            form: _form_outcome(profile, options, self._ref, form)
            for form in (DATA, HYBRID)
            if form not in left_out
        }
        results = [ParallelismResult(form, reason=reason, looked=False) for form, reason in left_out.items()]
        results += [
            ParallelismResult(form, row.plan, row.error, fits=row.plan is not None or row.undecided)
            for form, row in rows.items()
            if form not in left_out
        ]
        taken = choose_among(results)
        others = [outcome for outcome in outcomes if outcome is not pipeline]
        return [*others, *rows.values(), pipeline if taken is None else StrategyOutcome(best, taken)]

    def chosen_by_measurement(self, outcomes: Sequence[StrategyOutcome]) -> list[StrategyOutcome]:
        """The same, the last with the plan of the form whose steps were the shortest, of those that contend.

        Unchanged where forms were not compared, or none of several contending ones was measured.
        """
        *before, last = outcomes
        if self.options.parallel != AUTO or last.plan is None or not last.plan.forms:
            return list(outcomes)
        rows = [row for row in before if row.strategy in PARALLELISMS and row.plan is not None]
        contending = contenders([row.plan for row in rows if row.plan is not None])
        tried = [row for row in rows if row.plan in contending and row.measurement is not None]
        best = fastest_tried(tried) if len(tried) > 1 else None
        if best is None or best.plan is None or best.measurement is None:
            return list(outcomes)
        plan = with_tried_forms(best.plan, last.plan.forms, tried)
        return [*before, replace(last, plan=plan, measurement=best.measurement, error=None)]

    def syncs(self, profile: Profile, outcomes: Sequence[StrategyOutcome]) -> list[SyncRow]:
        """The best plan for each way to sum gradients, where the last outcome's pipelines sum them.

        That outcome is its way's row as it is, measured where it was; the others are planned for its problem.
        """
        *_, last = outcomes
        if last.plan is None or last.plan.strategy not in ("heuristic", "optimal"):
            return []
        rhythm = last.plan.problem.rhythm
        if last.plan.problem.parallel != DATA or rhythm.is_stale or rhythm.is_rounds:
            return []  # a parameter server has a star only, and rounds sum no gradients
        if (own := sync_choice(last.plan)) is None:
            return []
        outcomes_by_sync = {}
        choices = SYNC_CHOICES if own in SYNC_CHOICES else (*SYNC_CHOICES, own)
        for sync in choices:
            options = replace(
                within_limit(self.options, len(choices)),
                parallel=DATA,
                strategy=last.plan.strategy,
                microbatches=last.plan.problem.microbatches,
                schedule=last.plan.problem.schedule,
                sync=sync,
            )
            outcomes_by_sync[sync] = last if sync == own else _outcome(profile, options, self._ref)
        return sync_rows(outcomes_by_sync, own)

    def profile(
        self,
        sessions: NodeSessions,
        given: str | None,
        on_progress: OnProgress,
        on_note: Callable[[str], None],
        *,
        fresh: bool = False,
    ) -> Profile:
        """As ``known_profile``, but a cluster that has none (or where ``fresh``) is probed."""
        if not fresh:
            try:
                return self.known_profile(given)
            except InputError:
                if given is not None:
                    raise
        asked = (self.cluster, sessions, self.request, self.workload, on_progress)
        gloo = measures_gloo(self.options.backend)
        encrypt = self.request.encrypt
        return probe_cluster(*asked, refresh=fresh, encrypt=encrypt, gloo=gloo, on_note=on_note)[0]


def plain_rhythm(options: PlanOptions) -> Rhythm:
    """The rhythm that others are compared with: a sum, or with owners an average, before the next step."""
    return Rhythm() if options.owners is None else Rhythm(local_steps=1)


def _is_plain(options: PlanOptions) -> bool:
    """Whether the rhythm is that one, or none is asked for; one local step may be said of each owner."""
    rhythm = options.rhythm
    if rhythm is not None and isinstance(rhythm.local_steps, tuple) and set(rhythm.local_steps) == {1}:
        rhythm = rhythm.model_copy(update={"local_steps": 1})
    return rhythm in (None, plain_rhythm(options))


def plan_strategies(
    profile: Profile, options: PlanOptions, ref: WorkloadRef, strategies: Sequence[str] = STRATEGIES
) -> list[StrategyOutcome]:
    """One outcome per strategy, in the order given; one that does not fit says why.

    If the planner chooses the number of microbatches or the schedule, all rows use the best strategy's
    choice. So they answer the same problem. ``alone`` has no pipeline to fill: it takes whichever measured
    number of microbatches is the fastest there, whatever the others take.

    Raises:
        InfeasibleError, UndecidedError: none of them has a plan.
    """
    return require_a_plan(
        with_best_alone(profile, options, ref, plan_each(profile, options, ref, strategies))
    )


def with_best_alone(
    profile: Profile, options: PlanOptions, ref: WorkloadRef, outcomes: Sequence[StrategyOutcome]
) -> list[StrategyOutcome]:
    """The same, ``alone`` with the best of all measured numbers of microbatches in place of a given one."""
    free = replace(options, strategy=ALONE, microbatches=None)
    return [
        _outcome(profile, free, ref)
        if outcome.strategy == ALONE and options.microbatches is not None
        else outcome
        for outcome in outcomes
    ]


def plan_each(
    profile: Profile, options: PlanOptions, ref: WorkloadRef, strategies: Sequence[str] = STRATEGIES
) -> list[StrategyOutcome]:
    """As ``plan_strategies``, but a given number of microbatches holds for all, and no plan is an answer."""
    outcomes = [_outcome(profile, replace(options, strategy=s), ref) for s in strategies]
    made = [outcome.plan for outcome in outcomes if outcome.plan is not None and outcome.strategy != ALONE]
    if (options.microbatches is None or options.schedule in (None, AUTO)) and made:
        chosen = min(made, key=lambda plan: plan.step_s).problem
        for i, outcome in enumerate(outcomes):
            if outcome.strategy != ALONE and (outcome.plan is None or outcome.plan.problem != chosen):
                alike = replace(options, microbatches=chosen.microbatches, schedule=chosen.schedule)
                outcomes[i] = _outcome(profile, replace(alike, strategy=outcome.strategy), ref)
    return outcomes


def require_a_plan(outcomes: list[StrategyOutcome]) -> list[StrategyOutcome]:
    """The same outcomes. Raises InfeasibleError or UndecidedError where there is no plan among them."""
    if all(outcome.plan is None for outcome in outcomes):
        proved = not any(outcome.undecided for outcome in outcomes)
        raise (InfeasibleError if proved else UndecidedError)(
            "no strategy gives a plan that fits:"
            + "".join(f"\n  {outcome.strategy}: {outcome.error}" for outcome in outcomes),
            hint="add memory or a machine, or use more microbatches (smaller ones)",
        )
    return outcomes


def _outcome(profile: Profile, options: PlanOptions, ref: WorkloadRef) -> StrategyOutcome:
    if options.strategy == ALONE:
        # of one stage the simplest schedule is as good as any; and it sums with nobody, in any rhythm
        options = replace(options, schedule="1f1b", rhythm=None)
    if options.parallel == HYBRID and options.strategy in (BASELINE, ALONE):
        # what needs no search is one pipeline
        options = replace(options.without_sums(), parallel=PIPELINE)
    try:
        return StrategyOutcome(options.strategy, plan_profile(profile, options, ref))
    except (InfeasibleError, UndecidedError) as exc:
        return StrategyOutcome(options.strategy, error=exc.message, undecided=isinstance(exc, UndecidedError))


def _form_outcome(
    profile: Profile, options: PlanOptions, ref: WorkloadRef, form: Parallel
) -> StrategyOutcome:
    """The best plan of one form, under its name."""
    return replace(_outcome(profile, replace(options, parallel=form), ref), strategy=form)


def of_strategies(options: PlanOptions) -> PlanOptions:
    """How the strategies' own rows are planned: with ``auto`` as pipelines, in which helpers have no part."""
    if options.parallel != AUTO:
        return options
    nodes = options.only_nodes
    if nodes is not None:
        nodes = [node for node in nodes if node not in (options.helpers or ())]
    return replace(options.without_sums(), parallel=PIPELINE, only_nodes=nodes)


def measure_strategies(
    outcomes: Sequence[StrategyOutcome],
    run: RunOnePlan,
    on_outcome: Callable[[StrategyOutcome], None] = lambda _outcome: None,
    earlier: Sequence[StrategyOutcome] = (),
) -> list[StrategyOutcome]:
    """Runs every plan there is; equal plans, those of ``earlier`` too, run once and share their measurement.

    A run that fails is an outcome that says why; the others go on. ``on_outcome`` gets each as it comes.
    """
    measured: list[StrategyOutcome] = []
    for outcome in outcomes:
        measured.append(_measured(outcome, [*earlier, *measured], run))
        on_outcome(measured[-1])
    return measured


def _measured(
    outcome: StrategyOutcome, earlier: Sequence[StrategyOutcome], run: RunOnePlan
) -> StrategyOutcome:
    """One outcome, run, or with the measurement of an earlier one of the same plan."""
    if outcome.plan is None:
        return outcome
    twin = next((m for m in earlier if m.measurement is not None and is_same_plan(m, outcome)), None)
    if twin is not None and twin.measurement is not None:
        shared = twin.measurement.model_copy(update={"strategy": outcome.plan.strategy})
        return replace(outcome, measurement=shared)
    try:
        return replace(outcome, measurement=run(outcome.strategy, outcome.plan))
    except RunError as exc:
        return replace(outcome, error=str(exc))


def within_limit(options: PlanOptions, points: int) -> PlanOptions:
    """The same with its part of the time limit where so many are planned."""
    return replace(options, time_limit_s=max(LEAST_SEARCH_S, options.time_limit_s / points))
