"""How two ranks' clocks stand to each other: NTP's exchange over the pair that they have anyway.

The asker notes when it asks (t0) and when the answer is there (t3), the answerer when the question came (t1)
and when it answers (t2). The answerer's clock is ahead by ((t1 − t0) + (t2 − t3)) / 2, off by at most half of
the round trip without the answerer's part, (t3 − t0) − (t2 − t1), however unlike the two ways are. So the
exchange with the shortest round trip counts (Mills 1991, Internet Time Synchronization: the Network Time
Protocol, sections III and IV).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from skyctl.transport.pair import Pair

CLOCK_TAG = 3
ROUNDS = 16
LEAST_ROUNDS = 4
PATIENCE_S = 0.3
"""After this long no further round is begun, beyond the least: a link may take 100 ms a way."""

_MORE, _LAST = 0.0, 1.0


class Reading(NamedTuple):
    """At ``at_s`` of the asker's clock the answerer's was ``offset_s`` ahead, give or take ``error_s``."""

    at_s: float
    offset_s: float
    error_s: float


def ask(pair: Pair, clock: Callable[[], float] = time.perf_counter) -> Reading:
    """Compares this end's clock with that of the other, which calls ``answer`` meanwhile.

    Raises:
        PeerLostError, RunError: the pair's.
    """
    best: Reading | None = None
    began = time.perf_counter()
    for number in range(1, ROUNDS + 1):
        late = number >= LEAST_ROUNDS and time.perf_counter() - began > PATIENCE_S
        last = number == ROUNDS or late
        times = torch.zeros(2, dtype=torch.float64)
        answered = pair.recv(times, CLOCK_TAG)
        question = torch.full((1,), _LAST if last else _MORE, dtype=torch.float64)
        asked = clock()
        gone = pair.send(question, CLOCK_TAG)
        answered.wait()
        back = clock()
        gone.wait()
        came, left = times.tolist()
        found = Reading(
            (asked + back) / 2, ((came - asked) + (left - back)) / 2, ((back - asked) - (left - came)) / 2
        )
        if best is None or found.error_s < best.error_s:
            best = found
        if last:
            break
    assert best is not None
    return best._replace(error_s=max(0.0, best.error_s))


def answer(pair: Pair, clock: Callable[[], float] = time.perf_counter) -> None:
    """The other end of ``ask``: returns after the last question.

    Raises:
        PeerLostError, RunError: the pair's.
    """
    while True:
        question = torch.zeros(1, dtype=torch.float64)
        pair.recv(question, CLOCK_TAG).wait()
        came = clock()
        times = torch.tensor([came, 0.0], dtype=torch.float64)
        times[1] = clock()
        pair.send(times, CLOCK_TAG).wait()
        if question.item() == _LAST:
            return
