"""The cut is compared with the model itself: each mend, taken out, is seen; rounding and repeats are not."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyctl.errors import WorkloadError
from skyctl.worker.cut_check import comparison
from skyctl.worker.cut_check.comparison import compare_cut
from skyctl.workload import deferred_init, layered_model, optimizers, weight_gradients
from skyctl.workload.autocut import call_context, module_cutter, traced_layer
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import make_spec

FOLDER = Path(__file__).parents[2] / "brought" / "workloads"
Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.filterwarnings("ignore")  # what the users' own code warns of


@pytest.fixture(autouse=True)
def as_before() -> Any:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def load(name: str) -> Workload:
    return load_workload(make_spec(str(FOLDER / f"{name}.py"), batch_size=8))


def nothing(*_: object, **__: object) -> None:
    """In the place of a mend."""


def no_foreign_tensors_refused(patch: Patch) -> None:
    patch.setattr(optimizers, "_refuse_other_tensors", nothing)


def no_hooks_carried(patch: Patch) -> None:
    patch.setattr(layered_model, "carry_hooks", nothing)


def no_backward_hooks_seen(patch: Patch) -> None:
    patch.setattr(module_cutter, "module_hooks", lambda _module, *, backward: [])


def no_hooks_of_a_sequence_seen(patch: Patch) -> None:
    patch.setattr(layered_model, "module_hooks", lambda _module, *, backward: [])


def no_modes_kept(patch: Patch) -> None:
    none: frozenset[str] = frozenset()
    patch.setattr(traced_layer.ModuleModes, "read", classmethod(lambda cls, _model: cls(none, none)))


def no_counters_refused(patch: Patch) -> None:
    patch.setattr(module_cutter, "_refuse_counters", nothing)
    patch.setattr(comparison, "_find_counter", nothing)


def no_autocast_entered(patch: Patch) -> None:
    patch.setattr(call_context.CallContext, "entered", lambda *_: torch.enable_grad())


def nothing_lost_seen(patch: Patch) -> None:
    patch.setattr(call_context.ContextWatch, "what_is_lost", nothing)


def draws_by_whoever_asks(patch: Patch) -> None:
    run = deferred_init.OperationTape._run

    def redrawn(tape: Any, op: Any, values: Any) -> None:
        run(tape, op if op.draw is None else replace(op, draw=tape.next_draw()), values)

    patch.setattr(deferred_init.OperationTape, "_run", redrawn)


def shared_casts_not_seen(patch: Patch) -> None:
    patch.setattr(weight_gradients, "Counter", lambda casts: dict.fromkeys(casts, 1))


MENDS = [
    (no_foreign_tensors_refused, "optimizer_of_global_net", "after two steps: off by"),
    (no_hooks_carried, "hook_scales_parameter_gradient", "the gradient of"),
    (no_hooks_carried, "hook_masks_gradient", "the gradient of"),
    (no_backward_hooks_seen, "hook_backward_on_container", "the gradient of"),
    (no_hooks_of_a_sequence_seen, "hook_forward_on_root", "the outputs of microbatch 1 of step 1"),
    (no_modes_kept, "frozen_norms_by_train", "off by"),
    (no_counters_refused, "warmup_counter", "the outputs of microbatch"),
    (no_counters_refused, "counter_in_dict", "recomputation"),
    (no_autocast_entered, "autocast_whole", r" is the first; autocast_whole"),
    (nothing_lost_seen, "fork_rng", "off by"),
    (draws_by_whoever_asks, "teacher_copy", "begins as a copy of"),
    (shared_casts_not_seen, "autocast_reused_layer", "zero-bubble"),
]


@pytest.mark.parametrize(("take_out", "name", "words"), MENDS, ids=[f"{m.__name__}-{n}" for m, n, _ in MENDS])
def test_a_mend_taken_out_is_seen(
    take_out: Callable[[Patch], None], name: str, words: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(sys, "argv", ["skyctl"])
    take_out(monkeypatch)
    with pytest.raises(WorkloadError, match=words) as error:
        compare_cut(load(name))
    assert name in error.value.message
    assert error.value.hint


@pytest.mark.parametrize("name", sorted({name for _, name, _ in MENDS}))
def test_with_all_mends_it_is_right_or_refused_by_its_line(name: str) -> None:
    outcome = ""
    try:
        outcome = compare_cut(load(name)).verdict
    except WorkloadError as exc:
        outcome = exc.message
    assert outcome == "same" or f"{name}.py, line " in outcome


COUNTING = """
from torch import nn


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


def model():
    return [Counting(), Counting(), nn.Linear(8, 4)]
"""


def test_a_counter_that_nothing_looks_at_does_no_harm(tmp_path: Path) -> None:
    data = (FOLDER / "batchnorm1d.py").read_text()
    path = tmp_path / "counting.py"
    path.write_text("import torch\n" + COUNTING + "\n\n" + data[data.index("def data(") :])
    assert compare_cut(load_workload(make_spec(str(path), batch_size=8))).verdict == "same"


TIED = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(9, 8)
        self.encoder = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8))
        self.encoder[0].weight = self.shared.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
        return x


def model():
    return Tied()


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randint(0, 8, (batch_size,), generator=g)
        yield x, x
"""


def test_a_parameter_may_have_a_name_that_no_layer_uses(tmp_path: Path) -> None:
    (tmp_path / "tied.py").write_text(TIED)
    assert compare_cut(load_workload(make_spec(str(tmp_path / "tied.py"), batch_size=8))).verdict == "same"


def test_an_optimizer_across_parameters_is_refused() -> None:
    with pytest.raises(WorkloadError, match="after two steps: off by") as error:
        compare_cut(load("optimizer_clips"))
    assert "--clip-norm" in str(error.value.hint)


def test_built_in_models_are_compared_with_their_layers_in_one_process() -> None:
    spec = make_spec("gpt:layers=2,hidden=16,heads=2,context=8", batch_size=4)
    assert compare_cut(load_workload(spec)).verdict == "same"


NOISY = """
import os

import torch
from torch import nn


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big"))
        return self.linear(x) + torch.rand(x.shape, generator=generator)


def model():
    return [nn.Linear(4, 4), Noisy(), nn.Linear(4, 2)]


def example(batch_size):
    return torch.randn(batch_size, 4), torch.randint(0, 2, (batch_size,))


def data(batch_size, seed):
    while True:
        yield example(batch_size)
"""


def test_a_model_that_differs_from_its_own_repeat_is_reported(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    compared = compare_cut(load_workload(make_spec(str(tmp_path / "noisy.py"), batch_size=4)))
    assert compared.verdict == "unrepeatable"
    assert "outputs of microbatch 1" in str(compared.reason)


@pytest.mark.parametrize("name", ["batchnorm1d", "teacher_copy", "autocast_whole"])
def test_a_node_may_lack_numpy(name: str, monkeypatch: Patch) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", lacking)
    assert compare_cut(load(name)).verdict == "same"


def test_an_optimizer_that_draws_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"after two steps: off by .*line \d+") as error:
        compare_cut(load("opt_gradient_noise"))
    assert "draws random numbers in step()" in str(error.value.hint)


def test_it_stops_when_its_time_is_over() -> None:
    compared = compare_cut(load("batchnorm1d"), limit_s=0.0)
    assert (compared.verdict, compared.reason) == ("not compared", "it takes more than 0 s")


def test_generators_are_as_before() -> None:
    states = torch.get_rng_state(), random.getstate()
    compare_cut(load("batchnorm1d"))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_model_that_fails_in_plain_torch_is_named(tmp_path: Path) -> None:
    loss = "def loss(outputs, targets):\n    outputs.sum().backward()\n    return outputs.sum()\n"
    (tmp_path / "broken.py").write_text((FOLDER / "batchnorm1d.py").read_text() + "\n\n" + loss)
    with pytest.raises(WorkloadError, match="it fails in plain torch, without skyctl"):
        compare_cut(load_workload(make_spec(str(tmp_path / "broken.py"), batch_size=8)))
