"""What runs see: held against the probe's figures, used while it is newer, never counted twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyctl.control.corrections import learn_corrections
from skyctl.control.link_dtypes import LinkChoice
from skyctl.control.observations import (
    MOST_KEPT,
    correct_from_run,
    gather_observations,
    keep_observations,
    merge_observations,
    observe_run,
)
from skyctl.control.plan_creation import PlanOptions, plan_profile, plan_run, problems_of
from skyctl.control.problem_from_profile import build_problem
from skyctl.errors import InputError
from skyctl.files import newest_profile, profile_folder, read_record, recent_profiles, save_profile
from skyctl.planner.evaluation import simulation_input_of
from skyctl.records.measurement import (
    Measurement,
    Quantiles,
    ReplicaMeasurement,
    ReplicaPredicted,
    StepMeasurement,
)
from skyctl.records.plan import Machine, Plan, WorkloadRef
from skyctl.records.profile import (
    DeviceProfile,
    LayerCosts,
    LayerTiming,
    LinkProfile,
    Profile,
    ShapeProfile,
    WorkloadProfile,
)

A, B = "a/cpu:0", "b/cpu:0"
REF = WorkloadRef(source="gpt:…", digest="w", batch_size=8, dtype="float32", seed=0)
LATENCY_S, RATE = 0.001, 1e6
OPTIONS = PlanOptions(strategy="even", microbatches=4, schedule="1f1b")


def timing(size: int) -> LayerTiming:
    seconds = 0.01 * size
    return LayerTiming(
        signature="mlp", microbatch_size=size, forward_s=seconds, backward_s=2 * seconds, optimizer_s=0.001
    )


def profile() -> Profile:
    def layer(index: int, size: int) -> LayerCosts:
        bytes_ = {"state_bytes": 1e6, "activation_bytes": 1e5, "workspace_bytes": 0.0}
        return LayerCosts(
            name=f"block.{index}.mlp", signature="mlp", flops=3e6, output_bytes=1e4 * size, **bytes_
        )

    shapes = [
        ShapeProfile(microbatch_size=8 // m, microbatches=m, layers=[layer(i, 8 // m) for i in range(4)])
        for m in (2, 4)
    ]
    devices = [
        DeviceProfile(
            id=name,
            node=name[0],
            name="cpu",
            threads=1,
            slowdown=1.0,
            memory_bytes=1e9,
            memory_from="free memory",
            reserved_bytes=0.0,
            flops_per_s=1e9,
            timings=(timing(2), timing(4)),
        )
        for name in (A, B)
    ]
    links = [
        LinkProfile(source=a, target=b, latency_s=LATENCY_S, bandwidth_bytes_per_s=RATE)
        for a, b in ("ab", "ba")
    ]
    return Profile(
        cluster="c",
        cluster_digest="d",
        created="2026-01-01T00:00:00+00:00",
        nodes=(),
        devices=devices,
        links=links,
        workload=WorkloadProfile(source="gpt:…", digest="w", batch_size=8, dtype="float32", shapes=shapes),
    )


def ran(plan: Plan, real: dict[str, float], message_s: float | None = None, **more: object) -> Measurement:
    """A run on machines that take ``real`` times the probe's seconds, whatever the plan thinks."""
    probed = simulation_input_of(plan.model_copy(update={"problem": build_problem(profile(), 4)}))
    replicas = []
    for index, stage in enumerate(plan.stages):
        device, layers = stage.replicas[0].device, probed.layer_times(index)
        replicas.append(
            ReplicaMeasurement(
                device=device,
                compute_s=1.0,
                transfer_s=0.0,
                idle_s=0.0,
                peak_memory_bytes=None,
                predicted=ReplicaPredicted(compute_s=1.0, idle_s=0.0, memory_bytes=0.0),
                forward_s=4 * layers.forward_s * real[device],
                backward_s=4 * layers.backward_s * real[device],
                optimizer_s=layers.optimizer_s * real[device],
                input_message_s=message_s if index else None,
            )
        )
    steps = int(more.pop("steps", 6))  # type: ignore[call-overload]
    return Measurement(
        run_id=str(more.pop("run_id", "r1")),
        strategy="even",
        steps=[StepMeasurement(step=i, loss=1.0, iteration_s=1.0) for i in range(steps)],
        iteration_s=Quantiles(median=1.0, p10=1.0, p90=float(more.pop("p90", 1.05))),  # type: ignore[arg-type]
        predicted_iteration_s=1.0,
        replicas=replicas,
        final_loss=1.0,
        attempts=1,
        weights=None,
    )


def newest() -> Profile:
    found = newest_profile("c")
    assert found is not None
    return found[1]


def test_three_runs_of_the_same_slowness_count_it_once() -> None:
    save_profile(profile())
    for number in range(3):
        made = plan_profile(newest(), OPTIONS, REF)
        said = keep_observations("c", made, "w", ran(made, {A: 1.3, B: 0.9}, run_id=f"r{number}"))
        assert said is not None
        assert "the next plan uses it" in said
        seen = learn_corrections(newest(), 4)
        assert seen.corrections.factors == pytest.approx({A: 1.3, B: 0.9})
        assert len(list(profile_folder("c").glob("*.json"))) == 1
        (problem,) = problems_of(newest(), OPTIONS)
        assert problem.times[A].backward_s == pytest.approx((0.04 * 1.3,) * 4)
    assert f"as seen in run r2: times of {A} 1.30 × the probe's, times of {B} 0.90" in seen.notes[0]
    assert newest().created == profile().created
    assert newest().devices == profile().devices


def test_a_run_makes_no_profile_the_newest_and_what_it_saw_is_found_all_the_same() -> None:
    save_profile(profile())
    path = newest_profile("c")[0]  # type: ignore[index]
    made = plan_profile(newest(), OPTIONS, REF)
    other = WorkloadProfile(source="x", digest="x", batch_size=8, dtype="float32", shapes=())
    later = profile().model_copy(update={"workload": other, "created": "2026-01-02T00:00:00+00:00"})
    save_profile(later)
    keep_observations("c", made, "w", ran(made, {A: 1.3, B: 0.9}))
    assert newest() == later
    assert read_record(Profile, path).observations
    assert [p.created for p in recent_profiles("c")] == [later.created, profile().created]
    taken = [d.model_copy(update={"measured": profile().created}) for d in profile().devices]
    again = profile().model_copy(update={"devices": tuple(taken), "created": "2026-01-03T00:00:00+00:00"})
    assert learn_corrections(
        gather_observations(again, recent_profiles("c")), 4
    ).corrections.factors == pytest.approx({A: 1.3, B: 0.9})
    anew = [d.model_copy(update={"measured": again.created}) for d in profile().devices]
    again = again.model_copy(update={"devices": tuple(anew)})
    assert gather_observations(again, recent_profiles("c")).observations == ()


def test_a_run_is_kept_with_a_profile_that_has_its_devices() -> None:
    save_profile(profile())
    made = plan_profile(newest(), OPTIONS, REF)
    part = profile().model_copy(update={"devices": profile().devices[:1]})
    save_profile(part)
    assert keep_observations("c", made, "w", ran(made, {A: 1.3, B: 0.9})) is not None
    assert newest() == part
    assert [len(p.observations) for p in recent_profiles("c")] == [0, 2]


def test_the_probe_alone_where_that_is_asked_for() -> None:
    save_profile(profile())
    made = plan_profile(newest(), OPTIONS, REF)
    keep_observations("c", made, "w", ran(made, {A: 2.0, B: 2.0}))
    probe_alone = PlanOptions(strategy="even", microbatches=4, schedule="1f1b", learn=False)
    assert problems_of(newest(), probe_alone)[0].times == build_problem(profile(), 4).times


@pytest.mark.parametrize(("cpus", "idle_s", "kept"), [(0.2, 0.6, 1), (0.2, 0.1, 2), (2.0, 0.6, 2)])
def test_a_node_that_rested_under_its_quota_tells_nothing(cpus: float, idle_s: float, kept: int) -> None:
    """It was faster than its quota; what was slower than probed tells something all the same."""
    plan = plan_profile(profile(), OPTIONS)
    machines = tuple(
        Machine(device=name, name="cpu", cpu_model="x", cpus=cpus, threads=1, python="3.11", torch="2.13")
        for name in (A, B)
    )
    plan = plan.model_copy(update={"machines": machines})
    done = ran(plan, {A: 0.5, B: 1.5})
    done = done.model_copy(
        update={"replicas": tuple(one.model_copy(update={"idle_s": idle_s}) for one in done.replicas)}
    )
    assert len(observe_run(profile(), plan, done, "2026-01-02T00:00:00+00:00")) == kept
    _, words = correct_from_run(plan, done)
    assert len(words) == kept


def test_a_size_that_no_run_has_used_takes_what_was_seen_of_the_device() -> None:
    made = plan_profile(profile(), OPTIONS, REF)
    seen = observe_run(profile(), made, ran(made, {A: 1.3, B: 0.9}), "2026-02-01T00:00:00+00:00")
    known = profile().model_copy(update={"observations": tuple(seen)})
    assert learn_corrections(known, 2).corrections.factors == pytest.approx({A: 1.3, B: 0.9})


def test_what_is_older_than_the_probe_is_not_used() -> None:
    made = plan_profile(profile(), OPTIONS, REF)
    seen = observe_run(profile(), made, ran(made, {A: 1.3, B: 0.9}), "2025-02-01T00:00:00+00:00")
    assert (
        learn_corrections(profile().model_copy(update={"observations": tuple(seen)}), 4).corrections.factors
        == {}
    )
    old, new = profile().devices
    dated = old.model_copy(update={"measured": "2025-01-01T00:00:00+00:00"})
    known = profile().model_copy(update={"observations": tuple(seen), "devices": (dated, new)})
    assert list(learn_corrections(known, 4).corrections.factors) == [A]


def test_a_disturbed_run_is_kept_and_not_used_and_a_short_one_is_not_kept() -> None:
    save_profile(profile())
    made = plan_profile(newest(), OPTIONS, REF)
    assert keep_observations("c", made, "w", ran(made, {A: 3.0, B: 3.0}, steps=3)) is None
    said = keep_observations("c", made, "w", ran(made, {A: 3.0, B: 3.0}, p90=1.6))
    assert said is not None
    assert "disturbed" in said
    assert len(newest().observations) == 2
    seen = learn_corrections(newest(), 4)
    assert seen.corrections.factors == {}
    assert "run r1 was disturbed" in seen.notes[0]


def test_a_links_rate_comes_from_its_messages_unless_they_are_mostly_latency() -> None:
    made = plan_profile(profile(), OPTIONS, REF)
    half = LATENCY_S + 2e4 / (RATE / 2)
    seen = observe_run(profile(), made, ran(made, {A: 1, B: 1}, half), "2026-02-01T00:00:00+00:00")
    known = profile().model_copy(update={"observations": tuple(seen)})
    first, second = (stage.replicas[0].device for stage in made.stages)
    assert learn_corrections(known, 4).corrections.rates == pytest.approx({(first, second): RATE / 2})
    (problem,) = problems_of(known, OPTIONS)
    rates = {(link.source, link.target): link.bandwidth_bytes_per_s for link in problem.links}
    assert rates == pytest.approx({(first, second): RATE / 2, (second, first): RATE})
    short = observe_run(profile(), made, ran(made, {A: 1, B: 1}, 0.0012), "2026-02-01T00:00:00+00:00")
    known = profile().model_copy(update={"observations": tuple(short)})
    assert learn_corrections(known, 4).corrections.rates == {}


def test_planning_again_from_a_run_changes_that_plans_own_figures() -> None:
    save_profile(profile())
    made = plan_profile(newest(), OPTIONS, REF)
    keep_observations("c", made, "w", ran(made, {A: 1.3, B: 1.0}))
    made = plan_profile(newest(), OPTIONS, REF)  # has 1.3 in it already
    problem, words = correct_from_run(made, ran(made, {A: 1.3, B: 2.0}))
    assert problem.times[A].forward_s == pytest.approx((0.02 * 1.3,) * 4)
    assert problem.times[B].forward_s == pytest.approx((0.04,) * 4)
    assert any(f"{B} 2.00 ×" in text for text in words)
    again, _ = plan_run(made, ran(made, {A: 1.3, B: 2.0}), OPTIONS)
    assert again.workload == REF
    with pytest.raises(InputError, match="4 microbatches"):
        plan_run(made, ran(made, {A: 1, B: 1}), PlanOptions(microbatches=2))
    with pytest.raises(InputError, match="2 steps after its warm-up"):
        correct_from_run(made, ran(made, {A: 1, B: 1}, steps=3))


def test_planning_again_from_a_run_knows_what_its_layers_give() -> None:
    """In bfloat16 there is nothing to gain from sending bfloat16."""
    choice = (LinkChoice("bfloat16"),)
    for dtype, share in (("float32", 0.5), ("bfloat16", 1.0)):
        made = plan_profile(profile(), OPTIONS, REF.model_copy(update={"dtype": dtype}))
        again, _ = plan_run(made, ran(made, {A: 1, B: 1}), replace(OPTIONS, link_dtype=choice))
        assert {link.sent_share for link in again.problem.links} == {share}


def test_only_the_newest_of_a_kind_are_kept(tmp_path: Path) -> None:
    made = plan_profile(profile(), OPTIONS, REF)
    seen = [
        one
        for day in range(1, 9)
        for one in observe_run(
            profile(), made, ran(made, {A: 1, B: 1}, run_id=f"r{day}"), f"2026-02-0{day}T00:00:00+00:00"
        )
    ]
    kept = merge_observations([*seen, *seen])
    assert len(kept) == 2 * MOST_KEPT
    assert kept[0].run_id == "r5"
