"""The stored checkpoints of a run that is not running: listing, exporting and removing them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from skyctl.agent.node_cache import file_digest
from skyctl.checkpoint.launcher.policy import shard_limits
from skyctl.checkpoint.launcher.replicator_group import LAUNCHER_COPIES, ReplicatorGroup, run_folder_on_node
from skyctl.checkpoint.launcher.stored_run import StoredRun
from skyctl.checkpoint.node import layout
from skyctl.checkpoint.node.recovery import (
    RestorePoint,
    ShardHoldings,
    newest_restore_point,
    whole_steps,
)
from skyctl.errors import RunError, SkyctlError
from skyctl.files import home, make_private, read_record, write_atomic
from skyctl.records.run_state import RunState
from skyctl.remote.agent_session import Session


@dataclass(frozen=True)
class StoredCheckpoint:
    """A stored step: how many layers are on each node (``here``: this machine), and whether all are."""

    step: int
    whole: bool
    size_bytes: int
    nodes: Mapping[str, int]


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
    holdings = dict(replicators.holdings()) if replicators is not None else {}
    if run.paths.checkpoints.is_dir():
        holdings[LAUNCHER_COPIES] = layout.held_shards(run.paths.checkpoints)
    return holdings


def checkpoint_table(run: StoredRun, holdings: ShardHoldings) -> list[StoredCheckpoint]:
    """The steps that anything is left of, the newest first."""
    steps = sorted({step for by_step in holdings.values() for step in by_step}, reverse=True)
    whole = whole_steps(holdings, run.layers)
    table = []
    for step in steps:
        of_step = {node: by_step.get(step, {}) for node, by_step in holdings.items()}
        sizes = {layer: file.size_bytes for layers in of_step.values() for layer, file in layers.items()}
        nodes = {node or "here": len(layers) for node, layers in of_step.items() if layers}
        table.append(StoredCheckpoint(step, step in whole, sum(sizes.values()), nodes))
    return table


@contextmanager
def gather_checkpoint(
    run: StoredRun, replicators: ReplicatorGroup | None, sessions: Mapping[str, Session], step: int | None
) -> Iterator[tuple[int, Path]]:
    """One checkpoint's shards of all layers in one folder, which is removed afterwards; and its step.

    Every file is verified; a damaged copy is passed over for another one.

    Args:
        step: None: the newest that is there in full.

    Raises:
        RunError: no such step is there in full, or some layer has no whole copy.
    """
    holdings = checkpoint_holdings(run, replicators)
    if step is not None:
        holdings = {
            node: {stored: layers for stored, layers in by_step.items() if stored == step}
            for node, by_step in holdings.items()
        }
    point = newest_restore_point(holdings, run.layers)
    if point is None:
        raise _not_whole_error(run, step, any_left=any(holdings.values()))
    older = [
        stored.step for stored in checkpoint_table(run, holdings) if stored.whole and stored.step < point.step
    ]
    with tempfile.TemporaryDirectory(prefix="export-", dir=make_private(home())) as folder:
        gathered = Path(folder)
        for layer in range(run.layers):
            _gather(run, sessions, point, layer, layout.layer_path(gathered, 0, layer), older)
        yield point.step, layout.step_folder(gathered, 0)


def _not_whole_error(run: StoredRun, step: int | None, *, any_left: bool) -> RunError:
    """The error where a checkpoint is not there in full; the hint names what would help, if anything does."""
    run_id = run.paths.run_id
    hint = f"see what there is: skyctl checkpoint ls {run_id}" if any_left or step is not None else None
    if run.paths.weights.is_file() and run.state.status == "done":
        hint = f"the weights that it ended with are in {run.paths.weights}"
    which = f"step {step}" if step is not None else "any step"
    return RunError(f"of {which} of run {run_id} not every layer could be found", hint=hint)


def _gather(
    run: StoredRun,
    sessions: Mapping[str, Session],
    point: RestorePoint,
    layer: int,
    target: Path,
    older: Sequence[int],
) -> None:
    """Fetches one layer's file, from the first place whose copy is intact.

    Args:
        older: earlier steps that are there in full, the newest first.
    """
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
        hint=f"take an older step: skyctl checkpoint export {run.paths.run_id} --step {older[0]}"
        if older
        else None,
    )


def remove_checkpoints(
    run: StoredRun, replicators: ReplicatorGroup, unreached: Sequence[str] = ()
) -> dict[str, SkyctlError]:
    """Removes the run's checkpoints from the nodes and from here; where that failed, and why.

    If nothing is left its state says so: it can't be resumed any more.

    Args:
        unreached: nodes that can't be asked, and may have some.
    """
    failures = replicators.forget()
    with suppress(OSError):
        shutil.rmtree(run.paths.checkpoints)
    if not failures and not unreached:
        state = read_record(RunState, run.paths.state)
        write_atomic(run.paths.state, state.model_copy(update={"checkpoint": None, "best": None}).to_json())
    return failures
