"""How long a peer takes to be let in while strangers knock, by round trip and flood; one JSON line.

A lab of three nodes: a listener, its peer, and strangers who open connections and say nothing, from a node of
their own or from the peer's own address. Each figure is of ``PEERS`` peers, one after the other: how many
were let in within ``LIMIT_S``, and the median and the longest time. Needs root. Run:
``python benchmarks/admission.py``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from surviving.lab import of_tests

PEERS = 10
LIMIT_S = 5.0
ROUND_TRIPS_MS = (20, 100)
FLOODS_PER_S = (0, 300, 3000)

LISTENER = f"""
import sys
from skyctl.transport.handshake import AuthenticatingListener, open_listener
gate = AuthenticatingListener(open_listener(sys.argv[1]), "secret", purpose="p", log=lambda line: None)
print(gate.port, flush=True)
for _ in range({PEERS}):
    gate.accept(600.0).sock.close()
print(gate.refused_count, flush=True)
"""
PEER = f"""
import json, sys, time
from skyctl.transport.handshake import connect_authenticated
took = []
for _ in range({PEERS}):
    began = time.monotonic()
    try:
        where = sys.argv[1], int(sys.argv[2])
        connect_authenticated(*where, "secret", purpose="p", timeout_s={LIMIT_S}).sock.close()
        took.append(time.monotonic() - began)
    except OSError:
        pass
print(json.dumps(took), flush=True)
"""
STRANGERS = """
import select, socket, sys, time
host, port, per_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
held, began, made = [], time.monotonic(), 0
print("knocking", flush=True)
while not select.select([sys.stdin], [], [], 0.003)[0]:
    due = int((time.monotonic() - began) * per_s)
    for _ in range(min(due - made, 200)):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex((host, port))
        held.append(sock)
    made = due
    while len(held) > 900:
        held.pop(0).close()
"""


def admitted(state: Any, flood_per_s: int, source: str) -> dict[str, Any]:
    """Figures of one flood from that node."""
    injection = of_tests("lab.fault_injection")
    host = state.node("listener").address

    def start(node: str, program: str, *words: object) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", program, *(str(word) for word in words)]
        return subprocess.Popen(
            injection.command_in_node(state, node, argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    processes = [start("listener", LISTENER, host)]
    try:
        said = processes[0].stdout
        assert said is not None
        port = int(said.readline())
        if flood_per_s:
            processes.append(start(source, STRANGERS, host, port, flood_per_s))
            knocking = processes[-1].stdout
            assert knocking is not None
            knocking.readline()
        processes.append(start("peer", PEER, host, port))
        took = json.loads(processes[-1].communicate(timeout=PEERS * LIMIT_S + 60)[0])
        figures = {"let_in": len(took), "of": PEERS}
        if took:
            figures |= {"median_s": round(median(took), 3), "longest_s": round(max(took), 3)}
        if len(took) == PEERS:
            figures["refused"] = int(said.readline())
        return figures
    finally:
        for process in processes:
            for pipe in (process.stdin, process.stdout):  # strangers go when their standard input ends
                if pipe is not None:
                    pipe.close()
            process.kill()
            process.wait()


def main() -> None:
    """Measures and prints."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="skyctl-bench-") as folder:
        os.environ["SKYCTL_HOME"] = str(Path(folder) / "labs")
        from skyctl.lab.lab_setup import up
        from skyctl.lab.lab_spec import LabSpec
        from skyctl.lab.teardown import down

        for trip_ms in ROUND_TRIPS_MS:
            sites = {"listener": "here", "peer": "there", "strangers": "there"}
            nodes = [
                {"name": name, "cpus": 0.5, "memory_gib": 1, "site": site} for name, site in sites.items()
            ]
            name = f"admission-{os.getpid()}"
            spec = {"nodes": nodes, "sites": {"latency_ms": trip_ms / 2}}
            state = up(LabSpec.model_validate(spec), name=name)
            try:
                for flood_per_s in FLOODS_PER_S:
                    for source in ("strangers", "peer") if flood_per_s else ("strangers",):
                        case = {"round_trip_ms": trip_ms, "flood_per_s": flood_per_s, "from": source}
                        found.append(case | admitted(state, flood_per_s, source))
            finally:
                down(name)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
