"""The tokens that a rank's experts are sent, and which experts have to move as these loads drift."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from skyctl.worker.expert_orders import ExpertsOrder, HostAddress
from skyctl.worker.experts.held_experts import ExpertKey

WINDOW_STEPS = 16
"""Moves are weighed once in so many steps, by what these have sent."""
_SURE = 2.0
"""So many standard deviations of a host's tokens may be chance."""


def moves_that_pay(
    layer: int,
    counts: Sequence[int],
    holders: Sequence[int],
    hosts: Mapping[int, HostAddress],
    nbytes: Sequence[int],
    steps: int,
) -> dict[int, int]:
    """By expert of a layer that has to move, its new host.

    From the slowest host, one expert after the other goes where the slowest is fastest then. As many of these
    moves are made as gain most over the steps left, the bytes on both lines paid. A difference that
    chance alone may have brought about gains nothing.

    Args:
        counts: by expert, the tokens that it was sent in some steps.
        holders: by expert, its host.
        hosts: those between which experts may move.
        nbytes: by expert, what moving it sends.
        steps: how many are left.
    """
    total = sum(counts)
    token_s = {place: host.layer_s[layer] / max(1, total) for place, host in hosts.items()}
    held = {place: [e for e, holder in enumerate(holders) if holder == place] for place in hosts}
    time_s = {place: token_s[place] * sum(counts[e] for e in held[place]) for place in hosts}
    if not total or len(hosts) < 2:
        return {}
    slowest = max(time_s, key=lambda place: (time_s[place], place))
    chance_s = _SURE * token_s[slowest] * math.sqrt(sum(counts[e] for e in held[slowest]))
    before_s = time_s[slowest] - chance_s
    moves: dict[int, int] = {}
    best, best_gain_s, cost_s = 0, 0.0, 0.0
    while True:
        slowest = max(time_s, key=lambda place: (time_s[place], place))
        options = [
            (
                max(
                    time_s[slowest] - counts[e] * token_s[slowest],
                    time_s[place] + counts[e] * token_s[place],
                ),
                e,
                place,
            )
            for e in held[slowest]
            for place, host in hosts.items()
            if counts[e] and e not in moves and place != slowest and len(held[place]) < host.room[layer]
        ]
        after_s, expert, place = min(options, default=(math.inf, 0, 0))
        if after_s >= time_s[slowest]:
            return dict(list(moves.items())[:best])
        for end, sign in ((slowest, -1), (place, 1)):
            time_s[end] += sign * counts[expert] * token_s[end]
            cost_s += nbytes[expert] * hosts[end].byte_s
        held[slowest].remove(expert)
        held[place].append(expert)
        moves[expert] = place
        gain_s = (before_s - max(time_s.values())) * steps - cost_s
        if gain_s > best_gain_s:
            best, best_gain_s = len(moves), gain_s


class ExpertLoads:
    """The tokens that were sent so far.

    Attributes:
        by_expert: the tokens of each.
        dropped: tokens that no expert has answered.

    Args:
        experts: all that the rank's layers hold.
        hosts: how many there are.
    """

    def __init__(self, experts: Iterable[ExpertKey], hosts: int) -> None:
        self.by_expert = dict.fromkeys(experts, 0)
        self.dropped = 0
        self._by_host = [dict.fromkeys((layer for layer, _ in self.by_expert), 0) for _ in range(hosts)]
        self._before = dict(self.by_expert)

    def note(self, key: ExpertKey, host: int, tokens: int) -> None:
        """An expert was sent these, on that host."""
        self.by_expert[key] += tokens
        self._by_host[host][key[0]] += tokens

    def dealt(
        self,
        lost: Iterable[ExpertKey],
        hosts: Sequence[HostAddress],
        holders: Mapping[ExpertKey, int],
        places: Iterable[int],
    ) -> dict[ExpertKey, int]:
        """By expert that has lost its host, in the order of falling load, the one of ``places`` to go to."""

        def cost(key: ExpertKey, place: int) -> float:
            return (1 + self.by_expert[key]) * hosts[place].layer_s[key[0]]

        loads = dict.fromkeys(places, 0.0)
        for key, place in holders.items():
            if place in loads:
                loads[place] += cost(key, place)
        dealt = {}
        for key in sorted(lost, key=lambda key: (-self.by_expert[key], key)):
            dealt[key] = min(loads, key=lambda place: (loads[place] + cost(key, place), place))
            loads[dealt[key]] += cost(key, dealt[key])
        return dealt

    def moves(
        self,
        order: ExpertsOrder,
        holders: Mapping[ExpertKey, int],
        hosts: Iterable[int],
        nbytes: Mapping[ExpertKey, int],
        steps: int,
    ) -> dict[ExpertKey, int]:
        """By expert of the layers that the rank leads and that has to move, its new host.

        Args:
            hosts: those that are prompt.
            steps: how many are left. The others are as of ``moves_that_pay``, for what was sent since this
                was called before.
        """
        before, self._before = self._before, dict(self.by_expert)
        prompt = {place: order.hosts[place] for place in hosts}
        moves: dict[ExpertKey, int] = {}
        for layer in order.leads:
            keys = [key for key in holders if key[0] == layer]
            found = moves_that_pay(
                layer,
                [self.by_expert[key] - before[key] for key in keys],
                [holders[key] for key in keys],
                prompt,
                [nbytes[key] for key in keys],
                steps,
            )
            moves |= {keys[expert]: place for expert, place in found.items()}
        return moves

    def figures(self, names: Sequence[str]) -> dict[str, Any]:
        """As JSON values: tokens by expert, by host and layer, and how many were dropped.

        Args:
            names: of the hosts.
        """
        tokens: dict[str, list[int]] = {}
        for (layer, _), count in sorted(self.by_expert.items()):
            tokens.setdefault(str(layer), []).append(count)
        return {
            "tokens": tokens,
            "hosts": {
                name: {str(layer): count for layer, count in sent.items()}
                for name, sent in zip(names, self._by_host, strict=True)
            },
            "dropped": self.dropped,
        }
