"""The same number of layers for every device, in inventory order: the baseline that needs no measurement."""

from __future__ import annotations

from skyctl.planner.model import Model, Piece


def even_pieces(layers: int, devices: int) -> tuple[Piece, ...]:
    """The first devices hold one layer more where it does not divide; more devices than layers: the last
    ones stay unused."""
    share, more = divmod(layers, devices)
    pieces: list[Piece] = []
    start = 0
    for device in range(min(devices, layers)):
        stop = start + share + (1 if device < more else 0)
        pieces.append(Piece(device, start, stop))
        start = stop
    return tuple(pieces)


def even(model: Model) -> tuple[Piece, ...]:
    """The even split of a problem; it may not fit."""
    return even_pieces(model.layers, model.devices)
