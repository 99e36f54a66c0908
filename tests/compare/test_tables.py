from __future__ import annotations

import io

import pytest
from rich.console import Console

from skyctl.compare.rows import Outcome, rows
from skyctl.compare.tables import plain, table
from skyctl.compare.words import gap, percent, seconds, times


def _shown(compared, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table(compared))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (None, "–"),
        (0.0, "0.00 s"),
        (1.6149, "1.61 s"),
        (0.99949, "999 ms"),
        (0.9996, "1.00 s"),
        (0.084, "84.0 ms"),
        (9.996, "10.0 s"),
        (3e-5, "30.0 µs"),
        (120.0, "120 s"),
    ],
)
def test_seconds(value_s: float | None, text: str) -> None:
    assert seconds(value_s) == text


def test_other_words() -> None:
    assert (times(1.789), times(None)) == ("1.79×", "–")
    assert (percent(-0.0241), percent(0.5), percent(-1e-9)) == ("−2.4 %", "+50.0 %", "+0.0 %")
    assert (gap(0.0), gap(1e-12), gap(0.02), gap(None)) == ("proved", "proved", "+2.0 %", "–")


def test_plain_has_a_line_a_strategy(three) -> None:
    lines = plain(rows(three))
    assert len(lines) == 4
    assert lines[3].split("  ")[0] == "optimal"
    for text in ("1.60 s 1.52–1.68", "1.67×", "proved", "−6.2 %", "2.700", "tower 0–8 · laptop 8–12"):
        assert text in lines[3], text


def test_plain_of_what_does_not_fit() -> None:
    lines = plain(rows([Outcome("even", None, "n3 needs\n3 GiB")]))
    assert lines[1].endswith("infeasible: n3 needs 3 GiB")


def test_table_fits_80_columns(three) -> None:
    lines = _shown(rows(three), 80)
    assert all(len(line.rstrip()) <= 80 for line in lines)
    text = "\n".join(lines)
    for part in ("even", "heuristic", "optimal", "1.60 s", "1.52–1.68", "1.56×", "+66.7 %", "2.700"):
        assert part in text, part
    assert "…" not in text


def test_table_without_runs_has_no_measured_columns(outcome) -> None:
    text = "\n".join(_shown(rows([outcome()]), 80))
    assert "measured" not in text
    assert "loss" not in text


def test_names_are_not_markup(outcome) -> None:
    odd = outcome(devices=("[red]a/cpu:0", "b[/]/cpu:0"), error="[bold]why[/]")
    text = "\n".join(_shown(rows([odd, Outcome("even", None, "[x] lacks memory")]), 120))
    assert "[red]a 0–6" in text
    assert "[x] lacks memory" in text
    assert "[bold]why[/]" in text
