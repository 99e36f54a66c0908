"""Imports torch as nodes need it: quickly, and without its compiler until something is compiled.

Eager torch imports its compiler and sympy for a few functions that do next to nothing there: the first
optimizer, the first recomputed layer, or the first fake tensor imports ``torch._dynamo`` (0.9 s of CPU time,
67 MB), the first backward that is given gradients ``torch.fx.experimental.symbolic_shapes`` (0.4 s). On
a tenth of a core that is more than ten seconds. Here placeholders answer these functions; whoever wants
anything else of these modules gets the real ones.
"""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
        for name, placeholder in _PLACEHOLDERS.items():
            sys.modules.setdefault(name, placeholder)
        if not any(isinstance(finder, _ImportedMeanwhile) for finder in sys.meta_path):
            sys.meta_path.insert(0, _ImportedMeanwhile())
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
        is_package = self.__name__ == _DYNAMO
        if attribute.startswith("__") and not (attribute == "__path__" and is_package):
            # Every ``from … import`` asks for a path, and ``inspect`` all modules for their files: in the
            # midst of an import, in which the real module can't be imported, too.
            raise AttributeError(f"{self.__name__} has no {attribute} before it is imported")
        return getattr(_load(self.__name__), attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        """Sets it where it counts: who changes a setting wants it to hold for the real module."""
        setattr(_load(self.__name__), attribute, value)


def _load(name: str) -> ModuleType:
    """The real module, in the placeholder's place from now on. The compiler brings all of them."""
    is_compiler = name.startswith(_DYNAMO)
    for other in _PLACEHOLDERS if is_compiler else (name,):
        if isinstance(sys.modules.get(other), _Placeholder):
            del sys.modules[other]
    module = importlib.import_module(name)
    while is_compiler and _left_enabled:
        vars(_left_enabled.pop()).pop("__dynamo_disable", None)  # where torch keeps our answer
    return module


class _ImportedMeanwhile(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds submodules of ``torch._dynamo`` that the package, itself loaded for their sake, has imported.

    ``import torch._dynamo.utils`` asks the placeholder for its path. That loads the package, and with it the
    submodule, which Python would then execute a second time.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - as the base has it
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        is_there = fullname.startswith(f"{_DYNAMO}.") and fullname in sys.modules and target is None
        return importlib.machinery.ModuleSpec(fullname, self) if is_there else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = sys.modules[spec.name]
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for what breaks graphs and clears caches: there are none while nothing is compiled."""


def _disable(fn: Any = None, *rest: Any, **options: Any) -> Any:
    """Torch's own functions as they are; what others want left out of a compilation is for the real one."""
    if options.get("wrapping") is False:  # `torch._disable_dynamo`, which keeps the answer at the function
        _left_enabled.append(fn)
        return fn
    if getattr(fn, "__module__", None) == "torch.utils.checkpoint":
        return fn
    return _load(_DYNAMO).disable(fn, *rest, **options)


def _expect_true(value: Any) -> Any:
    """A plain bool is what it is; the rest is symbolic."""
    return value if type(value) is bool else _load(_SHAPES).expect_true(value)


def _sym_eq(one: Any, other: Any) -> Any:
    """Whether two numbers, or two shapes of plain numbers, are equal; the rest is symbolic."""
    return one == other if _is_plain(one) and _is_plain(other) else _load(_SHAPES).sym_eq(one, other)


def _is_plain(value: Any) -> bool:
    return type(value) is int or (isinstance(value, (tuple, list)) and all(map(_is_plain, value)))


_DYNAMO = "torch._dynamo"
_CONFIG = "torch._dynamo.config"
_TRACE_RULES = "torch._dynamo.trace_rules"
_SHAPES = "torch.fx.experimental.symbolic_shapes"
_left_enabled: list[Any] = []
"""The functions that ran as they are; the compiler is asked about them again once it is there."""
_config = _Placeholder(
    _CONFIG,
    {
        "error_on_nested_fx_trace": True,  # read by recomputed layers, and used in a compilation
        "fake_tensor_cache_enabled": True,
        "fake_tensor_cache_crosscheck_enabled": False,
        "_custom_ops_profile": None,
    },
)
_trace_rules = _Placeholder(_TRACE_RULES, {"clear_lru_cache": _nothing})
"""Process groups clear its caches when they are made, if there is a compiler."""
_PLACEHOLDERS: Mapping[str, ModuleType] = {
    _DYNAMO: _Placeholder(
        _DYNAMO,
        {"graph_break": _nothing, "disable": _disable, "config": _config, "trace_rules": _trace_rules},
    ),
    _CONFIG: _config,
    _SHAPES: _Placeholder(_SHAPES, {"expect_true": _expect_true, "sym_eq": _sym_eq}),
}
