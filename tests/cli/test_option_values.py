from __future__ import annotations

import pytest

from skyctl.cli.option_values import parse_node_counts, parse_numbers
from skyctl.errors import InputError


def test_one_number_means_what_it_meant() -> None:
    assert parse_numbers("--microbatches", "8") == (8,)
    assert parse_numbers("--microbatches", "4, 8,16,8") == (4, 8, 16)


@pytest.mark.parametrize(
    ("text", "all_", "expected"),
    [
        ("2..N", 4, (2, 3, 4)),
        ("1..n", 1, (1,)),
        ("3", 5, (3,)),
        ("1,2,N", 8, (1, 2, 8)),
        ("4..6,2", 9, (2, 4, 5, 6)),
    ],
)
def test_counts(text: str, all_: int, expected: tuple[int, ...]) -> None:
    assert parse_node_counts("--nodes", text)(all_) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "a", "4,,8", "2...4", "4..2", "1e9", "99999999999999"])
def test_nonsense_is_named(text: str) -> None:
    with pytest.raises(InputError, match="--nodes"):
        parse_node_counts("--nodes", text)(4)


def test_ranges_are_bounded() -> None:
    with pytest.raises(InputError, match="there is 1 only"):
        parse_node_counts("--nodes", "2..N")(1)
    with pytest.raises(InputError, match="at most"):
        parse_node_counts("--nodes", "1..1000000")(1_000_000)
