"""The agent's preparations for its tasks, before any begins."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMITED = """
import resource, sys
hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], int(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
from skyctl.agent.node_agent import MOST_OPEN_FILES, raise_open_files_limit
raise_open_files_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, MOST_OPEN_FILES), hard))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux has them")
@pytest.mark.parametrize("hard", [256, 2000, 1 << 20])
def test_tasks_may_open_as_many_files_as_the_node_allows(hard: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(hard)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"
