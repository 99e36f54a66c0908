"""Keeps the machine's cores from halting while something is measured.

A core that has nothing to do halts, and a virtual machine's host gives it to another guest. What runs on it
next finds that guest's values in the caches, and takes up to a fifth more CPU time. How often cores halt
depends on what runs: more while stages wait for each other than while all devices are probed. Nodes of a lab
stand for machines of their own, where the stage that a step waits for is busy all the time.
"""

from __future__ import annotations

import os
import subprocess
import sys

LOOP = """
import os, sys
parent = os.getppid()
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


class Awake:
    """While it is entered every core runs a loop that gives way to everything else (``SCHED_IDLE``)."""

    def __init__(self) -> None:
        self._loops: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Awake:
        for core in sorted(os.sched_getaffinity(0)):
            self._loops.append(subprocess.Popen([sys.executable, "-c", LOOP, str(core)]))
        return self

    def __exit__(self, *_: object) -> None:
        for loop in self._loops:
            loop.kill()
        for loop in self._loops:
            loop.wait()
