"""``launch --init-from``: which weights a new run begins with. Whether they fit is the workload's to say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.cli.command_output import Output
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.checkpoint.launcher.stored_run import StoredRun
    from skyctl.cli.run_options import LaunchOptions
    from skyctl.records.run_state import InitialWeights

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
"""How the names of files with weights end."""


def find_initial_weights(out: Output, options: LaunchOptions) -> InitialWeights | None:
    """The weights that ``--init-from`` names; None where it is not given (or a dry run would bring them).

    Of a run they are those that it has ended with, else those of its newest checkpoint, brought here.

    Raises:
        InputError: there is no such file, folder or run, or it has no weights.
        RunError: no checkpoint of the run is there in full.
    """
    named = options.init_from
    if named is None:
        return None
    path = Path(named).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise InputError(
                f"--init-from {named}: a file of weights ends in {', '.join(SUFFIXES)}",
                hint="a run's weights.safetensors, or torch.save(model.state_dict(), 'weights.pt')",
            )
        return _initial_weights(out, path)
    if path.is_dir() and not (path / "state.json").is_file():
        return _initial_weights(out, path)
    return _weights_of_run(out, named, options)


def _initial_weights(
    out: Output, path: Path, *, run: str | None = None, step: int | None = None
) -> InitialWeights:
    from skyctl.records.run_state import InitialWeights
    from skyctl.workload.weight_files import weights_digest

    path = path.resolve()
    initial = InitialWeights(path=str(path), sha256=weights_digest(path), run=run, step=step)
    whose = f" of run {run} after step {step}" if run is not None else ""
    out.note(f"starting from the weights{whose} in {path} (SHA-256 {initial.sha256[:12]}…)")
    return initial


def _weights_of_run(out: Output, named: str, options: LaunchOptions) -> InitialWeights | None:
    from skyctl.files import run_folder
    from skyctl.supervision.run_status import load_run, refuse_running
    from skyctl.workload.workload_spec import similar_files

    try:
        run_folder(named)
    except InputError as exc:
        near = similar_files(named, *SUFFIXES)
        raise InputError(
            f"--init-from {named} is neither a file nor a folder, and {exc.message}"
            + (f"; did you mean {' or '.join(near)}?" if near else ""),
            hint=f"give a file that ends in {', '.join(SUFFIXES)}, a folder with model.safetensors, or a run "
            "(skyctl ps -a lists them)",
        ) from exc
    stored_run = load_run(named)
    state = stored_run.state
    refuse_running(stored_run, "its weights can be taken")
    if state.status == "done" and stored_run.paths.weights.is_file():
        return _initial_weights(out, stored_run.paths.weights, run=state.run_id, step=state.step)
    if state.checkpoint is None:
        raise InputError(
            f"run {state.run_id} has no weights to start from: it is {state.status}, without checkpoint"
        )
    if options.dry_run:
        out.note(f"would bring the weights of run {state.run_id} here, of step {state.checkpoint}")
        return None
    path, step = _bring_checkpoint(out, stored_run, options)
    return _initial_weights(out, path, run=state.run_id, step=step)


def _bring_checkpoint(out: Output, stored_run: StoredRun, options: LaunchOptions) -> tuple[Path, int]:
    """Gathers the newest checkpoint's weights into the run's folder: the file, and its step.

    The run's own cluster file says where its nodes are: the new run may have another one.
    """
    from skyctl.checkpoint.launcher.stored_checkpoints import (
        checkpoint_holdings,
        checkpoint_table,
        gather_checkpoint,
    )
    from skyctl.cli.checkpoint_command import connect_replicators
    from skyctl.supervision.weight_files import write_weights

    own_file = stored_run.state.cluster_file
    cluster = None if own_file is not None and Path(own_file).is_file() else options.cluster
    here = checkpoint_table(stored_run, checkpoint_holdings(stored_run, None))
    offline = any(checkpoint.whole and checkpoint.step == stored_run.state.checkpoint for checkpoint in here)
    with (
        connect_replicators(out, stored_run, cluster, options, offline=offline) as nodes,
        gather_checkpoint(stored_run, nodes.replicators, nodes.sessions, None) as (step, layers),
    ):
        path = stored_run.paths.checkpoint_weights(step)
        write_weights(layers, path)
    return path, step
