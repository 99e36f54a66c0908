"""Exports the shards of one step as one file of weights, named as in a run's ``weights.safetensors``."""

from __future__ import annotations

from pathlib import Path

from skyctl.checkpoint.node import safetensors
from skyctl.checkpoint.node.shards import MODEL_PREFIX, SHARD_FORMAT
from skyctl.errors import RecordError


def export_weights(folder: Path, out: Path) -> int:
    """Writes the model's parameters and buffers, keyed ``LAYER.NAME``; streamed, never a layer in memory.

    Layers of an ordinary module hold tensors under their names in the whole model, which are the keys then.

    Args:
        folder: holds ``layer-….safetensors`` of every layer of one step; other files in it are ignored.

    Returns:
        The step that the shards are of.

    Raises:
        RecordError: a layer is missing, or they are not of one run, model and step.
        SkyctlError: the disk is full or not writable.
    """
    paths = sorted(folder.glob("layer-*.safetensors"))
    if not paths:
        raise RecordError(
            f"{folder} holds no layers of a checkpoint", hint="give a folder like …/runs/RUN_ID/step-00000060"
        )
    stamps = {path: safetensors.read_header(path).metadata for path in paths}
    first = stamps[paths[0]]
    by_layer: dict[int, Path] = {}
    for path, metadata in stamps.items():
        if metadata.get("format") != SHARD_FORMAT:
            raise RecordError(f"{path} is no shard of a checkpoint: its format is {metadata.get('format')!r}")
        for key in ("run_id", "step", "workload", "layers"):
            if metadata.get(key) != first.get(key):
                raise RecordError(
                    f"{path} is of {key} {metadata.get(key)!r:.80}, {paths[0].name} of {first.get(key)!r:.80}"
                )
        by_layer[_metadata_number(path, metadata, "layer")] = path
    layers = _metadata_number(paths[0], first, "layers")
    missing = next((n for n in range(layers) if n not in by_layer), None)
    if missing is not None:
        raise RecordError(
            f"{folder} lacks layer {missing}: it holds {len(by_layer)} of {layers}",
            hint="gather the step's layers from all nodes into one folder first",
        )
    prefixes = {
        path: "" if stamps[path].get("own_names") == "True" else f"{layer}."
        for layer, path in by_layer.items()
    }

    def named(path: Path, name: str) -> str | None:
        return prefixes[path] + name.removeprefix(MODEL_PREFIX) if name.startswith(MODEL_PREFIX) else None

    names = {f"layer.{layer}": stamps[path].get("name", "") for layer, path in sorted(by_layer.items())}
    parts = [path for _, path in sorted(by_layer.items())]
    safetensors.merge(parts, out, named=named, shared="" in prefixes.values(), metadata=names)
    return _metadata_number(paths[0], first, "step")


def _metadata_number(path: Path, metadata: dict[str, str], key: str) -> int:
    text = metadata.get(key, "")
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise RecordError(f"{path} is a damaged shard: its {key} is {text!r:.80}")
    return int(text)
