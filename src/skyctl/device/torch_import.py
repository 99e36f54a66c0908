"""Imports torch as nodes need it: quickly, and without its compiler until something is compiled.

Eager torch imports its compiler and sympy for a few functions that do next to nothing there: the first
optimizer, or the first recomputed layer, imports ``torch._dynamo`` (0.9 s of CPU time, 67 MB), the first
backward that is given gradients ``torch.fx.experimental.symbolic_shapes`` (0.4 s). On
a tenth of a core that is more than ten seconds. Here placeholders answer these functions; whoever wants
anything else of the two modules gets the real ones.
"""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def import_torch() -> None:
    """Imports torch, with placeholders for those of the modules that are not imported yet.

    No garbage is collected meanwhile, and none of torch's own objects are looked at later: that is a fifth of
    the import's CPU time, and most of each collection's.
    """
    with paused_collection(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        importlib.import_module("torch")
        for name, answers in _PLACEHOLDERS.items():
            sys.modules.setdefault(name, _Placeholder(name, answers))
        gc.freeze()


@contextmanager
def paused_collection() -> Iterator[None]:
    """No garbage is collected within it: of what is imported nothing becomes any."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class _Placeholder(ModuleType):
    """Stands for a module until somebody wants more of it than ``answers`` has."""

    def __init__(self, name: str, answers: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(answers)

    def __getattr__(self, attribute: str) -> Any:
        is_package = self.__name__ == "torch._dynamo"
        if attribute.startswith("__") and not (attribute == "__path__" and is_package):
            # Every ``from … import`` asks for a path, and ``inspect`` all modules for their files: in the
            # midst of an import, in which the real module can't be imported, too.
            raise AttributeError(f"{self.__name__} has no {attribute} before it is imported")
        return getattr(_load(self.__name__), attribute)


def _load(name: str) -> ModuleType:
    """The real module, in the placeholder's place from now on."""
    if isinstance(sys.modules.get(name), _Placeholder):
        del sys.modules[name]
    return importlib.import_module(name)


def _graph_break(*_: Any, **__: Any) -> None:
    """Nothing: there is no graph while nothing is compiled."""


def _disable(fn: Any = None, *rest: Any, **options: Any) -> Any:
    """Torch's own functions as they are; what others want left out of a compilation is for the real one."""
    if getattr(fn, "__module__", None) in _EAGER_CALLERS:
        return fn
    return _load("torch._dynamo").disable(fn, *rest, **options)


def _expect_true(value: Any) -> Any:
    """A plain bool is what it is; the rest is symbolic."""
    return value if type(value) is bool else _load(_SHAPES).expect_true(value)


def _sym_eq(one: Any, other: Any) -> Any:
    """Whether two shapes of plain numbers are equal; the rest is symbolic."""
    if all(type(number) is int for number in (*one, *other)):
        return one == other
    return _load(_SHAPES).sym_eq(one, other)


_CONFIG = "torch._dynamo.config"
_SHAPES = "torch.fx.experimental.symbolic_shapes"
_EAGER_CALLERS = ("torch.optim.optimizer", "torch.utils.checkpoint")
"""Whose functions are run as they are: optimizers' methods and recomputed layers are not compiled here."""
_PLACEHOLDERS: Mapping[str, Mapping[str, Any]] = {
    "torch._dynamo": {
        "graph_break": _graph_break,
        "disable": _disable,
        "config": _Placeholder(
            _CONFIG, {"error_on_nested_fx_trace": True}
        ),  # read, and used in a compilation
    },
    _SHAPES: {"expect_true": _expect_true, "sym_eq": _sym_eq},
}
