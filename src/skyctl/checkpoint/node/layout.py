"""The layout of a run's checkpoints on a node: paths, manifests, verifying, pruning. Needs no torch.

::

    FOLDER/                            0700; on nodes CACHE/runs/RUN_ID@NODE
    ├── pinned.json                    steps that are never pruned, as the launcher says
    ├── best.json                      and as ranks do: with the lowest validation loss
    └── step-00000060/                 written after 60 steps
        ├── layer-00012.safetensors    0600: the shard of one layer, see ``shards``
        ├── part-0003.json             manifest of rank 3: its layers, their bytes and SHA-256
        └── copy-00012.json            manifest of one layer that came from another node

A shard counts as present once a manifest names it, and manifests are written last. The shards of two attempts
at a run are never mixed. Messages from other machines name steps, layers and ranks by number, never by path.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyctl.agent.message_fields import NUMBER_LIMIT
from skyctl.agent.node_cache import file_digest
from skyctl.checkpoint.node.atomic_file import (
    FileDigest,
    UnwritableError,
    atomic_writer,
    remove_partial_files,
    sync_folder,
)
from skyctl.errors import RecordError

MANIFEST_KIND, MANIFEST_VERSION = "skyctl/part", 1
_STEP = re.compile(r"step-(\d{8})")
_MANIFEST = re.compile(r"(part|copy)-\d+\.json")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PINNED, _BEST = "pinned.json", "best.json"
_REMOVED_PREFIX = ".gone-"
MANIFEST_LIMIT_BYTES = 16 << 20


@dataclass(frozen=True)
class HeldShard:
    """The shard of one layer and step that a node holds, as its manifest describes it.

    Attributes:
        own: a rank of this node has written it; False: it was copied from another node.
    """

    sha256: str
    size_bytes: int
    attempt: int = 0
    own: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The shard as values that JSON can hold."""
        return {"sha256": self.sha256, "bytes": self.size_bytes, "attempt": self.attempt, "own": self.own}

    @classmethod
    def from_dict(cls, value: Any) -> HeldShard:
        """The shard that ``to_dict`` described; ValueError where the values are malformed."""
        if not isinstance(value, dict):
            raise ValueError(f"not a layer's file: {value!r:.80}")
        sha256, attempt = value.get("sha256"), value.get("attempt", 0)
        if not isinstance(sha256, str) or not _DIGEST.fullmatch(sha256):
            raise ValueError(f"not a SHA-256: {sha256!r:.80}")
        size_bytes = parse_natural(value.get("bytes"), 1 << 62)
        return cls(sha256, size_bytes, parse_natural(attempt), bool(value.get("own", True)))


@dataclass(frozen=True)
class ShardManifest:
    """The shards that one rank has written after ``step`` steps.

    Attributes:
        workload: the digest of what is trained; empty in the manifest of a copy.
        layers: by the layer's index in the model, its file; all of [start, stop).
    """

    run_id: str
    rank: int
    step: int
    attempt: int
    start: int
    stop: int
    workload: str
    layers: Mapping[int, FileDigest]

    def to_json(self) -> str:
        """The manifest as the text of its file."""
        files = {
            str(layer): {"file": layer_name(layer), "bytes": file.size_bytes, "sha256": file.sha256}
            for layer, file in sorted(self.layers.items())
        }
        values = {
            "kind": MANIFEST_KIND,
            "version": MANIFEST_VERSION,
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
    def from_json(cls, text: str | bytes, where: str) -> ShardManifest:
        """The manifest in a file's text; RecordError where it is none, or of another version."""
        try:
            raw = json.loads(text)
            if raw["kind"] != MANIFEST_KIND:
                raise ValueError(f"its kind is {raw['kind']!r:.80}")
            if parse_natural(raw["version"]) != MANIFEST_VERSION:
                raise ValueError(f"it is of version {raw['version']}, this skyctl reads {MANIFEST_VERSION}")
            start, stop = (parse_natural(n) for n in raw["range"])
            files = {parse_index(layer): HeldShard.from_dict(file) for layer, file in raw["layers"].items()}
            return cls(
                run_id=str(raw["run_id"]),
                rank=parse_natural(raw["rank"]),
                step=parse_natural(raw["step"]),
                attempt=parse_natural(raw["attempt"]),
                start=start,
                stop=stop,
                workload=str(raw["workload"]),
                layers={layer: FileDigest(f.size_bytes, f.sha256) for layer, f in files.items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise RecordError(f"{where} is no manifest of a checkpoint: {exc}") from exc


def parse_natural(value: Any, below: int = NUMBER_LIMIT) -> int:
    """A JSON value that must be a whole number in [0, below); ValueError where it is not."""
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"not a number from 0 to {below - 1}: {value!r:.80}")
    return value


def parse_index(key: Any) -> int:
    """A JSON key that must be a number of up to eight digits; ValueError where it is not."""
    if not isinstance(key, str) or not re.fullmatch(r"[0-9]{1,8}", key):
        raise ValueError(f"not a number: {key!r:.80}")
    return int(key)


def step_folder(folder: Path, step: int) -> Path:
    """The folder of the checkpoint written after ``step`` steps."""
    return folder / f"step-{parse_natural(step):08d}"


def layer_name(layer: int) -> str:
    """The name of a layer's shard within its step's folder."""
    return f"layer-{parse_natural(layer):05d}.safetensors"


def layer_path(folder: Path, step: int, layer: int) -> Path:
    """The path of a layer's shard."""
    return step_folder(folder, step) / layer_name(layer)


def manifest_path(folder: Path, step: int, rank: int) -> Path:
    """The path of the manifest of one rank's shards."""
    return step_folder(folder, step) / f"part-{parse_natural(rank):04d}.json"


def copy_manifest_path(folder: Path, step: int, layer: int) -> Path:
    """The path of the manifest of a shard copied from another node."""
    return step_folder(folder, step) / f"copy-{parse_natural(layer):05d}.json"


def make_folder(folder: Path) -> Path:
    """Makes a folder and those above it that are missing, each for this user only (0700).

    Raises:
        UnwritableError: the system refuses.
    """
    missing = [folder]
    try:
        while not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise UnwritableError(f"can't make folder {folder}: {exc.strerror or exc}") from exc
    return folder


def make_step_folder(folder: Path, step: int) -> Path:
    """Makes the folder of the checkpoint after ``step`` steps in a run's folder; see ``make_folder``."""
    return make_folder(step_folder(folder, step))


def write_manifest(folder: Path, manifest: ShardManifest, *, copied: int | None = None) -> Path:
    """Writes a manifest, after all shards that it names; returns its path.

    Args:
        copied: the layer, where it is the manifest of one copied from another node.

    Raises:
        SkyctlError: the disk is full or not writable.
    """
    path = manifest_path(folder, manifest.step, manifest.rank)
    if copied is not None:
        path = copy_manifest_path(folder, manifest.step, copied)
    sync_folder(path.parent)
    with atomic_writer(path, 0o600) as out:
        out.write(manifest.to_json().encode())
    sync_folder(path.parent)
    return path


def write_copy_manifest(
    folder: Path, step: int, layer: int, file: FileDigest, attempt: int, run_id: str
) -> None:
    """Writes the manifest of a shard that was copied from another node.

    Raises:
        SkyctlError: the disk is full or not writable, or the step was pruned meanwhile.
    """
    manifest = ShardManifest(
        run_id=run_id,
        rank=0,
        step=step,
        attempt=attempt,
        start=layer,
        stop=layer + 1,
        workload="",
        layers={layer: file},
    )
    write_manifest(folder, manifest, copied=layer)


def read_manifest(path: Path) -> ShardManifest:
    """Reads a manifest from its file; RecordError where it can't be read."""
    try:
        if path.stat().st_size > MANIFEST_LIMIT_BYTES:
            raise RecordError(f"{path} is no manifest of a checkpoint: it is too long")
        return ShardManifest.from_json(path.read_bytes(), str(path))
    except OSError as exc:
        raise RecordError(f"{path} can't be read: {exc.strerror or exc}") from exc


def list_steps(folder: Path) -> list[int]:
    """The steps that have a folder, complete or not, in ascending order."""
    try:
        found = [_STEP.fullmatch(entry.name) for entry in folder.iterdir()]
    except OSError:
        return []
    return sorted(int(match[1]) for match in found if match is not None)


def read_manifests(folder: Path, step: int) -> list[tuple[Path, ShardManifest]]:
    """The readable manifests of a step, with their paths; where two name a layer, the last one counts."""
    found = []
    try:
        paths = [p for p in step_folder(folder, step).iterdir() if _MANIFEST.fullmatch(p.name)]
    except OSError:
        return []
    for path in paths:
        with suppress(RecordError, OSError):
            manifest = read_manifest(path)
            if manifest.step == step:
                found.append((manifest.attempt, path.stat().st_mtime_ns, path.name, path, manifest))
    return [(path, manifest) for *_, path, manifest in sorted(found, key=lambda entry: entry[:3])]


def held_shards(
    folder: Path, only: Iterable[int] | None = None, *, named: bool = False
) -> dict[int, dict[int, HeldShard]]:
    """By step and layer, the shards that manifests name and whose files exist with the right size.

    Args:
        only: steps to look at; None: all.
        named: also shards whose files are gone or of another size; ``find_fault`` tells what is wrong.
    """
    found: dict[int, dict[int, HeldShard]] = {}
    for step in list_steps(folder) if only is None else only:
        layers: dict[int, HeldShard] = {}
        for path, manifest in read_manifests(folder, step):
            for layer, file in manifest.layers.items():
                with suppress(OSError):
                    if named or layer_path(folder, step, layer).stat().st_size == file.size_bytes:
                        own = path.name.startswith("part-")
                        layers[layer] = HeldShard(file.sha256, file.size_bytes, manifest.attempt, own)
        if layers:
            found[step] = dict(sorted(layers.items()))
    return found


def find_fault(folder: Path, step: int, layer: int, sha256: str | None = None) -> str | None:
    """The fault of a layer's shard, as a sentence that names the file; None: it is intact.

    Args:
        sha256: the digest it must have; None: the one in its manifest.
    """
    path = layer_path(folder, step, layer)
    name = f"{path.parent.name}/{path.name}"
    manifests = (manifest for _, manifest in read_manifests(folder, step))
    named = [manifest.layers[layer] for manifest in manifests if layer in manifest.layers]
    try:
        size = path.stat().st_size
        if sha256 is None and not named:
            return f"{name} has no manifest: it was not written to its end"
        if named and named[-1].size_bytes != size and sha256 in (None, named[-1].sha256):
            word = "truncated" if size < named[-1].size_bytes else "damaged"
            return f"{name} is {word}: it has {size} bytes, its manifest says {named[-1].size_bytes}"
        found = file_digest(path)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as exc:
        return f"{name} can't be read: {exc.strerror or exc}"
    wanted = sha256 or named[-1].sha256
    if found != wanted:
        return f"{name} is damaged: its SHA-256 is {found[:12]}…, it must be {wanted[:12]}…"
    return None


def pin_steps(folder: Path, pinned: Collection[int]) -> None:
    """Replaces the set of steps that are never pruned, as the launcher says.

    Raises:
        SkyctlError: the disk is full or not writable.
    """
    _write_steps(folder / _PINNED, pinned)


def pin_best_steps(folder: Path, best: Collection[int]) -> None:
    """As ``pin_steps``, of the steps that ranks pin: they do so while no launcher is connected, too."""
    _write_steps(folder / _BEST, best)


def pinned_steps(folder: Path) -> set[int]:
    """The steps in a run's folder that are never pruned: those that the launcher has pinned, and the best."""
    pinned: set[int] = set()
    for name in (_PINNED, _BEST):
        with suppress(OSError, ValueError, TypeError):
            pinned |= {parse_natural(step) for step in json.loads((folder / name).read_bytes())}
    return pinned


def _write_steps(path: Path, steps: Collection[int]) -> None:
    text = json.dumps(sorted(parse_natural(step) for step in steps))
    with atomic_writer(path, 0o600) as out:
        out.write(text.encode())


def prune_steps(folder: Path, keep: int) -> list[int]:
    """Removes the steps that are older than the newest ``keep`` and not pinned; returns them.

    Only steps written by ranks of this node count, or, where there are none, copied ones. The newest alone is
    never relied on: other nodes may not have written theirs yet. Steps of an earlier attempt that a later one
    has written again are stale, and are removed too.

    Args:
        keep: at least 2; 0 removes nothing.
    """
    if not keep:
        return []
    there = {step: read_manifests(folder, step) for step in list_steps(folder)}
    attempts = {
        step: max(manifest.attempt for _, manifest in manifests)
        for step, manifests in there.items()
        if manifests
    }
    stale = {s for s in attempts if any(t < s and attempts[t] > attempts[s] for t in attempts)}
    current = [step for step in attempts if step not in stale]
    own = [s for s in current if any(path.name.startswith("part-") for path, _ in there[s])]
    counted = (own or current)[-max(2, keep) :]
    first = counted[0] if len(counted) == max(2, keep) else 0
    kept = {step for step in there if step >= first and step not in stale} | pinned_steps(folder)
    return _remove_steps(
        folder, [step for step in there if step not in kept]
    )  # a newer one may come meanwhile


def retain_steps(folder: Path, kept: Collection[int]) -> list[int]:
    """Removes all steps but these; returns the removed ones."""
    return _remove_steps(folder, [step for step in list_steps(folder) if step not in kept])


def _remove_steps(folder: Path, steps: list[int]) -> list[int]:
    for step in steps:
        _remove(step_folder(folder, step))
    return steps


def remove_leftovers(folder: Path) -> None:
    """Removes files and folders that ended processes have left half-written or half-removed."""
    with suppress(OSError):
        for entry in list(folder.iterdir()):
            if entry.name.startswith(_REMOVED_PREFIX):
                shutil.rmtree(entry, ignore_errors=True)
    for place in (folder, *(step_folder(folder, step) for step in list_steps(folder))):
        remove_partial_files(place)


def remove_run_folder(folder: Path) -> None:
    """Removes the run's folder with all its checkpoints."""
    _remove(folder)


def _remove(path: Path) -> None:
    """Moves it aside at once, so that nobody finds half of it or writes into it; then deletes it."""
    with suppress(OSError):
        aside = Path(tempfile.mkdtemp(prefix=_REMOVED_PREFIX, dir=path.parent))
        with suppress(OSError):
            path.rename(aside / path.name)
        shutil.rmtree(aside, ignore_errors=True)
