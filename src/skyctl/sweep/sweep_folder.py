"""The folder of a sweep: what was asked for, its trials, what they printed, and the best one's files."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from skyctl.errors import InputError, SkyctlError
from skyctl.files import (
    json_line,
    make_private,
    new_run_id,
    read_record,
    safe_name,
    sweeps_folder,
    write_atomic,
)
from skyctl.records.sweep import KEPT, SweepRequest, TrialState


class SweepFolder:
    """The paths of one sweep, and its files. None is made by naming it.

    ::

        sweeps/SWEEP_ID/      0700
        ├── sweep.json        what was asked for
        ├── sweep.lock        held by the process that runs it
        ├── trials/0001.json  where each trial stands
        ├── logs/0001.log     all that it printed
        └── best/
            ├── best.json     the best trial so far: its parameters and figure
            └── files/        what it wrote in the folder it worked in
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.best = folder / "best"
        self.next_best = folder / "best.new"
        """As ``best``, not whole or not yet in its place."""
        self._old_best = folder / "best.old"
        self._request = folder / "sweep.json"
        self._trials = folder / "trials"

    @property
    def sweep_id(self) -> str:
        """The sweep's name."""
        return self.folder.name

    @classmethod
    def new(cls) -> SweepFolder:
        """A folder for a new sweep, with a new id (not made here)."""
        return cls(sweeps_folder() / new_run_id())

    @classmethod
    def find(cls, name: str) -> SweepFolder:
        """The folder of a sweep that the user named: by its id, the id's beginning or end, or the folder.

        Raises:
            InputError: there is none, or several are meant.
        """
        for folder in (sweeps_folder() / safe_name(name), Path(name)):
            if name and (folder / "sweep.json").is_file():
                return cls(folder.absolute())
        ids = sorted(path.parent.name for path in sweeps_folder().glob("*/sweep.json"))
        meant = [one for one in ids if name and (one.startswith(name) or one.endswith(name))]
        if len(meant) != 1:
            few = f"may be any of {len(meant)} sweeps: {', '.join(meant[-8:])}"
            known = f"those there are: {', '.join(ids[-8:])}" if ids else "there is none yet"
            raise InputError(
                f"{name!r} {few}" if meant else f"there is no sweep {name!r}",
                hint="give more of its id" if meant else f"sweeps are kept in {sweeps_folder()}; {known}",
            )
        return cls(sweeps_folder() / meant[0])

    def create(self, request: SweepRequest) -> None:
        """Makes the folder, with what was asked for. Raises SkyctlError where the system refuses."""
        make_private(self._trials)
        make_private(self.folder / "logs")
        write_atomic(self._request, request.to_json())

    def read_request(self) -> SweepRequest:
        """The request as it was written down. Raises RecordError where that can't be read."""
        return read_record(SweepRequest, self._request)

    def write_trial(self, trial: TrialState) -> None:
        """Writes down where a trial stands. Raises SkyctlError where the system refuses."""
        write_atomic(self._trials / f"{trial.number:04d}.json", trial.to_json())

    def read_trials(self) -> list[TrialState]:
        """All trials that were written down, by number. Raises RecordError where one can't be read."""
        trials = [read_record(TrialState, path) for path in self._trials.glob("[0-9]*.json")]
        return sorted(trials, key=lambda trial: trial.number)

    def log(self, number: int) -> Path:
        """The file with all that a trial printed."""
        return self.folder / "logs" / f"{number:04d}.log"

    @contextmanager
    def held(self) -> Iterator[None]:
        """The right to run the sweep. Raises SkyctlError where another process has it."""
        with (self.folder / "sweep.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SkyctlError(
                    f"sweep {self.sweep_id} is under way in another process",
                    hint="wait for it, or interrupt it",
                ) from None
            yield

    def clear_next_best(self) -> Path:
        """An empty folder for the files of the best trial so far, to be put into place by ``settle_best``."""
        shutil.rmtree(self.next_best, ignore_errors=True)
        return make_private(self.next_best / "files")

    def note_next_best(self, trial: TrialState, metric: str) -> None:
        """Writes ``best.json`` beside those files: from now on they are whole."""
        files = self.next_best / "files"
        names = sorted(path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file())
        said = {
            "number": trial.number,
            "parameters": trial.parameters,
            "metric": metric,
            "value": trial.value,
            "step": trial.step,
            "files": names,
        }
        write_atomic(self.next_best / "best.json", json_line(said) + "\n")

    def settle_best(self, trials: Sequence[TrialState]) -> None:
        """Puts the next best into its place, if its trial has ended for good; ends what was cut short."""
        if not self.best.exists() and self._old_best.exists():
            self._old_best.rename(self.best)
        shutil.rmtree(self._old_best, ignore_errors=True)
        if self._is_settled(trials):
            if self.best.exists():
                self.best.rename(self._old_best)
            self.next_best.rename(self.best)
            shutil.rmtree(self._old_best, ignore_errors=True)
        shutil.rmtree(self.next_best, ignore_errors=True)

    def _is_settled(self, trials: Sequence[TrialState]) -> bool:
        import json

        try:
            number = json.loads((self.next_best / "best.json").read_text())["number"]
        except (OSError, ValueError, LookupError, TypeError):
            return False
        return any(trial.number == number and trial.status in KEPT for trial in trials)


def open_log(path: Path) -> BinaryIO:
    """A trial's log, emptied; what is written is there at once. Raises SkyctlError where it can't be made."""
    try:
        path.touch(mode=0o600)
        return path.open("wb", buffering=0)
    except OSError as exc:
        raise log_error(path, exc) from exc


def log_error(path: Path, error: OSError) -> SkyctlError:
    """The error of a trial's log that the system refuses to write."""
    return SkyctlError(
        f"can't write {path}: {error.strerror or error}",
        hint="see whether its disk is full, then go on: skyctl sweep --resume",
    )
