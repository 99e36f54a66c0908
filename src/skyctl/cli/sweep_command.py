"""``skyctl sweep``: many small runs of a script, packed on the cluster's devices."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from skyctl.cli.command_output import Output, format_count
from skyctl.cli.command_runner import command
from skyctl.cli.mistyped_words import AFTER_DASHES
from skyctl.cli.option_values import complete_choices, require_choice
from skyctl.cli.options import ClusterOptions, ConnectionOptions, DryRunOption
from skyctl.cli.script_words import ScriptSourceOptions, read_environment, shipped_words
from skyctl.errors import InputError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skyctl.cli.options import ClusterTarget
    from skyctl.records.script_request import ScriptKind
    from skyctl.records.sweep import Choice, Range, StopRule, SweepMode, SweepRequest
    from skyctl.sweep.parameters import Parameters
    from skyctl.sweep.sweep_folder import SweepFolder
    from skyctl.sweep.trial_devices import TrialDevice

DEFAULT_GRACE = 5
SHOWN_CHANGES = 3


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """Which trials there are."""

    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid", metavar="NAME=VALUE,…", help="A parameter and its values: all combinations. Repeatable."
        ),
    ] = None
    range_: Annotated[
        list[str] | None,
        typer.Option(
            "--range",
            metavar="NAME=LOW:HIGH[:log]",
            help="With --random: a parameter drawn from here to there. Repeatable.",
        ),
    ] = None
    random: Annotated[
        int | None,
        typer.Option("--random", min=1, metavar="N", help="Draw N trials from --range and --grid."),
    ] = None
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE.csv", help="A line of names, then a line of values a trial."),
    ] = None
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Of --random; default 0.")] = None
    optuna: Annotated[
        bool, typer.Option("--optuna", help="Optuna's sampler draws the N trials of --random.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class SweepOptions(TrialOptions, ScriptSourceOptions, ConnectionOptions, ClusterOptions):
    """All options of ``sweep``."""

    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="KEY",
            help="The figure that trials are compared by: the script prints lines such as "
            '{"step": 10, "loss": 0.42}.',
        ),
    ] = None
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            metavar="min|max",
            autocompletion=complete_choices("min", "max"),
            help="Which figure is best; default min.",
        ),
    ] = None
    stop: Annotated[
        str | None,
        typer.Option(
            "--stop",
            metavar="median",
            autocompletion=complete_choices("median"),
            help="End a trial whose best figure is worse than the median of the others' at its step.",
        ),
    ] = None
    grace: Annotated[
        int | None,
        typer.Option(
            "--grace", min=1, metavar="N", help="Reports of a trial before --stop looks at it; default 5."
        ),
    ] = None
    per_device: Annotated[
        int, typer.Option("--per-device", min=1, max=100, metavar="K", help="Trials that share a device.")
    ] = 1
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="SWEEP", help="Run what of that sweep has not ended well."),
    ] = None
    dry_run: DryRunOption = False


@command
def sweep(
    out: Output,
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT|-m MODULE [-- ARGS]|-- COMMAND",
            help="A Python file or module, after -- its own arguments; or any command after --.",
            show_default=False,
        ),
    ] = None,
    *,
    options: SweepOptions,
) -> int | None:
    """Run a script with many values of its options, each trial on one device of the cluster.

    A trial is `SCRIPT ARGS --lr=1e-3 --width=64`. The longest are started first, each on the device that
    would end it soonest. A trial that fails is a row of the table, and does not end the sweep.
    """
    from skyctl.sweep.sweep_folder import SweepFolder
    from skyctl.sweep.trial_devices import find_devices

    if options.resume is not None:
        if words:
            raise InputError(f"{words[0]} does not go with --resume, which has its script already")
        folder = SweepFolder.find(options.resume)
        request = folder.read_request()
        clusters = (
            options if options.cluster is not None else replace(options, cluster=Path(request.cluster_file))
        )
        target = clusters.load()
        devices = find_devices(target.cluster)
        return _run(out, target, folder, request, devices, options)
    kind = options.kind("sweep", words or (), after_dashes=bool(context.meta.get(AFTER_DASHES)))
    trials, space = _trials(options)
    folder, target = SweepFolder.new(), options.load()
    devices = find_devices(target.cluster)
    request = _request(folder.sweep_id, kind, words or (), options, target, devices, len(trials), space)
    if options.dry_run:
        _show_trials(out, trials, devices, request)
        return None
    return _run(out, target, folder, request, devices, options, trials)


def _trials(options: SweepOptions) -> tuple[list[Parameters], Mapping[str, Choice | Range]]:
    """The trials as they are known now, and what they are drawn from where ``--random`` is given."""
    from skyctl.files import read_text
    from skyctl.records.sweep import Choice
    from skyctl.sweep.parameters import grid_trials, make_space, random_trials, read_trials

    space = make_space(options.grid or (), options.range_ or ())
    if options.from_ is not None:
        return read_trials(read_text(options.from_), str(options.from_)), {}
    if options.random is None:
        for flag, given in (
            ("--range", options.range_),
            ("--seed", options.seed),
            ("--optuna", options.optuna),
        ):
            if given not in (None, [], False):
                raise InputError(f"{flag} goes with --random N, which is not given")
        if not space:
            raise InputError(
                "which trials are there? give --grid, --random with --range, or --from",
                hint="skyctl sweep train.py --grid lr=1e-3,3e-4 --grid width=64,128",
            )
        return grid_trials({n: values for n, values in space.items() if isinstance(values, Choice)}), {}
    if not space:
        raise InputError("--random draws from --range and --grid, and neither is given")
    if options.optuna and options.metric is None:
        raise InputError("--optuna learns from trials' figures: it needs --metric")
    return random_trials(space, options.random, options.seed or 0), space


def _request(
    sweep_id: str,
    kind: ScriptKind,
    words: Sequence[str],
    options: SweepOptions,
    target: ClusterTarget,
    devices: Sequence[TrialDevice],
    trials: int,
    space: Mapping[str, Choice | Range],
) -> SweepRequest:
    """The typed words and options as a record, but for the files. Raises InputError for what can't be."""
    from skyctl.records.base import timestamp
    from skyctl.records.script_request import ScriptRequest
    from skyctl.records.sweep import STOP_RULES, SWEEP_MODES, SweepRequest

    for flag, given, needed, other in (
        ("--mode", options.mode, "--metric", options.metric),
        ("--stop", options.stop, "--metric", options.metric),
        ("--grace", options.grace, "--stop", options.stop),
    ):
        if given is not None and other is None:
            raise InputError(f"{flag} goes with {needed}, which is not given")
    sent_folder, words, ship = shipped_words(kind, words, options.ship or ())
    return SweepRequest(
        sweep_id=sweep_id,
        created=timestamp(),
        cluster=target.cluster.name,
        cluster_file=str(target.path.absolute()),
        script=ScriptRequest(
            kind=kind,
            words=tuple(words),
            folder=str(sent_folder or Path.cwd()),
            ship=tuple(ship) if options.ship else (),
            env=read_environment(options.env or ()),
            ranks={device.node: 1 for device in devices},
            stall_s=options.stall,
        ),
        files={},
        metric=options.metric,
        mode=cast("SweepMode", require_choice("--mode", options.mode or "min", SWEEP_MODES)),
        stop=None
        if options.stop is None
        else cast("StopRule", require_choice("--stop", options.stop, STOP_RULES)),
        grace=options.grace or DEFAULT_GRACE,
        per_device=options.per_device,
        trials=trials,
        seed=options.seed or 0,
        space=dict(space),
        optuna=options.optuna,
    )


def _show_trials(
    out: Output, trials: Sequence[Parameters], devices: Sequence[TrialDevice], request: SweepRequest
) -> None:
    """The trials and devices, as far as they are known without connecting."""
    from skyctl.sweep.parameters import script_words

    known = () if request.optuna else trials
    for number, parameters in enumerate(known, 1):
        out.line(f"trial {number}: {' '.join(script_words(parameters))}")
    places = len(devices) * request.per_device
    out.note(f"{format_count(request.trials, 'trial')}, {places} at once: {', '.join(d.id for d in devices)}")
    out.json({"trials": list(known), "devices": [device.id for device in devices]})


def _run(
    out: Output,
    target: ClusterTarget,
    folder: SweepFolder,
    request: SweepRequest,
    devices: Sequence[TrialDevice],
    options: SweepOptions,
    new: Sequence[Parameters] | None = None,
) -> int | None:
    """Connects, and runs what has not ended yet.

    Args:
        new: the trials of a sweep that begins; None: it is resumed.
    """
    from skyctl.cli.show_sweep import SweepDisplay, show_sweep
    from skyctl.jobs.node_sessions import connect_nodes, require_all
    from skyctl.records.sweep import TrialState
    from skyctl.remote.session_factory import make_connector
    from skyctl.run.scripts.script_attempt import SCRIPT_MODULE
    from skyctl.run.scripts.script_files import find_script_files, read_script_files
    from skyctl.sweep.optuna_sampler import OptunaSampler
    from skyctl.sweep.sweep_runner import SweepRunner

    script_folder = Path(request.script.folder or ".")
    files = read_script_files(script_folder, find_script_files(script_folder, request.script.ship))
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    sampler = OptunaSampler(request) if request.optuna else None
    if new is None:
        _refuse_changes(folder, request.files, digests)
    nodes = list(target.cluster.nodes)
    with ExitStack() as stack:
        progress = stack.enter_context(out.progress("sweep"))
        connector = stack.enter_context(make_connector(nodes, preloaded=(SCRIPT_MODULE,)))
        connect = options.connect_options(target.path)
        connected = stack.enter_context(connect_nodes(nodes, connect, progress, nodes, connector))
        require_all(connected.failures)
        if new is not None:
            folder.create(request.model_copy(update={"files": digests}))
            for number, parameters in enumerate(() if request.optuna else new, 1):
                folder.write_trial(TrialState(number=number, parameters=parameters))
        stack.enter_context(folder.held())
        display = SweepDisplay(out, progress, request)
        runner = SweepRunner(
            folder, request, target.cluster, devices, files, connected.sessions, display.callbacks(), sampler
        )
        try:
            with display.over(runner.trials):
                outcome = runner.run()
        except BaseException as exc:
            exc.add_note(f"go on with it: skyctl sweep --resume {folder.sweep_id}")
            raise
    show_sweep(out, folder, request, outcome)
    return 1 if any(trial.status == "failed" for trial in outcome.trials) else None


def _refuse_changes(folder: SweepFolder, then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises MismatchError where the script's folder is not what the trials so far have had."""
    changed = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    if changed:
        more = f" and {len(changed) - SHOWN_CHANGES} more" if len(changed) > SHOWN_CHANGES else ""
        raise MismatchError(
            f"files that sweep {folder.sweep_id} has sent have changed since: "
            f"{', '.join(changed[:SHOWN_CHANGES])}{more}",
            hint="put them back, or begin a new sweep; what is written beside the script is best named in "
            ".skyctlignore",
        )
