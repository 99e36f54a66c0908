"""The simulator against the contract's model of time: by hand, by a naive reference, by properties."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyctl.schedule.actions import actions, least_in_flight
from skyctl.schedule.simulation import last_backward_ends, simulate
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes


def numbers(schedule, stages, microbatches):
    return [least_in_flight(schedule, s, stages, microbatches) for s in range(stages)]


def run(schedule, microbatches, stages, boundaries, **kwargs):
    return simulate(
        schedule, microbatches, numbers(schedule, len(stages), microbatches), stages, boundaries, **kwargs
    )


def test_one_stage_is_its_work():
    out = run("1f1b", 3, [StageTimes(1, 2, 0.5)], [])
    assert out.iteration_s == 9.5
    assert out.compute_s == (9.5,)
    assert out.idle_s == (0.0,)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_take_m_plus_s_minus_1_slots(schedule):
    out = run(schedule, 8, [StageTimes(1, 2)] * 4, [BoundaryTimes()] * 3)
    assert out.iteration_s == 3 * (8 + 4 - 1)


def test_sequential_adds_everything_up():
    hop = MessageTimes(link_s=0.25, latency_s=0.5)
    out = run("sequential", 3, [StageTimes(1, 2), StageTimes(3, 4)], [BoundaryTimes(hop, hop)])
    assert out.iteration_s == pytest.approx(3 * (1 + 0.75 + 3 + 4 + 0.75 + 2))


def test_a_slow_link_queues_its_messages():
    boundary = BoundaryTimes(MessageTimes(link_s=5.0, latency_s=1.0), MessageTimes())
    out = run("gpipe", 3, [StageTimes(1, 1), StageTimes(1, 1)], [boundary], trace=True)
    starts = [s.start_s for s in out.trace if s.stage == 1 and s.kind == "F"]
    assert starts == [7.0, 12.0, 17.0]


def test_a_shared_resource_serves_first_come_first_served():
    """Both directions share one resource: gradients wait for activations."""
    hop = MessageTimes(link_s=0.0, latency_s=0.0, shared=(("up", 4.0),))
    out = run("gpipe", 2, [StageTimes(1, 1), StageTimes(1, 1)], [BoundaryTimes(hop, hop)], trace=True)
    starts = {(s.stage, s.kind, s.microbatch): s.start_s for s in out.trace}
    assert starts[1, "F", 0] == 5.0
    assert starts[1, "F", 1] == 9.0  # ready at 2, sent when the first has been
    assert starts[1, "B", 0] == 10.0
    assert starts[0, "B", 0] == 15.0  # ready at 11
    assert starts[0, "B", 1] == 19.0  # ready at 12, after the first gradient


def test_optimizer_runs_after_the_last_backward_of_its_device():
    out = run("1f1b", 2, [StageTimes(1, 1, 0.0), StageTimes(1, 1, 10.0)], [BoundaryTimes()], trace=True)
    last = next(s for s in out.trace if s.kind == "O")
    assert (last.stage, last.start_s, last.end_s) == (1, 5.0, 15.0)
    assert out.iteration_s == 15.0


def test_bad_shapes_and_deadlock():
    with pytest.raises(ValueError, match="boundaries"):
        simulate("1f1b", 1, [1], [StageTimes(1, 1)], [BoundaryTimes()])
    for hop in (MessageTimes(), MessageTimes(shared=(("x", 1.0),))):
        with pytest.raises(ValueError, match="for ever"):
            simulate("eager-1f1b", 4, [1, 3], [StageTimes(1, 1)] * 2, [BoundaryTimes(hop, hop)])


def reference(schedule, microbatches, in_flight, stages, boundaries, deferred=None):
    """A slow, literal reading: again and again the earliest possible event, everything in one list."""
    count = len(stages)
    deferred = deferred or [0] * count
    todo = [list(actions(schedule, microbatches, k, w)) for k, w in zip(in_flight, deferred, strict=True)]
    splits = schedule == "zero-bubble"
    free = [0.0] * count
    arrived = {("F", 0, m): 0.0 for m in range(microbatches)}
    arrived |= {("W", s, m): 0.0 for s in range(count) for m in range(microbatches)}
    arrived |= {("B", count - 1, m): 0.0 for m in range(microbatches)}
    ready = []  # (time, stage, order, kind, m): messages not taken yet
    busy = {}
    while any(todo) or ready:
        ends = []
        for s in range(count):
            if todo[s] and (todo[s][0].kind, s, todo[s][0].microbatch) in arrived:
                kind, m = todo[s][0]
                d = {
                    "F": stages[s].forward_s,
                    "B": stages[s].backward_s - (stages[s].weight_s if splits else 0.0),
                    "W": stages[s].weight_s,
                }[kind]
                ends.append((max(free[s], arrived[kind, s, m]) + d, s))
        if ready and (not ends or min(ready)[0] <= min(ends)[0]):
            ready.sort()
            at, s, _, kind, m = ready.pop(0)
            boundary = boundaries[s] if kind == "F" else boundaries[s - 1]
            hop = boundary.forward if kind == "F" else boundary.backward
            uses = {("link", kind, s): hop.link_s, **{("shared", n): x for n, x in hop.shared}}
            begin = max([at, *(busy.get(u, 0.0) for u in uses)])
            for u, x in uses.items():
                busy[u] = begin + x
            arrived[kind, s + 1 if kind == "F" else s - 1, m] = begin + max(uses.values()) + hop.latency_s
            continue
        end, s = min(ends)
        kind, m = todo[s].pop(0)
        free[s] = end
        if (kind == "F" and s < count - 1) or (kind == "B" and s > 0):
            ready.append((end, s, 0 if kind == "F" else 1, kind, m))
    return max(f + stage.optimizer_s for f, stage in zip(free, stages, strict=True))


def random_case(seed):
    """(schedule, microbatches, in flight, stages, boundaries, weights behind); every second one shares."""
    r = random.Random(seed)
    count, microbatches = r.randint(1, 5), r.randint(1, 7)
    schedule = r.choice(["sequential", "gpipe", "1f1b", "eager-1f1b", "zero-bubble", "zero-bubble"])
    stages = []
    for _ in range(count):
        backward_s = r.uniform(0.1, 2)
        weight_s = r.choice([0.0, r.uniform(0, backward_s), backward_s])
        stages.append(StageTimes(r.uniform(0.1, 2), backward_s, r.uniform(0, 1), weight_s))

    def hop():
        shared = tuple((name, r.uniform(0.05, 1)) for name in "ab" if seed % 2 and r.random() < 0.5)
        return MessageTimes(r.choice([0.0, r.uniform(0, 3)]), r.choice([0.0, r.uniform(0, 2)]), shared)

    boundaries = [BoundaryTimes(hop(), hop()) for _ in range(count - 1)]
    in_flight = numbers(schedule, count, microbatches)
    deferred = [0] * count
    if schedule in ("eager-1f1b", "zero-bubble"):
        in_flight = sorted((r.randint(least, microbatches) for least in in_flight), reverse=True)
    if schedule == "zero-bubble":
        deferred = [r.randrange(microbatches) for _ in range(count)]
    return schedule, microbatches, in_flight, stages, boundaries, deferred


@pytest.mark.parametrize("seed", range(120))
def test_agrees_with_a_literal_reading(seed):
    schedule, microbatches, in_flight, stages, boundaries, deferred = random_case(seed)
    out = simulate(schedule, microbatches, in_flight, stages, boundaries, deferred_weights=deferred)
    assert out.iteration_s == pytest.approx(
        reference(schedule, microbatches, in_flight, stages, boundaries, deferred), rel=1e-12
    )
    traced = simulate(
        schedule, microbatches, in_flight, stages, boundaries, trace=True, deferred_weights=deferred
    )
    assert traced.iteration_s == out.iteration_s
    for s, stage in enumerate(stages):
        spans = sorted((x.start_s, x.end_s) for x in traced.trace if x.stage == s)
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(spans))
        assert out.compute_s[s] + out.idle_s[s] == pytest.approx(out.iteration_s)
        assert sum(end - start for start, end in spans) == pytest.approx(out.compute_s[s])
        weights = [x.microbatch for x in sorted(traced.trace, key=lambda x: x.start_s) if x[:2] == (s, "W")]
        split = schedule == "zero-bubble" and stage.weight_s > 0
        assert weights == (list(range(microbatches)) if split else [])


def shares_nothing(boundaries, name):
    """The same boundaries, each hop with a shared resource of its own that takes no time."""
    names = itertools.count()

    def hop(given):
        return MessageTimes(given.link_s, given.latency_s, ((f"{name}{next(names)}", 0.0),))

    return [BoundaryTimes(hop(b.forward), hop(b.backward)) for b in boundaries]


@pytest.mark.parametrize("seed", range(0, 80, 2))
def test_both_ways_to_play_agree(seed):
    schedule, microbatches, in_flight, stages, boundaries, deferred = random_case(seed)
    whole = simulate(
        schedule, microbatches, in_flight, stages, boundaries, trace=True, deferred_weights=deferred
    )
    other = simulate(
        schedule, microbatches, in_flight, stages, shares_nothing(boundaries, "x"), trace=True,
        deferred_weights=deferred,
    )  # fmt: skip
    assert other.iteration_s == pytest.approx(whole.iteration_s, rel=1e-12)
    for a, b in zip(sorted(whole.trace), sorted(other.trace), strict=True):
        assert a[:3] == b[:3]
        assert a[3:] == pytest.approx(b[3:], rel=1e-12, abs=1e-12)
    if schedule == "zero-bubble":
        ends = last_backward_ends(
            microbatches, tuple(in_flight), [s.forward_s for s in stages], [s.backward_s for s in stages],
            ahead=[(b.forward.link_s, b.forward.latency_s) for b in boundaries],
            back=[(b.backward.link_s, b.backward.latency_s) for b in boundaries],
            weight_s=[s.weight_s for s in stages], deferred_weights=deferred,
        )  # fmt: skip
        step = max(end + s.optimizer_s for end, s in zip(ends, stages, strict=True))
        assert step == pytest.approx(whole.iteration_s, rel=1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_zero_bubble_without_weight_gradients_is_eager_1f1b(seed):
    _, microbatches, _, stages, boundaries, _ = random_case(seed)
    r = random.Random(seed)
    in_flight = numbers("zero-bubble", len(stages), microbatches)
    in_flight = sorted((r.randint(least, microbatches) for least in in_flight), reverse=True)
    deferred = [r.randrange(microbatches) for _ in stages]
    plain = [StageTimes(s.forward_s, s.backward_s, s.optimizer_s) for s in stages]
    eager = simulate("eager-1f1b", microbatches, in_flight, plain, boundaries, trace=True)
    assert simulate("eager-1f1b", microbatches, in_flight, stages, boundaries, trace=True) == eager
    assert eager == simulate(
        "zero-bubble", microbatches, in_flight, plain, boundaries, trace=True, deferred_weights=deferred
    )


@settings(max_examples=100)
@given(st.integers(1, 8), st.booleans(), st.data())
def test_no_zero_bubble_plan_waits_for_ever(stages, shared, data):
    """Any numbers in flight that do not grow along the pipeline, below the least too, and any lag."""
    microbatches = data.draw(st.integers(1, 9))
    number = st.integers(1, microbatches)
    in_flight = sorted(data.draw(st.lists(number, min_size=stages, max_size=stages)), reverse=True)
    deferred = data.draw(st.lists(number.map(lambda n: n - 1), min_size=stages, max_size=stages))
    hop = MessageTimes(0.5, 0.25, (("up", 0.5),) if shared else ())
    out = simulate(
        "zero-bubble", microbatches, in_flight, [StageTimes(1, 2, 0, 1)] * stages,
        [BoundaryTimes(hop, hop)] * (stages - 1), trace=True, deferred_weights=deferred,
    )  # fmt: skip
    assert len(out.trace) == 3 * stages * microbatches


times = st.floats(0.01, 10, allow_nan=False)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(times, times, times), min_size=1, max_size=5),
    st.integers(1, 6),
    st.sampled_from(["sequential", "gpipe", "1f1b"]),
    st.floats(0, 3),
    st.sampled_from([0.25, 2.0, 8.0]),
)
def test_scaling_every_time_scales_the_step(stages, microbatches, schedule, latency, scale):
    def play(x):
        hop = MessageTimes(latency * x / 2, latency * x)
        return run(
            schedule, microbatches, [StageTimes(f * x, b * x, o * x) for f, b, o in stages],
            [BoundaryTimes(hop, hop)] * (len(stages) - 1),
        ).iteration_s  # fmt: skip

    assert play(scale) == pytest.approx(scale * play(1.0), rel=1e-12)


def test_a_link_never_makes_a_step_faster():
    stages = [StageTimes(1, 2), StageTimes(2, 1), StageTimes(1, 1)]
    free = run("1f1b", 6, stages, [BoundaryTimes()] * 2).iteration_s
    hop = MessageTimes(0.5, 0.1)
    assert run("1f1b", 6, stages, [BoundaryTimes(hop, hop)] * 2).iteration_s > free


def test_64_stages_of_64_microbatches():
    out = run("1f1b", 64, [StageTimes(1, 2)] * 64, [BoundaryTimes()] * 63)
    assert out.iteration_s == 3 * (64 + 63)


def test_zero_bubble_fills_the_bubbles_of_equal_stages():
    """Forward, B and W of one second each, weights enough behind: as Qi et al. say, (S − 1)(f + b − w) is
    left of 1F1B's (S − 1)(f + b + w)."""
    stages, microbatches = 4, 8
    times = [StageTimes(1, 2, 0, 1)] * stages
    plain = run("1f1b", microbatches, times, [BoundaryTimes()] * 3)
    in_flight = numbers("zero-bubble", stages, microbatches)
    assert plain.iteration_s == 3 * microbatches + 3 * 3
    best = simulate(
        "zero-bubble", microbatches, in_flight, times, [BoundaryTimes()] * 3, deferred_weights=[0, 1, 2, 3]
    )
    assert best.iteration_s == 3 * microbatches + 3


def test_wrong_deferred_weights():
    with pytest.raises(ValueError, match="3 deferred_weights"):
        simulate("zero-bubble", 2, [1], [StageTimes(1, 1)], [], deferred_weights=[0, 0, 0])
    with pytest.raises(ValueError, match="1f1b has no deferred_weights"):
        simulate("1f1b", 2, [1], [StageTimes(1, 1)], [], deferred_weights=[1])
