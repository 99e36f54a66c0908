"""A processor whose bfloat16 dies by SIGILL, as on a virtual machine that may not use what it advertises."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

COUNTER = "trials"

FAKE_TORCH = """
import os, signal, sys

float32, bfloat16 = "float32", "bfloat16"
with open({counter!r}, "a") as file:
    file.write("x")

def randn(*shape, dtype, requires_grad):
    if dtype == bfloat16 and os.environ.get("ONEDNN_MAX_CPU_ISA") != {cure!r}:
        os.kill(os.getpid(), signal.SIGILL)
"""
"""No more of torch than a trial asks for before it dies: the real one takes seconds to import."""

SITECUSTOMIZE = """
import importlib.machinery, os, signal, sys

class BreakTorch:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for owner, name in (
                (module.Tensor, "__matmul__"),
                (module.nn.functional, "linear"),
                (module.nn.functional, "conv2d"),
            ):
                setattr(owner, name, dying(module, getattr(owner, name)))

        spec.loader.exec_module = exec_module
        return spec

def dying(torch, compute):
    def computed(tensor, *rest, **named):
        real = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if real and tensor.dtype is torch.bfloat16 and os.environ.get("ONEDNN_MAX_CPU_ISA") != {cure!r}:
            os.kill(os.getpid(), signal.SIGILL)
        return compute(tensor, *rest, **named)

    return computed

sys.meta_path.insert(0, BreakTorch())
"""
"""Python runs it at each start: the real torch, whose bfloat16 products end the process."""


def fake_torch(folder: Path, monkeypatch: pytest.MonkeyPatch, *, cure: str) -> Path:
    """Gives Python processes started from now on a torch of their own, good for trials only.

    Args:
        cure: the ``ONEDNN_MAX_CPU_ISA`` with which it works.

    Returns:
        A file that grows by one byte with each trial.
    """
    counter = folder / COUNTER
    package = folder / "site" / "torch"
    (package / "nn" / "functional").mkdir(parents=True)
    text = FAKE_TORCH.replace("{counter!r}", repr(str(counter))).replace("{cure!r}", repr(cure))
    (package / "__init__.py").write_text(text)
    (package / "nn" / "__init__.py").touch()
    (package / "nn" / "functional" / "__init__.py").touch()
    _put_first(folder / "site", monkeypatch)
    return counter


def break_bfloat16(folder: Path, monkeypatch: pytest.MonkeyPatch, *, cure: str) -> None:
    """Gives Python processes started from now on such a processor, with the real torch."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE.replace("{cure!r}", repr(cure)))
    _put_first(site, monkeypatch)


def _put_first(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``site`` before all else that Python finds, and a cache that knows nothing of this processor."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(site.parent / "fresh-cache"))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
