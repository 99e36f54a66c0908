"""Parameters that several layers use, as tied embeddings.

The first layer that uses one names it, and gives it its initial values. Layers of one stage use one and the
same parameter; stages that hold copies sum their gradients (``worker.gradient_sync``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from skyctl.errors import WorkloadError


@dataclass(frozen=True)
class SharedParameter:
    """A parameter of several layers.

    Attributes:
        uses: (layer, the parameter's name in it), one for each layer, ascending by layer.
        gradient_bytes: of its gradient in float32; 0 where it is not trained.
    """

    uses: tuple[tuple[int, str], ...]
    gradient_bytes: int

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that use it, ascending."""
        return tuple(layer for layer, _ in self.uses)


def find_shared_parameters(layers: Sequence[nn.Module], who: str) -> tuple[SharedParameter, ...]:
    """The parameters that two layers or more use, in the order of their first uses.

    Args:
        who: what to call the model in errors.

    Raises:
        WorkloadError: layers share memory otherwise than as one parameter, or a table of sparse gradients.
    """
    uses: dict[int, list[tuple[int, str]]] = {}
    owners: dict[int, tuple[int, str, nn.Parameter]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            if parameter.numel() == 0:
                continue
            first = owners.setdefault(parameter.untyped_storage()._cdata, (index, name, parameter))
            if first[2] is not parameter and first[0] != index:
                raise WorkloadError(
                    f"{who}: layers {first[0]} and {index} share the memory of {first[1]} and {name}, which "
                    "are two parameters",
                    hint="share the parameter itself (head.weight = table.weight), not its data or a part",
                )
            uses.setdefault(id(parameter), []).append((index, name))
    shared = []
    for _, _, parameter in owners.values():
        places = uses.get(id(parameter), [])
        if len(places) < 2:
            continue
        for index, name in places:
            _refuse_sparse(layers[index], index, name, who)
        nbytes = 4 * parameter.numel() if parameter.requires_grad else 0
        shared.append(SharedParameter(tuple(places), nbytes))
    return tuple(shared)


def _refuse_sparse(layer: nn.Module, index: int, name: str, who: str) -> None:
    module = layer.get_submodule(name.rpartition(".")[0])
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        raise WorkloadError(
            f"{who}: layer {index} shares {name}, an embedding with sparse=True, with another layer; sparse "
            "gradients can't be summed over stages",
            hint="sparse=False makes them dense",
        )
