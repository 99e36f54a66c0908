"""A run's figures as they happen: ``metrics.jsonl``, and TensorBoard's events where it is installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TextIO

from skyctl.errors import SkyctlError
from skyctl.files import RunPaths
from skyctl.launch.events import Progress, Watcher

_SCALARS = ("loss", "validation_loss", "learning_rate", "grad_norm", "iteration_s", "samples_per_s")


class Metrics:
    """Writes each finished step. Files are made with the first one; a step done again gets one more line.

    Args:
        note: told once where TensorBoard is not installed.
    """

    def __init__(self, paths: RunPaths, note: Callable[[str], None]) -> None:
        self._paths, self._note = paths, note
        self._lines: TextIO | None = None
        self._writer: Any = None
        self._board: Any = None

    def beside(self, watcher: Watcher) -> Watcher:
        """The watcher, its steps written down before it is told."""

        def step(progress: Progress) -> None:
            self.step(progress)
            told(progress)

        self.ready()
        told = watcher.step
        return replace(watcher, step=step)

    def ready(self) -> Metrics:
        """Looks whether TensorBoard is there, before the first step."""
        self._writer = self._tensorboard()
        return self

    def step(self, progress: Progress) -> None:
        """One line, flushed, so that it can be read while the run goes on.

        Raises:
            SkyctlError: the disk is full, or the folder is gone.
        """
        line = {"step": progress.step, **{name: getattr(progress, name) for name in _SCALARS}}
        try:
            if self._lines is None:
                self._lines = self._paths.metrics.open("a", encoding="utf-8")
                self._board = self._writer and self._writer(log_dir=str(self._paths.tensorboard))
            self._lines.write(json.dumps({k: v for k, v in line.items() if v is not None}) + "\n")
            self._lines.flush()
            if self._board is not None:
                for name in _SCALARS:
                    if line[name] is not None:
                        self._board.add_scalar(name, line[name], progress.step)
                self._board.flush()
        except OSError as exc:
            raise SkyctlError(
                f"cannot write the run's figures to {self._paths.metrics}: {exc.strerror or exc}",
                hint="free some space, or set SKYCTL_HOME to another disk",
            ) from exc

    def close(self) -> None:
        """Idempotent. Every step was written out when it ended, or what could not be was said then."""
        opened, self._lines, self._board = (self._lines, self._board), None, None
        for one in opened:
            if one is not None:
                with suppress(OSError):
                    one.close()

    def _tensorboard(self) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._note("no TensorBoard events: it is not installed (pip install 'skyctl[tensorboard]')")
            return None
        return SummaryWriter


def figures(progress: Progress) -> dict[str, Any]:
    """A step's line of ``metrics.jsonl``."""
    line = {"step": progress.step, **{name: getattr(progress, name) for name in _SCALARS}}
    return {key: value for key, value in line.items() if value is not None}


class Board:
    """TensorBoard's events, where it is installed. Files are made with the first step.

    Args:
        note: told where it is not.
    """

    def __init__(self, paths: RunPaths, note: Callable[[str], None]) -> None:
        self._folder = paths.tensorboard
        self._writer: Any = None
        self._open: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            note("no TensorBoard events: it is not installed (pip install 'skyctl[tensorboard]')")
        else:
            self._writer = SummaryWriter

    def step(self, line: Mapping[str, Any]) -> None:
        """Adds a step's ``figures``. Raises SkyctlError where the disk refuses."""
        if self._writer is None:
            return
        try:
            self._open = self._open or self._writer(log_dir=str(self._folder), purge_step=line["step"])
            for name in _SCALARS:
                if name in line:
                    self._open.add_scalar(name, line[name], line["step"])
            self._open.flush()
        except OSError as exc:
            raise SkyctlError(
                f"cannot write the run's figures to {self._folder}: {exc.strerror or exc}",
                hint="free some space, or set SKYCTL_HOME to another disk",
            ) from exc

    def close(self) -> None:
        """Idempotent."""
        board, self._open = self._open, None
        if board is not None:
            with suppress(OSError):
                board.close()
