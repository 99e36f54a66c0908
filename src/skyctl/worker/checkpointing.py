"""A rank's part of the checkpoints: when one is due, its layers' shards, and what it says of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyctl.checkpoint import layout
from skyctl.checkpoint.atomic import Written
from skyctl.checkpoint.shards import StageState, Stamp
from skyctl.errors import SkyctlError, WorkloadError


@dataclass(frozen=True)
class Options:
    """A payload's ``checkpoint``.

    Attributes:
        folder: the run's, on this node; see ``checkpoint.layout``.
        every: steps from one checkpoint to the next; 0: only at an early end, and ``at_end``.
        keep: this node's newest steps that are kept, at least 2; 0: all.
        at_end: also after the run's last step.
        attempt: which go at the run this is, counted up by whoever plans again.
    """

    folder: Path
    every: int = 0
    keep: int = 2
    at_end: bool = False
    attempt: int = 0

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> Options | None:
        """What a payload says; None: no checkpoints."""
        told = payload.get("checkpoint")
        if told is None:
            return None
        return cls(
            folder=Path(told["folder"]),
            every=int(told.get("every") or 0),
            keep=int(told.get("keep", 2)),
            at_end=bool(told.get("at_end")),
            attempt=int(told.get("attempt") or 0),
        )


@dataclass(frozen=True)
class Origin:
    """What this rank's shards are of, but for step and layer. ``names``: of all the model's layers."""

    run_id: str
    rank: int
    start: int
    stop: int
    names: tuple[str, ...]
    workload: str
    dtype: str
    seed: int

    def stamp(self, step: int, layer: int) -> Stamp:
        """What one layer's shard says of itself."""
        return Stamp(
            run_id=self.run_id,
            step=step,
            layer=layer,
            name=self.names[layer],
            layers=len(self.names),
            workload=self.workload,
            dtype=self.dtype,
            seed=self.seed,
        )


class Checkpointer:
    """Writes the stage's shards while everything else of the rank waits: no second copy is kept in memory."""

    def __init__(self, options: Options, state: StageState, origin: Origin) -> None:
        self._options, self._state, self._origin = options, state, origin
        self._told: set[str] = set()

    def due(self, done: int, *, early: bool, last: bool) -> bool:
        """Whether to write one after ``done`` steps; ``early``: the run ends with this step."""
        every = self._options.every
        return early or (last and self._options.at_end) or bool(every and done % every == 0)

    def write(self, done: int) -> dict[str, Any]:
        """The shards after ``done`` steps and their manifest, then prunes; the event to be sent.

        Where the disk is full the event has an ``error`` and the step is not there: the run can go on.

        Raises:
            WorkloadError: something of a layer's or the optimizer's state can't be kept.
        """
        began = time.perf_counter()
        event: dict[str, Any] = {"event": "checkpoint", "step": done, "layers": {}}
        try:
            written = self._write(done)
            told = {
                str(layer): {"sha256": file.sha256, "bytes": file.size_bytes}
                for layer, file in written.items()
            }
            event["layers"] = told
            layout.prune(self._options.folder, self._options.keep)
        except WorkloadError:
            raise
        except SkyctlError as exc:
            event["error"] = exc.message
        notes = [note for note in self._state.notes if note not in self._told]
        self._told.update(notes)
        return {**event, "notes": notes, "wall_s": time.perf_counter() - began}

    def _write(self, done: int) -> dict[int, Written]:
        origin, folder = self._origin, self._options.folder
        step = layout.make_step(folder, done)
        paths: list[Path] = []
        try:
            for path, part in layout.manifests(folder, done):
                if part.attempt < self._options.attempt:
                    path.unlink(missing_ok=True)
            written = {}
            for position, layer in enumerate(range(origin.start, origin.stop)):
                paths.append(layout.layer_path(folder, done, layer))
                written[layer] = self._state.write(position, paths[-1], origin.stamp(done, layer))
            layout.write_part(
                folder,
                layout.Part(
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
                step.rmdir()  # nobody else has anything there
            if isinstance(exc, OSError):
                raise SkyctlError(f"{step} can't be written: {exc.strerror or exc}") from exc
            raise
        return written
