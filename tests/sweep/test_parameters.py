"""Grids, ranges and tables: what they come to, and what is no such thing."""

from __future__ import annotations

import pytest

from skyctl.errors import InputError
from skyctl.records.sweep import Choice
from skyctl.sweep.parameters import (
    as_number,
    grid_trials,
    make_space,
    parse_grid,
    parse_range,
    random_trials,
    read_trials,
    script_words,
)


def test_a_grid_is_all_combinations_as_they_were_typed() -> None:
    space = dict(map(parse_grid, ("lr=1e-3,3e-4", "act=relu, gelu")))
    assert grid_trials(space) == [
        {"lr": "1e-3", "act": "relu"},
        {"lr": "1e-3", "act": "gelu"},
        {"lr": "3e-4", "act": "relu"},
        {"lr": "3e-4", "act": "gelu"},
    ]
    assert script_words({"lr": "1e-3", "as": "{x}"}) == ["--lr=1e-3", "--as={{x}}"]


def test_draws_are_within_their_ranges_and_repeatable() -> None:
    space = make_space(["act=relu,gelu"], ["lr=1e-4:1e-2:log", "width=8:64", "depth=1:100:log", "p=0:0.5"])
    drawn = random_trials(space, 400, 3)
    assert drawn == random_trials(space, 400, 3)
    assert drawn != random_trials(space, 400, 4)
    assert {trial["act"] for trial in drawn} == {"relu", "gelu"}
    rates = [float(trial["lr"]) for trial in drawn]
    assert min(rates) >= 1e-4 * (1 - 1e-5)
    assert max(rates) <= 1e-2 * (1 + 1e-5)
    assert 150 < sum(rate < 1e-3 for rate in rates) < 250  # half of a logarithmic range is its lower decade
    widths, depths = [int(trial["width"]) for trial in drawn], [int(trial["depth"]) for trial in drawn]
    assert (min(widths), max(widths)) == (8, 64)
    assert 1 <= min(depths) <= max(depths) <= 100
    assert 150 < sum(depth < 10 for depth in depths) < 250
    assert all(0 <= float(trial["p"]) <= 0.5 for trial in drawn)


def test_a_table_has_a_trial_a_line() -> None:
    text = 'lr,name\n0.1,"a, b"\n\n0.2,c\n'
    assert read_trials(text, "t.csv") == [{"lr": "0.1", "name": "a, b"}, {"lr": "0.2", "name": "c"}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr", "is not NAME=VALUE"),
        ("=1", "is not NAME=VALUE"),
        ("--lr=1", "is not NAME=VALUE"),
        ("lr=", "a value is empty"),
        ("lr=1,,2", "a value is empty"),
        ("lr=1,2,1", "1 stands there twice"),
    ],
)
def test_what_is_no_grid(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_grid(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr=1", "is not NAME=LOW:HIGH"),
        ("lr=1:x", "is not NAME=LOW:HIGH"),
        ("lr=1:2:lin", "is not NAME=LOW:HIGH"),
        ("lr=1:inf", "is not NAME=LOW:HIGH"),
        ("lr=2:1", "2 is not below 1"),
        ("lr=1:1", "1 is not below 1"),
        ("lr=0:1:log", "begins above 0"),
    ],
)
def test_what_is_no_range(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_range(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no trial"),
        ("lr,width\n", "has no trial"),
        ("lr,1x\n1,2\n", "'1x' is no name"),
        ("lr,lr\n1,2\n", "names lr twice"),
        ("lr,width\n1,2\n3\n", "line 3: 2 values are needed"),
        ("lr,width\n1,2,3\n", "line 2: 2 values are needed"),
        ("lr,width\n1,\n", "line 2: 2 values are needed"),
        ('lr\n"1\n', "no CSV"),
    ],
)
def test_what_is_no_table(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_trials(text, "t.csv")


def test_a_parameter_is_given_once_and_trials_are_countable() -> None:
    with pytest.raises(InputError, match="lr is given twice"):
        make_space(["lr=1,2"], ["lr=1:2"])
    many = Choice(values=tuple(map(str, range(101))))
    with pytest.raises(InputError, match="10201 trials are asked for"):
        grid_trials({"a": many, "b": many})
    assert as_number("nan") is None
