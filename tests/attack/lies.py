"""Real events of every kind, and lies made of them: seeded mutations that went over the wire as JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyctl.worker.rank_events import BatchSketch, TensorSketch

from ..fuzz.mutate import ODD, structural
from ..helpers.events import step_message

Message = dict[str, Any]
SHA = "0123456789abcdef" * 4
LIAR, HONEST = "liar", "honest"
STEPS = 6

FACTS: Message = {
    "event": "facts",
    "device_name": "a cpu",
    "devices": ["cpu:0"],
    "cpu_model": "a cpu",
    "cpus": 2.0,
    "threads": 2,
    "python": "3.11.7",
    "torch": "2.6.0",
    "memory_bytes": 8e9,
    "memory_scope": "boot/",
    "own_bytes": 1e8,
}
BATCH = BatchSketch(
    epoch=0,
    index=3,
    length=9,
    inputs=(TensorSketch(norm=2.0, sums=(1.0, -1.0)),),
    targets=(TensorSketch(whole=7),),
)
LOG: Message = {"event": "log", "text": "epoch 1"}
ERROR: Message = {
    "event": "error",
    "type": "ValueError",
    "message": "no",
    "traceback": "Traceback …",
    "skyctl": False,
    "exit_code": 1,
    "hint": None,
    "python": "/usr/bin/python3",
    "module": None,
    "errno": None,
    "out_of_memory": False,
}
EXIT: Message = {"event": "exit", "returncode": -9, "signal": "SIGKILL", "tail": ["a", "b"]}
CHECKPOINT: Message = {
    "event": "checkpoint",
    "step": 1,
    "layers": {str(layer): {"sha256": SHA, "bytes": 1000} for layer in (2, 3)},
    "wall_s": 0.1,
    "notes": ["none"],
}
RESULT: Message = {
    "event": "result",
    "steps": STEPS,
    "weights": "/w",
    "trace": None,
    "peak_memory_bytes": 1e8,
}
RANK: Sequence[Message] = (
    FACTS,
    {"event": "ready"},
    LOG,
    {"event": "alive", "phase": "step 0", "waiting": False},
    step_message(0, validates=True, peak_memory_bytes=1e8, weight_s=0.01, batch=BATCH),
    {"event": "validation", "step": 0, "loss": 1.0, "wall_s": 0.1, "metrics": {"accuracy": 0.5}},
    CHECKPOINT,
    *[step_message(step) for step in range(1, STEPS)],
    RESULT,
    ERROR,
    EXIT,
)
"""The messages of the last of two ranks (layers 2, 3) in a run, in order; then how it can end otherwise."""

REPLICATOR: Sequence[Message] = (
    {"event": "listening", "address": "192.0.2.1", "port": 4000, "pinned": [5, 10]},
    {
        "event": "answer",
        "id": 1,
        "steps": {"5": {"0": {"sha256": SHA, "bytes": 900, "attempt": 1, "own": True}}},
        "damaged": {"1": "truncated"},
        "failed": {"2": "gone"},
    },
    {"event": "answer", "id": 1, "error": "no such step"},
    {
        "event": "replicated",
        "step": 5,
        "attempt": 1,
        "from": HONEST,
        "layers": {"0": {"sha256": SHA, "bytes": 900}},
        "bytes": 900,
        "wall_s": 0.2,
    },
    {"event": "unreplicated", "from": HONEST, "error": "it is gone"},
    LOG,
    ERROR,
    EXIT,
)

AGENT: Sequence[Message] = (
    {
        "op": "hello",
        "session": "s-abc",
        "folder": "/c/sessions/s-abc",
        "cache": "/c",
        "home": "/home/ada",
        "cwd": "/",
        "hostname": "n",
        "platform": "Linux",
        "python": "3.11.7",
        "version": "1",
        "pid": 7,
        "guardian": 8,
        "addresses": [["lo", "127.0.0.1"], ["eth0", "192.0.2.1"]],
        "lease_s": 30.0,
        "hold_s": 600.0,
        "tasks": [{"task": 1, "name": "rank-0", "gone": None, "returncode": None, "signal": None}],
        "highest": 3,
        "received": 2,
        "n": 4,
        "r": 5,
    },
    {"op": "fault", "error": "no room", "path": "/c", "gone": False, "taken": False},
    {"op": "ending", "why": "its input ended"},
    {"op": "bye", "left": [4, 5]},
    {"op": "ack", "n": 3},
    {"op": "event", "task": 1, "message": LOG, "n": 1},
    {"op": "gone", "task": 1, "returncode": 0, "signal": None, "n": 2},
    {"op": "reply", "id": 3, "path": "/c/blobs/x", "error": None, "sha256": SHA, "r": 1},
    {"op": "size", "id": 3, "bytes": 10, "r": 2},
    {"op": "chunk", "id": 3, "r": 3},
)

CHECK: Mapping[str, Message] = {
    "clock": {"event": "answer", "id": 1, "time_s": 1.7e9},
    "facts": {
        "event": "answer",
        "id": 1,
        "python": "3.11.7",
        "executable": "/usr/bin/python3",
        "cpus": 2,
        "cpu_quota": 1.5,
        "memory_total_bytes": 2**34,
        "memory_available_bytes": 2**33,
        "memory_limit_bytes": None,
        "nofile": [1024, 4096],
        "shm_bytes": 2**26,
        "cache": {"path": "/c", "free_bytes": 2**35},
        "tmp": {"path": "/tmp", "free_bytes": 2**30},
    },
    "listen": {"event": "answer", "id": 1, "port": 4000},
    "connect": {"event": "answer", "id": 1, "results": {HONEST: {"connect_s": 0.01}, "b": {"error": "no"}}},
}
TORCH: Message = {
    "event": "result",
    "torch": "2.6.0",
    "distributed": True,
    "threads": 2,
    "devices": [{"id": "cuda:0", "name": "a card", "memory_bytes": 2**34}],
    "missing": ["cuda:1"],
    "faults": {"cuda:0": "driver too old"},
    "dtypes": [{"dtype": "bfloat16", "works": True, "max_cpu_isa": "avx2", "died_by": "SIGILL"}],
}

SETUP: Mapping[str, Sequence[Message]] = {
    "look": (
        {
            "event": "result",
            "python": "/usr/bin/python3",
            "version": "3.11.7",
            "base": "/usr 3.11.7 x86_64",
            "system": "Linux",
            "machine": "x86_64",
            "glibc": "2.35",
            "root": "/home/ada/env",
            "free_bytes": 2**34,
            "cards": ["NVIDIA"],
            "torch": "2.6.0",
            "distributed": True,
            "fault": None,
            "versions": {"numpy": "2.1"},
            "had": ["numpy>=2"],
        },
    ),
    "make": (
        {
            "event": "result",
            "path": "/home/ada/env/x",
            "python": "/home/ada/env/x/bin/python",
            "made": True,
            "torch": "2.6.0",
            "size_bytes": 10**9,
        },
        {"event": "result", "offline": "no index answers"},
        {"event": "result", "refused": "no torch 9"},
    ),
    "remove": (
        {"event": "result", "removed": ["/e/x"], "shared": [], "busy": {"/e/y": [7]}, "freed_bytes": 5},
    ),
}

TRACE: Message = {
    "clocks": {
        "start": {"at_s": 1.0, "offset_s": 0.1, "error_s": 0.01},
        "end": {"at_s": 9.0, "offset_s": 0.1, "error_s": 0.01},
    },
    "steps": [{"step": 0, "start_s": 1.0, "end_s": 2.0, "spans": [["F", 0, 1.0, 1.5], ["B", 0, 1.5, 1.9]]}],
}

BLATANT: Sequence[Any] = (
    *ODD,
    10**400,
    -1,
    -1e300,
    "x" * 100_000,
    "../../etc/passwd",
    "\ud800\x1b]0;owned\x07",
    [[[[[[[[[[]]]]]]]]]],
    None,
    True,
)
"""Values that are put in the place of each of an event's own."""


def lies(rng: random.Random, events: Sequence[Message], count: int, key: str = "event") -> Iterator[Message]:
    """So many mutations of those events, as they arrive: what JSON can't hold was never sent."""
    made = 0
    while made < count:
        event = rng.choice(events)
        lie = structural(event, rng, rng.choice([1, 1, 2, 4]))
        if not isinstance(lie, dict):
            continue
        if rng.random() < 0.3 and lie:
            name = rng.choice(sorted(lie))
            lie[name] = rng.choice(BLATANT)
        if rng.random() < 0.01 and lie:
            lie[rng.choice(sorted(lie))] = rng.choice([[0] * 100_001, {str(n): n for n in range(100_001)}])
        if rng.random() < 0.1:
            lie = {**event, key: rng.choice(["", "sing", None, 7, [], {}, "x" * 5000])}
        made += 1
        yield json.loads(json.dumps(lie))
