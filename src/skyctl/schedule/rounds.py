"""Which owners take part in which round of local steps: the same on every machine, by the seed alone."""

from __future__ import annotations

import random

from skyctl.errors import InputError


def clients_of_round(count: int, per_round: int | None, seed: int, round_number: int) -> tuple[int, ...]:
    """The clients of a round (FedAvg, arXiv 1602.05629): indices of the owners that take part in it.

    They are ``random.Random(f"{seed}/{round_number}").sample(range(count), per_round)``, in ascending order.

    Args:
        count: how many owners there are.
        per_round: how many of them take part in each round; None: all.
        seed: the run's.
        round_number: counted from 0.

    Raises:
        InputError: more are to take part than there are, or none.
    """
    if per_round is None:
        return tuple(range(count))
    if not 1 <= per_round <= count:
        raise InputError(f"{per_round} of {count} owners can't take part in a round")
    return tuple(sorted(random.Random(f"{seed}/{round_number}").sample(range(count), per_round)))  # noqa: S311
