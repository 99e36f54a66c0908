"""A node that lies: whatever it sends is refused with its name, or does no harm.

Here at the level where what it sends arrives, without processes; ``test_lying_rank`` has runs in which a rank
really does so.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.agent.frames import FrameError
from skyctl.agent.task_events import read_as_json
from skyctl.check import diagnosis
from skyctl.check.check_answers import ANSWERS, TorchFacts
from skyctl.check.check_report import DtypeReport
from skyctl.compare import chrome_trace, timeline
from skyctl.errors import NodeError, ProtocolError, RunError, SkyctlError, WorkloadError
from skyctl.files import RunPaths
from skyctl.planner.evaluation import simulation_input_of
from skyctl.records.base import timestamp
from skyctl.records.cluster import Cluster, Node, PreparedEnvironment
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.records.problem import Device, Layer, LayerTimes, Link, Problem
from skyctl.records.profile import Profile
from skyctl.records.run_state import NodeSession, RunState
from skyctl.remote.agent_messages import AgentHello, parse_agent_message
from skyctl.run.artifacts import _check_weights, _plain_trace, gather_weights
from skyctl.run.callbacks import RankGroupHooks, RunCallbacks
from skyctl.run.checkpoints.replicator_group import ReplicatorGroup
from skyctl.run.checkpoints.replicator_messages import ReplicatorEnded
from skyctl.run.event_sink import RunFolderSink
from skyctl.run.plan_update import observed_slowdowns
from skyctl.run.rank_failure import RankState
from skyctl.run.rank_group import RankGroup
from skyctl.run.rank_spec import RankSpec, rank_task_name
from skyctl.run.step_metrics import build_measurement, with_differences
from skyctl.setup.installer import missing_requirements
from skyctl.setup.node.setup_events import ANSWERS as SETUP_ANSWERS
from skyctl.setup.wheels import WheelTarget
from skyctl.setup.workload_requirements import is_plain_requirement
from skyctl.supervision.run_journal import RunJournal

from . import lies

NODES = {name: Node(name=name, transport="local") for name in (lies.HONEST, lies.LIAR)}
STATE_BYTES = 1e5
LIMIT = 10_000
SEED = 20261123


def make_plan() -> Plan:
    """Two stages of two layers, the second on the node that lies."""
    from skyctl.planner.api import plan

    ids = [f"{name}/cpu:0" for name in NODES]
    problem = Problem(
        layers=tuple(
            Layer(name=f"l{i}", flops=1e9, state_bytes=STATE_BYTES, activation_bytes=1e3, output_bytes=1e3)
            for i in range(4)
        ),
        devices=tuple(Device(id=name, flops_per_s=1e9, memory_bytes=None) for name in ids),
        times={
            name: LayerTimes(forward_s=(0.1,) * 4, backward_s=(0.1,) * 4, optimizer_s=(0.0,) * 4)
            for name in ids
        },
        links=tuple(
            Link(source=a, target=b, latency_s=1e-4, bandwidth_bytes_per_s=1e7) for a, b in (ids, ids[::-1])
        ),
        microbatches=4,
    )
    made = plan(problem, strategy="even")
    assert [stage.replicas[0].device for stage in made.stages] == ids
    return made


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan()


def run_state(paths: RunPaths) -> RunState:
    now = timestamp()
    return RunState(
        run_id=paths.run_id, created=now, written=now, workload="w", cluster="c", steps=lies.STEPS
    )


def rank_spec(rank: int) -> RankSpec:
    node, layers = list(NODES)[rank], [2 * rank, 2 * rank + 2]
    payload = {"steps": lies.STEPS, "layers": layers, "microbatches": 4}
    return RankSpec(rank, node, f"{node}/cpu:0", payload, dict.fromkeys(range(*layers), LIMIT))


def names_the_liar(exc: NodeError) -> bool:
    """Whether the error names it, and is of a size that a person reads."""
    return exc.node == lies.LIAR and lies.LIAR in exc.message and len(exc.message) < 1000


class Ranks:
    """Two ranks as the launcher has them once they were started; what is said is handled at once."""

    def __init__(self) -> None:
        self.specs = [rank_spec(0), rank_spec(1)]
        sessions: Any = {
            name: SimpleNamespace(node=node, host="127.0.0.1", lost=None, silent_s=0.0, disconnected_s=0.0)
            for name, node in NODES.items()
        }
        paths = RunPaths.new()
        self.sink = RunFolderSink(paths, run_state(paths), lambda _text: None)
        self.kept: list[Mapping[str, Any]] = []

        def write_down(spec: RankSpec, plain: Mapping[str, Any]) -> bool:
            self.kept.append(json.loads(json.dumps(plain)))
            return self.sink.heard(spec.node, rank_task_name(spec.rank), plain)

        hooks = RankGroupHooks(message=write_down)
        self.group = RankGroup(paths, self.specs, sessions, RunCallbacks(), hooks=hooks)
        task: Any = SimpleNamespace(done=True)
        self.ranks = [RankState(spec, task) for spec in self.specs]
        self.group._ranks.extend(self.ranks)

    def say(self, rank: int, *messages: Mapping[str, Any]) -> None:
        for message in messages:
            event = self.group._take(self.ranks[rank], dict(message))
            if event is not None:
                self.group._reports.take(self.ranks[rank], event)


def honest_events() -> list[lies.Message]:
    """What the first rank says."""
    listening = {"event": "listening", "address": "192.0.2.1", "port": 4000}
    checkpoint = {**lies.CHECKPOINT, "layers": {str(n): {"sha256": lies.SHA, "bytes": 1000} for n in (0, 1)}}
    found = [checkpoint if one is lies.CHECKPOINT else one for one in lies.RANK[:-2]]
    return [found[0], listening, *(one for one in found[1:] if one["event"] != "validation")]


@pytest.mark.parametrize("seed", range(3))
def test_what_a_rank_sends(seed: int, plan: Plan) -> None:
    rng = random.Random(SEED + seed)
    names: Counter[Any] = Counter()
    for _ in range(70):
        at = rng.randrange(len(lies.RANK))
        (lie,) = lies.lies(rng, [lies.RANK[at]], 1)
        ranks = Ranks()
        ranks.say(0, *honest_events())
        ranks.say(1, *lies.RANK[: min(at, len(lies.RANK) - 2)])
        assert ranks.ranks[1].failure is None
        try:
            ranks.say(1, lie)
            if ranks.ranks[1].failure is None:
                ranks.say(1, *lies.RANK[at + 1 : -2])
        except (RunError, WorkloadError) as exc:  # no finite loss, other data: not told from bad luck
            names[RunError if "loss" in exc.message or "data()" in exc.message else exc.message] += 1
            continue
        failure = ranks.ranks[1].failure
        if isinstance(failure, SkyctlError):
            assert isinstance(failure, ProtocolError), lie
            assert names_the_liar(failure), failure
            names[ProtocolError] += 1
        else:
            names[None] += 1
        assert sum(len(json.dumps(one)) for one in ranks.kept) < 1 << 20
        if ranks.group.collected.reported > 1:
            figures_hold(ranks, plan)
    assert names[ProtocolError] > 35, names
    assert set(names) <= {ProtocolError, RunError, None}, names


def figures_hold(ranks: Ranks, plan: Plan) -> None:
    """Figures that were taken can be computed with and written down."""
    observed_slowdowns(plan, ranks.group.collected.settled_events())
    play = simulation_input_of(plan)
    done = build_measurement("r", plan, ranks.specs, ranks.group.collected, None, [play])
    Measurement.model_validate_json(with_differences(play, done).to_json())


@pytest.mark.parametrize(
    ("prefix", "lie", "words"),
    [
        (5, {"iteration_s": float("nan")}, "iteration_s: nan is no number"),
        (5, {"forward_s": -1.0}, "forward_s: -1.0 is not from 0"),
        (5, {"step": 3}, "step 1 comes next, not step 3"),
        (5, {"step": 10**9}, "step: 1000000000 is not from 0"),
        (5, {"loss": None}, "it has no loss"),
        (5, {"event": "sing"}, "'sing', which is nothing that is expected"),
        (5, {"event": ["step"]}, "an event without a kind"),
        (6, {"event": "checkpoint", "layers": {"0": {"sha256": lies.SHA, "bytes": 1}}}, r"\[2, 4\)"),
        (6, {"event": "checkpoint", "layers": {"../x": {"sha256": lies.SHA, "bytes": 1}}}, "'../x' is no"),
        (
            6,
            {"event": "checkpoint", "layers": {n: {"sha256": lies.SHA, "bytes": 1 << 30} for n in "23"}},
            "layer 2 has 10000 bytes at most",
        ),
        (1, {"event": "result", "steps": 6}, "it is not ready yet"),
        (2, {"event": "listening", "address": "192.0.2.1", "port": 1}, "it is ready already"),
        (1, {"event": "listening", "address": "evil.example", "port": 1}, "no IPv4 address"),
        (1, {"event": "listening", "address": "192.0.2.1", "port": 1}, "no rank comes after it"),
        (2, {"event": "result", "steps": 0}, "the run has 6 steps, not 0"),
        (2, {"event": "log", "text": "x" * (1 << 20)}, "1048576 characters, more than"),
        (2, {"event": "error", "type": [], "message": "x"}, "does not say how"),
        (2, {"event": "error", "type": "x", "message": "x", "peer_rank": 1}, "rank 1 sends it nothing"),
    ],
)
def test_a_lie_is_named(prefix: int, lie: lies.Message, words: str) -> None:
    ranks = Ranks()
    ranks.say(1, *lies.RANK[:prefix])
    step = {} if "event" in lie else lies.RANK[7 if prefix > 6 else 4] | {"step": 1, "validates": False}
    base = {"step": 1, "wall_s": 0.1, "notes": []} if lie.get("event") == "checkpoint" else step
    if prefix == 5:
        ranks.say(1, lies.RANK[5])
    ranks.say(1, {**base, **lie})
    failure = ranks.ranks[1].failure
    assert isinstance(failure, ProtocolError)
    assert failure.exit_code == 4
    with pytest.raises(ProtocolError, match=words):
        raise failure
    before = len(ranks.kept)
    ranks.say(1, lies.LOG)  # nothing more is taken of it
    assert len(ranks.kept) == before


def test_what_a_replicator_sends() -> None:
    rng = random.Random(SEED)
    refused = 0
    for lie in lies.lies(rng, lies.REPLICATOR, 120):
        ended: dict[str, ReplicatorEnded] = {}
        kept: list[Mapping[str, Any]] = []

        def write_down(_node: str, _who: str, message: Mapping[str, Any], kept: Any = kept) -> bool:
            kept.append(json.loads(json.dumps(message)))
            return True

        def hear(node: str, news: Any, ended: Any = ended) -> None:
            if isinstance(news, ReplicatorEnded):
                ended[node] = news

        sessions: Any = {name: SimpleNamespace(node=node, is_waited_for=True) for name, node in NODES.items()}
        group = ReplicatorGroup("r", sessions, write_down, hear, shard_limits={0: 1000, 1: 1000})
        task: Any = SimpleNamespace(send=lambda _m: None, kill=lambda: None, ended=True)
        for session in sessions.values():
            session.discard = lambda _task: None
        group._tasks = {lies.LIAR: task}
        number = group._send(lies.LIAR, {"op": "list"})
        group._events._events.put(SimpleNamespace(key=lies.LIAR, value=lie, ended=False, task=task))
        group.take_events()
        for news in ended.values():
            assert isinstance(news.error, SkyctlError)
            assert lies.LIAR in news.error.message
            refused += isinstance(news.error, ProtocolError)
        answers = group._gather([number], 0.0)
        assert len(answers) == 1
        assert sum(len(json.dumps(one)) for one in kept) < 1 << 20
    assert refused > 60, refused


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"id": 2}, "order 2, which it was not given"),
        ({"id": 1, "steps": {"5": {"7": {"sha256": lies.SHA, "bytes": 1}}}}, "there is no such layer"),
        ({"id": 1, "steps": {"5": {"0": {"sha256": lies.SHA, "bytes": 1 << 30}}}}, "1000 are the most"),
        ({"id": 1, "steps": {"../5": {}}}, "'../5' is no number"),
    ],
)
def test_an_answer_that_none_would_give(answer: lies.Message, words: str) -> None:
    from skyctl.remote.remote_task import read_task_message
    from skyctl.run.checkpoints.replicator_messages import REPLICATOR_KINDS, ReplicatorOrders

    orders = ReplicatorOrders({0: 1000})
    orders.give(orders.next_number(), lies.LIAR)
    orders.give(orders.next_number(), lies.HONEST)
    message = {"event": "answer", **answer}
    with pytest.raises(ProtocolError, match=words):
        orders.take(lies.LIAR, read_task_message(REPLICATOR_KINDS, NODES[lies.LIAR], message).event)


def test_what_an_agent_sends() -> None:
    rng = random.Random(SEED)
    refused = 0
    for lie in lies.lies(rng, lies.AGENT, 150, key="op"):
        try:
            message = parse_agent_message(lie)
        except FrameError as exc:
            refused += len(str(exc)) < 1000
            continue
        if isinstance(message, AgentHello):
            NodeSession(node="n", session=message.session, cache=message.cache)
    assert refused > 50, refused


@pytest.mark.parametrize("op", sorted(lies.CHECK))
def test_what_check_is_told(op: str) -> None:
    rng, unnamed = random.Random(SEED), 0
    for lie in lies.lies(rng, [lies.CHECK[op]], 30):
        try:
            answer = read_as_json(ANSWERS[op], lie, lies.LIAR)
        except NodeError as exc:
            unnamed += not names_the_liar(exc)
            continue
        if op == "facts":
            diagnosis.python_tick(answer)
            diagnosis.limits_ticks(NODES[lies.LIAR], answer)
        elif op == "clock":
            diagnosis.clock_tick(answer["time_s"] - 1.7e9, 0.1)
    assert not unnamed


def test_what_check_is_told_of_torch() -> None:
    rng, unnamed = random.Random(SEED), 0
    for lie in lies.lies(rng, [lies.TORCH], 40):
        try:
            answer = read_as_json(TorchFacts, lie, lies.LIAR)
        except NodeError as exc:
            unnamed += not names_the_liar(exc)
            continue
        found = [DtypeReport(**one) for one in answer["dtypes"]]
        diagnosis.torch_ticks(NODES[lies.LIAR], answer)
        diagnosis.dtype_ticks(NODES[lies.LIAR], found)
    assert not unnamed


@pytest.mark.parametrize("op", sorted(lies.SETUP))
def test_what_setup_is_told(op: str) -> None:
    rng, unnamed = random.Random(SEED), 0
    for lie in lies.lies(rng, lies.SETUP[op], 30):
        try:
            answer = read_as_json(SETUP_ANSWERS[op], lie, lies.LIAR)
        except NodeError as exc:
            unnamed += not names_the_liar(exc)
            continue
        if op == "look":
            missing_requirements(answer, "2.6.0")
        elif op == "facts":
            WheelTarget(
                answer["version"], answer["implementation"], tuple(answer["abis"]), tuple(answer["platforms"])
            )
        elif op == "make" and "python" in answer:
            PreparedEnvironment.of(NODES[lies.LIAR], answer["python"], "me")
    assert not unnamed


@pytest.mark.parametrize(
    "line",
    [
        "evil @ https://example.org/evil.tar.gz",
        "numpy\n--index-url https://example.org",
        "--index-url=https://example.org",
        "https://example.org/evil.tar.gz",
        "numpy --config-settings=x",
        "./evil",
        "",
    ],
)
def test_of_requirements_only_names_and_versions_reach_this_machines_pip(line: str) -> None:
    assert not is_plain_requirement(line)


@pytest.mark.parametrize(
    "line",
    [
        "numpy",
        "numpy>=2,<3",
        "torch==2.6.0+cpu",
        "a[b,c]~=1.*",
        "x ; python_version < '3.12'",
        "a-b_c.d (>=1)",
    ],
)
def test_honest_requirements_do(line: str) -> None:
    assert is_plain_requirement(line)


def test_what_a_trace_holds() -> None:
    rng = random.Random(SEED)
    spec = RankSpec(1, lies.LIAR, f"{lies.LIAR}/cpu:0", {"microbatches": 4})
    refused = 0
    for lie in lies.lies(rng, [lies.TRACE], 80):
        try:
            found = _plain_trace(lie, spec)
        except ProtocolError as exc:
            refused += names_the_liar(exc)
            continue
        made = timeline.measured_timeline([lies.TRACE, found], ["a", "b"])
        if not made.steps:
            continue
        json.dumps(chrome_trace.trace_document(made, made, run_id="r"), allow_nan=False)
    assert refused > 20, refused


# Files


def test_of_a_file_that_is_too_large_nothing_is_taken(tmp_path: Path) -> None:
    """By its announced size, by what comes beyond that, by what is missing."""
    from skyctl.remote.agent_messages import FileChunk, FileReply, FileSize
    from skyctl.remote.file_transfers import FileTransfers

    def fetch(*replies: tuple[Any, bytes]) -> None:
        import itertools
        import threading

        connection: Any = SimpleNamespace(
            node=NODES[lies.LIAR],
            changed=threading.Condition(),
            lost=None,
            send=lambda _message: None,
            wait=lambda ready, _timeout, **_options: ready(),
        )
        transfers = FileTransfers(connection, itertools.count(1).__next__)
        expect = transfers._expect

        def expect_and_reply() -> int:
            number = expect()
            for message, body in replies:
                transfers.add_reply(message.model_copy(update={"id": number}), body)
            return number

        transfers._expect = expect_and_reply  # type: ignore[method-assign]
        transfers.fetch("/there", tmp_path / "here", 100)

    size = FileSize(op="size", id=0, bytes=50)
    chunk = FileChunk(op="chunk", id=0), b"x" * 50
    end = FileReply(op="reply", id=0, sha256="0" * 64), b""
    with pytest.raises(ProtocolError, match=r"node liar is 1073741824 bytes large; 100 are the most"):
        fetch((size.model_copy(update={"bytes": 1 << 30}), b""))
    with pytest.raises(ProtocolError, match="is -5 bytes large"):
        fetch((size.model_copy(update={"bytes": -5}), b""))
    with pytest.raises(ProtocolError, match="sent more than the 50 bytes"):
        fetch((size, b""), chunk, chunk)
    with pytest.raises(ProtocolError, match="sent more than the 0 bytes"):
        fetch(chunk)
    with pytest.raises(ProtocolError, match="ended 50 bytes before"):
        fetch((size, b""), end)
    with pytest.raises(ProtocolError, match="said twice"):
        fetch((size, b""), (size, b""))
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_its_own(tmp_path: Path) -> None:
    import torch

    from skyctl.checkpoint import safetensors

    spec = RankSpec(1, lies.LIAR, f"{lies.LIAR}/cpu:0", {"layers": [2, 4]})
    file = tmp_path / "part"
    safetensors.save(file, {"2.weight": torch.ones(3), "3.weight": torch.ones(3)}, {"layer.2": "a"})
    _check_weights(file, spec)
    good = file.read_bytes()
    safetensors.save(file, {"0.weight": torch.ones(3)}, {})
    with pytest.raises(ProtocolError, match=r"weights of layers \[2, 4\): they are of layers 0"):
        _check_weights(file, spec)
    rng = random.Random(SEED)
    from ..fuzz.mutate import bytewise

    for _ in range(60):
        file.write_bytes(bytewise(good, rng, rng.choice([1, 3])))
        with suppress(ProtocolError):
            _check_weights(file, spec)
    results = {1: SimpleNamespace(weights=None)}
    ranks: Any = SimpleNamespace(paths=RunPaths.new(), specs=[None, spec], results=lambda: results)
    with pytest.raises(ProtocolError, match="node liar has no weights of rank 1"):
        gather_weights(ranks, {})


# Logs


@pytest.mark.parametrize("supervised", [False, True])
def test_logs_end_at_their_limit_and_it_is_said_once(
    supervised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyctl.run import event_sink, log_limits
    from skyctl.supervision import run_journal

    def limits(note: Callable[[str], None]) -> log_limits.LogLimits:
        return log_limits.LogLimits(note, log_bytes=2 << 20, run_bytes=3 << 20)

    monkeypatch.setattr(event_sink, "LogLimits", limits)
    monkeypatch.setattr(run_journal, "LogLimits", limits)
    notes: list[str] = []
    paths = RunPaths.new()
    create: Any = RunJournal.create if supervised else RunFolderSink
    sink = create(paths, run_state(paths), notes.append)
    notes.clear()
    line = {"event": "log", "text": "x" * 60_000}
    for rank in range(3):
        for _ in range(100):
            assert sink.heard(lies.LIAR, rank_task_name(rank), line)
    assert sink.heard(lies.LIAR, rank_task_name(0), lies.ERROR)
    if supervised:
        for _ in range(100):
            event = {"event": "unreplicated", "from": "b", "error": "x" * 60_000}
            assert sink.heard(lies.LIAR, "keeper", event)
    sink.close()
    told = [note for note in notes if "MiB" in note]
    assert len(told) == (4 if supervised else 3), notes
    kept = sum(path.stat().st_size for path in paths.folder.rglob("*") if path.is_file())
    assert kept < 3.2 * (1 << 20)
    first = paths.log(0).read_text().splitlines()
    assert "[skyctl: the log ends here: it has 2 MiB]" in first
    assert first[-1] == "Traceback …"
    assert "[skyctl: the log ends here: the run has 3 MiB]" in paths.log(1).read_text().splitlines()[-1]


# The probe


def probe_scripts() -> tuple[Any, Any, Any]:
    from ..probe.test_cluster_probe import GOOD, FakeSession, cluster

    return GOOD, FakeSession, cluster


@pytest.mark.parametrize("seed", range(2))
def test_what_a_probe_sends(seed: int) -> None:
    from skyctl.probe.cluster_probe import ProbeOptions, measure_cluster

    good, session, cluster = probe_scripts()
    rng = random.Random(SEED + seed)
    them: Cluster = cluster(lies.HONEST, lies.LIAR, "also")
    options = ProbeOptions(start_s=0.2, cap_s=0.2)
    refused = 0
    for _ in range(30):
        order = rng.choice(["start", "measure", "count", "stop", "link listen", "link connect"])
        at = rng.randrange(len(good[order]))
        (lie,) = lies.lies(rng, [good[order][at]], 1)
        script = {**good, order: [*good[order][:at], lie, *good[order][at + 1 :]]}
        sessions = {
            node.name: session(node, script if node.name == lies.LIAR else good) for node in them.nodes
        }
        profile = measure_cluster(them, sessions, options=options)
        Profile.model_validate_json(profile.to_json())
        assert {failure.node for failure in profile.failures} <= {lies.LIAR}, (lie, profile.failures)
        assert {device.node for device in profile.devices} >= {lies.HONEST, "also"}
        for failure in profile.failures:
            assert lies.LIAR in failure.error, failure
            refused += 1
    assert refused > 10, refused


@pytest.mark.parametrize(
    ("order", "lie", "words"),
    [
        ("stop", {"flops_per_s": 1e30}, "flops_per_s: 1e\\+30 is not from"),
        ("stop", {"flops_per_s": float("nan")}, "nan is no number"),
        ("stop", {"flops_per_s": -1.0}, "-1.0 is not from"),
        ("stop", {"memory_bytes": 1e40}, "memory_bytes"),
        ("stop", {"timings": [{"signature": "x", "microbatch_size": 1}]}, "has timed 1 layers, not the 0"),
        ("start", {"devices": [{"id": "cpu:0", "name": "a"}] * 2}, "lists a device twice"),
        ("start", {"device": "cuda:7"}, "measures cuda:7"),
        ("start", {"cpus": float("inf")}, "inf is no number"),
    ],
)
def test_a_figure_that_no_device_has_is_refused_by_name(order: str, lie: lies.Message, words: str) -> None:
    import re

    from skyctl.probe.cluster_probe import ProbeOptions, measure_cluster

    good, session, cluster = probe_scripts()
    them: Cluster = cluster(lies.HONEST, lies.LIAR)
    bad = {**good, order: [{**good[order][0], **lie}]}
    sessions = {lies.HONEST: session(them.nodes[0], good), lies.LIAR: session(them.nodes[1], bad)}
    profile = measure_cluster(them, sessions, options=ProbeOptions(start_s=5.0, cap_s=5.0))
    (failure,) = profile.failures
    assert failure.node == lies.LIAR
    assert re.search(words, failure.error), failure.error
    assert [device.node for device in profile.devices] == [lies.HONEST]


def test_layers_that_are_faster_than_physics() -> None:
    from skyctl.probe.probe_messages import check_timings

    row = {"signature": "a", "microbatch_size": 2, "forward_s": 1e-12, "backward_s": 0.0}
    check_timings(NODES[lies.LIAR], [row], {("a", 2): 1e5})
    with pytest.raises(ProtocolError, match="node liar claims 1e\\+09 FLOPs in 1e-12 s"):
        check_timings(NODES[lies.LIAR], [row], {("a", 2): 1e9})


def test_arrivals_that_can_not_be() -> None:
    from skyctl.probe.probe_messages import check_arrivals

    node = NODES[lies.LIAR]
    check_arrivals(node, {"a": [0.1, 0.2]}, {"a": 1000}, 4)
    for arrivals in ({}, {"b": [0.1]}, {"a": [0.2, 0.1]}, {"a": [0.1] * 5}, {"a": [1e-300]}):
        with pytest.raises(ProtocolError, match="node liar tells of"):
            check_arrivals(node, arrivals, {"a": 1000}, 4)
