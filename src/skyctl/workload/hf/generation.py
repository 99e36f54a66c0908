"""Text, one token at a time: the layers of an ``hf:`` model with what attention keeps of tokens before.

Each attention keeps keys and values in a cache of its own, so that a stage needs nothing of other stages'.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from torch import nn

from skyctl.workload.hf.hub_layers import BlockContext, Gpt2Embedding


def remember_tokens(layers: Iterable[nn.Module]) -> None:
    """Has layers of a causal model go on from all tokens that they are called with from now on.

    Their next call is with the first tokens of a sample, [samples, tokens], or what layers before make of
    these; each further call is with the tokens that follow. They are put into ``eval()``.
    """
    for layer in layers:
        layer.eval()
        for module in layer.modules():
            if isinstance(module, BlockContext):
                module.cache = _make_cache()
            elif isinstance(module, Gpt2Embedding):
                module.seen = 0


def _make_cache() -> Any:
    """A cache of the library's that holds one layer, whatever number its attention has in the model."""
    library: Any = importlib.import_module("transformers.cache_utils")

    class OneLayerCache(library.DynamicCache):  # type: ignore[misc]
        def update(
            self, key_states: Any, value_states: Any, _layer_idx: int, *more: Any, **named: Any
        ) -> Any:
            return super().update(key_states, value_states, 0, *more, **named)

    return OneLayerCache()
