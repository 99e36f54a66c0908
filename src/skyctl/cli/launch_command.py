"""``skyctl launch``: train on the cluster with a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import check_output, command
from skyctl.cli.initial_weights import find_initial_weights
from skyctl.cli.option_values import STRATEGIES, is_plan_file, require_choice
from skyctl.cli.options import WORKLOAD_HELP, ClusterTarget
from skyctl.cli.run_options import LaunchOptions
from skyctl.cli.shared_step import keep_shared_step, say_shared_step
from skyctl.cli.show_records import show_records
from skyctl.errors import InfeasibleError, InputError, WorkloadError

if TYPE_CHECKING:
    from skyctl.cli.progress_display import ProgressDisplay
    from skyctl.jobs.node_sessions import NodeSessions
    from skyctl.jobs.training_request import TrainingRequest
    from skyctl.records.backend import Backend
    from skyctl.records.cluster import Node
    from skyctl.records.plan import Plan
    from skyctl.records.run_state import InitialWeights
    from skyctl.workload.datasets.survey import Survey
    from skyctl.workload.workload import Workload

    LoadWorkload = Callable[[], tuple[TrainingRequest, Workload]]
    MakePlan = Callable[[ProgressDisplay, NodeSessions, TrainingRequest, Workload], Plan]


@command
def launch(
    out: Output,
    plan: Annotated[
        str | None,
        typer.Argument(
            metavar="PLAN|WORKLOAD",
            help=f"A plan file, or a workload to probe and plan: {WORKLOAD_HELP}",
        ),
    ] = None,
    *,
    options: LaunchOptions,
) -> None:
    """Train on the cluster. A bare workload is probed and planned first.

    A plan whose devices, versions or free memory are no longer as measured is refused (exit 5).
    A run that fails is tried again, from the newest checkpoint, without nodes that were lost.
    One that has ended keeps its last checkpoint: --resume RUN --steps MORE goes on from it, also with another
    PLAN. --init-from RUN begins anew with its weights.
    Batch size, number of microbatches, dtype and seed of a plan file are the plan's own. The run's folder
    holds its plan, logs, metrics (a line a step), measurement and weights; -o copies measurement.json.
    """
    launch_run(out, plan, options)


def launch_run(out: Output, source: str | None, options: LaunchOptions) -> str | None:
    """Trains until the run has ended, or is left to the background.

    Args:
        source: a plan's file or a workload; beside ``--resume`` None, or a plan's file.

    Returns:
        The run's id; None for a dry run.
    """
    check_output(options.output)
    options.placement_backend(None, encrypt=options.encrypt)  # a mistyped one needs no cluster to be told
    if options.patience is not None:
        from skyctl.run.round_spec import refuse_patience

        refuse_patience(owners=bool(options.owners), patience=options.patience)
    if options.turns is not None:
        from skyctl.turns.turn_policy import parse_turns

        parse_turns(options.turns)
    options.check_expert_hosts()
    if options.wandb is not None:
        from skyctl.run.wandb_writer import require_wandb

        require_wandb(options.wandb)
    if options.resume is not None:
        from skyctl.cli.resume_run import resume_run

        return resume_run(out, options.resume, source, options)
    if source is None:
        raise InputError("what to train? give a PLAN.json, a WORKLOAD, or --resume RUN")
    is_plan = is_plan_file(source)
    _check_source(source, is_plan=is_plan)
    return _launch_plan(out, Path(source), options) if is_plan else _launch_workload(out, source, options)


def _check_source(text: str, *, is_plan: bool) -> None:
    """Raises InputError for what is neither a plan nor a workload; names files that are called nearly so."""
    from skyctl.workload.workload_spec import parse_source, similar_files

    with contextlib.suppress(OSError, ValueError, RuntimeError):  # a path that no system takes
        if Path(text).expanduser().exists():
            return
    if not is_plan:
        try:
            parse_source(text)
            return
        except WorkloadError:
            if ":" in text or ".py," in text:  # a model's name, a script's argument: that says what is wrong
                raise
    near = similar_files(text, ".json", ".py")
    raise InputError(
        f"there is no file {text}" + (f"; did you mean {' or '.join(near)}?" if near else ""),
        hint="a plan is a .json file (skyctl plan WORKLOAD -o plan.json makes one); a workload is a .py "
        "file, gpt:layers=8,…, bert:… or hf:DIR",
    )


def _launch_plan(out: Output, path: Path, options: LaunchOptions) -> str | None:
    """Trains what a plan file was made for, as it says."""
    from skyctl.files import read_record
    from skyctl.planning.backend_choice import check_backend_of_plan, with_asked_backend
    from skyctl.records.plan import Plan
    from skyctl.run.rank_spec import check_plan_fits, used_nodes
    from skyctl.run.round_spec import refuse_patience, refuse_trace

    target = options.load()
    recipe = options.recipe(options.steps_wanted)
    init = find_initial_weights(out, options)
    plan = read_record(Plan, path)
    _refuse_settled(path, options)
    refuse_trace(plan.problem.rhythm, trace=options.trace)
    refuse_patience(owners=plan.problem.owners is not None, patience=options.patience)
    check_plan_fits(plan, target.cluster)
    backend = options.backend_of_run(plan, target.cluster)
    plan = with_asked_backend(plan, backend, encrypt=options.encrypt)
    check_backend_of_plan(plan, encrypt=options.encrypt)
    options.check_elastic(out, plan)
    expert_nodes = options.expert_nodes(target.cluster)
    if plan.workload is None:
        raise InputError(
            f"{path} was made from a problem file: it has no workload to train",
            hint="plan a workload: skyctl plan WORKLOAD -o plan.json",
        )
    from skyctl.cli.show_plan import certainty_lines, show_backend
    from skyctl.compare.sync_summary import describe_sync
    from skyctl.jobs.training_request import load_plan_request

    load: LoadWorkload = partial(
        load_plan_request,
        plan.workload,
        plan.problem.microbatches,
        layers=len(plan.problem.layers),
        learning_rate=options.learning_rate,
        data_path=str(options.data) if options.data is not None else None,
        ship=options.ship or (),
        record_choices=options.record_choices,
        random_inputs=options.random_inputs,
        recipe=recipe,
        init=init,
    )
    if len(plan.pipelines) > 1:
        load = partial(_load_summable, load)
    if options.dry_run:
        request, loaded, _ = _load(out, load)
        _show_experts(out, plan, loaded, expert_nodes)
        _show_ranks(out, plan, target, request, options)
        return None
    if options.encrypt and not plan.encrypted:
        out.note("the plan was made for links without TLS; with it: skyctl probe --encrypt, plan --encrypt")
    if sync := describe_sync(plan):
        out.line(sync, wrap=True)
    out.line(certainty_lines(plan)[0])
    show_backend(out, [plan])
    used = {*(node.name for node in used_nodes(plan, target.cluster)), *expert_nodes}
    nodes = [node for node in target.cluster.nodes if node.name in used]
    return _train(out, target, nodes, load, lambda *_: plan, options, init, backend)


def _refuse_settled(path: Path, options: LaunchOptions) -> None:
    """A plan file has settled these; giving them again would be ignored, so it is an error."""
    given = {
        **options.settled_by_plan(),
        "--batch-size": options.batch_size,
        "--seed": options.seed,
        "--dtype": options.dtype,
        "--lora": options.lora,
        "--no-compare": options.no_compare or None,
        "--no-trial": None if options.trial else True,
    }
    for flag, value in given.items():
        if value is not None:
            raise InputError(
                f"{flag} {value} does not go with the plan {path}, which has settled that",
                hint="plan again with it, or launch the workload itself",
            )


def _launch_workload(out: Output, source: str, options: LaunchOptions) -> str | None:
    """Probes (what earlier probes found and still holds is reused), plans, and trains."""
    from skyctl.run.round_spec import refuse_trace

    target = options.load()
    backend = options.placement_backend(target.cluster, encrypt=options.encrypt)
    recipe = options.recipe(options.steps_wanted)
    init = find_initial_weights(out, options)
    load: LoadWorkload = partial(
        options.make_request,
        source,
        microbatches=options.microbatches,
        learning_rate=options.learning_rate,
        recipe=recipe,
        init=init,
    )
    choice = options.plan_options(
        target.cluster,
        strategy=require_choice("--strategy", options.strategy or "optimal", STRATEGIES),
        microbatches=options.microbatches,
        beside_pipeline=True,
        backend=backend,
    )
    rhythm = choice.rhythm
    refuse_trace(rhythm, trace=options.trace)
    if choice.parallel in ("data", "hybrid") or (rhythm is not None and not rhythm.is_synchronous):
        load = partial(_load_summable, load)
    if options.dry_run:
        request, *_ = _load(out, load)
        names = ", ".join(node.name for node in target.cluster.nodes)
        out.line(
            f"would probe {names} with {request.spec.source}, plan, and train {options.steps_wanted} "
            f"{'step' if rhythm is None else rhythm.unit}s"
        )
        out.json({"ranks": None})
        return None

    named = None if backend in (None, "auto") else cast("Backend", backend)

    def make_plan(
        progress: ProgressDisplay, sessions: NodeSessions, request: TrainingRequest, loaded: Workload
    ) -> Plan:
        from skyctl.cli.form_trial import try_forms
        from skyctl.cli.show_plan import show_full_training, show_left_out, show_link_dtypes, show_plan
        from skyctl.cli.show_profile import show_learned, show_reused, warn_unmeasured
        from skyctl.jobs.contradiction_recheck import recheck_contradictions
        from skyctl.jobs.form_trial import make_trial
        from skyctl.jobs.profiles import probe_cluster
        from skyctl.planning.backend_choice import measures_gloo
        from skyctl.planning.parallelism_choice import parallelisms_left_out_by
        from skyctl.planning.plan_from_profile import plan_profile
        from skyctl.planning.schedule_choice import AUTO

        asked = (target.cluster, sessions, request, loaded, progress, progress.node)
        profile, _ = probe_cluster(
            *asked, encrypt=request.encrypt, gloo=measures_gloo(backend), on_note=out.note
        )
        arguments = (target.cluster, sessions, profile, request, loaded)
        profile = recheck_contradictions(*arguments, progress, out.warn)
        progress("planning")
        show_reused(out, profile)
        warn_unmeasured(out, profile, target.cluster)
        asked_for = choice
        if choice.parallel == AUTO:
            asked_for = replace(choice, left_out=parallelisms_left_out_by(loaded.model.layers))
        plan = plan_profile(profile, asked_for, request.ref(loaded.digest))
        show_learned(out, profile, plan.problem.microbatches)
        trial = make_trial(profile, asked_for, request.ref(loaded.digest), plan)
        if trial is not None:
            run = options.run_options(named)
            tried = (out, progress, target.cluster, request, sessions, trial, run, loaded.digest)
            plan = try_forms(*tried, yes=options.yes, wanted=options.trial)
        show_plan(out, plan)
        show_left_out(out, plan, profile)
        show_full_training(out, plan, profile)
        show_link_dtypes(out, plan)
        return plan

    return _train(
        out,
        target,
        target.cluster.nodes,
        load,
        _with_more_microbatches(out, make_plan),
        options,
        init,
        named,
    )


def _with_more_microbatches(out: Output, make_plan: MakePlan) -> MakePlan:
    """The same; as long as nothing fits, of more and smaller microbatches."""

    def make(
        progress: ProgressDisplay, sessions: NodeSessions, request: TrainingRequest, loaded: Workload
    ) -> Plan:
        while True:
            try:
                return make_plan(progress, sessions, request, loaded)
            except InfeasibleError as exc:
                smaller = request.with_more_microbatches(loaded)
                if smaller is None:
                    raise
                out.note(f"{exc.message}; measuring {', '.join(map(str, smaller.sweep))} microbatches")
                request = smaller

    return make


def _load_summable(load: LoadWorkload) -> tuple[TrainingRequest, Workload]:
    """The loaded request and workload; WorkloadError if several replicas could not sum its gradients."""
    from skyctl.worker.sums.summed_gradients import check_summable

    request, loaded = load()
    check_summable(loaded.model.layers)
    return request, loaded


def _load(
    out: Output, load: LoadWorkload, on_progress: Callable[[str], None] = lambda _text: None
) -> tuple[TrainingRequest, Workload, Survey | None]:
    """The request, its workload, whose notes are printed, and what its records are (None: it has none)."""
    request, loaded = load()
    out.notes(loaded.notes)
    return request, loaded, show_records(out, loaded, on_progress)


def _train(
    out: Output,
    target: ClusterTarget,
    nodes: Sequence[Node],
    load: LoadWorkload,
    make_plan: MakePlan,
    options: LaunchOptions,
    init: InitialWeights | None,
    backend: Backend | None,
) -> str:
    """Loads the workload, connects, begins a run, and supervises it until it ends or is detached from.

    The fork server of local nodes imports torch while this process imports it, too.

    Args:
        init: the weights that it begins with; None: random ones, or the folder's.
        backend: what is to carry tensors whatever the plan says; None: what it says.

    Returns:
        The run's id.
    """
    from skyctl.cli.run_display import supervise_on_terminal
    from skyctl.cli.show_run import show_outcome
    from skyctl.jobs.node_sessions import connect_nodes, require_all
    from skyctl.remote.session_factory import make_connector
    from skyctl.run.expert_spec import check_expert_plan, expert_setting

    connect = options.supervised_connection(target.path, options.hold)
    with ExitStack() as stack:
        progress = stack.enter_context(out.progress("launch"))
        connector = stack.enter_context(make_connector(nodes, target.everyone))
        progress("loading the workload")
        request, loaded, survey = _load(out, load, progress)
        experts = expert_setting(loaded, options.expert_nodes(target.cluster))
        run_options = options.run_options(backend, experts)
        from skyctl.supervision.opened_runs import new_run
        from skyctl.supervision.run_settings import saved_settings
        from skyctl.workload.starting_weights import with_frozen_digest

        request = replace(request, spec=with_frozen_digest(request.spec))

        sessions = stack.enter_context(connect_nodes(nodes, connect, progress, target.everyone, connector))
        require_all(sessions.failures)
        settings = saved_settings(
            request,
            run_options,
            connect,
            digest=loaded.digest,
            own_lr_scheduler="lr_scheduler" in loaded.model.functions,
            surveyed=None if survey is None else survey.to_dict(),
            limit=options.limit,
            output=options.output,
        )

        def planned() -> Plan:
            plan = options.check_elastic(out, make_plan(progress, sessions, request, loaded))
            if experts is not None:
                check_expert_plan(plan, experts)
            if options.turns is not None:
                found = say_shared_step(out, plan, options.steps_wanted, options.turns, target.path)
                if found is not None:
                    keep_shared_step(run.journal, found)
            return plan

        with new_run(
            target.cluster,
            sessions.sessions,
            out.note,
            workload=request.spec.source,
            steps=run_options.steps,
            cluster_file=str(target.path.absolute()),
            order=settings,
            init_from=init,
        ) as run:
            measured = supervise_on_terminal(
                out, progress, run, planned, yes=options.yes, detach=options.detach
            )
    show_outcome(out, run.run_id, measured)
    return run.run_id


def _show_experts(out: Output, plan: Plan, workload: Workload, nodes: tuple[str, ...]) -> None:
    """Prints where experts would be, if these nodes are to hold them."""
    from skyctl.run.expert_spec import check_expert_plan, expert_setting, place_hosts
    from skyctl.run.expert_step import predict_hosted

    setting = expert_setting(workload, nodes)
    if setting is not None:
        check_expert_plan(plan, setting)
        places = place_hosts(plan, setting, nodes)
        assert places is not None, "all of its nodes are in the plan"
        step_s = predict_hosted(plan, setting, places).iteration_s
        out.line(places.describe(step_s), wrap=True)


def _show_ranks(
    out: Output, plan: Plan, target: ClusterTarget, request: TrainingRequest, options: LaunchOptions
) -> None:
    """Prints what each rank would be told, but for addresses and nodes' paths, known only once connected."""
    from skyctl.agent.message_fields import write_fields
    from skyctl.run.rank_spec import rank_specs
    from skyctl.worker.rank_order import RankOrder

    nodes = target.cluster.nodes
    steps, unit = options.steps_wanted, plan.problem.rhythm.unit
    specs = rank_specs(
        plan,
        target.cluster,
        run_id="dry-run",
        steps=steps,
        workload={node.name: request.spec for node in nodes},
        addresses={node.name: node.host or "127.0.0.1" for node in nodes},
        recipe=request.recipe,
        trace=options.trace,
        turns=options.turns,
    )
    for spec in specs:
        order = spec.order
        if not isinstance(order, RankOrder):
            out.line(f"rank {spec.rank} on {spec.device}: no layers, helps to sum gradients, {steps} steps")
            continue
        start, stop = order.layers
        first, last = order.microbatch_range
        share, row = f"{order.microbatches} microbatches", ""
        if len(plan.pipelines) > 1:
            row, share = f"pipeline {order.pipeline}, ", f"{last - first} of {share}"
        out.line(
            f"rank {spec.rank} on {spec.device}: {row}layers {start}–{stop}, {share} "
            f"({order.schedule}, {order.in_flight} in flight), {steps} {unit}s"
        )
    out.note("the whole of what each rank is told: --json")
    out.json(
        {"ranks": [{"rank": s.rank, "device": s.device, "payload": write_fields(s.order)} for s in specs]}
    )
