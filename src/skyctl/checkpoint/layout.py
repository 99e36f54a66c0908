"""Where a run's checkpoints lie on a node, and what is there. Standard library only: no torch.

::

    FOLDER/                            0700; on nodes CACHE/runs/RUN_ID@NODE
    ├── pinned.json                    steps that are kept whatever is pruned
    └── step-00000060/                 after 60 steps
        ├── layer-00012.safetensors    0600: one layer's state, see ``shards``
        ├── part-0003.json             what rank 3 wrote: its layers, their bytes and SHA-256
        └── copy-00012.json            the same of one layer that came from another node

A layer counts as there once a manifest names it, and manifests are written last. An ``attempt`` is one plan's
go at the run: layers of two attempts are never mixed. Nothing that comes from elsewhere is ever a path here,
only numbers of steps, layers and ranks are.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyctl.checkpoint.atomic import Written, remove_parts, sync_folder, writing
from skyctl.errors import RecordError, SkyctlError

KIND, VERSION = "skyctl/part", 1
MOST = 10**8
"""Steps, layers and ranks are less than this."""

_STEP = re.compile(r"step-(\d{8})")
_MANIFEST = re.compile(r"(part|copy)-\d+\.json")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PINNED = "pinned.json"
_GONE = ".gone-"
MANIFEST_LIMIT_BYTES = 16 << 20


@dataclass(frozen=True)
class Held:
    """One layer's file of one step, as its manifest has it. ``own``: written by a rank of this node."""

    sha256: str
    size_bytes: int
    attempt: int = 0
    own: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"sha256": self.sha256, "bytes": self.size_bytes, "attempt": self.attempt, "own": self.own}

    @classmethod
    def from_dict(cls, value: Any) -> Held:
        """What ``to_dict`` gave, also from another node. Raises ValueError where it is something else."""
        if not isinstance(value, dict):
            raise ValueError(f"not a layer's file: {value!r:.80}")
        sha256, attempt = value.get("sha256"), value.get("attempt", 0)
        if not isinstance(sha256, str) or not _DIGEST.fullmatch(sha256):
            raise ValueError(f"not a SHA-256: {sha256!r:.80}")
        size_bytes = natural(value.get("bytes"), 1 << 62)
        return cls(sha256, size_bytes, natural(attempt), bool(value.get("own", True)))


@dataclass(frozen=True)
class Part:
    """A manifest: the layers that a rank has written after ``step`` steps.

    ``workload``: the digest of what is trained. ``layers``: by index in the model, all of [start, stop).
    """

    run_id: str
    rank: int
    step: int
    attempt: int
    start: int
    stop: int
    workload: str
    layers: Mapping[int, Written]

    def to_json(self) -> str:
        """The manifest's text."""
        files = {
            str(layer): {"file": layer_name(layer), "bytes": file.size_bytes, "sha256": file.sha256}
            for layer, file in sorted(self.layers.items())
        }
        values = {
            "kind": KIND,
            "version": VERSION,
            "run_id": self.run_id,
            "rank": self.rank,
            "step": self.step,
            "attempt": self.attempt,
            "range": [self.start, self.stop],
            "workload": self.workload,
            "layers": files,
        }
        return json.dumps(values, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Part:
        """Raises RecordError: it is no manifest, or one of a newer version."""
        try:
            raw = json.loads(text)
            if raw["kind"] != KIND:
                raise ValueError(f"its kind is {raw['kind']!r:.80}")
            if natural(raw["version"]) > VERSION:
                raise ValueError(f"it is of version {raw['version']}, this skyctl reads {VERSION}")
            start, stop = (natural(n) for n in raw["range"])
            files = {index(layer): Held.from_dict(file) for layer, file in raw["layers"].items()}
            return cls(
                run_id=str(raw["run_id"]),
                rank=natural(raw["rank"]),
                step=natural(raw["step"]),
                attempt=natural(raw["attempt"]),
                start=start,
                stop=stop,
                workload=str(raw["workload"]),
                layers={layer: Written(f.size_bytes, f.sha256) for layer, f in files.items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise RecordError(f"{where} is no manifest of a checkpoint: {exc}") from exc


def natural(value: Any, below: int = MOST) -> int:
    """A whole number from 0 on, as it came in JSON. Raises ValueError where it is something else."""
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"not a number from 0 to {below - 1}: {value!r:.80}")
    return value


def index(key: Any) -> int:
    """A number that is a key in JSON. Raises ValueError where it is something else."""
    if not isinstance(key, str) or not re.fullmatch(r"[0-9]{1,8}", key):
        raise ValueError(f"not a number: {key!r:.80}")
    return int(key)


def step_folder(folder: Path, step: int) -> Path:
    """Where what was written after ``step`` steps lies."""
    return folder / f"step-{natural(step):08d}"


def layer_name(layer: int) -> str:
    """One layer's file, within its step's folder."""
    return f"layer-{natural(layer):05d}.safetensors"


def layer_path(folder: Path, step: int, layer: int) -> Path:
    """One layer's file."""
    return step_folder(folder, step) / layer_name(layer)


def part_path(folder: Path, step: int, rank: int) -> Path:
    """What one rank has written of a step."""
    return step_folder(folder, step) / f"part-{natural(rank):04d}.json"


def copy_path(folder: Path, step: int, layer: int) -> Path:
    """That a layer has come from another node."""
    return step_folder(folder, step) / f"copy-{natural(layer):05d}.json"


def make_folder(folder: Path) -> Path:
    """Makes a folder and those above it that are missing, each for this user only (0700).

    Raises:
        SkyctlError: the system refuses.
    """
    missing = [folder]
    try:
        while not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise SkyctlError(f"can't make folder {folder}: {exc.strerror or exc}") from exc
    return folder


def make_step(folder: Path, step: int) -> Path:
    """Makes a step's folder, as ``make_folder``."""
    return make_folder(step_folder(folder, step))


def write_part(folder: Path, part: Part, *, copied: int | None = None) -> Path:
    """Writes a manifest, after all that it names. ``copied``: the one layer that came from another node.

    Raises:
        SkyctlError: the disk is full or not writable.
    """
    path = part_path(folder, part.step, part.rank)
    if copied is not None:
        path = copy_path(folder, part.step, copied)
    sync_folder(path.parent)
    with writing(path, 0o600) as out:
        out.write(part.to_json().encode())
    sync_folder(path.parent)
    return path


def read_part(path: Path) -> Part:
    """A manifest. Raises RecordError where it can't be read."""
    try:
        if path.stat().st_size > MANIFEST_LIMIT_BYTES:
            raise RecordError(f"{path} is no manifest of a checkpoint: it is too long")
        return Part.from_json(path.read_bytes(), str(path))
    except OSError as exc:
        raise RecordError(f"{path} can't be read: {exc.strerror or exc}") from exc


def steps(folder: Path) -> list[int]:
    """The steps that have a folder, whole or not, the newest last."""
    try:
        found = [_STEP.fullmatch(entry.name) for entry in folder.iterdir()]
    except OSError:
        return []
    return sorted(int(match[1]) for match in found if match is not None)


def manifests(folder: Path, step: int) -> list[tuple[Path, Part]]:
    """A step's manifests that can be read and are of that step; where two name a layer, the last counts."""
    found = []
    try:
        paths = [p for p in step_folder(folder, step).iterdir() if _MANIFEST.fullmatch(p.name)]
    except OSError:
        return []
    for path in paths:
        with suppress(RecordError, OSError):
            part = read_part(path)
            if part.step == step:
                found.append((part.attempt, path.stat().st_mtime_ns, path.name, path, part))
    return [(path, part) for *_, path, part in sorted(found, key=lambda entry: entry[:3])]


def held(
    folder: Path, only: Iterable[int] | None = None, *, named: bool = False
) -> dict[int, dict[int, Held]]:
    """By step and layer, what manifests name and files of that size are there for.

    Args:
        only: steps to look at; None: all.
        named: also those whose files are gone or of another size: ``fault`` says what is wrong with them.
    """
    found: dict[int, dict[int, Held]] = {}
    for step in steps(folder) if only is None else only:
        layers: dict[int, Held] = {}
        for path, part in manifests(folder, step):
            for layer, file in part.layers.items():
                with suppress(OSError):
                    if named or layer_path(folder, step, layer).stat().st_size == file.size_bytes:
                        own = path.name.startswith("part-")
                        layers[layer] = Held(file.sha256, file.size_bytes, part.attempt, own)
        if layers:
            found[step] = dict(sorted(layers.items()))
    return found


def fault(folder: Path, step: int, layer: int, sha256: str | None = None) -> str | None:
    """What is wrong with a layer's file, in words that name it; None: it is whole.

    Args:
        sha256: what it must be; None: what its manifest says.
    """
    path = layer_path(folder, step, layer)
    name = f"{path.parent.name}/{path.name}"
    named = [part.layers[layer] for _, part in manifests(folder, step) if layer in part.layers]
    try:
        size = path.stat().st_size
        if sha256 is None and not named:
            return f"{name} has no manifest: it was not written to its end"
        if named and named[-1].size_bytes != size and sha256 in (None, named[-1].sha256):
            word = "truncated" if size < named[-1].size_bytes else "damaged"
            return f"{name} is {word}: it has {size} bytes, its manifest says {named[-1].size_bytes}"
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as exc:
        return f"{name} can't be read: {exc.strerror or exc}"
    wanted = sha256 or named[-1].sha256
    if found != wanted:
        return f"{name} is damaged: its SHA-256 is {found[:12]}…, it must be {wanted[:12]}…"
    return None


def pin(folder: Path, pinned: Collection[int]) -> None:
    """From now on these steps are kept, and no longer those of before.

    Raises:
        SkyctlError: the disk is full or not writable.
    """
    text = json.dumps(sorted(natural(step) for step in pinned))
    with writing(folder / _PINNED, 0o600) as out:
        out.write(text.encode())


def pinned(folder: Path) -> set[int]:
    """The steps that are kept whatever is pruned."""
    try:
        return {natural(step) for step in json.loads((folder / _PINNED).read_bytes())}
    except (OSError, ValueError, TypeError):
        return set()


def prune(folder: Path, keep: int) -> list[int]:
    """Removes steps older than the newest ``keep`` (at least 2; 0: removes nothing) and not pinned.

    Those count that ranks of this node have written, or where there are none, that were copied here.
    The newest one alone is never relied on: other nodes may not have written theirs yet. What an earlier
    attempt has written from the first step of a later one on is dead, and goes too.

    Returns:
        What was removed.
    """
    if not keep:
        return []
    there = {step: manifests(folder, step) for step in steps(folder)}
    attempts = {step: max(part.attempt for _, part in parts) for step, parts in there.items() if parts}
    dead = {s for s in attempts if any(t < s and attempts[t] > attempts[s] for t in attempts)}
    whole = [step for step in attempts if step not in dead]
    own = [s for s in whole if any(path.name.startswith("part-") for path, _ in there[s])]
    counted = (own or whole)[-max(2, keep) :]
    first = counted[0] if len(counted) == max(2, keep) else 0
    return retain(folder, {step for step in there if step >= first and step not in dead} | pinned(folder))


def retain(folder: Path, kept: Collection[int]) -> list[int]:
    """Removes every other step; returns which."""
    gone = [step for step in steps(folder) if step not in kept]
    for step in gone:
        _remove(step_folder(folder, step))
    return gone


def clean(folder: Path) -> None:
    """Removes what processes that are gone have left half-written, or half-removed."""
    with suppress(OSError):
        for entry in list(folder.iterdir()):
            if entry.name.startswith(_GONE):
                shutil.rmtree(entry, ignore_errors=True)
    for place in (folder, *(step_folder(folder, step) for step in steps(folder))):
        remove_parts(place)


def forget(folder: Path) -> None:
    """Removes the whole of it."""
    _remove(folder)


def _remove(path: Path) -> None:
    """Out of the way at once, so that nobody finds half of it or writes into it; then for good."""
    with suppress(OSError):
        aside = Path(tempfile.mkdtemp(prefix=_GONE, dir=path.parent))
        with suppress(OSError):
            path.rename(aside / path.name)
        shutil.rmtree(aside, ignore_errors=True)
