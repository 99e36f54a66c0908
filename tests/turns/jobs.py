"""A job in a process of its own that takes turns, driven by its input: ``jobs.py CACHE TURNS NAME``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from skyctl.errors import SkyctlError
from skyctl.turns.turn_client import open_turns

DEVICE = "here/cpu:0"


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def main() -> None:
    cache, policy, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    try:
        turns = open_turns(policy, device=DEVICE, job_id=name, cache=cache)
    except SkyctlError as exc:
        print(type(exc).__name__, exc.message, exc.hint, flush=True)
        return
    print("open", flush=True)
    for line in sys.stdin:
        count, seconds, gap = line.split()
        for _ in range(int(count)):
            with turns.turn():
                begin = time.monotonic()
                compute(float(seconds))
                end = time.monotonic()
            print(begin, end, flush=True)
            time.sleep(float(gap))
        print("done", flush=True)
    turns.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main()
