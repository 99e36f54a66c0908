"""The parameters of trials: every combination of a grid, draws from ranges, or the rows of a table. Pure."""

from __future__ import annotations

import csv
import io
import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence

from skyctl.errors import InputError
from skyctl.records.sweep import Choice, Range

Parameters = dict[str, str]
Space = Mapping[str, Choice | Range]
MOST_TRIALS = 10_000
SIGNIFICANT_DIGITS = 6
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)


def parse_grid(text: str) -> tuple[str, Choice]:
    """``lr=1e-3,3e-4``: a name and its values. Raises InputError for anything else, or a doubled value."""
    name, values_text = _split("--grid", text, "NAME=VALUE,VALUE,…")
    values = [value.strip() for value in values_text.split(",")]
    if "" in values:
        raise InputError(f"--grid {text}: a value is empty", hint="as in --grid lr=1e-3,3e-4")
    if twice := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
        raise InputError(f"--grid {text}: {twice[0]} stands there twice", hint="give each value once")
    return name, Choice(values=tuple(values))


def parse_range(text: str) -> tuple[str, Range]:
    """``lr=1e-4:1e-2:log``: a name and its range; two integers without ``log`` or with it draw integers.

    Raises:
        InputError: it is none, its ends are not in order, or a logarithm of it does not exist.
    """
    form = "NAME=LOW:HIGH or NAME=LOW:HIGH:log"
    name, ends = _split("--range", text, form)
    low_text, colon, rest = ends.partition(":")
    high_text, _, scale = rest.partition(":")
    low, high = as_number(low_text), as_number(high_text)
    if not colon or low is None or high is None or scale not in ("", "log"):
        raise InputError(f"--range {text} is not {form}", hint="as in --range lr=1e-4:1e-2:log")
    if low >= high:
        raise InputError(f"--range {text}: {low_text} is not below {high_text}")
    if scale == "log" and low <= 0:
        raise InputError(f"--range {text}: a logarithmic range begins above 0, not at {low_text}")
    whole = all(_WHOLE.fullmatch(end.strip()) for end in (low_text, high_text))
    return name, Range(low=low, high=high, log=scale == "log", whole=whole)


def make_space(grids: Sequence[str], ranges: Sequence[str]) -> dict[str, Choice | Range]:
    """All parameters by name, as typed. Raises InputError where one is given twice, or can't be read."""
    space: dict[str, Choice | Range] = {}
    typed: list[tuple[str, Choice | Range]] = [*map(parse_grid, grids), *map(parse_range, ranges)]
    for name, values in typed:
        if name in space:
            raise InputError(f"parameter {name} is given twice", hint="give all its values at once")
        space[name] = values
    return space


def grid_trials(space: Mapping[str, Choice]) -> list[Parameters]:
    """Every combination, the last parameter's values next to each other. Raises InputError for too many."""
    count = math.prod(len(choice.values) for choice in space.values())
    _refuse_many(count)
    combinations = itertools.product(*(choice.values for choice in space.values()))
    return [dict(zip(space, values, strict=True)) for values in combinations]


def random_trials(space: Space, count: int, seed: int) -> list[Parameters]:
    """So many independent draws, the same for the same seed. Raises InputError for too many."""
    _refuse_many(count)
    generator = random.Random(seed)  # noqa: S311 - nothing secret
    return [{name: _draw(values, generator) for name, values in space.items()} for _ in range(count)]


def read_trials(text: str, source: str) -> list[Parameters]:
    """The rows of a CSV table whose first line names the parameters.

    Args:
        source: what to call it in an error.

    Raises:
        InputError: no row, a wrong or doubled name, or a row with too few, too many or empty cells.
    """
    rows = csv.reader(io.StringIO(text), strict=True)
    trials: list[Parameters] = []
    names: list[str] = []
    try:
        for row in rows:
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            if not names:
                names = cells
                _check_names(names, source)
                continue
            if len(cells) != len(names) or "" in cells:
                raise InputError(
                    f"{source}, line {rows.line_num}: {len(names)} values are needed ({', '.join(names)}), "
                    f"{sum(cell != '' for cell in cells)} are there",
                    hint="give each trial a value of each parameter",
                )
            trials.append(dict(zip(names, cells, strict=True)))
    except csv.Error as exc:
        raise InputError(f"{source}, line {rows.line_num}: no CSV: {exc}") from exc
    if not trials:
        raise InputError(f"{source} has no trial", hint="a line of names, then a line of values a trial")
    _refuse_many(len(trials))
    return trials


def as_number(text: str) -> float | None:
    """A text as a finite number; None where it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def format_value(value: float | str) -> str:
    """A drawn value as a script gets it: an integer, or a number of six digits."""
    return f"{value:.{SIGNIFICANT_DIGITS}g}" if isinstance(value, float) else str(value)


def script_words(parameters: Parameters) -> list[str]:
    """``--lr=1e-3 --width=64``; braces are doubled, for ``fill_placeholders`` to leave them as they are."""
    return [f"--{name}={value}".replace("{", "{{").replace("}", "}}") for name, value in parameters.items()]


def _draw(values: Choice | Range, generator: random.Random) -> str:
    if isinstance(values, Choice):
        return generator.choice(values.values)
    low, high = values.low, values.high
    if values.whole and not values.log:
        return str(generator.randint(int(low), int(high)))
    drawn = (
        math.exp(generator.uniform(math.log(low), math.log(high)))
        if values.log
        else generator.uniform(low, high)
    )
    return format_value(round(drawn) if values.whole else drawn)


def _split(option: str, text: str, form: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise InputError(f"{option} {text} is not {form}", hint="NAME is the script's option without its --")
    return name, rest


def _check_names(names: Sequence[str], source: str) -> None:
    for name in names:
        if not _NAME.fullmatch(name):
            raise InputError(
                f"{source}: its first line names the parameters, and {name!r} is no name",
                hint="as in: lr,width",
            )
        if names.count(name) > 1:
            raise InputError(f"{source}: its first line names {name} twice")


def _refuse_many(count: int) -> None:
    if count > MOST_TRIALS:
        raise InputError(
            f"{count} trials are asked for, and a sweep has {MOST_TRIALS} at most",
            hint="give fewer values, or draw some of them: --random N",
        )
