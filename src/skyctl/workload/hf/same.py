"""Whether the layers one after another compute what the library's own ``forward`` computes.

Both are run without values while every operation is written down (``deferred``); their results are the same
function of the weights and the ids where they come from the same operations on the same things. That holds at
the model's full size, costs no memory, and needs no knowledge of the family.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from skyctl.workload.deferred import Op, Ref, deferring, ref_of
from skyctl.workload.hf.library import Settings

COMMUTATIVE = ("aten.add.Tensor", "aten.mul.Tensor")


def same(model: Any, layers: Sequence[nn.Module], settings: Settings) -> bool:
    """Whether the layers give the scores that ``model(input_ids)`` gives.

    Raises whatever the library raises where it can't run without values.
    """
    with torch.no_grad(), deferring(0) as record:
        ids = torch.zeros(2, settings.context, dtype=torch.int64)
        whole: Tensor = model(input_ids=ids, use_cache=False).logits
        value: Tensor = ids
        for layer in layers:
            value = layer(value)
    known: dict[int, str] = {}
    for op in record.operations():
        if _changes_nothing(op):
            known[op.outputs[0][1].storage] = known.get(op.args[0].storage, str(op.args[0].storage))
            continue
        words = [_word(leaf, known) for leaf in tree_leaves((op.args, op.kwargs))]
        if str(op.func) in COMMUTATIVE and not op.kwargs:
            words.sort()
        made = _hash(str(op.func), *words)
        for storage in op.writes:
            known[storage] = _hash(made, known.get(storage, ""))
        for place, ref in op.outputs:
            known[ref.storage] = _hash(made, str(place))
    return _word(ref_of(whole), known) == _word(ref_of(value), known)


def _changes_nothing(op: Op) -> bool:
    """``positions + 0`` (how much was seen before), ``x.to(device)``: the values stay what they are."""
    name = str(op.func)
    if name not in ("aten.add.Tensor", "aten._to_copy.default") or not isinstance(op.args[0], Ref):
        return False
    if name == "aten.add.Tensor" and (op.args[1:] != (0,) or op.kwargs):
        return False
    return replace(op.outputs[0][1], storage=op.args[0].storage) == op.args[0]


def _word(value: Any, known: dict[int, str]) -> str:
    if isinstance(value, Ref):
        window = f"{value.dtype}{value.size}{value.stride}{value.offset}"
        return f"{window} {known.get(value.storage, str(value.storage))}"
    if isinstance(value, Tensor):
        return f"{value.dtype}{value.tolist()}"
    return repr(value)


def _hash(*words: str) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()
