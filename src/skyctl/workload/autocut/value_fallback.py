"""Submodules that ask for values, while a forward is traced: run on real tensors, each by itself.

Such a submodule's output goes on as fake tensors. So only its results' shapes are taken from the real run;
what the traced forward itself does may not depend on values, as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from skyctl.workload.autocut.call_graph import tensors_in
from skyctl.workload.autocut.tracing_errors import CannotFollowError
from skyctl.workload.layered_model import LayeredModel
from skyctl.workload.real_runs import draw_tensor, drawn_alike, is_for_lack_of_values, refuse_too_large
from skyctl.workload.received_values import attach_inputs


class ValueFallback:
    """Runs submodules of a fake module on real tensors, where fake ones can't answer.

    Args:
        model: whose only layer the fake module is a copy of.
    """

    def __init__(self, model: LayeredModel) -> None:
        self._model = model
        self._built: tuple[str, nn.Module] | None = None

    def install(self, fake: nn.Module) -> None:
        """From now on, calls of the fake module's submodules fall back; not of the module itself."""
        for name, module in fake.named_modules():
            if name:
                module.forward = self._falling_back(name, module, module.forward)

    def _falling_back(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def fall_back(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except CannotFollowError:  # it is looked into, and what it does itself is to be told
                raise
            except Exception as exc:
                if not is_for_lack_of_values(exc):
                    raise
                return self._run(name, module, args, kwargs)

        return fall_back

    def _run(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's results, as fake tensors; marks the fake ones of tensors that it has written to."""
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        fake = [*tensors_in((args, kwargs)), *module.parameters(), *module.buffers()]
        with unset_fake_temporarily(), drawn_alike():  # what counts operations goes on
            real_module = self._real(name).train(module.training)
            drawn: dict[int, Tensor] = {}
            for tensor in tensors_in((args, kwargs)):
                if id(tensor) not in drawn:
                    values = draw_tensor(tuple(tensor.shape), tensor.dtype)
                    drawn[id(tensor)] = attach_inputs([values], [tensor.requires_grad])[0][0]
            real = [drawn[id(t)] for t in tensors_in((args, kwargs))]
            real += [*real_module.parameters(), *real_module.buffers()]
            versions = [tensor._version for tensor in real]
            given = tree_map_only(Tensor, lambda tensor: drawn[id(tensor)], (args, kwargs))
            out = real_module(*given[0], **given[1])
        for twin, tensor, version in zip(fake, real, versions, strict=True):
            if tensor._version != version:
                twin.detach().zero_()  # it has no values: this counts as a change
        return tree_map_only(Tensor, lambda tensor: _fake_result(tensor, real, fake), out)

    def _real(self, name: str) -> nn.Module:
        """The submodule with values, in the place of the one built before."""
        if self._built is None or self._built[0] != name:
            self._built = None  # its memory is needed
            part = self._model.layers[0].get_submodule(name)
            alone = replace(self._model, names=[name], layers=[part], values=None, stored=None)
            refuse_too_large(alone.tensors(0), f"{self._model.source_name}: what {name} does")
            self._built = name, alone.build(0, torch.device("cpu"))
        return self._built[1]


def _fake_result(tensor: Tensor, real: Sequence[Tensor], fake: Sequence[Tensor]) -> Tensor:
    """A fake tensor for a result; one that was given or is held stays itself, a view of it is one."""
    for twin, given in zip(fake, real, strict=True):
        if given is tensor:
            return twin
    for twin, given in zip(fake, real, strict=True):
        if given.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
            return twin.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    result = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype)
    return attach_inputs([result], [tensor.requires_grad])[0][0]
