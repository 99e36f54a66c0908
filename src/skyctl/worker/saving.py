"""A rank's part of the trained weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from skyctl.checkpoint import safetensors
from skyctl.workload.mixed import master_of


def save(path: Path, layers: Sequence[nn.Module], start: int, names: Sequence[str]) -> str:
    """Writes the layers' state, keyed ``<layer index>.<name>``; a float32 master for its parameter.

    What is no tensor (a module's extra state) is left out.

    Args:
        start: the first layer's index.
        names: of all the model's layers, for the file's metadata.
    """
    tensors = {}
    for index, layer in enumerate(layers, start):
        masters = {name: master_of(p) for name, p in layer.named_parameters(remove_duplicate=False)}
        for name, tensor in layer.state_dict().items():
            if isinstance(tensor, Tensor):
                tensors[f"{index}.{name}"] = masters.get(name, tensor).detach().cpu()
    metadata = {f"layer.{index}": names[index] for index in range(start, start + len(layers))}
    safetensors.save(path, tensors, metadata)
    return str(path)
