"""Exports a run's trained weights as a folder that ``from_pretrained`` reads.

``python -m skyctl.workload.hf.export RUN/weights.safetensors hf:DIR OUT``; in place of the file, also a
folder with the shards of all layers of one step of a checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from skyctl.checkpoint.node import safetensors
from skyctl.checkpoint.node import weights_export as checkpoint
from skyctl.errors import SkyctlError, WorkloadError
from skyctl.workload import weight_files
from skyctl.workload.hf import hub_folder
from skyctl.workload.hf.hub_model import HubModel, make_hub_model
from skyctl.workload.hf.weight_conversion import WeightConversion
from skyctl.workload.shared_parameters import find_shared_parameters


def export_model(weights: Path, workload: str, out: Path) -> Path:
    """Writes ``model.safetensors`` under the library's own names, ``config.json``, and the tokenizer's files.

    Args:
        weights: the file that a run ended with, or the folder of one step of a checkpoint.
        workload: what was trained, as it was typed: ``hf:DIR,…``.
        out: a folder, made where it does not exist.

    Returns:
        The path of the weights written.

    Raises:
        WorkloadError: the file is not of that model, or ``out`` holds a model already.
        SkyctlError: the disk is full or not writable.
    """
    folder, options = hub_folder.parse_hub_source(workload)
    folder = hub_folder.check_folder(workload, folder)
    hub_model = make_hub_model(folder, options, 0, count=None, own_weights=False)
    kept = out / weight_files.WEIGHT_FILE_NAMES[0]
    if kept.exists() or (out / hub_folder.CONFIG_NAME).exists():
        raise WorkloadError(f"{out} holds a model already", hint="give a new folder")
    with as_one_file(weights, out) as file:
        header = safetensors.read_header(file)
        wanted = run_names(hub_model.names)
        check_names(header, wanted, weights, workload)
        out.mkdir(parents=True, exist_ok=True)
        _rename(file, without_copies(hub_model, wanted), kept, hub_model.conversion)
        write_config(hub_model, safetensors.DTYPES[next(iter(header.tensors.values())).dtype], out)
        copy_tokenizer(folder, out)
    return kept


@contextmanager
def as_one_file(weights: Path, out: Path) -> Iterator[Path]:
    """The weights as one file, while the folder ``out`` is written; of a step's folder it is a copy."""
    merged = out / ".weights.merged"
    try:
        if weights.is_dir():
            out.mkdir(parents=True, exist_ok=True)
            checkpoint.export_weights(weights, merged)
        yield merged if weights.is_dir() else weights
    except OSError as exc:
        raise SkyctlError(f"can't write {out}: {exc.strerror or exc}") from exc
    finally:
        with suppress(OSError):
            merged.unlink()


def run_names(names: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Per layer, what a run's file calls a tensor → its name in the library's model."""
    return [{f"{index}.{own}": name for own, name in named.items()} for index, named in enumerate(names)]


def write_config(hub_model: HubModel, dtype: torch.dtype, out: Path) -> None:
    """Writes the model's ``config.json``, with the dtype of its weights."""
    config = hub_model.settings.config
    config.architectures = [hub_model.architecture]
    config.dtype = dtype
    config.save_pretrained(str(out))


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copies the tokenizer's files, where there are any."""
    for path in hub_folder.tokenizer_files(folder):
        shutil.copyfile(path, out / path.name)


def check_names(
    header: safetensors.FileHeader, wanted: Sequence[dict[str, str]], weights: Path, workload: str
) -> None:
    """Raises WorkloadError where a run's file holds other tensors than those of the workload."""
    names = {name for layer in wanted for name in layer}
    if odd := sorted(names ^ header.tensors.keys()):
        raise WorkloadError(
            f"{weights} is not of {workload}: {odd[0]!r} is in one and not in the other",
            hint="give the workload as it was typed for the run: its options, and --lora, belong to it",
        )


def without_copies(hub_model: HubModel, wanted: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The names with each tied parameter once, by its first layer, as ``save_pretrained`` writes it."""
    shared = find_shared_parameters([layer for _, layer in hub_model.layers], hub_model.architecture)
    copies = {f"{layer}.{own}" for parameter in shared for layer, own in parameter.uses[1:]}
    return [{own: name for own, name in names.items() if own not in copies} for names in wanted]


def _rename(weights: Path, wanted: Sequence[dict[str, str]], out: Path, conversion: WeightConversion) -> None:
    """Writes the weights as ``save_pretrained`` names them, one layer in memory at a time."""
    pieces = []
    try:
        for index, names in enumerate(wanted):
            piece = out.with_name(f".{out.name}.{index}")
            pieces.append(piece)
            held = safetensors.load(weights, list(names)) if names else {}
            parts: dict[str, Tensor] = {}
            for own, tensor in held.items():
                parts |= conversion.split(names[own], tensor)
            safetensors.save(piece, {n: t.contiguous() for n, t in parts.items()}, {"format": "pt"})
        safetensors.merge(pieces, out)
    finally:
        for piece in pieces:
            piece.unlink(missing_ok=True)


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m skyctl.workload.hf.export", description=export_model.__doc__
    )
    parser.add_argument("weights", type=Path, help="the run's weights.safetensors, or a step's folder")
    parser.add_argument("workload", help="hf:DIR as it was typed for the run")
    parser.add_argument("out", type=Path, help="a new folder")
    given = parser.parse_args(words)
    try:
        sys.stdout.write(f"{export_model(given.weights, given.workload, given.out)}\n")
    except SkyctlError as exc:
        sys.stderr.write(f"error: {exc.message}\n" + (f"  next: {exc.hint}\n" if exc.hint else ""))
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
