"""Exports what a run with ``--lora`` has trained: as a folder of ``peft``, or merged into the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from skyctl.checkpoint.node import safetensors
from skyctl.checkpoint.node.shards import frozen_names
from skyctl.errors import WorkloadError
from skyctl.workload import weight_files
from skyctl.workload.hf import hub_folder
from skyctl.workload.hf.adapter_folder import ADAPTER_CONFIG
from skyctl.workload.hf.export import (
    as_one_file,
    check_names,
    copy_tokenizer,
    run_names,
    without_copies,
    write_config,
)
from skyctl.workload.hf.hub_model import HubModel
from skyctl.workload.hf.lora import merge_adapters
from skyctl.workload.hf.lora_options import parse_lora
from skyctl.workload.layered_model import LayeredModel, make_model
from skyctl.workload.workload_spec import parse_source


def export_adapters(
    weights: Path,
    workload: str,
    lora: str,
    out: Path,
    *,
    merge: bool = False,
    seed: int = 0,
    init_from: Path | None = None,
) -> Path:
    """Writes a folder that ``PeftModel.from_pretrained`` reads, or the model with its adapters merged in.

    Args:
        weights: the file that a run ended with, or the folder of one step of a checkpoint.
        workload: what was trained, as it was typed: ``hf:DIR,…``.
        lora: the adapters, as ``--lora`` takes them.
        out: a folder, hub_model where it does not exist.
        merge: write the whole model, one layer in memory at a time.
        seed: of the run: it gives frozen weights that no file holds.
        init_from: the weights that the run has begun with, where they are not the folder's.

    Returns:
        The path of the weights written.

    Raises:
        WorkloadError: the file is not of that model, or ``out`` holds a model already.
        SkyctlError: the disk is full or not writable.
    """
    source = replace(parse_source(workload), lora=parse_lora(lora))
    model = make_model(source, seed, own_weights=merge)
    hub_model = model.hub
    assert hub_model is not None
    assert hub_model.adapters is not None
    kept = out / weight_files.WEIGHT_FILE_NAMES[0]
    if any((out / name).exists() for name in (kept.name, hub_folder.CONFIG_NAME, ADAPTER_CONFIG)):
        raise WorkloadError(f"{out} holds a model already", hint="give a new folder")
    with as_one_file(weights, out) as file:
        frozen = [frozen_names(layer) for _, layer in hub_model.layers]
        trained = [
            {own: name for own, name in names.items() if own not in left_out}
            for names, left_out in zip(hub_model.names, frozen, strict=True)
        ]
        wanted = run_names(trained)
        check_names(safetensors.read_header(file), wanted, weights, f"{workload} --lora {lora}")
        out.mkdir(parents=True, exist_ok=True)
        if merge:
            base = model if init_from is None else model.starting_from(init_from)
            _merge(file, base, hub_model, kept)
            write_config(hub_model, torch.float32, out)
        else:
            named = {own: name for names in wanted for own, name in names.items()}
            held = safetensors.load(file)
            kept = hub_model.adapters.write(
                {name: held[own] for own, name in named.items()}, hub_model.folder, out
            )
        copy_tokenizer(hub_model.folder, out)
    return kept


def _merge(file: Path, model: LayeredModel, hub_model: HubModel, out: Path) -> None:
    """Writes the model with its adapters merged, one layer in memory at a time."""
    assert hub_model.adapters is not None
    adapters = hub_model.adapters
    trained = list(safetensors.read_header(file).tensors)
    pieces = []
    try:
        for index, names in enumerate(without_copies(hub_model, run_names(hub_model.names))):
            layer = model.build(index, torch.device("cpu"))
            held = safetensors.load(file, [name for name in trained if name.startswith(f"{index}.")])
            layer.load_state_dict({n.removeprefix(f"{index}."): t for n, t in held.items()}, strict=False)
            merged = {f"{index}.{own}": t for own, t in merge_adapters(layer).items()}
            pieces.append(out.with_name(f".{out.name}.{index}"))
            parts: dict[str, torch.Tensor] = {}
            for own, tensor in merged.items():
                if own in names:
                    parts |= hub_model.conversion.split(adapters.own_name(names[own]), tensor)
            safetensors.save(pieces[-1], {n: t.contiguous() for n, t in parts.items()}, {"format": "pt"})
        safetensors.merge(pieces, out)
    finally:
        for piece in pieces:
            piece.unlink(missing_ok=True)
