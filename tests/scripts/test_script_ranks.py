"""The ranks of a script, and what they are told."""

from __future__ import annotations

import pytest

from skyctl.errors import InputError
from skyctl.records.script_request import ScriptRequest
from skyctl.run.scripts.script_ranks import (
    divide_by_node,
    fill_placeholders,
    find_batch_size,
    place_ranks,
    relative_speeds,
    torchrun_environment,
)

RANKS = place_ranks({"a": 2, "b": 1})


def test_ranks_are_placed_node_by_node() -> None:
    assert [(one.rank, one.node, one.local_rank, one.node_rank) for one in RANKS] == [
        (0, "a", 0, 0),
        (1, "a", 1, 0),
        (2, "b", 0, 1),
    ]
    assert {(one.world_size, one.nodes) for one in RANKS} == {(3, 2)}


def test_the_environment_is_torchruns() -> None:
    made = torchrun_environment(RANKS[2], run_id="r", restarts=1, max_restarts=3)
    assert made["RANK"] == made["ROLE_RANK"] == "2"
    assert made["LOCAL_RANK"] == "0"
    assert made["GROUP_RANK"] == "1"
    assert (made["TORCHELASTIC_RESTART_COUNT"], made["TORCHELASTIC_MAX_RESTARTS"]) == ("1", "3")


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("{rank}/{world_size}", "2/3"),
        ("{local_rank}{node}{node_rank}", "0b1"),
        ("--batch={share:64}", "--batch=9"),
        ("{{rank}}", "{rank}"),
        ("{unknown} {} {a:b} {rank", "{unknown} {} {a:b} {rank"),
        ('{"json": {"x": 1}}', '{"json": {"x": 1}'),
    ],
)
def test_only_known_placeholders_are_replaced(word: str, filled: str) -> None:
    assert fill_placeholders(word, RANKS[2], 9) == filled


def test_a_batch_is_divided_once() -> None:
    assert find_batch_size(["--a", "{share:64}", "x{share:64}"]) == 64
    assert find_batch_size(["{rank}"]) is None
    for words in (["{share:64}", "{share:32}"], ["{share:many}"], ["{share:0}"]):
        with pytest.raises(InputError):
            find_batch_size(words)


def test_a_nodes_share_is_divided_among_its_ranks() -> None:
    assert divide_by_node({"a": 7, "b": 3}, RANKS) == [4, 3, 3]
    with pytest.raises(InputError, match="node a has 2 ranks and a share of 1 samples"):
        divide_by_node({"a": 1, "b": 3}, RANKS)


def test_speeds_are_told_by_rank_unless_shares_are() -> None:
    asked = ScriptRequest(kind="script", words=("x.py",), ranks={"a": 2, "b": 1}, speeds={"a": 2.0, "b": 8.0})
    assert relative_speeds(asked, RANKS) == [0.25, 0.25, 1.0]
    assert relative_speeds(asked.model_copy(update={"speeds": None}), RANKS) is None
    assert relative_speeds(asked.model_copy(update={"shares": {"a": 3, "b": 1}}), RANKS) is None
