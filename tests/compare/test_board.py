"""The table that is drawn while runs go on."""

from __future__ import annotations

import io

from rich.console import Console

from skyctl.compare.board import Board
from skyctl.compare.rows import Outcome


def shown(board: Board, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(board.table())
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_from_waiting_to_done(outcome) -> None:
    even = outcome("even", steps_s=[9.0, 2.4, 2.6])
    best = outcome("optimal", compute_s=(1.0, 1.2), step_s=1.25, steps_s=[9.0, 1.2, 1.3])
    board = Board([even, best, Outcome("heuristic", None, "too small")], steps=3)
    lines = shown(board)
    assert "waiting" in lines[1]
    assert "(2.00×)" in lines[2]  # predicted, as long as nothing was measured
    assert "no plan" in lines[3]
    board.doing("even", "shipping the workload")
    assert "shipping the workload" in shown(board)[1]
    board.step("even", 3.0, 9.0)
    board.step("even", 2.9, 2.5)
    line = shown(board)[1]
    assert "step 2 of 3" in line
    assert "2.900" in line
    assert "2.50 s" in line  # without the first step
    board.ended(even)
    board.ended(best)
    assert "done, 3 steps" in shown(board)[1]
    assert "2.00×" in shown(board)[2]
    assert (
        board.said("optimal")
        == "optimal: done, 3 steps · loss 2.800 · 1.25 s a step, predicted 1.25 s · 2.00×"
    )


def test_a_run_that_failed(outcome) -> None:
    board = Board([outcome("even")], steps=3)
    board.doing("even", "starting")
    board.ended(outcome("even", error="rank 1 died"))
    assert board.said("even") == "even: failed"


def test_it_fits_80_columns_and_names_are_not_markup(outcome) -> None:
    board = Board([Outcome("[red]even", None, "too small"), outcome("optimal")], steps=10)
    board.step("optimal", 12.3456, 123.4)
    lines = shown(board, 80)
    assert "[red]even" in lines[1]
    assert all(len(line.rstrip()) <= 80 and "…" not in line for line in lines)
