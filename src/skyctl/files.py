"""Names every path that skyctl writes to, and writes every file atomically.

::

    $SKYCTL_HOME  (default $XDG_STATE_HOME/skyctl, else ~/.local/state/skyctl)
    ├── profiles/CLUSTER/20261121-063012-ab12.json    the cluster's profiles, the newest last
    ├── setups/CLUSTER.json                           environments that ``skyctl setup`` made on its nodes
    ├── labs/NAME/                                    what ``skyctl lab`` keeps of a lab that is up
    ├── comparisons/20261121-063012-ab12/             plans, measurements and plots of one comparison
    ├── sweeps/20261121-063012-ab12/                  one sweep, see ``sweep.sweep_folder``
    └── runs/20261121-063012-ab12/                    one run, see ``RunPaths``
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from skyctl.errors import InputError, SkyctlError
from skyctl.private_folder import UnsafeFolderError, check_private_folder
from skyctl.records.clock import CLOCK_STEP_S

if TYPE_CHECKING:
    from skyctl.records.base import FileRecord
    from skyctl.records.profile import Profile

R = TypeVar("R", bound="FileRecord")

PROFILES_KEPT = 20
"""Older profiles of the same cluster are removed when a new one is saved."""

_NAME_LIMIT = 120
_NOT_IN_A_LINE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_BAD_USAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
_HINTS = {
    errno.ENOSPC: "free some space on that disk, or set SKYCTL_HOME to a folder on another one",
    errno.EDQUOT: "your quota on that disk is used up; set SKYCTL_HOME to a folder on another one",
    errno.EROFS: "that disk is mounted read-only; set SKYCTL_HOME to a folder on another one",
    errno.EACCES: "choose a folder you may write to (-o, or SKYCTL_HOME)",
    errno.ENOENT: "make that folder first",
}


def home() -> Path:
    """The state folder (absolute; not made here): SKYCTL_HOME over XDG_STATE_HOME over the default."""
    given = os.environ.get("SKYCTL_HOME")
    if given:
        return Path(given).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME")
    # The XDG specification: a relative path there is to be ignored.
    base = Path(state) if state and Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "skyctl"


def safe_name(name: str) -> str:
    """Any text as one file name: percent-encoded, never hidden, of bounded length, one to one."""
    encoded = quote(name, safe=" +=,@", errors="surrogatepass")
    encoded = re.sub(r"^[.~ -]|[. ]$", lambda m: f"%{ord(m[0]):02X}", encoded)
    if len(encoded) > _NAME_LIMIT:
        import hashlib

        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        cut = re.sub(r"%[0-9A-F]?$", "", encoded[:_NAME_LIMIT])
        return f"{cut}%%{digest}"
    return encoded or "%"


def make_private(folder: Path) -> Path:
    """Makes ``folder`` and its missing parents, for this user only (0700).

    The contents of the state folder decide what runs here and on nodes, so nobody else may be able to put
    anything there. Elsewhere that is the user's business.

    Raises:
        SkyctlError: with the path and the system's reason, or who else could write to the state folder.
    """
    try:
        if folder.absolute().is_relative_to(home()):
            check_private_folder(folder, make=True)
        missing = [folder]
        while not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
    except UnsafeFolderError as exc:
        raise SkyctlError(
            f"skyctl's state can't be kept in {folder}: {exc.filename}: {exc.strerror}",
            hint=f"{exc.hint}, or set SKYCTL_HOME to a folder of your own",
        ) from exc
    except OSError as exc:
        raise _cannot("make folder", folder, exc) from exc
    return folder


def write_atomic(path: str | Path, data: str | bytes, *, mode: int | None = 0o600) -> Path:
    """Writes a file whole or leaves the old one: temporary file in the same folder, fsync, ``os.replace``.

    Args:
        mode: permissions of the file; None: what the umask gives, for a file the user asked for.

    Returns:
        The path written (a link's target where ``path`` is a link).

    Raises:
        InputError: the folder is missing, or the path is a folder.
        SkyctlError: the system refused (disk full, no permission); nothing is left behind.
    """
    target = Path(path)
    raw = data.encode() if isinstance(data, str) else data
    temporary: Path | None = None
    try:
        if target.exists() and not target.is_file():
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            target.write_bytes(raw)  # /dev/stdout, a pipe: nothing to replace
            return target
        target = target.resolve()
        temporary = target.with_name(f".{target.name[:80]}.{secrets.token_hex(6)}.tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
        with os.fdopen(fd, "wb") as fp:
            fp.write(raw)
            fp.flush()
            os.fsync(fp.fileno())
        temporary.replace(target)
        temporary = None
    except OSError as exc:
        raise _cannot("write", target, exc) from exc
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
    return target


def json_line(value: Any) -> str:
    """A value as one line of JSON, with names as they were typed.

    Escaped is only what ends a line for some reader, controls a terminal, or is no character.
    """
    import json

    return _NOT_IN_A_LINE.sub(lambda m: f"\\u{ord(m[0]):04x}", json.dumps(value, ensure_ascii=False))


def unfinished_writes(target: Path) -> list[Path]:
    """The temporary files of killed writers of ``target``; a writer at work has one, too."""
    pattern = f".{glob.escape(target.name[:80])}.{'[0-9a-f]' * 12}.tmp"
    return sorted(target.parent.glob(pattern))


def _cannot(verb: str, path: Path, exc: OSError) -> SkyctlError:
    reason = os.strerror(exc.errno) if exc.errno else str(exc)
    error = InputError if exc.errno in _BAD_USAGE else SkyctlError
    return error(f"can't {verb} {path}: {reason}", hint=_HINTS.get(exc.errno or 0))


def read_text(path: str | Path, *, hint: str | None = None) -> str:
    """Reads a UTF-8 file that the user named, without the byte order mark that Windows puts before it.

    Raises:
        InputError: missing, unreadable, a folder, or not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as exc:
        raise InputError(
            f"can't read {path}: it is not UTF-8 text (byte {exc.start})", hint="save it anew, in UTF-8"
        ) from exc
    except (OSError, ValueError) as exc:
        reason = os.strerror(exc.errno) if isinstance(exc, OSError) and exc.errno else str(exc)
        raise InputError(f"can't read {path}: {reason}", hint=hint) from exc


def read_record(cls: type[R], path: str | Path, *, hint: str | None = None) -> R:
    """Reads one JSON file as a record of type ``cls``.

    Raises:
        InputError: missing or unreadable (``hint`` says how to make one).
        RecordError: it is there, but is not that record.
    """
    from skyctl.records.base import parse

    kind = cls.model_fields["kind"].default.rpartition("/")[2]
    makers = {
        "profile": "make one with `skyctl probe`",
        "plan": "make one with `skyctl plan WORKLOAD -o FILE`",
        "problem": "without a problem file: `skyctl plan WORKLOAD` makes the problem from a profile",
    }
    return parse(cls, read_text(path, hint=hint or makers.get(kind)), str(path))


def new_run_id() -> str:
    """A new run's id: short, unique and sortable by time (UTC), as in ``20261121-063012-ab12``."""
    return f"{_stamp(time.time())}-{secrets.token_hex(2)}"


def _stamp(time_s: float) -> str:
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(time_s))


class RunPaths:
    """The paths of one run. None is made by naming it; ``create`` makes the folder.

    Args:
        attempt: whose plan, logs and events ``plan``, ``logs`` and ``events`` are.

    ::

        runs/RUN_ID/            0700
        ├── state.json          where it stands
        ├── supervisor.lock     held by, and naming, the process that supervises it
        ├── position.json       how much of what its nodes said is in the files below
        ├── plan.json           the plan of the last attempt
        ├── logs                → attempts/N/logs, the last attempt's
        ├── attempts/1/         what belongs to one attempt
        │   ├── plan.json       the plan that ran
        │   ├── events.jsonl    what the ranks reported, as it came
        │   └── logs/rank-000.log  all that rank printed
        ├── measurement.json    what it did
        ├── outcome.json        of a script: how its ranks have ended
        ├── metrics.jsonl       a line a step, written as it happens
        ├── tensorboard/        the same for TensorBoard, where it is installed
        ├── experts.json        with --expert-hosts: by rank, tokens, lost hosts, and the record of steps
        ├── wandb/              with --wandb: what its library keeps
        ├── weights.safetensors the trained weights
        ├── weights-00000060.safetensors  those of a checkpoint that another run began with (--init-from)
        ├── trace.json          with --trace: who did what when, for Perfetto or chrome://tracing
        ├── trace.svg           a typical step of it as a picture
        ├── supervisor.log      what the supervisor said
        ├── requests/           what other commands ask of the supervisor (stop, join)
        └── checkpoints/        with --keep-here: shards as on the nodes
    """

    def __init__(self, run_id: str, attempt: int = 1) -> None:
        self.run_id = run_id
        self.attempt = attempt
        self.folder = home() / "runs" / safe_name(run_id)
        self.state = self.folder / "state.json"
        self.lock = self.folder / "supervisor.lock"
        self.newest_plan = self.folder / "plan.json"
        self.newest_logs = self.folder / "logs"
        self.measurement = self.folder / "measurement.json"
        self.outcome = self.folder / "outcome.json"
        self.metrics = self.folder / "metrics.jsonl"
        self.experts = self.folder / "experts.json"
        self.tensorboard = self.folder / "tensorboard"
        self.weights = self.folder / "weights.safetensors"
        self.trace = self.folder / "trace.json"
        self.trace_picture = self.folder / "trace.svg"
        self.supervisor_log = self.folder / "supervisor.log"
        self.requests = self.folder / "requests"
        self.checkpoints = self.folder / "checkpoints"
        own = self.folder / "attempts" / str(attempt)
        self.plan = own / "plan.json"
        self.events = own / "events.jsonl"
        self.logs = own / "logs"

    @classmethod
    def new(cls) -> RunPaths:
        """A fresh run: a new id, its folder made."""
        while True:
            paths = cls(new_run_id())
            if not paths.folder.exists():
                return paths.create()

    def create(self) -> RunPaths:
        """Makes the attempt's folder and its ``logs`` (0700). Raises SkyctlError where the system refuses."""
        make_private(self.logs)
        link = self.folder / f".logs-{self.attempt}"
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(self.logs.relative_to(self.folder))
            link.replace(self.newest_logs)
        except OSError as exc:
            raise _cannot("make", self.newest_logs, exc) from exc
        return self

    def keep_plan(self, text: str) -> None:
        """Writes the attempt's plan, and it as the run's newest."""
        write_atomic(self.plan, text)
        write_atomic(self.newest_plan, text)

    def checkpoint_weights(self, step: int) -> Path:
        """The file with the weights after so many steps, where they were gathered for another run."""
        return self.folder / f"weights-{step:08d}.safetensors"

    def log(self, rank: int) -> Path:
        """The file with everything that one rank has printed."""
        return self.logs / f"rank-{rank:03d}.log"

    def weights_part(self, rank: int) -> Path:
        """The file of one rank's weights, while they are gathered."""
        return self.folder / f".weights-{rank}.safetensors"

    def trace_part(self, rank: int) -> Path:
        """The file of one rank's trace, while traces are gathered."""
        return self.folder / f".trace-{rank}.json"


def runs_folder() -> Path:
    """The folder that holds all runs (not made here)."""
    return home() / "runs"


def run_ids() -> list[str]:
    """The ids of all runs in the state folder, the oldest first: an id begins with its date."""
    try:
        return [path.name for path in _oldest_first(runs_folder().iterdir()) if path.is_dir()]
    except OSError:
        return []


def _oldest_first(paths: Iterable[Path]) -> list[Path]:
    """Paths in the order of the dates that their names begin with.

    Those dated ahead of this machine's clock count as the oldest: the clock was set back since, and for as
    long as it had been ahead each of them would be taken for the newest.
    """
    soon = _stamp(time.time() + CLOCK_STEP_S)
    return sorted(paths, key=lambda path: (path.name < soon, path.name))


def run_folder(run: str | None = None) -> Path:
    """The folder of a run that the user named: by its id, the id's beginning or end, or the folder itself.

    Args:
        run: None: the newest one.

    Raises:
        InputError: there is none, or several are meant.
    """
    hint = f"runs are kept in {runs_folder()}: skyctl ps -a"
    ids = run_ids()
    start = "start one: skyctl launch PLAN"
    if run is None:
        if not ids:
            raise InputError("there is no run yet", hint=start)
        return runs_folder() / ids[-1]
    for folder in (runs_folder() / safe_name(run), Path(run)):
        if run and folder.is_dir():
            return folder
    matches = [run_id for run_id in ids if run and (run_id.startswith(run) or run_id.endswith(run))]
    if len(matches) > 1:
        raise InputError(
            f"{run!r} may be any of {len(matches)} runs: {', '.join(matches[-8:])}",
            hint="give more of its id",
        )
    if not matches:
        raise InputError(f"there is no run {run!r}", hint=hint if ids else start)
    return runs_folder() / matches[0]


def comparison_folder() -> Path:
    """A new folder for a comparison that the user named none for (not made here)."""
    return home() / "comparisons" / new_run_id()


def sweeps_folder() -> Path:
    """The folder that holds all sweeps (not made here)."""
    return home() / "sweeps"


def lab_folder(name: str) -> Path:
    """The folder of a lab's files (not made here)."""
    return home() / "labs" / safe_name(name)


def setups_file(cluster_name: str) -> Path:
    """The file that lists what ``skyctl setup`` has made on a cluster's nodes (not made here)."""
    return home() / "setups" / f"{safe_name(cluster_name)}.json"


def profile_folder(cluster_name: str) -> Path:
    """The folder of a cluster's profiles (not made here)."""
    return home() / "profiles" / safe_name(cluster_name)


def save_profile(profile: Profile) -> Path:
    """Saves a profile as its cluster's newest, and removes the oldest beyond ``PROFILES_KEPT``."""
    folder = make_private(profile_folder(profile.cluster))
    kept = _oldest_first(folder.glob("*.json"))
    path = folder / f"{new_run_id()}.json"
    if kept and _oldest_first([kept[-1], path])[-1] != path:
        # Within one second, or the clock made a step back: the newest must still sort last.
        path = folder / f"{kept[-1].stem}~.json"
    write_atomic(path, profile.to_json())
    for old in [*kept, path][:-PROFILES_KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()
    return path


def newest_profile(
    cluster_name: str, fits: Callable[[Profile], bool] | None = None
) -> tuple[Path, Profile] | None:
    """The newest profile of that cluster that can be read and ``fits``, and where it lies; or None."""
    profiles = (entry for entry in _profiles(cluster_name) if fits is None or fits(entry[1]))
    return next(profiles, None)


def recent_profiles(cluster_name: str, *, interrupted: bool = False) -> list[Profile]:
    """The profiles of that cluster that are kept and can be read, newest first.

    Args:
        interrupted: those of interrupted probes, too.
    """
    profiles = [profile for _, profile in _profiles(cluster_name, interrupted=interrupted)]
    return sorted(profiles, key=lambda profile: profile.created, reverse=True)


def _profiles(cluster_name: str, *, interrupted: bool = False) -> Iterator[tuple[Path, Profile]]:
    from skyctl.records.profile import Profile

    folder = profile_folder(cluster_name)
    if not folder.is_dir():
        return
    for path in reversed(_oldest_first(folder.glob("*.json"))):
        try:
            profile = read_record(Profile, path)
        except InputError:
            continue
        if profile.cluster == cluster_name and (interrupted or not profile.interrupted):
            yield path, profile
