"""The table of a comparison: at its end, for terminals and pipes, and while its runs go on."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from skyctl.compare.comparison import ProgressTable, comparison_lines, comparison_table
from skyctl.compare.outcome import StrategyOutcome, summarize_outcomes


def _lines(table: Table, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_plain_has_a_line_a_strategy(three) -> None:
    lines = comparison_lines(summarize_outcomes(three))
    assert len(lines) == 4
    assert lines[3].split("  ")[0] == "optimal"
    for text in (
        "1.60 s 1.52–1.68",
        "1.67×",
        "proved",
        "6.2% too short",
        "2.700",
        "tower 0–8 · laptop 8–12",
    ):
        assert text in lines[3], text


def test_plain_of_what_does_not_fit() -> None:
    lines = comparison_lines(summarize_outcomes([StrategyOutcome("even", None, "n3 needs\n3 GiB")]))
    assert lines[1].endswith("infeasible: n3 needs 3 GiB")


def test_table_fits_80_columns(three) -> None:
    lines = _lines(comparison_table(summarize_outcomes(three)), 80)
    assert all(len(line.rstrip()) <= 80 for line in lines)
    text = "\n".join(lines)
    for part in ("even", "heuristic", "optimal", "1.60 s", "1.52–1.68", "1.56×", "+66.7%", "2.700"):
        assert part in text, part
    assert "…" not in text


def test_table_without_runs_has_no_measured_columns(outcome) -> None:
    text = "\n".join(_lines(comparison_table(summarize_outcomes([outcome()])), 80))
    assert "measured" not in text
    assert "loss" not in text


def test_names_are_not_markup(outcome) -> None:
    odd = outcome(devices=("[red]a/cpu:0", "b[/]/cpu:0"), error="[bold]why[/]")
    text = "\n".join(
        _lines(
            comparison_table(summarize_outcomes([odd, StrategyOutcome("even", None, "[x] lacks memory")])),
            120,
        )
    )
    assert "[red]a 0–6" in text
    assert "[x] lacks memory" in text
    assert "[bold]why[/]" in text


def test_from_waiting_to_done(outcome) -> None:
    even = outcome("even", steps_s=[9.0, 2.4, 2.6])
    best = outcome("optimal", compute_s=(1.0, 1.2), step_s=1.25, steps_s=[9.0, 1.2, 1.3])
    running = ProgressTable([even, best, StrategyOutcome("heuristic", None, "too small")], steps=3)
    lines = _lines(running.table())
    assert "waiting" in lines[1]
    assert "(2.00×)" in lines[2]  # predicted, as long as nothing was measured
    assert "no plan" in lines[3]
    running.show_phase("even", "shipping the workload")
    assert "shipping the workload" in _lines(running.table())[1]
    running.add_step("even", 3.0, 9.0)
    running.add_step("even", 2.9, 2.5)
    line = _lines(running.table())[1]
    assert "step 2 of 3" in line
    assert "2.900" in line
    assert "2.50 s" in line  # without the first step
    running.end_run(even)
    running.end_run(best)
    assert "done, 3 steps" in _lines(running.table())[1]
    assert "2.00×" in _lines(running.table())[2]
    assert (
        running.ended_line("optimal")
        == "optimal: done, 3 steps · loss 2.800 · 1.25 s a step, predicted 1.25 s · 2.00×"
    )


def test_a_run_that_failed(outcome) -> None:
    running = ProgressTable([outcome("even")], steps=3)
    running.show_phase("even", "starting")
    running.end_run(outcome("even", error="rank 1 died"))
    assert running.ended_line("even") == "even: failed"


def test_it_fits_80_columns_and_names_are_not_markup(outcome) -> None:
    running = ProgressTable([StrategyOutcome("[red]even", None, "too small"), outcome("optimal")], steps=10)
    running.add_step("optimal", 12.3456, 123.4)
    lines = _lines(running.table(), 80)
    assert "[red]even" in lines[1]
    assert all(len(line.rstrip()) <= 80 and "…" not in line for line in lines)


def _unsure(outcome) -> list[StrategyOutcome]:
    """Even, the tower alone and optimal, with intervals; the first two were run."""
    return [
        outcome("even", interval_s=(2.3, 2.9), steps_s=[9.0, 2.4, 2.5, 2.6]),
        outcome(
            "alone",
            counts=(12, 0),
            compute_s=(2.0,),
            step_s=2.0,
            interval_s=(1.9, 2.2),
            steps_s=[9.0, 2.3, 2.4, 2.5],
        ),
        outcome("optimal", compute_s=(1.0, 1.2), step_s=1.25, interval_s=(1.2, 1.4), bound_s=2.5 / 3.726),
    ]


def test_intervals_and_whether_they_held(outcome) -> None:
    rows = summarize_outcomes(_unsure(outcome))
    assert [row.within_interval for row in rows] == [True, False, None]
    lines = comparison_lines(rows)
    assert "predicted step (80%)" in lines[0]
    assert "2.50 s (2.30–2.90)" in lines[1]
    assert "as measured (within)" in lines[1]
    assert lines[2].startswith("alone (tower)")
    assert "16.7% too short (outside)" in lines[2]
    table = _lines(comparison_table(rows, "alone"), 80)
    text = "\n".join(table)
    assert all(len(line.rstrip()) <= 80 for line in table)
    for part in ("(2.30–2.90)", "within", "outside", "alone", "(tower)", "(1.20–1.40)", "2.700", "+272.6%"):
        assert part in text, part
    assert "…" not in text


def test_a_line_of_a_run_has_its_interval(outcome) -> None:
    even, alone, _ = _unsure(outcome)
    running = ProgressTable([even, alone], steps=4)
    running.end_run(even)
    assert "predicted 2.50 s (2.30–2.90)" in running.ended_line("even")
