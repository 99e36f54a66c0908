"""A checkpoint of one plan, gone on with under another: the losses are those of the undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.worker.workloads import DROPOUT, VALIDATION, edit_workload

from skyctl.checkpoint.node import layout
from skyctl.schedule.actions import SCHEDULES
from skyctl.workload.recipe import Recipe

Workloads = Callable[..., dict[str, Any]]
STEPS, AT, MICROBATCHES = 8, 6, 4
FOUR = [0, 2, 4, 5, 7]
CUTS = {1: [0, 7], 2: [0, 3, 7], 3: [0, 2, 5, 7], 4: FOUR, 6: [0, 1, 2, 3, 4, 5, 7]}
OPTIMIZERS = {
    "momentum": "torch.optim.SGD(parameters, lr=0.1, momentum=0.9)",
    "amsgrad in two groups": (
        "torch.optim.Adam([{'params': [p for p in parameters if p.ndim > 1], 'weight_decay': 0.1}, "
        "{'params': [p for p in parameters if p.ndim <= 1]}], lr=0.01, amsgrad=True)"
    ),
    "adagrad": "torch.optim.Adagrad(parameters, lr=0.05)",
    "adafactor": "torch.optim.Adafactor(parameters, lr=0.02)",
}
EPOCHS = ("    while True:\n", "    for _ in range(5):\n")
BATCH_NORM = ("nn.Linear(8, 8), nn.GELU(), Head()", "Norm(), nn.GELU(), Head()")
NORM = """
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.norm(x) * (1 + self.seen / 100)
"""
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="a full disk is a small one that root mounts")


@pytest.fixture(scope="module")
def six(driver: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Six processes."""
    pool = driver.Pool(6, tmp_path_factory.mktemp("six"))
    try:
        yield pool
    finally:
        pool.close()


def run(six: Any, driver: ModuleType, spec: Any, cuts: list[int], **options: Any) -> Any:
    options = {"schedule": "1f1b", "steps": STEPS, **options}
    schedule, steps = options.pop("schedule"), options.pop("steps")
    outcome = six.run(driver.orders(spec, cuts, MICROBATCHES, schedule, steps, **options))
    assert not outcome.errors, (cuts, outcome.errors)
    return outcome


def keeping(folder: Path, **options: Any) -> dict[str, Any]:
    return {"folder": str(folder), "every": 3, "keep": 2, **options}


def resuming(outcome: Any, folder: Path, step: int = AT) -> dict[str, Any]:
    layers = {
        layer: entry["sha256"]
        for events in outcome.checkpoints.values()
        for event in events
        if event["step"] == step
        for layer, entry in event["layers"].items()
    }
    assert sorted(map(int, layers)) == list(range(7))
    return {"step": step, "folder": str(folder), "layers": layers}


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(name, marks=() if name in ("1f1b", "zero-bubble") else pytest.mark.matrix)
        for name in SCHEDULES
    ],
)
def test_a_checkpoint_of_four_goes_on_on_any_number(
    schedule: str, workload: Workloads, six: Any, driver: ModuleType, tmp_path: Path
) -> None:
    spec, folder = workload(), tmp_path / "cache" / "runs" / "r"
    whole = run(six, driver, spec, FOUR, schedule=schedule, checkpoint=keeping(folder))
    assert [event["step"] for event in whole.checkpoints[0]] == [3, 6]
    resume = resuming(whole, folder)
    for number, cuts in CUTS.items():
        for other in dict.fromkeys((schedule, "1f1b")):
            rest = run(six, driver, spec, cuts, schedule=other, resume=resume)
            assert [event["step"] for event in rest.steps[0]] == list(range(AT, STEPS))
            assert rest.losses == pytest.approx(whole.losses[AT:], rel=1e-5), (number, other)
            assert {result["steps"] for result in rest.results.values()} == {STEPS}
    again = run(six, driver, spec, FOUR, schedule=schedule, resume=resume)
    assert again.losses == whole.losses[AT:], "to the last bit on the same cut"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_users_own_optimizer_and_data(
    optimizer: str, workload: Workloads, six: Any, driver: ModuleType, tmp_path: Path
) -> None:
    given = "torch.optim.AdamW(parameters, lr=0.01)"
    spec = edit_workload(workload(), (given, OPTIMIZERS[optimizer]), EPOCHS, BATCH_NORM, text=NORM)
    whole = run(six, driver, spec, FOUR, checkpoint=keeping(tmp_path / "r"), weights=True)
    resume = resuming(whole, tmp_path / "r")
    for number in (1, 4):
        rest = run(six, driver, spec, CUTS[number], resume=resume)
        assert rest.losses == pytest.approx(whole.losses[AT:], rel=1e-5), number
    assert rest.losses == whole.losses[AT:]


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_all_that_a_recipe_can_ask_for(
    dtype: str, workload: Workloads, six: Any, driver: ModuleType, tmp_path: Path
) -> None:
    spec = edit_workload(workload(), DROPOUT, text=VALIDATION) | {"dtype": dtype}
    recipe = Recipe(
        clip_norm=0.4,
        lr_schedule="cosine",
        warmup_steps=3,
        min_learning_rate=1e-4,
        validate_every=2,
        total_steps=STEPS,
    ).to_dict()
    whole = run(six, driver, spec, FOUR, recipe=recipe, checkpoint=keeping(tmp_path / "r"))
    assert sorted(whole.validation) == [1, 3, 5, 7]
    resume = resuming(whole, tmp_path / "r")
    for number, cuts in CUTS.items():
        rest = run(six, driver, spec, cuts, recipe=recipe, resume=resume)
        expected = whole.losses[AT:]
        assert rest.losses == pytest.approx(expected, rel=1e-5 if dtype == "float32" else 1e-3), number
        assert rest.validation == pytest.approx({7: whole.validation[7]}, rel=1e-3), number
        rates = [[event["learning_rate"] for event in outcome.steps[0]] for outcome in (rest, whole)]
        assert rates[0] == rates[1][AT:]
        norms = [[event["grad_norm"] for event in outcome.steps[0]] for outcome in (rest, whole)]
        assert norms[0] == pytest.approx(norms[1][AT:], rel=1e-5 if dtype == "float32" else 1e-2)


def test_recomputing_stages_and_the_standard_optimizer_of_a_built_in_model(
    six: Any, driver: ModuleType, tmp_path: Path
) -> None:
    from skyctl.workload.workload_spec import WorkloadSpec

    spec = WorkloadSpec(
        source="gpt:layers=3,hidden=16,heads=2,context=8", batch_size=6, seed=2, random_inputs=True
    ).to_dict()
    cuts = [0, 2, 5, 8]
    whole = run(six, driver, spec, cuts, recompute=True, checkpoint=keeping(tmp_path / "r"))
    rest = run(six, driver, spec, [0, 8], resume={"step": AT, "folder": str(tmp_path / "r")})
    assert rest.losses == pytest.approx(whole.losses[AT:], rel=1e-5)


def test_checkpoints_at_the_end_and_where_a_run_is_told_to_stop(
    workload: Workloads, six: Any, driver: ModuleType, tmp_path: Path
) -> None:
    spec = workload()
    checkpoint = keeping(tmp_path / "end", every=0, at_end=True)
    whole = run(six, driver, spec, CUTS[2], steps=5, checkpoint=checkpoint)
    assert [[event["step"] for event in events] for events in whole.checkpoints.values()] == [[5], [5]]
    done = run(six, driver, spec, CUTS[3], steps=5, resume={"step": 5, "folder": str(tmp_path / "end")})
    assert not done.steps, "nothing is left to do"

    def stop(pool: Any, rank: int, event: dict[str, Any]) -> None:
        if rank == 0 and event.get("step") == 1 and event["event"] == "step":
            pool.processes[0].send({"op": "stop"})

    orders = driver.orders(
        spec, CUTS[3], MICROBATCHES, "1f1b", 100_000, checkpoint=keeping(tmp_path / "stop", every=0)
    )
    outcome = six.run(orders, stop)
    assert not outcome.errors
    (steps,) = {result["steps"] for result in outcome.results.values()}
    assert {event["step"] for events in outcome.checkpoints.values() for event in events} == {steps}
    more = {"steps": steps + 2, "resume": {"step": steps, "folder": str(tmp_path / "stop")}}
    assert len(run(six, driver, spec, CUTS[2], **more).losses) == 2


def test_the_newest_are_kept_and_the_time_is_in_no_step(
    workload: Workloads, six: Any, driver: ModuleType, tmp_path: Path
) -> None:
    folder = tmp_path / "r"
    layout.make_step_folder(folder, 1)
    layout.pin_steps(folder, [2])
    outcome = run(six, driver, workload(), CUTS[2], checkpoint=keeping(folder, every=1), trace=True)
    assert layout.list_steps(folder) == [2, 7, 8]
    for events in outcome.steps.values():
        for event in events:
            parts = event["compute_s"] + event["transfer_s"] + event["idle_s"]
            assert parts == pytest.approx(event["iteration_s"])
    for events in outcome.checkpoints.values():
        for event in events:
            assert event["wall_s"] > 0
            assert "error" not in event
            assert "notes" not in event
    for path in folder.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_what_earlier_attempts_wrote_of_later_steps_goes(
    workload: Workloads, six: Any, driver: ModuleType, tmp_path: Path
) -> None:
    folder = tmp_path / "r"
    run(six, driver, workload(), FOUR, checkpoint=keeping(folder, every=2, keep=9))
    assert layout.list_steps(folder) == [2, 4, 6, 8]
    keeps = keeping(folder, every=2, keep=9, attempt=1)
    resume = {"step": 4, "folder": str(folder)}
    run(six, driver, workload(), CUTS[2], steps=6, checkpoint=keeps, resume=resume)
    assert layout.list_steps(folder) == [2, 4, 6]
    assert {file.attempt for file in layout.held_shards(folder)[6].values()} == {1}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_cut, "step-00000006/layer-00001.safetensors is truncated"),
        (_flip, "step-00000006/layer-00001.safetensors is damaged"),
        (Path.unlink, "step-00000006/layer-00001.safetensors is missing"),
    ],
)
def test_a_damaged_shard_is_named(
    harm: Callable[[Path], None],
    words: str,
    workload: Workloads,
    six: Any,
    driver: ModuleType,
    tmp_path: Path,
) -> None:
    whole = run(six, driver, workload(), FOUR, checkpoint=keeping(tmp_path / "r"))
    harm(layout.layer_path(tmp_path / "r", AT, 1))
    for resume in (resuming(whole, tmp_path / "r"), {"step": AT, "folder": str(tmp_path / "r")}):
        order = driver.orders(workload(), [0, 7], MICROBATCHES, "1f1b", STEPS, resume=resume)
        error = six.run(order).errors[0]
        assert error["type"] == "RecordError"
        assert "layer 1 (1.Mix) can't go on from step 6" in error["message"]
        assert words in error["message"]


def test_a_shard_of_another_run_is_refused(
    workload: Workloads, six: Any, driver: ModuleType, tmp_path: Path
) -> None:
    spec = workload()
    run(six, driver, spec, FOUR, checkpoint=keeping(tmp_path / "r"))
    resume = {"step": AT, "folder": str(tmp_path / "r")}

    def error(spec: dict[str, Any], **options: Any) -> str:
        changed = {"resume": resume, **options}
        order = driver.orders(spec, [0, 7], MICROBATCHES, "1f1b", STEPS, **changed)
        return str(six.run(order).errors[0]["message"])

    assert "is of seed '3', needed is '4'" in error(spec | {"seed": 4})
    assert "is of dtype 'float32', needed is 'bfloat16'" in error(spec | {"dtype": "bfloat16"})
    assert "is of workload" in error(edit_workload(spec, text="OTHER = 1"))
    assert "is of step 7" in error(spec, resume={**resume, "step": 7}) or "missing" in error(
        spec, resume={**resume, "step": 7}
    )
    assert "the run has 8 steps" in error(spec, resume={**resume, "step": 9})


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("torch.optim.LBFGS(parameters)", "LBFGS's step() needs closure"),
        ("Counting(parameters, lr=0.1)", "Counting keeps state that is not of one parameter ('count')"),
    ],
)
def test_an_optimizer_that_cant_be_kept_is_refused(
    optimizer: str, words: str, workload: Workloads, six: Any, driver: ModuleType, tmp_path: Path
) -> None:
    counting = """
class Counting(torch.optim.SGD):
    def step(self, closure=None):
        self.state["count"] = self.state.get("count", 0) + 1
        return super().step(closure)
"""
    spec = edit_workload(workload(), ("torch.optim.AdamW(parameters, lr=0.01)", optimizer), text=counting)
    order = driver.orders(spec, [0, 7], MICROBATCHES, "1f1b", 3, checkpoint=keeping(tmp_path / "r"))
    error = six.run(order).errors[0]
    assert error["type"] == "WorkloadError"
    assert words in error["message"]
    assert not list((tmp_path / "r").rglob("*.*")), "nothing is left of it"


@ROOT
def test_a_full_disk_stops_no_run_and_nothing_half_written_is_left(
    workload: Workloads, six: Any, driver: ModuleType, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], check=True)
    try:
        folder = small / "r"
        outcome = run(six, driver, workload(), [0, 7], checkpoint=keeping(folder, every=1, keep=0))
        events = outcome.checkpoints[0]
        failed = [event for event in events if "error" in event]
        assert len(outcome.losses) == STEPS
        assert failed
        assert len(failed) < len(events)
        assert all("No space left" in event["error"] and not event["layers"] for event in failed)
        held = layout.held_shards(folder)
        assert sorted(held) == [event["step"] for event in events if "error" not in event]
        for step, layers in held.items():
            assert sorted(layers) == list(range(7))
            assert not any(layout.find_fault(folder, step, layer) for layer in layers)
        files = {path.name for path in folder.rglob("*") if path.is_file()}
        assert all(name.startswith(("layer-", "part-")) for name in files)
        assert len(list(folder.iterdir())) == len(held)
        step = max(held)
        rest = run(six, driver, workload(), CUTS[2], resume={"step": step, "folder": str(folder)})
        assert rest.losses == pytest.approx(outcome.losses[step:], rel=1e-5)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_the_manifest_says_what_was_written(
    workload: Workloads, six: Any, driver: ModuleType, tmp_path: Path
) -> None:
    outcome = run(six, driver, workload(), CUTS[2], checkpoint=keeping(tmp_path / "r"))
    raw = json.loads((tmp_path / "r" / "step-00000006" / "part-0001.json").read_text())
    event = outcome.checkpoints[1][-1]
    assert raw["range"] == [3, 7]
    assert raw["layers"] == {
        layer: {"file": f"layer-{int(layer):05d}.safetensors", **entry}
        for layer, entry in event["layers"].items()
    }
    assert (raw["run_id"], raw["rank"], raw["step"], raw["attempt"]) == ("test", 1, 6, 0)


GROUPS = """
    quiet = [p for name, p in named if name.endswith(("bias", "norm.weight"))]
    rest = [p for name, p in named if all(p is not one for one in quiet)]
    assert all(name.split(".")[0].isdigit() for name, _ in named)
    return torch.optim.AdamW([{"params": quiet, "weight_decay": 0.0, "lr": 0.02}, {"params": rest}], lr=0.01)

def lr_scheduler(optimizer, steps):
    return CHOSEN
"""
CYCLE = "torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.03], total_steps=steps)"
CHAINED = (
    "torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "
    "torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, steps // 2)])"
)


@pytest.mark.parametrize(
    ("chosen", "dtype"),
    [
        (CYCLE, "float32"),
        (CYCLE, "bfloat16"),
        (CHAINED, "float32"),
    ],
    ids=["momentum, too", "in bfloat16", "chained"],
)
def test_groups_by_name_and_the_users_own_rates(
    chosen: str, dtype: str, workload: Workloads, six: Any, driver: ModuleType, tmp_path: Path
) -> None:
    """Some stages have no parameter in a group, one has none at all."""
    spec = edit_workload(
        workload(),
        ("def optimizer(parameters):", "def optimizer(parameters, named):"),
        ("    return torch.optim.AdamW(parameters, lr=0.01)\n", GROUPS.replace("CHOSEN", chosen)),
    ) | {"dtype": dtype}
    whole = run(six, driver, spec, FOUR, checkpoint=keeping(tmp_path / "r"))
    rates = [event["learning_rate"] for event in whole.steps[0]]
    assert len(set(rates)) > 3
    resume = resuming(whole, tmp_path / "r")
    for number in (1, 3, 6):
        rest = run(six, driver, spec, CUTS[number], resume=resume)
        expected = pytest.approx(whole.losses[AT:], rel=1e-5 if dtype == "float32" else 1e-3)
        assert rest.losses == expected, number
        for rank, events in rest.steps.items():
            rates_seen = [event["learning_rate"] for event in events]
            assert rates_seen in (rates[AT:], [None] * (STEPS - AT)), (number, rank)
    again = run(six, driver, spec, FOUR, resume=resume)
    assert again.losses == whole.losses[AT:]
