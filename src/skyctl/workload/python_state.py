"""Plain Python values that modules keep from one call to the next: numbers, texts, and collections of them.

A layer is called once per microbatch, again where it is recomputed, on several machines where these share
the batch, and a resumed run begins anew. So a number in ``self`` that each call changes counts something
else everywhere. A buffer is kept, sent and restored.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

BUFFER = "keep it in a buffer: self.register_buffer('calls', torch.zeros(())), and self.calls += 1"
_MOST_ITEMS = 1000
_MOST_DEPTH = 3
_GLOBALS = (int, float, list, dict, set)
_PLAIN = (int, float, bool, str, type(None))


def snapshot(
    modules: Sequence[nn.Module], folder: Path, functions: Sequence[Callable[..., Any]] = ()
) -> dict[tuple[int, str], Any]:
    """The plain values of these modules, by module and name, as in ``calls`` or ``state.step``.

    Args:
        folder: the user's: global numbers of the files there, which a forward can see, are among them.
        functions: that can see such globals as well, as a loss.
    """
    state: dict[tuple[int, str], Any] = {}
    for module in modules:
        own = {n: v for n, v in vars(module).items() if n not in ("training", "_program")}
        state |= {(id(module), name): value for name, value in _plain_values(own, "", 0)}
    for function in _users_functions(modules, folder, functions):
        kept = {n: v for n, v in function.__globals__.items() if type(v) in _GLOBALS and n[:2] != "__"}
        state |= {(0, name): value for name, value in _plain_values(kept, "global ", 0)}
    return state


def _users_functions(
    modules: Iterable[nn.Module], folder: Path, functions: Sequence[Callable[..., Any]]
) -> Iterator[types.FunctionType]:
    """Those of the functions and of the modules' forwards that are written in a file of that folder."""
    for function in map(inspect.unwrap, (*functions, *(type(m).forward for m in modules))):
        written = isinstance(function, types.FunctionType) and Path(function.__code__.co_filename)
        if written and written.is_relative_to(folder):
            yield function


def _plain_values(values: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for name, value in list(values.items())[:_MOST_ITEMS]:
        path = f"{prefix}{name}"
        if isinstance(value, _PLAIN):
            yield path, value
        elif depth == _MOST_DEPTH or callable(value) or isinstance(value, Tensor | types.ModuleType):
            continue  # modules are callable, and looked at by themselves
        elif isinstance(value, list | tuple | set | frozenset):
            yield f"len({path})", len(value)
            yield from _plain_values(dict(enumerate(value)), f"{path}.", depth + 1)
        elif isinstance(value, Mapping):
            yield f"len({path})", len(value)
            yield from _plain_values(value, f"{path}.", depth + 1)
        elif isinstance(getattr(value, "__dict__", None), dict):
            yield from _plain_values(vars(value), f"{path}.", depth + 1)


class AttributeLines:
    """The lines of the user's files at which attributes of modules were set last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: dict[tuple[int, str], str] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, lines that set an attribute of a module are noted."""
        before = nn.Module.__setattr__

        def noting(module: nn.Module, name: str, value: Any) -> None:
            frame = sys._getframe(1)
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(self._folder):
                self._lines[id(module), name] = f"{file.relative_to(self._folder)}, line {frame.f_lineno}"
            before(module, name, value)

        nn.Module.__setattr__ = noting  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = before  # type: ignore[method-assign]

    def of(self, module: nn.Module, name: str) -> str:
        """The line that set an attribute, else where the module's forward begins; empty if unknown."""
        name = name.removeprefix("len(").rstrip(")").partition(".")[0]
        if (id(module), name) in self._lines:
            return self._lines[id(module), name]
        try:
            code = inspect.unwrap(type(module).forward).__code__
        except AttributeError:
            return ""
        file = Path(code.co_filename)
        shown = file.relative_to(self._folder) if file.is_relative_to(self._folder) else file.name
        return f"{shown}, line {code.co_firstlineno}"

    def of_global(self, name: str, model: nn.Module, functions: Sequence[Callable[..., Any]]) -> str:
        """The first line of the function that knows ``global NAME``."""
        name = name.removeprefix("global ").partition(".")[0]
        for function in _users_functions(model.modules(), self._folder, functions):
            code = function.__code__
            if name in code.co_names:
                return f"{Path(code.co_filename).relative_to(self._folder)}, line {code.co_firstlineno}"
        return ""


def changed_value(
    before: Mapping[tuple[int, str], Any],
    after: Mapping[tuple[int, str], Any],
    model: nn.Module,
    lines: AttributeLines,
    functions: Sequence[Callable[..., Any]] = (),
) -> tuple[str, str] | None:
    """The first plain value that a call has changed: (the line, what it is in words); None: there is none.

    Args:
        functions: as for ``snapshot``.
    """
    modules = {id(module): (name, module) for name, module in model.named_modules()}
    for key in [*after, *(key for key in before if key not in after)]:
        if key in before and key in after and _equal(before[key], after[key]):
            continue
        where, name = key
        path, module = modules.get(where, ("", model))
        if "global " in name:
            name = name.removeprefix("len(").rstrip(")")
            return lines.of_global(name, model, functions), f"each call changes the {name}"
        owner = f"{path} ({type(module).__name__})" if path else type(module).__name__
        return lines.of(module, name), f"each call of {owner} changes self.{name}"
    return None


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b) or (a != a and b != b)  # noqa: PLR0124 - not a number
