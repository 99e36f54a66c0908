"""Why nothing fits, in words: the layer that fits nowhere, the total shortage, or what would be enough."""

from __future__ import annotations

import math

from skyctl.errors import InfeasibleError
from skyctl.planner.bottleneck import subsets
from skyctl.planner.memory import human
from skyctl.planner.model import Model

PRECISION = 1e-4


def raise_infeasible(model: Model, *, proved: bool) -> None:
    """Raises InfeasibleError with the plainest reason that holds.

    Args:
        proved: by the caller; without it this raises only where one of its own reasons is a proof.
    """
    for names, where in ((model.first, "first"), (model.last, "last")):
        if not names:
            raise InfeasibleError(f"no device is allowed to hold the {where} stage ({where}_stage is empty)")
    _layer_that_fits_nowhere(model)
    _total_shortage(model)
    if proved:
        raise InfeasibleError(
            "no order of the devices and no cut fits in their memory" + _pin_words(model),
            hint=_enough(model),
        )


def _pin_words(model: Model) -> str:
    pinned = len(model.first) < model.devices or len(model.last) < model.devices
    return " with the devices that may be first and last" if pinned else ""


def _layer_that_fits_nowhere(model: Model) -> None:
    for i, layer in enumerate(model.problem.layers):
        need = model.state[i + 1] - model.state[i] + model.activation[i + 1] - model.activation[i]
        need += layer.workspace_bytes
        most = max(model.available)
        if need > most:
            device = model.problem.devices[model.available.index(most)]
            raise InfeasibleError(
                f"layer {layer.name!r} fits on no device: alone it needs {human(need)}; "
                f"the most any device has is {human(max(0.0, most))} ({device.id})",
                hint="smaller microbatches, or a device with more memory",
            )


def _total_shortage(model: Model) -> None:
    need = model.state[-1] + model.activation[-1]
    have = math.fsum(max(0.0, x) for x in model.available)
    if need > have:
        raise InfeasibleError(
            f"the model needs at least {human(need)}, all devices together have {human(have)}: "
            f"{human(need - have)} short",
            hint="smaller microbatches, or more devices",
        )


def _enough(model: Model) -> str | None:
    """The least memory added to one device that would make it fit."""
    if not subsets.can(model) or model.devices > 10:
        return None
    best: tuple[float, int] | None = None
    saved = list(model.available)
    top = model.need_bytes(0, model.layers, model.microbatches) + sum(model.output) * model.window
    try:
        for d in range(model.devices):
            low, high = 0.0, top + max(0.0, -saved[d])
            if best is not None:
                high = min(high, best[0])
            model.available[d] = saved[d] + high
            if subsets.cover(model, math.inf) is not None:
                while high - low > PRECISION * high:
                    middle = (low + high) / 2
                    model.available[d] = saved[d] + middle
                    if subsets.cover(model, math.inf) is None:
                        low = middle
                    else:
                        high = middle
                if best is None or high < best[0]:
                    best = (high, d)
            model.available[d] = saved[d]
    finally:
        model.available[:] = saved
    if best is None:
        return None
    return f"{human(best[0])} more on {model.ids[best[1]]} would be enough"
