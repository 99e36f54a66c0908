"""The figures that runs see: held against the probe's, used while they are newer, never counted twice."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from tests.helpers.bare_records import (
    NO_PARTS,
    OF_DEVICE,
    OF_LAYER,
    OF_MEASUREMENT,
    OF_NODE,
    OF_PROFILE,
    OF_WORKLOAD,
)

from skyctl.errors import InputError
from skyctl.files import newest_profile, profile_folder, read_record, recent_profiles, save_profile
from skyctl.jobs.contradiction_recheck import doubted_nodes, keep_remeasurements, remeasurements_of
from skyctl.learning.corrections import MOST_SPREAD, estimate_profile, learn_corrections
from skyctl.learning.evidence_notes import learned_notes
from skyctl.learning.observations import (
    MOST_KEPT,
    add_observations,
    correct_from_run,
    gather_evidence,
    keep_observations,
    newest_evidence,
    observe_run,
)
from skyctl.learning.problem_from_profile import build_problem
from skyctl.planner.plan_record import pipeline_simulations
from skyctl.planning.link_dtypes import LinkChoice
from skyctl.planning.plan_creation import plan_run, problems_of
from skyctl.planning.plan_from_profile import plan_profile
from skyctl.planning.plan_options import PlanOptions
from skyctl.records.base import timestamp
from skyctl.records.measurement import (
    Measurement,
    Quantiles,
    ReplicaMeasurement,
    ReplicaPredicted,
    StepMeasurement,
)
from skyctl.records.plan import Contradiction, Machine, Plan, WorkloadRef
from skyctl.records.profile import (
    DeviceProfile,
    LayerCosts,
    LayerTiming,
    LinkProfile,
    NodeProfile,
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
        bytes_ = {**OF_LAYER, "state_bytes": 1e6, "activation_bytes": 1e5, "workspace_bytes": 0.0}
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
            **OF_DEVICE,
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
        workload=WorkloadProfile(
            source="gpt:…", digest="w", batch_size=8, dtype="float32", shapes=shapes, **OF_WORKLOAD
        ),
        **OF_PROFILE,
    )


def ran(plan: Plan, real: dict[str, float], message_s: float | None = None, **more: object) -> Measurement:
    """A run on machines that take ``real`` times the probe's seconds, whatever the plan thinks."""
    (probed,) = pipeline_simulations(plan.model_copy(update={"problem": build_problem(profile(), 4)}))
    spread = more.pop("layers_spread", None)
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
                predicted=ReplicaPredicted(compute_s=1.0, idle_s=0.0, memory_bytes=0.0, **NO_PARTS),
                forward_s=4 * layers.forward_s * real[device],
                backward_s=4 * layers.backward_s * real[device],
                optimizer_s=layers.optimizer_s * real[device],
                input_message_s=message_s if index else None,
                layers_spread=spread,  # type: ignore[arg-type]
                gradient_message_s=None,
                sync_s=None,
                layer_steps_s=(),
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
        **OF_MEASUREMENT,
    )


def newest() -> Profile:
    newest_file = newest_profile("c")
    assert newest_file is not None
    return newest_file[1]


def test_three_runs_of_the_same_slowness_count_it_once() -> None:
    save_profile(profile())
    for number in range(3):
        plan = plan_profile(newest(), OPTIONS, REF)
        words = keep_observations("c", plan, "w", ran(plan, {A: 1.2, B: 0.9}, run_id=f"r{number}"))
        assert words is not None
        assert "the next plan uses it" in words
        seen = learn_corrections(newest(), 4)
        assert seen.corrections.factors == pytest.approx({A: 1.2, B: 0.9})
        assert len(list(profile_folder("c").glob("*.json"))) == 1
        (problem,) = problems_of(newest(), OPTIONS)
        assert problem.times[A].backward_s == pytest.approx((0.04 * 1.2,) * 4)
    (words,) = learned_notes(seen)
    assert words.startswith(
        f"as seen in run r2 and 2 earlier: times of {A} 1.20 × the probe's, times of {B} 0.9"
    )
    assert newest().created == profile().created
    assert newest().devices == profile().devices


def test_a_run_makes_no_profile_the_newest_and_what_it_saw_is_found_all_the_same() -> None:
    save_profile(profile())
    path = newest_profile("c")[0]  # type: ignore[index]
    plan = plan_profile(newest(), OPTIONS, REF)
    other = WorkloadProfile(source="x", digest="x", batch_size=8, dtype="float32", shapes=(), **OF_WORKLOAD)
    later = profile().model_copy(update={"workload": other, "created": "2026-01-02T00:00:00+00:00"})
    save_profile(later)
    keep_observations("c", plan, "w", ran(plan, {A: 1.2, B: 0.9}))
    assert newest() == later
    assert read_record(Profile, path).observations
    assert [p.created for p in recent_profiles("c")] == [later.created, profile().created]
    taken = [d.model_copy(update={"measured": profile().created}) for d in profile().devices]
    again = profile().model_copy(update={"devices": tuple(taken), "created": "2026-01-03T00:00:00+00:00"})
    assert learn_corrections(
        gather_evidence(again, recent_profiles("c")), 4
    ).corrections.factors == pytest.approx({A: 1.2, B: 0.9})
    anew = [d.model_copy(update={"measured": again.created}) for d in profile().devices]
    again = again.model_copy(update={"devices": tuple(anew)})
    assert gather_evidence(again, recent_profiles("c")).observations == ()


def test_what_is_dated_ahead_of_the_clock_teaches_nothing() -> None:
    """A run's clock was ten years ahead: by its date it would outweigh every run until then."""
    save_profile(profile())
    plan = plan_profile(newest(), OPTIONS, REF)
    for run_id, factor in (("wrong", 3.0), ("r1", 1.2), ("r2", 1.2), ("r3", 1.2)):
        keep_observations("c", plan, "w", ran(plan, {A: factor, B: 1.0}, run_id=run_id))
    ahead = newest().model_copy(
        update={
            "observations": tuple(
                observation.model_copy(update={"seen": "2996-01-01T00:00:00+00:00"})
                if observation.run_id == "wrong"
                else observation
                for observation in newest().observations
            )
        }
    )
    taken = gather_evidence(ahead, ())
    assert {observation.run_id for observation in taken.observations} == {"r1", "r2", "r3"}
    assert learn_corrections(taken, 4).corrections.factors[A] == pytest.approx(1.2)


def test_a_run_is_not_kept_with_a_profile_that_no_plan_uses() -> None:
    """It is dated ahead of the clock: nothing is said to be used by the next plan."""
    save_profile(profile().model_copy(update={"created": "2996-01-01T00:00:00+00:00"}))
    plan = plan_profile(newest(), OPTIONS, REF)
    assert keep_observations("c", plan, "w", ran(plan, {A: 1.2, B: 0.9})) is None
    assert newest().observations == ()


def test_a_run_is_kept_with_a_profile_that_has_its_devices() -> None:
    save_profile(profile())
    plan = plan_profile(newest(), OPTIONS, REF)
    part = profile().model_copy(update={"devices": profile().devices[:1]})
    save_profile(part)
    assert keep_observations("c", plan, "w", ran(plan, {A: 1.2, B: 0.9})) is not None
    assert newest() == part
    assert [len(p.observations) for p in recent_profiles("c")] == [0, 2]


def test_the_probe_alone_where_that_is_asked_for() -> None:
    save_profile(profile())
    plan = plan_profile(newest(), OPTIONS, REF)
    keep_observations("c", plan, "w", ran(plan, {A: 2.0, B: 2.0}))
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
        update={"replicas": tuple(replica.model_copy(update={"idle_s": idle_s}) for replica in done.replicas)}
    )
    assert len(observe_run(profile(), plan, done, "2026-01-02T00:00:00+00:00")) == kept
    _, words = correct_from_run(plan, done)
    assert len(words) == kept


def test_a_size_that_no_run_has_used_takes_what_was_seen_of_the_device() -> None:
    plan = plan_profile(profile(), OPTIONS, REF)
    seen = observe_run(profile(), plan, ran(plan, {A: 1.2, B: 0.9}), "2026-02-01T00:00:00+00:00")
    with_runs = profile().model_copy(update={"observations": tuple(seen)})
    assert learn_corrections(with_runs, 2).corrections.factors == pytest.approx({A: 1.2, B: 0.9})


def test_what_is_older_than_the_probe_is_not_used() -> None:
    plan = plan_profile(profile(), OPTIONS, REF)
    seen = observe_run(profile(), plan, ran(plan, {A: 1.2, B: 0.9}), "2025-02-01T00:00:00+00:00")
    assert (
        learn_corrections(profile().model_copy(update={"observations": tuple(seen)}), 4).corrections.factors
        == {}
    )
    old, new = profile().devices
    dated = old.model_copy(update={"measured": "2025-01-01T00:00:00+00:00"})
    with_runs = profile().model_copy(update={"observations": tuple(seen), "devices": (dated, new)})
    assert list(learn_corrections(with_runs, 4).corrections.factors) == [A]


def test_a_disturbed_run_is_kept_and_not_used_and_a_short_one_is_not_kept() -> None:
    save_profile(profile())
    plan = plan_profile(newest(), OPTIONS, REF)
    assert keep_observations("c", plan, "w", ran(plan, {A: 3.0, B: 3.0}, steps=3)) is None
    words = keep_observations("c", plan, "w", ran(plan, {A: 1.2, B: 1.2}, p90=1.6))
    assert words is not None
    assert "disturbed" in words
    assert len(newest().observations) == 2
    seen = learn_corrections(newest(), 4)
    assert seen.corrections.factors == {}
    assert "run r1 was disturbed" in learned_notes(seen)[0]


def test_a_run_that_something_slowed_moves_no_plan_and_the_plan_says_so() -> None:
    save_profile(profile())
    alone = plan_profile(newest(), OPTIONS, REF)
    words = keep_observations("c", alone, "w", ran(alone, {A: 3.0, B: 0.8}, steps=12))
    assert words is not None
    assert f"run r1 saw times of {A} 3.00 × the probe's" in words
    assert "what else it saw is kept" in words
    after = plan_profile(newest(), OPTIONS, REF)
    assert after.stages == alone.stages
    assert after.predicted.iteration_s == alone.predicted.iteration_s
    then, now = alone.predicted.interval, after.predicted.interval
    assert then is not None
    assert now is not None
    assert now.high_s > then.high_s  # but it is less sure
    (contradiction,) = after.contradictions
    assert (contradiction.device, contradiction.target, contradiction.run_id, contradiction.believed) == (
        A,
        None,
        "r1",
        1.0,
    )
    assert contradiction.factor == pytest.approx(3.0)
    (note,) = learned_notes(learn_corrections(newest(), 4))
    assert note in words
    assert plan_profile(newest(), replace(OPTIONS, learn=False), REF).contradictions == ()


@pytest.mark.parametrize(("again", "factor"), [(2.9, 3.0), (1.05, None)])
def test_measured_again_it_is_settled_and_later_plans_know(again: float, factor: float | None) -> None:
    save_profile(profile())
    plan = plan_profile(newest(), OPTIONS, REF)
    keep_observations("c", plan, "w", ran(plan, {A: 3.0, B: 1.0}, steps=12))
    then = newest()
    asked = plan_profile(then, OPTIONS, REF).contradictions
    (looked,) = remeasurements_of(then, measured_again(again), asked)
    assert (looked.device, looked.target) == (A, None)
    assert looked.factor == pytest.approx(again)
    keep_remeasurements(then, (looked,))
    after = plan_profile(newest(), OPTIONS, REF)
    assert after.contradictions == ()
    assert learn_corrections(newest(), 4).corrections.factors.get(A) == (factor and pytest.approx(factor))
    notes = learned_notes(learn_corrections(newest(), 4))
    assert any(looked.seen in note for note in notes)
    assert any("not used" in note for note in notes) == (factor is None)
    assert gather_evidence(profile(), recent_profiles("c")).remeasurements == (looked,)


def measured_again(factor: float) -> Profile:
    """The profile of a look: device a's costliest layer takes so many times as long, at the smallest size."""
    (layer,) = (row for row in profile().devices[0].timings if row.microbatch_size == 2)
    assert layer.forward_s is not None
    assert layer.backward_s is not None
    update = {"forward_s": layer.forward_s * factor, "backward_s": layer.backward_s * factor}
    device = profile().devices[0].model_copy(update={"timings": (layer.model_copy(update=update),)})
    return profile().model_copy(update={"devices": (device,), "created": timestamp()})


def test_nodes_of_one_machine_are_measured_again_together() -> None:
    def node(name: str, host: str) -> NodeProfile:
        words = {**OF_NODE, "platform": "x", "python": "3.11", "torch": "2.13", "cpu_model": "x"}
        memory = {"memory_total_bytes": 1e9, "memory_available_bytes": 1e9}
        return NodeProfile(
            name=name, hostname=host, cpus=1.0, address=None, interface=None, **words, **memory
        )

    with_runs = profile().model_copy(update={"nodes": (node("a", "x"), node("b", "y"), node("c", "x"))})
    about = Contradiction(run_id="r", seen="2026-12-01", device=A, factor=3.0, believed=1.0)
    assert doubted_nodes(with_runs, [about]) == {"a", "c"}
    assert doubted_nodes(with_runs, [about.model_copy(update={"target": B})]) == {"a", "b", "c"}
    assert doubted_nodes(with_runs, []) == set()


def test_a_device_that_was_uneven_by_itself_takes_the_run_with_it() -> None:
    plan = plan_profile(profile(), OPTIONS, REF)
    steady = {"p90": 1.6, "layers_spread": 1.1}  # the steps varied, the layers did not
    for more, kept in ((steady, {A: 1.1, B: 0.9}), ({"p90": 1.1, "layers_spread": 1.6}, {})):
        done = ran(plan, {A: 1.1, B: 0.9}, **more)
        seen = observe_run(profile(), plan, done, "2026-02-01T00:00:00+00:00")
        with_runs = profile().model_copy(update={"observations": tuple(seen)})
        assert learn_corrections(with_runs, 4).corrections.factors == pytest.approx(kept)


def test_how_far_runs_were_from_what_is_reckoned_with() -> None:
    plan = plan_profile(profile(), OPTIONS, REF)

    def after_runs(*factors: float) -> Profile:
        dates = [f"2026-02-0{day + 1}T00:00:00+00:00" for day in range(len(factors))]
        runs = [ran(plan, {A: f, B: 1.0}, run_id=f"r{i}", steps=12) for i, f in enumerate(factors)]
        seen = [o for run, at in zip(runs, dates, strict=True) for o in observe_run(profile(), plan, run, at)]
        return profile().model_copy(update={"observations": tuple(seen)})

    def spread(*factors: float) -> float | None:
        return estimate_profile(after_runs(*factors)).spreads().get(A)

    assert estimate_profile(profile()).spreads() == {}
    assert spread(1.1) == pytest.approx(math.log(1.1))
    assert spread(1.0, 1.1, 1.2) == pytest.approx(0.0913, abs=1e-3)
    assert spread(1.1, 1.1) == pytest.approx(0.0)
    assert spread(3.0) == MOST_SPREAD
    assert spread(1.1, 3.0, 1.1) == pytest.approx(0.0)  # settled by the run after it
    corrections = learn_corrections(after_runs(1.0, 1.1, 1.2), 4).corrections
    sure, less = (corrections.spreads.get(name, 0.0) for name in (B, A))
    assert sure < less


def test_a_links_rate_comes_from_its_messages_unless_they_are_mostly_latency() -> None:
    plan = plan_profile(profile(), OPTIONS, REF)
    slower = LATENCY_S + 2e4 / (0.8 * RATE)
    seen = observe_run(profile(), plan, ran(plan, {A: 1, B: 1}, slower), "2026-02-01T00:00:00+00:00")
    with_runs = profile().model_copy(update={"observations": tuple(seen)})
    first, second = (stage.replicas[0].device for stage in plan.stages)
    assert learn_corrections(with_runs, 4).corrections.rates == pytest.approx({(first, second): 0.8 * RATE})
    (problem,) = problems_of(with_runs, OPTIONS)
    rates = {(link.source, link.target): link.bandwidth_bytes_per_s for link in problem.links}
    assert rates == pytest.approx({(first, second): 0.8 * RATE, (second, first): RATE})
    short = observe_run(profile(), plan, ran(plan, {A: 1, B: 1}, 0.0012), "2026-02-01T00:00:00+00:00")
    with_runs = profile().model_copy(update={"observations": tuple(short)})
    assert learn_corrections(with_runs, 4).corrections.rates == {}
    quick = observe_run(profile(), plan, ran(plan, {A: 1, B: 1}, 0.0009), "2026-02-01T00:00:00+00:00")
    assert [observation.device for observation in quick if observation.target] == [], (
        "a receiver takes as long to wake up"
    )


def test_planning_again_from_a_run_changes_that_plans_own_figures() -> None:
    save_profile(profile())
    plan = plan_profile(newest(), OPTIONS, REF)
    keep_observations("c", plan, "w", ran(plan, {A: 1.3, B: 1.0}))
    plan = plan_profile(newest(), OPTIONS, REF)  # has 1.3 in it already
    problem, words = correct_from_run(plan, ran(plan, {A: 1.3, B: 2.0}))
    assert problem.times[A].forward_s == pytest.approx((0.02 * 1.3,) * 4)
    assert problem.times[B].forward_s == pytest.approx((0.04,) * 4)
    assert any(f"{B} 2.00 ×" in text for text in words)
    again, _ = plan_run(plan, ran(plan, {A: 1.3, B: 2.0}), OPTIONS)
    assert again.workload == REF
    with pytest.raises(InputError, match="4 microbatches"):
        plan_run(plan, ran(plan, {A: 1, B: 1}), PlanOptions(microbatches=2))
    again, _ = plan_run(
        plan, ran(plan, {A: 1.3, B: 2.0}), replace(OPTIONS, parallel="auto", strategy="heuristic")
    )
    assert [(outcome.parallel, outcome.reason is None) for outcome in again.forms] == [
        ("pipeline", True),
        ("data", False),
        ("hybrid", False),
    ]
    with pytest.raises(InputError, match="2 steps after its warm-up"):
        correct_from_run(plan, ran(plan, {A: 1, B: 1}, steps=3))


def test_planning_again_from_a_run_knows_what_its_layers_give() -> None:
    """In bfloat16 there is nothing to gain from sending bfloat16."""
    choice = (LinkChoice("bfloat16"),)
    for dtype, share in (("float32", 0.5), ("bfloat16", 1.0)):
        plan = plan_profile(profile(), OPTIONS, REF.model_copy(update={"dtype": dtype}))
        again, _ = plan_run(plan, ran(plan, {A: 1, B: 1}), replace(OPTIONS, link_dtype=choice))
        assert {link.sent_share for link in again.problem.links} == {share}


def test_only_the_newest_of_a_kind_are_kept(tmp_path: Path) -> None:
    plan = plan_profile(profile(), OPTIONS, REF)
    seen = [
        observation
        for day in range(1, 9)
        for observation in observe_run(
            profile(), plan, ran(plan, {A: 1, B: 1}, run_id=f"r{day}"), f"2026-02-0{day}T00:00:00+00:00"
        )
    ]
    kept = newest_evidence([*seen, *seen])
    assert len(kept) == 2 * MOST_KEPT
    assert kept[0].run_id == "r5"


def test_one_part_of_first_steps_is_kept_alone_and_the_end_of_the_run_takes_its_place() -> None:
    save_profile(profile())
    plan = plan_profile(newest(), OPTIONS, REF)
    early = ran(plan, {A: 1.2, B: 0.9}, steps=11)
    assert add_observations("c", plan, "w", early, ("c/cpu:0", None)) is None
    assert add_observations("c", plan, "w", early, (A, None)) is not None
    assert [(observation.device, observation.steps) for observation in newest().observations] == [(A, 10)]
    keep_observations("c", plan, "w", ran(plan, {A: 1.1, B: 0.9}, steps=101))
    assert [(observation.device, observation.steps) for observation in newest().observations] == [
        (A, 100),
        (B, 100),
    ]
    assert learn_corrections(newest(), 4).corrections.factors == pytest.approx({A: 1.1, B: 0.9})
    assert add_observations("c", plan, "w", early, (A, None)) is None  # the run goes on: it saw more then
    assert [observation.steps for observation in newest().observations] == [100, 100]
