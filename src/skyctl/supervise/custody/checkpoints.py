"""The checkpoints of a run that nobody trains just now: what there is, one file of it, and its end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from skyctl.agent.store import file_digest
from skyctl.checkpoint import layout
from skyctl.checkpoint.choosing import Chosen, Holdings, newest
from skyctl.checkpoint.export import weights
from skyctl.errors import InputError, RunError, SkyctlError
from skyctl.files import RunPaths, home, make_private, read_record, run_folder
from skyctl.records.plan import Plan
from skyctl.records.run import ENDED, RunState
from skyctl.remote.session import Session
from skyctl.supervise.attempts.keepers import HERE, Keepers, run_folder_on


@dataclass(frozen=True)
class Held:
    """One step: by node (``here``: this machine) how many layers, and whether all are somewhere."""

    step: int
    whole: bool
    size_bytes: int
    nodes: Mapping[str, int]


@dataclass(frozen=True)
class Known:
    """A run as its folder here has it."""

    paths: RunPaths
    state: RunState
    plan: Plan

    @property
    def layers(self) -> int:
        """How many the model has."""
        return len(self.plan.problem.layers)


def known_run(run: str) -> Known:
    """The run that the user named.

    Raises:
        InputError: there is none, or it was never begun.
    """
    folder = run_folder(run)
    state = read_record(RunState, folder / "state.json")
    number = state.attempts[-1].number if state.attempts else 1
    paths = RunPaths(state.run_id, number)
    return Known(paths, state, read_record(Plan, folder / "plan.json"))


def refuse_running(known: Known, what: str) -> None:
    """Raises InputError where the run has not ended."""
    if known.state.status not in ENDED:
        raise InputError(
            f"run {known.paths.run_id} is {known.state.status}: {what} only once it has ended",
            hint=f"stop it first: skyctl stop {known.paths.run_id}",
        )


@contextmanager
def keepers_of(run_id: str, sessions: Mapping[str, Session]) -> Iterator[Keepers]:
    """Keepers that answer on those nodes; they listen to no other node."""
    keepers = Keepers(run_id, sessions)
    try:
        keepers.start(dict.fromkeys(sessions, "127.0.0.1"))
        keepers.ready()
        yield keepers
    finally:
        keepers.close()


def holdings_of(known: Known, keepers: Keepers | None) -> Holdings:
    """What nodes and this machine hold of the run."""
    found = dict(keepers.holdings()) if keepers is not None else {}
    if known.paths.checkpoints.is_dir():
        found[HERE] = layout.held(known.paths.checkpoints)
    return found


def table_of(known: Known, holdings: Holdings) -> list[Held]:
    """The steps that anything is left of, the newest first."""
    steps = sorted({step for by_step in holdings.values() for step in by_step}, reverse=True)
    found = []
    for step in steps:
        of_step = {node: by_step.get(step, {}) for node, by_step in holdings.items()}
        sizes = {layer: file.size_bytes for layers in of_step.values() for layer, file in layers.items()}
        chosen = newest({node: {step: layers} for node, layers in of_step.items()}, known.layers)
        nodes = {node or "here": len(layers) for node, layers in of_step.items() if layers}
        found.append(Held(step, chosen is not None, sum(sizes.values()), nodes))
    return found


def export(
    known: Known, keepers: Keepers | None, sessions: Mapping[str, Session], step: int | None, out: Path
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
    holdings = holdings_of(known, keepers)
    if step is not None:
        holdings = {
            node: {one: layers for one, layers in by_step.items() if one == step}
            for node, by_step in holdings.items()
        }
    chosen = newest(holdings, known.layers)
    if chosen is None:
        which = f"step {step}" if step is not None else "any step"
        raise RunError(
            f"of {which} of run {known.paths.run_id} not every layer could be found",
            hint=f"see what there is: skyctl checkpoint ls {known.paths.run_id}",
        )
    source = known.state.workload
    with tempfile.TemporaryDirectory(prefix="export-", dir=make_private(home())) as folder:
        gathered = Path(folder)
        for layer in range(known.layers):
            _gather(known, sessions, chosen, layer, layout.layer_path(gathered, 0, layer))
        made = layout.step_folder(gathered, 0)
        if not source.startswith("hf:"):
            weights(made, out)
            return chosen.step, out
        from skyctl.workload.hf.export import export as to_folder

        merged = gathered / "weights.safetensors"
        weights(made, merged)
        return chosen.step, to_folder(merged, source, out)


def _gather(known: Known, sessions: Mapping[str, Session], chosen: Chosen, layer: int, target: Path) -> None:
    """One layer's file, from the first of its holders whose copy is whole."""
    target.parent.mkdir(mode=0o700, exist_ok=True)
    wanted, reasons = chosen.layers[layer], []
    for node in sorted(wanted.nodes, key=lambda name: name != HERE):
        try:
            if node == HERE:
                shutil.copyfile(layout.layer_path(known.paths.checkpoints, chosen.step, layer), target)
            else:
                there = run_folder_on(sessions[node], known.paths.run_id)
                sessions[node].fetch(str(layout.layer_path(there, chosen.step, layer)), target)
            if file_digest(target) == wanted.sha256:
                return
            reasons.append(f"{node or 'here'}: damaged")
        except OSError as exc:
            reasons.append(f"{node or 'here'}: {exc.strerror or exc}")
        except SkyctlError as exc:
            reasons.append(f"{node or 'here'}: {exc.message}")
    raise RunError(
        f"no copy of layer {layer} of step {chosen.step} is whole: {'; '.join(reasons)}",
        hint="export an older step: --step",
    )


def remove(known: Known, keepers: Keepers) -> dict[str, SkyctlError]:
    """Removes the run's checkpoints from the nodes and from here; where that failed, and why."""
    failures = keepers.forget()
    with suppress(OSError):
        shutil.rmtree(known.paths.checkpoints)
    return failures
