"""Whether torch's own tracers take a model as it is: ``torch.fx`` and ``torch.export``."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from porting.plain_torch import ModelFile, arguments_of

Traced = Callable[..., Any]


def _trace_fx(model: nn.Module, *_: Any) -> Traced:
    return torch.fx.symbolic_trace(model)


def _trace_export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """With the number of samples left open."""
    batch = torch.export.Dim("batch", min=2)
    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    shapes = {name: tree_map(lambda _: {0: batch}, value) for name, value in given.items()}
    return torch.export.export(model, args, kwargs, dynamic_shapes=shapes).module()


TRACERS = {"fx": _trace_fx, "export": _trace_export}


def failure(file: ModelFile, tracer: str, batch_size: int) -> str | None:
    """Why a tracer does not take the model in ``train()``; None: it does.

    It takes a model where what it traced with one batch gives, for one of half the samples and the same
    seed, what the model itself gives.
    """
    model = file.make().train()
    inputs, _ = next(iter(file.data(batch_size, 0)))
    fewer = tree_map(lambda tensor: tensor[: batch_size // 2], inputs)
    given = []
    try:
        traced = TRACERS[tracer](copy.deepcopy(model), *arguments_of(model, inputs))
        args, kwargs = arguments_of(model, fewer)
        for function in (traced, model):
            torch.manual_seed(0)
            given.append([t for t in tree_leaves(function(*args, **kwargs)) if isinstance(t, torch.Tensor)])
    except Exception as exc:  # noqa: BLE001 - whatever a tracer says
        text = " ".join(str(exc).split())
        return f"{type(exc).__name__}: {text[:160]}"
    have, want = given
    if len(have) != len(want):
        return f"gives {len(have)} tensors, the model {len(want)}"
    apart = [
        a.shape != b.shape or not torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(have, want, strict=True)
    ]
    return "gives other values than the model" if any(apart) else None
