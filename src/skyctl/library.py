"""Runs from Python and notebooks: ``skyctl.launch`` and ``skyctl.attach``, with the code of the commands.

    import skyctl

    run = skyctl.launch("train.py", cluster="cluster.yaml", steps=500, progress=print)
    measured = run.wait(on_step=lambda step: print(step.step, step.loss))
    print(measured.final_loss, measured.iteration_s.median, run.weights)

A run belongs to a process in the background as soon as it trains, as with ``skyctl launch --detach``: it goes
on where the notebook's kernel ends, and each handle on it only reads its folder.
"""

from __future__ import annotations

import difflib
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from skyctl.errors import InputError, RunError, SkyctlError

if TYPE_CHECKING:
    from skyctl.cli.run_options import LaunchOptions
    from skyctl.records.measurement import Measurement
    from skyctl.records.plan import Plan
    from skyctl.records.run_state import RunState
    from skyctl.run.callbacks import StepProgress
    from skyctl.supervision.run_status import InspectedRun

OF_A_TERMINAL = ("detach", "yes", "dry_run")
"""Options of ``skyctl launch`` that mean nothing here: a run is always left to the background."""


class Run:
    """A run that a process in the background supervises. Made by ``launch`` and ``attach``.

    It holds nothing but the run's id: every question is answered by the run's folder as it is then.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id

    def __repr__(self) -> str:
        return f"<skyctl run {self.run_id}: {self._summary()}>"

    def _summary(self) -> str:
        try:
            state = self.state
        except SkyctlError as exc:
            return exc.message
        return f"{self.status}, {state.step} of {state.steps}"

    @property
    def folder(self) -> Path:
        """The folder with everything that the run leaves: plan, logs, figures, weights."""
        return self._inspect().paths.folder

    @property
    def state(self) -> RunState:
        """The state as its supervisor has last written it: step, loss, attempts, nodes that are away."""
        return self._inspect().state

    @property
    def status(self) -> str:
        """One word: ``starting``, ``running``, ``restarting``, ``stopping``, ``done``, ``failed``,
        ``stopped``, or ``unsupervised`` where the process in the background is gone."""
        return self._inspect().status

    @property
    def ended(self) -> bool:
        """Whether the run is over: done, failed or stopped."""
        return self._inspect().ended

    @property
    def measurement(self) -> Measurement | None:
        """The figures measured of the run, beside those predicted; None as long as it has not ended well."""
        run = self._inspect()
        return _measurement(run) if run.state.status == "done" else None

    @property
    def weights(self) -> Path | None:
        """The trained weights, a safetensors file; None as long as the run has not ended well."""
        run = self._inspect()
        return run.paths.weights if run.state.status == "done" and run.paths.weights.is_file() else None

    def steps(self) -> list[StepProgress]:
        """All steps that have ended, with loss, seconds and validation, the first one first."""
        from skyctl.supervision.run_logs import MetricsFollower, read_step
        from skyctl.supervision.run_status import counted_unit

        run = self._inspect()
        unit = counted_unit(run.paths)
        return [read_step(line, run.state, unit) for line in MetricsFollower(run.paths).lines()]

    def wait(
        self,
        *,
        progress: Callable[[str], None] | None = None,
        on_step: Callable[[StepProgress], None] | None = None,
    ) -> Measurement:
        """Waits until the run has ended.

        Ctrl-C (in a notebook: "interrupt the kernel") ends the waiting with KeyboardInterrupt, and the run
        goes on: wait again, or ``stop`` it. A run whose supervisor is gone gets another in the background.

        Args:
            progress: told the lines that ``skyctl attach`` shows, such as ``print``; some of them by another
                thread.
            on_step: told every step once, those before the call included; a step that a restart makes again,
                once more.

        Returns:
            The run's measurement: losses and seconds by step, each device's times beside the prediction.

        Raises:
            RunError: the run failed, or was stopped.
            SkyctlError: its supervisor is gone, and none could be started.
        """
        from skyctl.cli.attach_command import RunView
        from skyctl.cli.callback_output import CallbackOutput
        from skyctl.cli.run_display import make_terminal_callbacks

        out, run = CallbackOutput(progress), self._inspect()
        view = RunView(out, run, yes=True)
        with out.progress("wait") as display:
            callbacks = make_terminal_callbacks(out, display)
            if on_step is not None:
                callbacks = replace(callbacks, step=_both(on_step, callbacks.step))
            while not run.ended:
                _supervise(run)
                view.follow(callbacks)
                run = self._inspect()
            view.show_new(callbacks)
        return _result(run)

    def stop(self, *, checkpoint: bool = True) -> None:
        """Ends the run, and waits until nothing of it is left on any node. Of one that has ended, nothing.

        ``launch(resume=RUN)`` goes on with it.

        Args:
            checkpoint: keep its state first.

        Raises:
            NodeError: a node could not be told.
            SkyctlError: its supervisor does not end it, and does not end itself.
        """
        from skyctl.run.callbacks import RunCallbacks
        from skyctl.supervision.run_status import refuse_other_machine
        from skyctl.supervision.shutdown import refuse_unreached, stop_run

        run = self._inspect()
        refuse_other_machine(run)
        refuse_unreached([stop_run(run, RunCallbacks(), checkpoint=checkpoint)])

    def _inspect(self) -> InspectedRun:
        from skyctl.supervision.run_status import inspect_run

        return inspect_run(self.run_id)


def launch(
    plan_or_workload: Plan | str | os.PathLike[str] | None = None,
    *,
    cluster: str | os.PathLike[str] | None = None,
    limit: str | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    seed: int | None = None,
    resume: str | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Run:
    """Trains on a cluster, as ``skyctl launch --detach`` does, and returns once the run trains.

    A workload is probed and planned first; what earlier probes found and still holds is used again. Nothing
    is asked and nothing is printed. Ctrl-C before the run trains ends it: KeyboardInterrupt is raised and
    nothing is left on any node. After that the run belongs to a process in the background.

    Args:
        plan_or_workload: a plan (``skyctl.plan``, or a plan file's path), or a workload: ``train.py``,
            ``gpt:layers=8,…``, ``hf:DIR``. None beside ``resume``.
        cluster: the cluster file; default: SKYCTL_CLUSTER, else ``./cluster.yaml``.
        limit: only these of its nodes: names, globs, groups, ``!left-out``.
        steps: training steps, default 100; with ``resume`` so many more.
        batch_size: samples a step, default 32; a plan has its own, as of ``seed``, default 0.
        learning_rate: default: the workload's own.
        resume: go on with this run (an id) from its newest checkpoint.
        progress: told the lines that the command shows, such as ``print``; some of them by another thread.
        options: any other option of ``skyctl launch``, with underscores: ``validate_every=50``,
            ``parallel="data"``, ``lr_schedule="cosine"``, ``checkpoint_every=100``.

    Raises:
        InputError: bad input, or not called from the main thread, where alone Ctrl-C arrives.
        InfeasibleError: it is proved that no plan fits.
        NodeError: a node could not be reached, refused, or is unfit.
        MismatchError: the cluster is not what the plan was made for.
        RunError: the run failed before it trained.
    """
    from skyctl.cli.callback_output import CallbackOutput
    from skyctl.cli.launch_command import launch_run
    from skyctl.records.plan import Plan

    if threading.current_thread() is not threading.main_thread():
        raise InputError("launch is called from the main thread only: nowhere else does Ctrl-C arrive")
    named = {
        "cluster": cluster,
        "limit": limit,
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "seed": seed,
        "resume": resume,
    }
    given = _launch_options({**{key: value for key, value in named.items() if value is not None}, **options})
    with ExitStack() as stack:
        source: str | None = None
        if isinstance(plan_or_workload, Plan):
            source = stack.enter_context(_plan_file(plan_or_workload))
        elif plan_or_workload is not None:
            source = os.fspath(plan_or_workload)
        stack.enter_context(_interruptible())
        run_id = launch_run(CallbackOutput(progress), source, given)
    assert run_id is not None  # only a dry run has none
    return Run(run_id)


def attach(run: str | os.PathLike[str] | None = None) -> Run:
    """A handle on a run that goes on or has ended, as ``skyctl attach`` finds it.

    A run that nobody supervises gets a process in the background that does: ranks that still train are taken
    over; where none is left, the run resumes from its last checkpoint.

    Args:
        run: its id, the id's beginning or end, or its folder; None: the newest.

    Raises:
        InputError: there is no such run, several are meant, or it is a script's (``skyctl run``).
        UndecidedError: it is supervised on another machine, which can't be asked from here.
        SkyctlError: no supervisor could be started.
    """
    from skyctl.supervision.run_status import refuse_other_machine, resolve_run

    inspected = resolve_run(None if run is None else os.fspath(run))
    if inspected.state.is_script:
        raise InputError(
            f"run {inspected.paths.run_id} is a script's, which has no plan, steps or measurement",
            hint=f"see it: skyctl attach {inspected.paths.run_id}",
        )
    refuse_other_machine(inspected)
    _supervise(inspected)
    return Run(inspected.paths.run_id)


def _supervise(run: InspectedRun) -> None:
    """Starts a supervisor in the background for a run that goes on without one."""
    from skyctl.supervision.background_supervisor import start_background
    from skyctl.supervision.run_status import inspect_run

    if run.ended or run.supervisor_state != "gone":
        return
    try:
        start_background(run.paths)
    except SkyctlError:
        now = inspect_run(run.paths.run_id)
        if not now.ended and now.supervisor_state != "alive":  # else another process was quicker
            raise


def _result(run: InspectedRun) -> Measurement:
    """The measurement of a run that has ended. Raises RunError: it has not ended well."""
    from skyctl.supervision.run_status import counted_unit, refuse_failed

    refuse_failed(run)
    measurement = _measurement(run)
    if run.state.status == "done" and measurement is not None:
        return measurement
    name, state = run.paths.run_id, run.state
    raise RunError(
        f"run {name} was {state.status} after {state.step} of {state.steps} {counted_unit(run.paths)}s",
        hint=f"go on with it: skyctl.launch(resume={name!r})",
        log=str(run.paths.folder),
    )


def _measurement(run: InspectedRun) -> Measurement | None:
    from skyctl.files import read_record
    from skyctl.records.measurement import Measurement

    path = run.paths.measurement
    return read_record(Measurement, path) if path.is_file() else None


def _both(
    first: Callable[[StepProgress], None], second: Callable[[StepProgress], None]
) -> Callable[[StepProgress], None]:
    def tell(step: StepProgress) -> None:
        first(step)
        second(step)

    return tell


def _launch_options(given: Mapping[str, Any]) -> LaunchOptions:
    """The options of the command with these values, each checked as on the command line.

    Raises:
        InputError: there is no such option, it means nothing here, or a value is none that it takes.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    from skyctl.cli.run_options import LaunchOptions

    names = {field.name for field in fields(LaunchOptions)} - set(OF_A_TERMINAL)
    hints = get_type_hints(LaunchOptions, include_extras=True)
    values = {}
    for name, value in given.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise InputError(
                f"launch has no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                hint="skyctl launch --help lists them; here they have underscores",
            )
        config = ConfigDict(coerce_numbers_to_str=True)
        try:
            values[name] = TypeAdapter(hints[name], config=config).validate_python(value)
        except ValidationError as exc:
            raise InputError(f"{name}={value!r}: {exc.errors()[0]['msg']}") from exc
        info = next(iter(getattr(hints[name], "__metadata__", ())), None)
        least, most = getattr(info, "min", None), getattr(info, "max", None)
        if values[name] is not None and least is not None and values[name] < least:
            raise InputError(f"{name}={value!r}: it is {least} at least")
        if values[name] is not None and most is not None and values[name] > most:
            raise InputError(f"{name}={value!r}: it is {most} at most")
    return LaunchOptions(**values, detach=True, yes=True)


@contextmanager
def _plan_file(plan: Plan) -> Iterator[str]:
    """The plan as a file, as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="skyctl-") as folder:
        path = Path(folder) / "plan.json"
        path.write_text(plan.to_json(), encoding="utf-8")
        yield str(path)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C is Python's own while the context lasts: by it a run is left to the background, too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        with suppress(TypeError):  # a handler that is not Python's can't be put back
            signal.signal(signal.SIGINT, before)
