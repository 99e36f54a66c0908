"""``launch --resume``: going on with a run that has ended, with its own plan or another one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.cli.command_output import Output
from skyctl.cli.options import ClusterOptions
from skyctl.cli.run_options import LaunchOptions, RecipeOptions
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.checkpoint.launcher.stored_run import StoredRun
    from skyctl.cli.options import ClusterTarget
    from skyctl.jobs.training_request import TrainingRequest
    from skyctl.records.plan import Plan


RECIPE_NAMES = tuple(option.name for option in fields(RecipeOptions) if option.name != "learning_rate")
"""The options of a recipe beside the learning rate, which is the workload's."""


def resume_run(out: Output, run_id: str, plan: str | None, options: LaunchOptions) -> str | None:
    """Goes on with a run that has ended, from its newest checkpoint.

    Args:
        plan: the file of a plan to go on with, for the same workload; None: the run's own.

    Returns:
        The run's id; None for a dry run.
    """
    from skyctl.cli.run_display import supervise_on_terminal
    from skyctl.cli.show_run import show_outcome
    from skyctl.jobs.node_sessions import connect_nodes, require_all
    from skyctl.run.run_lock import acquire_run_lock
    from skyctl.supervision.opened_runs import resumed_run
    from skyctl.supervision.resume import prepare_resume
    from skyctl.supervision.run_settings import request_of, saved_settings, surveyed_of
    from skyctl.supervision.run_status import load_run, refuse_running

    given = _read_plan(run_id, plan)
    stored_run = load_run(run_id)
    refuse_running(stored_run, "it can be gone on with")
    _refuse_other_training(stored_run, request_of(stored_run.state), options)
    target = _cluster_target(stored_run, options)
    connect = options.supervised_connection(target.path, options.hold)
    resumption = prepare_resume(
        stored_run, target.cluster, options.steps, options.changed_run_options(), given
    )
    nodes = [target.cluster.node(name) for name in resumption.nodes]
    before = stored_run.state.order.get("first_attempt", 1)
    settings = saved_settings(
        resumption.request,
        resumption.options,
        connect,
        digest=str(stored_run.state.order.get("digest") or ""),
        own_lr_scheduler=stored_run.state.order.get("own_lr_scheduler") is True,
        surveyed=surveyed_of(stored_run.state),
        limit=_limit(stored_run, options),
        output=options.output,
        first_attempt=len(stored_run.state.attempts) + 1
        if given
        else before
        if isinstance(before, int)
        else 1,
    )
    for sentence in resumption.words():
        out.note(sentence)
    if options.dry_run:
        out.json(
            {
                "run_id": stored_run.paths.run_id,
                "from_step": resumption.done,
                "steps": resumption.options.steps,
            }
        )
        return None
    with (
        acquire_run_lock(stored_run.paths, attached=True) as lock,
        out.progress("launch") as progress,
        connect_nodes(nodes, connect, progress, target.everyone) as sessions,
    ):
        if not sessions.sessions:
            require_all(sessions.failures)
        for name, failure in sessions.failures.items():
            out.warn(f"left out: node {name}: {failure.message}")
        played = resumption.plan_for(sessions.sessions)
        changes = {
            "steps": resumption.options.steps,
            "order": settings,
            "cluster_file": str(target.path.absolute()),
        }
        with resumed_run(lock, target.cluster, sessions.sessions, out.note, **changes) as run:
            measured = supervise_on_terminal(
                out, progress, run, lambda: played, yes=options.yes, detach=options.detach
            )
    show_outcome(out, run.run_id, measured)
    return run.run_id


def _read_plan(run_id: str, plan: str | None) -> Plan | None:
    """The plan beside ``--resume``. Raises InputError for a workload there: the run has its own."""
    if plan is None:
        return None
    if not plan.endswith(".json"):
        raise InputError(
            f"--resume {run_id} goes on with that run's own workload; {plan} does not go with it",
            hint=f"leave it out; for other machines plan it on them: skyctl plan {plan} -o plan.json; skyctl "
            f"launch plan.json --resume {run_id}",
        )
    from skyctl.files import read_record
    from skyctl.records.plan import Plan

    return read_record(Plan, Path(plan))


def _cluster_target(stored_run: StoredRun, options: LaunchOptions) -> ClusterTarget:
    """The cluster file given, or the run's own."""
    own_file = Path(stored_run.state.cluster_file) if stored_run.state.cluster_file else None
    return ClusterOptions(cluster=options.cluster or own_file, limit=_limit(stored_run, options)).load()


def _limit(stored_run: StoredRun, options: LaunchOptions) -> str | None:
    """Which nodes of the cluster file are used: as given; without another file, as the run was launched."""
    own = stored_run.state.order.get("limit")
    if options.limit is not None or options.cluster is not None:
        return options.limit
    return str(own) if own is not None else None


def _refuse_other_training(stored_run: StoredRun, request: TrainingRequest, options: LaunchOptions) -> None:
    """Refuses an option that says anew what is trained, or how: the run settles that, and would ignore it.

    Raises:
        InputError: an option says something else than the run.
    """
    from skyctl.supervision.resume import other_training_error
    from skyctl.workload.hf.lora_options import format_lora, parse_lora

    spec, recipe = request.spec, request.recipe
    lora = format_lora(parse_lora(options.lora)) if options.lora is not None else None
    data = str(options.data.expanduser().resolve()) if options.data is not None else None
    settled = {
        "--batch-size": (options.batch_size, spec.batch_size),
        "--seed": (options.seed, spec.seed),
        "--dtype": (options.dtype, spec.dtype),
        "--lora": (lora, spec.lora_text),
        "--data": (data, spec.data_path),
        "--packing": (options.packing, (spec.records or {}).get("packing")),
        "--train-on-inputs": (options.train_on_inputs or None, (spec.records or {}).get("train_on_inputs")),
        "--skip-bad": (options.skip_bad or None, (spec.records or {}).get("skip_bad")),
        "--random-inputs": (options.random_inputs or None, spec.random_inputs),
        "--learning-rate": (options.learning_rate, spec.learning_rate),
    }
    defaults = RecipeOptions()
    for name in RECIPE_NAMES:
        value = getattr(options, name)
        given = value if value != getattr(defaults, name) else None
        settled[f"--{name.replace('_', '-')}"] = (given, getattr(recipe, name))
    for flag, (given, own) in settled.items():
        if given is not None and given != own:
            need = "none" if own is None else own
            raise other_training_error(
                stored_run.state, f"{flag} {given} does not go with --resume", f"{flag} {need}"
            )
    placement = {
        **options.settled_by_plan(),
        "--init-from": options.init_from,
        "--expert-hosts": options.expert_hosts,
    }
    for flag, value in placement.items():
        if value is None:
            continue
        hint = f"plan with it, then: skyctl launch PLAN.json --resume {stored_run.paths.run_id}"
        if flag == "--init-from":
            hint = "a run that is resumed has the weights of its checkpoint: leave one of them out"
        elif flag == "--expert-hosts":
            hint = "a run that is resumed has its experts where it had them: leave it out"
        raise InputError(f"{flag} {value} does not go with --resume", hint=hint)
