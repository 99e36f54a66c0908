"""Keeps the machine's cores from halting while something is measured.

A core that has nothing to do halts, and a virtual machine's host gives it to another guest. The next process
on it finds that guest's values in the caches, and takes up to a fifth more CPU time. How often cores halt
depends on what runs: more while stages wait for each other than while all devices are probed. Nodes of a lab
stand for machines of their own, where the stage that a step waits for is busy all the time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

LOOP = """
import os, sys
core, parent = (int(word) for word in sys.argv[1:])
os.sched_setaffinity(0, [core])
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
try:
    with open("/proc/self/autogroup", "w") as group:
        group.write("19")
except OSError:  # a kernel without: nothing to be last in
    pass
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


class Awake:
    """While it is entered every core runs a loop of the lowest priority (``SCHED_IDLE``, session nice 19).

    The loops end with this process, however it ends.
    """

    def __init__(self) -> None:
        self._loops = ExitStack()

    def __enter__(self) -> Awake:
        with ExitStack() as begun:
            for core in sorted(os.sched_getaffinity(0)):
                loop = subprocess.Popen(
                    [sys.executable, "-c", LOOP, str(core), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the benchmark
                )
                begun.callback(loop.wait)
                begun.callback(loop.kill)  # the last is called first
            self._loops = begun.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._loops.close()
