"""Plans whose sums are compressed: from profiles that know the shapes of gradients, and as advice."""

from __future__ import annotations

import pytest
from tests.learning.profiles import device, profile

from skyctl.cli.command_output import Output
from skyctl.cli.show_plan import show_training_changes
from skyctl.compare.sync_summary import describe_sync
from skyctl.errors import InputError
from skyctl.planner.api import verify
from skyctl.planning.plan_from_profile import plan_profile
from skyctl.planning.plan_options import PlanOptions
from skyctl.planning.problem_overrides import override_problem
from skyctl.planning.training_changes import find_training_changes
from skyctl.records.base import parse
from skyctl.records.plan import Plan
from skyctl.records.profile import LinkProfile, Profile

LINKS = tuple(
    LinkProfile(source=a, target=b, latency_s=0.001, bandwidth_bytes_per_s=1.25e6)
    for a, b in (("a", "b"), ("b", "a"))
)


def compressible() -> Profile:
    """Each layer with a matrix of 200 × 300 and a vector of 300."""
    measured = profile(device("a", 5.0), device("b", 5.0), links=LINKS)
    assert measured.workload is not None
    (shape,) = measured.workload.shapes
    more = {"gradient_bytes": 4.0 * 60_300, "gradient_matrices": ((200, 300),)}
    layers = tuple(layer.model_copy(update=more) for layer in shape.layers)
    shape = shape.model_copy(update={"layers": layers})
    return measured.model_copy(update={"workload": measured.workload.model_copy(update={"shapes": (shape,)})})


def options(**more: object) -> PlanOptions:
    return PlanOptions(**{"parallel": "data", "sync": "star", "microbatches": 4, **more})  # type: ignore[arg-type]


def test_a_plan_from_a_profile_says_what_is_sent_and_stays_so_when_read() -> None:
    plan = plan_profile(compressible(), options(sync_format="powersgd:4", uncompressed_steps=10))
    assert len(plan.pipelines) == 2
    assert verify(plan.problem, plan).ok
    text = plan.to_json()
    again = parse(Plan, text, "it")
    assert again == plan
    words = describe_sync(again)
    assert "53.9 KiB of gradients as powersgd:4" in words  # 6 × (4 × 4 × 500 + 1200) bytes
    assert "(compressed with error feedback: changes training; the first 10 steps in float32)" in words


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(InputError, match=r"--uncompressed-steps 3 is of --sync-format powersgd:R"):
        plan_profile(compressible(), options(uncompressed_steps=3))
    plain = plan_profile(compressible(), options()).problem
    assert all(layer.gradient_matrices is None for layer in plain.layers)
    with pytest.raises(InputError, match="needs the gradient_bytes and gradient_matrices of every layer"):
        override_problem(plain, PlanOptions(sync_format="powersgd:4"))


def test_what_compressing_saves_is_advised_with_its_figure(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_profile(compressible(), options())
    changes = {change.kind: change for change in find_training_changes(plan, profile=compressible())}
    compressed = plan_profile(compressible(), options(sync_format="powersgd:4"))
    gain = plan.predicted.iteration_s / compressed.predicted.iteration_s
    assert gain > 1.05
    assert changes["compression"].gain == pytest.approx(gain)
    assert plan.sync is None or plan.sync.format == "float32"
    show_training_changes(Output(), plan, list(changes.values()))
    assert "changes training: --sync-format powersgd:4 would be " in capsys.readouterr().out
    assert "compression" not in {change.kind for change in find_training_changes(plan)}
