"""Names of parameters: each knows its own in the file of the whole model's weights.

So building layers is enough to have an optimizer with groups by name, on any stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from skyctl.workload.mixed_precision import master_of

_NAME_ATTRIBUTE = "_skyctl_name"


def name_parameters(layer: nn.Module, names: Mapping[str, str]) -> None:
    """Gives a layer's parameters, and their masters, their names in the whole model's weights.

    Args:
        names: the layer's own names → those.
    """
    for name, parameter in layer.named_parameters():
        for named in (parameter, master_of(parameter)):
            setattr(named, _NAME_ATTRIBUTE, names.get(name, name))


def copy_name(source: nn.Parameter, target: nn.Parameter) -> None:
    """Gives a parameter the name of the one that it stands in for."""
    setattr(target, _NAME_ATTRIBUTE, weight_name(source))


def weight_name(parameter: nn.Parameter) -> str:
    """A parameter's name in the whole model's weights; empty where it is of no workload's layer."""
    return str(getattr(parameter, _NAME_ATTRIBUTE, ""))


def with_names(parameters: Iterable[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of each, as ``optimizer(parameters, named)`` gets them."""
    return [(weight_name(parameter), parameter) for parameter in parameters]
