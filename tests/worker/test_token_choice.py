"""Which token comes next, of its scores."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from skyctl.worker.generator import TokenChoice  # noqa: E402 - it needs both
from skyctl.worker.rank_order import Sampling  # noqa: E402

SCORES = torch.tensor([0.0, 3.0, 2.0, -1.0]).log_softmax(dim=-1)


def test_without_temperature_it_is_the_likeliest() -> None:
    assert {TokenChoice(Sampling())(SCORES) for _ in range(5)} == {1}


def test_draws_are_as_likely_as_the_scores_say() -> None:
    choose = TokenChoice(Sampling(temperature=2.0, seed=3))
    counts = Counter(choose(SCORES) for _ in range(4000))
    wanted = (SCORES / 2.0).softmax(dim=-1)
    for token in range(4):
        assert counts[token] / 4000 == pytest.approx(float(wanted[token]), abs=0.03)


@pytest.mark.parametrize(("top_p", "tokens"), [(0.0, {1}), (0.5, {1}), (0.8, {1, 2}), (1.0, {0, 1, 2, 3})])
def test_tokens_beyond_the_share_are_never_drawn(top_p: float, tokens: set[int]) -> None:
    choose = TokenChoice(Sampling(1.0, top_p, 1))
    assert {choose(SCORES) for _ in range(2000)} == tokens
