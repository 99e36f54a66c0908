"""The result of model(), as layers can be made of it: modules that run as Python, and give tensors.

Code of ``torch.compile`` and ``torch.jit`` can't be traced, copied without values, or run on fake tensors. As
both only make a model faster, they are left out while the user's file and its model() run. So is the cache of
keys and values that a transformers model gives beside its logits: only generating text has a use for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.jit import _state as jit_state

from skyctl.errors import WorkloadError


class UncompiledModule(nn.Module):
    """In the place of what ``torch.compile`` makes of a module: names its weights alike, compiles nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module
        self.training = module.training

    def __getattr__(self, name: str) -> Any:
        if name == "_orig_mod":
            return self._modules[name]
        return getattr(self._orig_mod, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the module itself."""
        return self._orig_mod(*args, **kwargs)


@contextmanager
def uncompiled(who: str, notes: list[str]) -> Iterator[None]:
    """Inside, ``torch.compile`` and ``torch.jit.script`` leave modules and functions as they are.

    Args:
        who: what to call the file in notes, as in ``train.py``.
        notes: a note for the user is added, once, where it uses ``torch.compile``.
    """

    def leave(model: Any = None, **_options: Any) -> Any:
        note = f"{who}: torch.compile is left out, the layers run as they are written"
        if note not in notes:
            notes.append(note)
        if model is None:
            return leave
        return UncompiledModule(model) if isinstance(model, nn.Module) else model

    compile_before, jit_before = torch.compile, jit_state._enabled.enabled
    torch.compile = leave
    jit_state._enabled.enabled = False  # as PYTORCH_JIT=0 does
    try:
        yield
    finally:
        torch.compile, jit_state._enabled.enabled = compile_before, jit_before


def refuse_scripted(given: Any, who: str) -> None:
    """Raises a WorkloadError where a module that model() gives has no Python code, as of ``torch.jit.load``.

    Args:
        who: what to call the file, as in ``train.py``.
    """
    for at, part in enumerate(given if isinstance(given, list | tuple) else [given]):
        for name, module in part.named_modules() if isinstance(part, nn.Module) else ():
            if not isinstance(module, torch.jit.ScriptModule):
                continue
            place = ".".join([str(at)] * isinstance(given, list | tuple) + [name] * bool(name))
            raise WorkloadError(
                f"{who}: model() gives TorchScript{f' ({place})' if place else ''}, which can't be cut into "
                "layers or built on another machine: it has no Python code",
                hint="make the plain module in model(), and give it the weights of the scripted one by "
                "--init-from; script the trained model",
            )


def leave_out_caches(given: Any, who: str, notes: list[str]) -> None:
    """Switches ``config.use_cache`` off in the transformers models that model() gives, or holds.

    Args:
        who: what to call the file in notes, as in ``train.py``.
        notes: a note for the user is added where one was on.
    """
    note = f"{who}: config.use_cache is off, a cache of keys and values is only of use for generating text"
    for part in given if isinstance(given, list | tuple) else [given]:
        for module in part.modules() if isinstance(part, nn.Module) else ():
            config = module.__dict__.get("config")
            if config is not None and _is_of_transformers(config) and getattr(config, "use_cache", 0) is True:
                config.use_cache = False
                if note not in notes:
                    notes.append(note)


class RankBatchNorm(nn.modules.batchnorm._BatchNorm):
    """In the place of a ``SyncBatchNorm``: norms by what its rank sees, as every batch norm here."""

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 — torch calls it so
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def leave_out_synced_norms(given: Any, who: str, notes: list[str]) -> None:
    """Has each ``SyncBatchNorm`` in what model() gives norm by what its rank sees.

    It would gather figures from all ranks of the run, of which most hold other layers. Arguments as of
    ``leave_out_caches``.
    """
    note = f"{who}: SyncBatchNorm norms by what each rank sees, as BatchNorm does"
    for part in given if isinstance(given, list | tuple) else [given]:
        for module in part.modules() if isinstance(part, nn.Module) else ():
            if type(module) is nn.SyncBatchNorm:
                module.__class__ = RankBatchNorm  # type: ignore[assignment]
                if note not in notes:
                    notes.append(note)


def _is_of_transformers(config: Any) -> bool:
    """Whether it is a config of that library, which need not be installed."""
    return any(kind.__module__.partition(".")[0] == "transformers" for kind in type(config).__mro__)
