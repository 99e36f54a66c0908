"""Windows: which layers are run together, one after the other, to time those of them that are not timed yet.

A layer follows one that is like the layer before it in the model. So the kinds of a model whose blocks repeat
fit into one window, and its last layer needs no second one with blocks that are timed already.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

MOST_LAYERS = 8
"""Layers, where they fit: a call's own cost is then shared as in a stage, and so are the caches. Weights and
gradients of four blocks may fit into a core's, where those of a replica of all layers do not."""

MOST_WINDOW_BYTES = 128 << 20
MOST_IN_FLIGHT = 4
MOST_IN_FLIGHT_BYTES = 256 << 20
"""Above these, a layer's own values fill the caches, and its company makes no difference."""


@dataclass(frozen=True)
class LayerWindow:
    """Layers of the workload, by index. ``kinds``: by layer, the position of the distinct layer it is."""

    layers: tuple[int, ...]
    kinds: tuple[int, ...]
    in_flight: int = 1


def choose_windows(
    kinds: Sequence[int],
    wanted: Sequence[tuple[int, int]],
    needs: Sequence[float],
    alone: Collection[int],
    room_bytes: float,
) -> list[LayerWindow]:
    """Windows in which every kind wanted occurs.

    Args:
        kinds: each layer's kind.
        wanted: (kind, index of the first layer of it).
        needs: by kind, bytes that running one takes.
        alone: kinds that are not run together with others.
        room_bytes: what a window may take in all.
    """
    windows: list[LayerWindow] = []
    left = {kind for kind, _ in wanted}
    for kind, first in wanted:
        if kind in left:
            windows.append(_window_around(kinds, first, left, needs, alone, room_bytes))
            left.difference_update(windows[-1].kinds)
    return windows


def _window_around(
    kinds: Sequence[int],
    first: int,
    left: Collection[int],
    needs: Sequence[float],
    alone: Collection[int],
    room_bytes: float,
) -> LayerWindow:
    """The largest window from ``first`` on that fits ``room_bytes``; at the model's end also before it.

    Args:
        left: kinds that no window has yet; layers of these come first.
    """
    layers, sum_bytes = [first], needs[kinds[first]]
    most_bytes = 0.0 if kinds[first] in alone else min(MOST_WINDOW_BYTES, room_bytes)
    while len(layers) < MOST_LAYERS:
        new = set(left) - {kinds[index] for index in layers}
        after = range(layers[-1] + 1, len(kinds))
        follow = [index for index in after if kinds[index - 1] == kinds[layers[-1]]]
        choices = [*(index for index in follow if kinds[index] in new), *after[:1], *range(layers[0])[-1:]]
        fits = (
            index
            for index in choices
            if kinds[index] not in alone and sum_bytes + needs[kinds[index]] <= most_bytes
        )
        chosen = next(fits, None)
        if chosen is None:
            break
        layers = sorted([*layers, chosen])
        sum_bytes += needs[kinds[chosen]]
    if len(layers) > 1:
        layers = _with_repeats(layers, kinds, needs, alone, most_bytes - sum_bytes)
        sum_bytes = sum(needs[kinds[index]] for index in layers)
    in_flight = int(min(MOST_IN_FLIGHT_BYTES, room_bytes) // max(1.0, sum_bytes)) if most_bytes else 1
    indices = tuple(layers)
    return LayerWindow(indices, tuple(kinds[i] for i in indices), max(1, min(MOST_IN_FLIGHT, in_flight)))


def _with_repeats(
    layers: Sequence[int],
    kinds: Sequence[int],
    needs: Sequence[float],
    alone: Collection[int],
    room_bytes: float,
) -> list[int]:
    """The same layers, and of a model whose blocks repeat further blocks, where there is room for them.

    A block is put behind a layer that is like its last one. So each follows what it follows in the model.
    """
    extended = list(layers)
    place = 0
    while place < len(extended):
        first = extended[place]
        until = extended[place + 1] if place + 1 < len(extended) else len(kinds)
        last = next((index for index in range(first + 1, until) if kinds[index] == kinds[first]), None)
        block = [] if last is None else list(range(first + 1, last + 1))
        need_bytes = sum(needs[kinds[index]] for index in block)
        fits = len(extended) + len(block) <= MOST_LAYERS and need_bytes <= room_bytes
        if block and fits and not any(kinds[index] in alone for index in block):
            extended[place + 1 : place + 1] = block
            room_bytes -= need_bytes
            place += len(block)
        else:
            place += 1
    return extended


def single_layer_windows(window: LayerWindow) -> list[LayerWindow]:
    """Windows of one layer each, one for every kind in that window."""
    first = {kind: index for index, kind in reversed(list(zip(window.layers, window.kinds, strict=True)))}
    return [LayerWindow((index,), (kind,)) for kind, index in sorted(first.items(), key=lambda kv: kv[1])]
