"""A script's arguments, and what its functions are called with."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional

import pytest

from skyctl.errors import WorkloadError
from skyctl.workload.script_functions import bind_functions

FILE = Path("/somewhere/train.py")
Make = Callable[..., Any]


def bound(arguments: Mapping[str, str], **functions: Make) -> dict[str, Make]:
    return bind_functions(functions, arguments, FILE)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], tuple[dict[str, Make], Path]]:
    """The functions of a file with that text, and its path: errors can name its lines."""

    def make(text: str) -> tuple[dict[str, Make], Path]:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        names: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec"), names)
        return {name: value for name, value in names.items() if callable(value)}, path

    return make


def test_values_are_read_as_the_parameter_says() -> None:
    def model(
        width: int,
        rate=0.5,
        deep=False,
        name="relu",
        *,
        size: Optional[int] = None,  # noqa: UP045 - as users write it
        left: float | None = None,
        guess=None,
        **rest,
    ):
        return width, rate, deep, name, size, left, guess, rest

    given = {"width": "512", "rate": "2", "deep": "true", "name": "3", "size": "7", "left": "None"}
    given |= {"guess": "1e-3", "more": "12", "yes": "True", "text": "nan", "long": "9" * 5000}
    values = bound(given, model=model)["model"]()
    rest = {"more": 12, "yes": True, "text": "nan", "long": "9" * 5000}
    assert values == (512, 2.0, True, "3", 7, None, 1e-3, rest)
    assert type(values[1]) is float


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"widht": "3"}, ["model() has no parameter 'widht' (did you mean 'width'?)", "width, deep"]),
        ({"width": "3.0"}, ["width must be a whole number, not '3.0'", "train.py,width=512"]),
        ({"width": "3", "deep": "1"}, ["deep must be True or False, not '1'"]),
        ({}, ["model() needs width, which has no default", "train.py,width=VALUE"]),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, str], words: list[str]) -> None:
    def model(width: int, deep: bool = False) -> None:
        pass

    with pytest.raises(WorkloadError) as refused:
        bound(arguments, model=model)
    for word in words:
        assert word in str(refused.value)


def test_a_model_without_parameters_takes_no_argument() -> None:
    with pytest.raises(WorkloadError, match=r"no parameter 'width'; it takes no argument"):
        bound({"width": "3"}, model=lambda: [])


def test_other_functions_get_an_argument_that_they_have_a_parameter_for() -> None:
    seen: dict[str, Any] = {}

    def data(batch_size, seed, width, start=0, stop=1):
        seen["data"] = batch_size, seed, width, start, stop

    def loss(outputs, targets, *, smoothing=0.0):
        seen["loss"] = outputs, targets, smoothing

    def optimizer(parameters, lr, named):
        seen["optimizer"] = parameters, lr, named

    functions = bound(
        {"width": "8", "seed": "3", "smoothing": "0.5", "lr": "0.125"},
        model=lambda width=4, seed=0: seen.update(model=(width, seed)),
        data=data,
        loss=loss,
        optimizer=optimizer,
    )
    functions["model"]()
    functions["data"](2, 1, start=5, stop=6)
    functions["loss"]("o", "t")
    functions["optimizer"]("p", "n")
    assert seen == {
        "model": (8, 3), "data": (2, 1, 8, 5, 6), "loss": ("o", "t", 0.5), "optimizer": ("p", 0.125, "n")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda parameters: (parameters,), ("p",)),
        (lambda parameters, lr=0.1: (parameters, lr), ("p", 0.1)),
        (lambda parameters, pairs: (parameters, pairs), ("p", "n")),
        (lambda parameters, lr=0.1, named=None: (parameters, lr, named), ("p", 0.1, "n")),
        (lambda parameters, *, named: (parameters, named), ("p", "n")),
        (lambda parameters, pairs, /: (parameters, pairs), ("p", "n")),
        (lambda *everything: everything, ("p",)),
    ],
)
def test_an_optimizer_gets_names_where_it_asks_for_a_second_value(function: Make, given: Any) -> None:
    assert bound({}, model=list, optimizer=function)["optimizer"]("p", "n") == given


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def optimizer(): pass", "train.py, line 2: optimizer() can't be called"),
        ("def optimizer(a, b, c): pass", "train.py, line 2: optimizer(a, b, c) can't be called"),
        ("def optimizer(*, named): pass", "train.py, line 2: optimizer(*, named) can't be called"),
        ("def lr_scheduler(a, b, *, c): pass", "train.py, line 2: lr_scheduler(a, b, *, c) can't be called"),
        ("def metrics(outputs): pass", "train.py, line 2: metrics(outputs) can't be called with"),
    ],
)
def test_a_wrong_signature_is_refused_with_its_line(
    script: Callable[[str], tuple[dict[str, Make], Path]], text: str, words: str
) -> None:
    functions, path = script(f"def model(): return []\n{text}\n")
    with pytest.raises(WorkloadError) as refused:
        bind_functions(functions, {}, path)
    assert refused.value.message.startswith(words)
    assert "def " in str(refused.value.hint)


def test_a_builtin_that_tells_no_signature_is_called_as_it_is() -> None:
    assert bound({}, model=dict)["model"]() == {}
