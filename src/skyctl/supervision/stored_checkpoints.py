"""The stored checkpoints of a run that is not running: listing, exporting and removing them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from skyctl.agent.node_cache import file_digest
from skyctl.checkpoint import layout
from skyctl.checkpoint.recovery import RestorePoint, ShardHoldings, newest_restore_point
from skyctl.errors import InputError, RunError, SkyctlError
from skyctl.files import RunPaths, home, make_private, read_record, run_folder
from skyctl.records.plan import Plan
from skyctl.records.run_state import ENDED, RunState
from skyctl.remote.agent_session import Session
from skyctl.run.checkpoints.policy import shard_limits
from skyctl.run.checkpoints.replicator_group import LAUNCHER_COPIES, ReplicatorGroup, run_folder_on_node


@dataclass(frozen=True)
class StoredCheckpoint:
    """A stored step: how many layers are on each node (``here``: this machine), and whether all are."""

    step: int
    whole: bool
    size_bytes: int
    nodes: Mapping[str, int]


@dataclass(frozen=True)
class StoredRun:
    """A run as its folder on this machine has it."""

    paths: RunPaths
    state: RunState
    plan: Plan

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return len(self.plan.problem.layers)


def load_run(run: str) -> StoredRun:
    """The run that the user named, read from its folder.

    Raises:
        InputError: there is none, or it was never begun.
    """
    folder = run_folder(run)
    state = read_record(RunState, folder / "state.json")
    number = state.attempts[-1].number if state.attempts else 1
    paths = RunPaths(state.run_id, number)
    return StoredRun(paths, state, read_record(Plan, folder / "plan.json"))


def refuse_running(run: StoredRun, what: str) -> None:
    """Raises InputError where the run has not ended."""
    if run.state.status not in ENDED:
        raise InputError(
            f"run {run.paths.run_id} is {run.state.status}: {what} only once it has ended",
            hint=f"stop it first: skyctl stop {run.paths.run_id}",
        )


@contextmanager
def replicators_on(run: StoredRun, sessions: Mapping[str, Session]) -> Iterator[ReplicatorGroup]:
    """Replicators that answer on those nodes; no other node reaches them."""
    limits = shard_limits(run.plan.problem)
    replicators = ReplicatorGroup(run.paths.run_id, sessions, shard_limits=limits)
    try:
        replicators.start(dict.fromkeys(sessions, "127.0.0.1"))
        replicators.wait_ready()
        yield replicators
    finally:
        replicators.close()


def checkpoint_holdings(run: StoredRun, replicators: ReplicatorGroup | None) -> ShardHoldings:
    """By node, what it holds of the run, this machine included."""
    found = dict(replicators.holdings()) if replicators is not None else {}
    if run.paths.checkpoints.is_dir():
        found[LAUNCHER_COPIES] = layout.held_shards(run.paths.checkpoints)
    return found


def checkpoint_table(run: StoredRun, holdings: ShardHoldings) -> list[StoredCheckpoint]:
    """The steps that anything is left of, the newest first."""
    steps = sorted({step for by_step in holdings.values() for step in by_step}, reverse=True)
    found = []
    for step in steps:
        of_step = {node: by_step.get(step, {}) for node, by_step in holdings.items()}
        sizes = {layer: file.size_bytes for layers in of_step.values() for layer, file in layers.items()}
        point = newest_restore_point({node: {step: layers} for node, layers in of_step.items()}, run.layers)
        nodes = {node or "here": len(layers) for node, layers in of_step.items() if layers}
        found.append(StoredCheckpoint(step, point is not None, sum(sizes.values()), nodes))
    return found


def export_checkpoint(
    run: StoredRun,
    replicators: ReplicatorGroup | None,
    sessions: Mapping[str, Session],
    step: int | None,
    out: Path,
) -> tuple[int, Path]:
    """One checkpoint's weights as one safetensors file, for ``hf:`` workloads as a folder that can be loaded.

    Every file is verified; a damaged copy is passed over for another one.

    Args:
        step: None: the newest that is there in full.

    Returns:
        The step, and what was written.

    Raises:
        RunError: no such step is there in full, or some layer has no whole copy.
        SkyctlError: the disk is full or not writable.
    """
    from skyctl.checkpoint.weights_export import export_weights  # late: it needs torch

    holdings = checkpoint_holdings(run, replicators)
    if step is not None:
        holdings = {
            node: {one: layers for one, layers in by_step.items() if one == step}
            for node, by_step in holdings.items()
        }
    point = newest_restore_point(holdings, run.layers)
    if point is None:
        which = f"step {step}" if step is not None else "any step"
        raise RunError(
            f"of {which} of run {run.paths.run_id} not every layer could be found",
            hint=f"see what there is: skyctl checkpoint ls {run.paths.run_id}",
        )
    source = run.state.workload
    with tempfile.TemporaryDirectory(prefix="export-", dir=make_private(home())) as folder:
        gathered = Path(folder)
        for layer in range(run.layers):
            _gather(run, sessions, point, layer, layout.layer_path(gathered, 0, layer))
        made = layout.step_folder(gathered, 0)
        if not source.startswith("hf:"):
            export_weights(made, out)
            return point.step, out
        from skyctl.workload.hf.export import export_model as to_folder

        merged = gathered / "weights.safetensors"
        export_weights(made, merged)
        return point.step, to_folder(merged, source, out)


def _gather(
    run: StoredRun, sessions: Mapping[str, Session], point: RestorePoint, layer: int, target: Path
) -> None:
    """Fetches one layer's file, from the first holder whose copy is intact."""
    target.parent.mkdir(mode=0o700, exist_ok=True)
    wanted, reasons = point.layers[layer], []
    for node in sorted(wanted.nodes, key=lambda name: name != LAUNCHER_COPIES):
        try:
            if node == LAUNCHER_COPIES:
                shutil.copyfile(layout.layer_path(run.paths.checkpoints, point.step, layer), target)
            else:
                there = run_folder_on_node(sessions[node], run.paths.run_id)
                sessions[node].fetch(
                    str(layout.layer_path(there, point.step, layer)), target, wanted.size_bytes
                )
            if file_digest(target) == wanted.sha256:
                return
            reasons.append(f"{node or 'here'}: damaged")
        except OSError as exc:
            reasons.append(f"{node or 'here'}: {exc.strerror or exc}")
        except SkyctlError as exc:
            reasons.append(f"{node or 'here'}: {exc.message}")
    raise RunError(
        f"no copy of layer {layer} of step {point.step} is whole: {'; '.join(reasons)}",
        hint="export an older step: --step",
    )


def remove_checkpoints(run: StoredRun, replicators: ReplicatorGroup) -> dict[str, SkyctlError]:
    """Removes the run's checkpoints from the nodes and from here; where that failed, and why."""
    failures = replicators.forget()
    with suppress(OSError):
        shutil.rmtree(run.paths.checkpoints)
    return failures
