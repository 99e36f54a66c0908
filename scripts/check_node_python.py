"""Checks that what is sent to nodes runs on the oldest Python that a node may have (``MIN_PYTHON``).

mypy reads it as of that version: its syntax, and what it uses of the standard library.
"""

from __future__ import annotations

import subprocess
import sys

from skyctl.agent.node_package import PACKAGE_FOLDER, node_package_files
from skyctl.remote.bootstrap import MIN_PYTHON_TEXT


def main() -> int:
    """Not 0 where something needs a newer one; mypy prints what it is, and where."""
    paths = [str(PACKAGE_FOLDER.parent / name) for name in node_package_files()]
    command = [sys.executable, "-m", "mypy", "--python-version", MIN_PYTHON_TEXT, *paths]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
