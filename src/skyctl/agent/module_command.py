"""How a Python process is started that runs one of skyctl's modules, wherever it is started."""

from __future__ import annotations

_RUN_MODULE = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; del sys.argv[0]; import runpy; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def module_command(python: str, module: str, *arguments: str) -> list[str]:
    """``python -u -m MODULE ARGUMENTS``, but nothing in the working folder is imported.

    ``-P`` says the same, from Python 3.11 on only.
    """
    return [python, "-u", "-c", _RUN_MODULE, module, *arguments]
