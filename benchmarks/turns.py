"""Devices by turns, on this machine: what a switch costs, and what each policy gives. Prints one JSON line.

``switch_ms``: from the end of one job's action to the begin of the other's, median of 1,000 switches.
``throughput_two_over_one``: actions of 16 ms of two equal jobs together ÷ those of one alone.
``kept_turn_us``: a turn that nobody else wants. ``fifo_over_srtf``: mean seconds to completion of a job of
100 steps and five of 10 that come after 10, 20, … 50 steps; the trace's limit is 3. ``fair_*``: two jobs of
unequal actions, and a run of two such ranks beside another run (``runs``), for 40 s. ``off``: how far a
run's device seconds are from an equal part, at most, in any 20 s. ``pack_makespan``: two jobs that wait for
data half of the time, ÷ one after the other. ``opposite_longest_wait_s``: for a turn, of a pipeline of real
ranks over 200 steps, while another one goes through the same three devices in opposite order until a rank of
it is killed. Actions of the other parts are busy for a time that the clock says, as a device's are.
Run: ``python benchmarks/turns.py``.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Queue
from statistics import mean, median
from typing import Any

from runs.driver import worker_driver
from shared_runs import Part, orders

from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import StageTimes
from skyctl.turns.turn_client import list_shared_devices, open_turns
from skyctl.turns.turn_policy import parse_turns
from skyctl.turns.turn_simulation import PlacedPipeline, SharedRun, step_ends

DEVICE = "here/cpu:0"
STEP_S = 0.05
PIPELINE_STEPS = 200
FAIR_S, WINDOW_S = 40.0, 20.0
BEGIN_S = 300.0
"""Six ranks may take so long to import torch."""
Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Load:
    """A job of ``count`` actions of ``seconds``, each after ``gap_s``, from ``arrival_s`` to ``end_s``.

    ``run``: None: one of its own.
    """

    turns: str
    seconds: float
    count: int = 10**9
    arrival_s: float = 0.0
    gap_s: float = 0.0
    end_s: float = 1e9
    run: str | None = None


def main() -> None:
    """Measures all of it, one part after the other."""
    figures = {
        "kept_turn_us": _kept_turn_us(),
        "switch_ms": _switch_ms(),
        "throughput_two_over_one": _throughput(),
        **_fair(),
        **_short_jobs(),
        **_packed(),
        "opposite_longest_wait_s": max(_longest_wait_s(killed) for killed in (0, 1)),
    }
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


def _kept_turn_us() -> float:
    with tempfile.TemporaryDirectory() as cache:
        turns = open_turns("fair", device=DEVICE, job_id="one", cache=Path(cache))
        start, count = time.perf_counter(), 100_000
        for _ in range(count):
            with turns.turn():
                pass
        spent = time.perf_counter() - start
        turns.close()
    return spent / count * 1e6


def _switch_ms() -> float:
    """Actions are longer than a slice, so every one ends in a switch."""
    spans = sorted(span for of_one in _play([Load("fair", 0.051, 501)] * 2) for span in of_one)
    gaps = [begin - end for (_, end), (begin, _) in pairwise(spans)]
    return median(gaps[:1000]) * 1e3


def _throughput() -> float:
    (alone,) = _play([Load("fair", 0.016, end_s=10.0)])
    both = _play([Load("fair", 0.016, end_s=10.0)] * 2)
    return sum(map(len, both)) / len(alone)


def _fair() -> dict[str, float]:
    loads = [Load("fair", seconds, end_s=FAIR_S) for seconds in (0.016, 0.03)]
    jobs = _play(loads)
    used = [_used_s(spans, 0.0, FAIR_S) for spans in jobs]
    ranks = _play([*(replace(load, run="of two") for load in loads), Load("fair", 0.02, end_s=FAIR_S)])
    return {
        "fair_jain": sum(used) ** 2 / (len(used) * sum(of_one**2 for of_one in used)),
        "fair_off": _off(jobs),
        "fair_runs_off": _off([sorted(ranks[0] + ranks[1]), ranks[2]]),
    }


def _off(runs: Sequence[Spans]) -> float:
    """At most, over all windows while all of them are there."""
    first, last = max(spans[0][0] for spans in runs), min(spans[-1][1] for spans in runs)
    begins = {
        at for spans in runs for begin, end in spans for at in (begin, end, begin - WINDOW_S, end - WINDOW_S)
    }
    worst = 0.0
    for begin in begins:
        if first <= begin <= last - WINDOW_S:
            used = [_used_s(spans, begin, begin + WINDOW_S) for spans in runs]
            worst = max(worst, *(abs(of_one / mean(used) - 1.0) for of_one in used))
    return worst


def _used_s(spans: Spans, begin: float, end: float) -> float:
    return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in spans)


def _short_jobs() -> dict[str, float]:
    found = {}
    for kind in ("fifo", "srtf"):
        loads = [
            Load(kind, STEP_S, 100),
            *(Load(kind, STEP_S, 10, at * STEP_S) for at in (10, 20, 30, 40, 50)),
        ]
        played = _play(loads)
        found[kind] = mean(spans[-1][1] - load.arrival_s for spans, load in zip(played, loads, strict=True))
        ends = step_ends([_simulated(load) for load in loads], kind)
        found[f"simulated {kind}"] = mean(
            of_one[-1] - load.arrival_s for of_one, load in zip(ends, loads, strict=True)
        )
    return {
        "fifo_over_srtf": found["fifo"] / found["srtf"],
        "fifo_over_srtf_simulated": found["simulated fifo"] / found["simulated srtf"],
        "srtf_mean_over_simulated": found["srtf"] / found["simulated srtf"],
    }


def _simulated(load: Load) -> SharedRun:
    halves = (StageTimes(load.seconds / 2, load.seconds / 2),)
    pipeline = SimulationInput("sequential", 1, (1,), (0,), halves, ())
    return SharedRun((PlacedPipeline(pipeline, (DEVICE,)),), load.count, arrival_s=load.arrival_s)


def _packed() -> dict[str, float]:
    load = Load("pack", 0.02, 200, gap_s=0.02)
    alone = max(end for spans in _play([load]) for _, end in spans)
    both = max(end for spans in _play([load] * 2) for _, end in spans)
    return {"pack_makespan": both / (2 * alone)}


def _longest_wait_s(killed: int) -> float:
    """Of the pipeline that goes on."""
    driver = worker_driver()
    parts = [Part(devices, ((0.01, 0.02),) * 3, 3) for devices in ("abc", "cba")]
    waits: list[float] = []
    gate = threading.Barrier(len(parts))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pools = [driver.Pool(3, folder) for _ in parts]
        for pool in pools:
            pool.stall_s = BEGIN_S

        def watch(pool: Any, rank: int, event: dict[str, Any]) -> None:
            if event["event"] == "ready" and rank == 2:
                gate.wait(BEGIN_S)
            if (event["event"], rank) != ("step", 0):
                return
            if pool is pools[killed] and event["step"] == PIPELINE_STEPS // 4:
                pool.processes[1].popen.kill()
            if pool is not pools[killed] and event["step"] == PIPELINE_STEPS - 2:
                waits.extend(
                    job.longest_wait_s for listed in list_shared_devices(folder) for job in listed.jobs
                )

        def play(number: int) -> int:
            ranks = orders(driver, folder / str(number), "fair", parts[number], PIPELINE_STEPS)
            return len(pools[number].run(ranks, watch).errors)

        try:
            with ThreadPoolExecutor(2) as threads:
                failed = list(threads.map(play, (0, 1)))
        finally:
            for pool in pools:
                pool.close()
    assert [number for number in (0, 1) if failed[number]] == [killed], failed
    assert len(waits) == 3, "the other's jobs are there yet"
    return max(waits)


def _play(loads: Sequence[Load]) -> list[Spans]:
    """Each job in a process of its own; begin and end of its actions, in seconds since all began."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(len(loads)), context.Queue()
    with tempfile.TemporaryDirectory() as cache:
        processes = [
            context.Process(target=_work, args=(Path(cache), index, load, barrier, queue))
            for index, load in enumerate(loads)
        ]
        for process in processes:
            process.start()
        found = {index: (start, spans) for index, start, spans in (queue.get(timeout=300) for _ in processes)}
        for process in processes:
            process.join()
        time.sleep(0.5)  # the arbiter ends
    start = min(start for start, _ in found.values())
    return [[(begin - start, end - start) for begin, end in found[index][1]] for index in range(len(loads))]


def _work(
    cache: Path, index: int, load: Load, barrier: Barrier, queue: Queue[tuple[int, float, Spans]]
) -> None:
    spans: Spans = []
    barrier.wait()
    start = time.monotonic()
    time.sleep(load.arrival_s)
    turns = open_turns(load.turns, device=DEVICE, job_id=load.run or str(index), cache=cache)
    if parse_turns(load.turns).kind == "pack":
        turns.tell(demand=load.seconds / (load.seconds + load.gap_s))
    for done in range(load.count):
        if time.monotonic() - start >= load.end_s:
            break
        if load.gap_s:
            time.sleep(load.gap_s)
        turns.tell(remaining_s=min(1e9, (load.count - done) * load.seconds))
        with turns.turn():
            begin = time.monotonic()
            while (now := time.monotonic()) < begin + load.seconds:
                pass
        spans.append((begin, now))
    turns.close()
    queue.put((index, start, spans))


if __name__ == "__main__":
    main()
