"""A figure of how rhythms and compressed sums change a step's time, as predicted, and the loss, as trained.

Times are predictions for three devices that are alike and a model of 13 MB, so they are of no machine;
losses are of a small GPT, trained on this one.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.worker import reference
from tests.worker.sums import star

from runs.driver import worker_driver
from skyctl import plan
from skyctl.records.problem import Problem
from skyctl.records.rhythm import Rhythm
from skyctl.schedule.stale_simulation import WorkerTimes, simulate_stale
from skyctl.worker.updates.update_delay import UpdateDelay
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import WorkloadSpec

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "rhythms.png"
GPT = "gpt:layers=4,hidden=128,heads=4,context=64"
DEVICES, LAYERS, WIDTH, MATRICES = 3, 4, 256, 12
"""Each layer has so many square matrices."""
GRADIENT_BYTES = 4.0 * WIDTH * WIDTH * MATRICES
COMPUTE_S, SHARE = 0.5, 4
"""Of each device's part of a step, and its microbatches."""
LATENCY_S, REDUCE_BYTE_S, MESSAGE_BYTE_S = 1e-3, 2e-10, 1e-9
CLOCKS, WORKERS, SEED = 5_000, 4, 25
STEPS, COMPRESSED_STEPS, MEAN_OF = 200, 50, 10
RATES_MBIT = (5, 10, 20, 50, 100, 200, 500, 1000)

Line = tuple[str, Sequence[float], Sequence[float]]
"""A label, x and y."""


def draw() -> Path:
    """Writes the figure; a minute or two of training."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: list[tuple[str, str, str, str, Callable[[], list[Line]]]] = [
        ("Delayed updates", "sum ÷ computing", "times as fast", "linear", _delays),
        ("Staleness, 4 workers", "steps ahead at most", "times as fast", "linear", _staleness),
        ("Local steps, 10 Mbit/s", "local steps a round", "s for a step's samples", "log", _rounds),
        ("Compressed sums", "Mbit/s", "s a step", "log", _formats),
        ("Loss with a delay (AdamW, 1e-3)", "step", "loss", "linear", _delayed_losses),
        ("Loss with compressed sums", "step", "loss", "linear", _compressed_losses),
    ]
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    for plot, (title, x, y, scale, lines) in zip(figure.subplots(2, 3).flat, panels, strict=True):
        for label, xs, ys in lines():
            plot.plot(xs, ys, label=label, marker="." if len(xs) < COMPRESSED_STEPS else None)
        plot.set(title=title, xlabel=x, ylabel=y, xscale=scale, yscale=scale)
        plot.title.set_fontsize(10)
        plot.grid(alpha=0.3)
        plot.legend(fontsize=7.5)
    figure.savefig(PICTURE, dpi=110)
    return PICTURE


def problem(rate_mbit: float, gradient_bytes: float = GRADIENT_BYTES, **fields: Any) -> Problem:
    """Devices that are alike, every two of them linked at that rate."""
    ids = [f"n{number}/cpu:0" for number in range(DEVICES)]
    layer = {
        "flops": 1.0,
        "state_bytes": 4 * gradient_bytes,
        "gradient_bytes": gradient_bytes,
        "gradient_matrices": [[WIDTH, WIDTH]] * MATRICES if gradient_bytes >= GRADIENT_BYTES else [],
        "activation_bytes": 1e5,
        "output_bytes": 1e5,
    }
    device = {"flops_per_s": 1.0, "reduce_byte_s": REDUCE_BYTE_S, "message_byte_s": MESSAGE_BYTE_S}
    times = {
        "forward_s": [COMPUTE_S / 3 / LAYERS / SHARE] * LAYERS,
        "backward_s": [COMPUTE_S * 2 / 3 / LAYERS / SHARE] * LAYERS,
        "optimizer_s": [0.0] * LAYERS,
    }
    link = {"latency_s": LATENCY_S, "bandwidth_bytes_per_s": rate_mbit * 1e6 / 8}
    return Problem.model_validate(
        {
            "layers": [{"name": f"l{number}", **layer} for number in range(LAYERS)],
            "devices": [{"id": name, "memory_bytes": None, **device} for name in ids],
            "times": dict.fromkeys(ids, times),
            "links": [{"source": a, "target": b, **link} for a, b in itertools.permutations(ids, 2)],
            "microbatches": DEVICES * SHARE,
            "parallel": "data",
            "sync": "ring",
            **fields,
        }
    )


def _step_s(asked: Problem) -> float:
    """As predicted with a share for every device: fewer would do for slow lines."""
    shares = [(device.id, SHARE) for device in asked.devices]
    return plan(asked, assign=shares).predicted.iteration_s


def _delays() -> list[Line]:
    """Along links whose sum takes ever longer beside the computing."""
    ratios = [0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0]
    lines: list[Line] = []
    for label, message_byte_s in (("processor free", 0.0), ("its part of sums: a fifth", 0.1 * COMPUTE_S)):
        gains = []
        for ratio in ratios:
            size = LAYERS * GRADIENT_BYTES
            sent = 2 * (DEVICES - 1) / DEVICES * size
            asked = problem(8e-6 * sent / (ratio * COMPUTE_S))
            devices = [
                one.model_copy(update={"message_byte_s": message_byte_s / sent, "reduce_byte_s": 0.0})
                for one in asked.devices
            ]
            plain = asked.model_copy(update={"devices": tuple(devices)})
            gains.append(_step_s(plain) / _step_s(plain.model_copy(update={"rhythm": Rhythm(delay=1)})))
        lines.append((label, ratios, gains))
    return lines


def _staleness() -> list[Line]:
    """Steps of 50 ms, of which a part takes ten times as long."""
    lines: list[Line] = []
    for stalls in (0.05, 0.1, 0.2):
        rng = random.Random(SEED)
        workers = [
            WorkerTimes([0.5 if rng.random() < stalls else 0.05 for _ in range(CLOCKS)])
            for _ in range(WORKERS)
        ]
        most = list(range(11))
        took = [simulate_stale(workers, number).clock_s(CLOCKS // 10) for number in most]
        lines.append((f"{stalls:.0%} of steps stall", most, [took[0] / each for each in took]))
    return lines


def _rounds() -> list[Line]:
    """A round's seconds for each step's worth of samples."""
    counts = [1, 2, 5, 10, 20, 50, 100]
    lines: list[Line] = []
    for name in ("float32", "bfloat16", "int8"):
        took = [
            _step_s(problem(10, sync_format=name, rhythm=Rhythm(local_steps=count))) / count
            for count in counts
        ]
        lines.append((f"average as {name}", counts, took))
    return [*lines, ("sums each step", counts, [_step_s(problem(10))] * len(counts))]


def _formats() -> list[Line]:
    return [
        (name, RATES_MBIT, [_step_s(problem(rate, sync_format=name)) for rate in RATES_MBIT])
        for name in ("float32", "bfloat16", "int8", "powersgd:4")
    ]


def _delayed_losses() -> list[Line]:
    """The plain loop of tests, in which a step's gradients are applied at once or after the next."""
    spec = WorkloadSpec(source=GPT, batch_size=16).to_dict()
    recipe = Recipe(total_steps=STEPS)
    found = {
        "without": reference.train(spec, 4, recipe).losses,
        "with": reference.train(spec, 4, recipe, UpdateDelay(STEPS, 0, ()).settles).losses,
    }
    return [(label, *_smooth(losses)) for label, losses in found.items()]


def _smooth(losses: Sequence[float]) -> tuple[list[int], list[float]]:
    """Running means, each at its last step."""
    ends = range(MEAN_OF, len(losses) + 1)
    return [*ends], [sum(losses[end - MEAN_OF : end]) / MEAN_OF for end in ends]


def _compressed_losses() -> list[Line]:
    """Two ranks of this machine, in float32 and with rank 4 after ten uncompressed steps."""
    spec = WorkloadSpec(source=GPT, batch_size=8, seed=1)
    layers = load_workload(spec).layers
    driver = worker_driver()
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        pool = driver.Pool(2, Path(folder))
        try:
            for label, sync in (
                ("float32", {}),
                ("powersgd:4 after 10 steps", {"format": "powersgd:4", "uncompressed_steps": 10}),
            ):
                told = {"chunk_bytes": 65536, **sync}
                made = driver.side_by_side(
                    spec.to_dict(), layers, [2, 2], star(2), COMPRESSED_STEPS, sync=told
                )
                outcome = pool.run(made)
                if outcome.errors:
                    raise RuntimeError(f"{label}: {outcome.errors}")
                lines.append((label, [*range(1, COMPRESSED_STEPS + 1)], outcome.losses))
        finally:
            pool.close()
    return lines
