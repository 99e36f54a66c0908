"""A rank's part of the checkpoints: writes its layers' shards when one is due, and resumes from them.

The weights that a run ends with are written here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from skyctl.checkpoint.node import layout, safetensors
from skyctl.checkpoint.node.atomic_file import FileDigest
from skyctl.checkpoint.node.replicator_events import ShardDigest
from skyctl.checkpoint.node.shards import ShardStamp, StageState, frozen_names
from skyctl.errors import RecordError, SkyctlError, WorkloadError
from skyctl.worker.rank_events import CheckpointEvent, TensorSketch
from skyctl.worker.rank_order import AnyRankOrder, CheckpointOptions, RankOrder
from skyctl.workload.layered_model import LayeredModel
from skyctl.workload.mixed_precision import master_of


@dataclass(frozen=True)
class ShardOrigin:
    """The entries that all shards of this rank have in common: run, layers [start, stop), workload.

    Attributes:
        names: the names of all the model's layers.
        workload: the digest of what is trained.
        own_names: layers' tensors have the names that they have in the whole model.
    """

    run_id: str
    rank: int
    start: int
    stop: int
    names: tuple[str, ...]
    workload: str
    dtype: str
    seed: int
    own_names: bool = False

    def stamp(self, step: int, layer: int) -> ShardStamp:
        """The stamp that the shard of one layer has after ``step`` steps."""
        return ShardStamp(
            run_id=self.run_id,
            step=step,
            layer=layer,
            name=self.names[layer],
            layers=len(self.names),
            workload=self.workload,
            dtype=self.dtype,
            seed=self.seed,
            own_names=self.own_names,
        )


class Checkpointer:
    """Writes the stage's shards while the rank's training waits: no second copy is kept in memory.

    Args:
        sketch: by layer, a few numbers of its parameters, where other pipelines hold them as well.
        best: the step whose checkpoint is kept for its validation loss.
        writes: whether it is this rank that writes its layers; None: as the options have it.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        state: StageState,
        origin: ShardOrigin,
        sketch: Callable[[], Mapping[int, tuple[TensorSketch, ...]]] = dict,
        best: int | None = None,
        writes: Callable[[], bool] | None = None,
    ) -> None:
        self._writes = writes or (lambda: options.writes)
        self._options, self._state, self._origin, self._sketch = options, state, origin, sketch
        self._sent_notes: set[str] = set()
        self._best = [] if best is None else [best]

    def due(self, done: int, *, early: bool, last: bool) -> bool:
        """Whether to write one after ``done`` steps.

        Args:
            early: the run was stopped and ends with this step.
            last: this was the last of the run's steps.
        """
        every = self._options.every
        return early or (last and self._options.at_end) or bool(every and done % every == 0)

    def write(self, done: int, *, best: bool = False) -> CheckpointEvent:
        """Writes the shards after ``done`` steps and their manifest, then prunes; returns the event to send.

        One that is ``best`` (its validation loss is) stays until a better one and yet another checkpoint are
        written here: all ranks have written the better one by then. If the disk is full the event has an
        ``error`` and nothing is left of that step: the run continues.

        Raises:
            WorkloadError: some state of a layer or of the optimizer can't be saved.
        """
        began = time.perf_counter()
        layers: dict[int, ShardDigest] = {}
        error = None
        try:
            writes = self._writes()
            written = self._write(done) if writes else {}
            layers = {layer: ShardDigest(file.sha256, file.size_bytes) for layer, file in written.items()}
            if writes and (best or self._best):
                self._best = [*self._best[-1:], *([done] if best else [])]
                layout.pin_best_steps(self._options.folder, self._best)
            layout.prune_steps(self._options.folder, self._options.keep)
        except WorkloadError:
            raise
        except SkyctlError as exc:
            error = exc.message
        notes = [note for note in self._state.notes if note not in self._sent_notes]
        self._sent_notes.update(notes)
        sketches = self._sketch()
        return CheckpointEvent(done, layers, time.perf_counter() - began, tuple(notes), error, sketches)

    def _write(self, done: int) -> dict[int, FileDigest]:
        origin, folder = self._origin, self._options.folder
        step_folder = layout.make_step_folder(folder, done)
        paths: list[Path] = []
        try:
            for path, manifest in layout.read_manifests(folder, done):
                if manifest.attempt < self._options.attempt:
                    path.unlink(missing_ok=True)
            written = {}
            for position, layer in enumerate(range(origin.start, origin.stop)):
                paths.append(layout.layer_path(folder, done, layer))
                written[layer] = self._state.write(position, paths[-1], origin.stamp(done, layer))
            layout.write_manifest(
                folder,
                layout.ShardManifest(
                    run_id=origin.run_id,
                    rank=origin.rank,
                    step=done,
                    attempt=self._options.attempt,
                    start=origin.start,
                    stop=origin.stop,
                    workload=origin.workload,
                    layers=written,
                ),
            )
        except BaseException as exc:
            for path in paths:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            with suppress(OSError):
                step_folder.rmdir()  # only where no other rank has written there
            if isinstance(exc, OSError):
                raise SkyctlError(f"{step_folder} can't be written: {exc.strerror or exc}") from exc
            raise
        return written


def resumed_step(order: AnyRankOrder) -> int:
    """The first step to make: that of the checkpoint that the rank goes on from; 0 where there is none.

    Raises:
        RecordError: the run has fewer steps.
    """
    step = order.first_step
    if step > order.steps:
        raise RecordError(f"the checkpoint is of step {step}, and the run has {order.steps} steps")
    return step


def restore_stage(order: RankOrder, state: StageState, origin: ShardOrigin) -> int:
    """Verifies the shards that the order's ``resume`` names, and restores the stage from them.

    Later steps that earlier attempts have written in this run's folder are removed.

    Returns:
        The first step to make (0: nothing to resume from).

    Raises:
        RecordError: a shard is missing, damaged, or of another model; named, with what is wrong.
    """
    resume = order.resume
    if resume is None:
        return 0
    step, folder = resumed_step(order), resume.folder
    for position, layer in enumerate(range(origin.start, origin.stop)):
        fault = layout.find_fault(folder, step, layer, resume.layers.get(layer))
        if fault is not None:
            raise RecordError(
                f"layer {layer} ({origin.names[layer]}) can't go on from step {step}: {fault}",
                hint=f"it was looked for in {folder}; take it from another node, or an earlier step",
            )
        state.read(position, layout.layer_path(folder, step, layer), origin.stamp(step, layer))
    options, elastic = order.checkpoint, order.elastic
    enters = elastic is not None and elastic.join is not None  # then its node may be copying others' files
    # before any rank is to start, while no rank writes there yet
    if options is not None and not enters:
        layout.remove_leftovers(options.folder)
        earlier = [kept for kept in layout.list_steps(options.folder) if kept <= step]
        layout.retain_steps(options.folder, earlier)
        if order.recipe.validate_every is not None:
            layout.pin_best_steps(layout.make_folder(options.folder), [order.best.step] if order.best else [])
    return step


def save_weights(path: Path, layers: Sequence[nn.Module], start: int, model: LayeredModel) -> str:
    """Writes the layers' trained weights, keyed ``<layer index>.<name>``; returns the path.

    If ``own_names`` is in the metadata the launcher drops the index: names are those in the whole model.

    In mixed precision these are the float32 masters. State that is no tensor (a module's extra state) is left
    out, and so are frozen weights beside adapters.

    Args:
        start: the first layer's index.
    """
    tensors = {}
    for index, layer in enumerate(layers, start):
        masters = {name: master_of(p) for name, p in layer.named_parameters(remove_duplicate=False)}
        frozen = frozen_names(layer) if model.trains_adapters else ()
        for name, tensor in layer.state_dict().items():
            if isinstance(tensor, Tensor) and name not in frozen:
                tensors[f"{index}.{name}"] = masters.get(name, tensor).detach().cpu()
    metadata = {f"layer.{index}": model.names[index] for index in range(start, start + len(layers))}
    safetensors.save(path, tensors, metadata | ({"own_names": "True"} if model.ordinary else {}))
    return str(path)
