"""A whole probe: real processes on local nodes, and fakes for every way a node can fail."""

import queue
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.errors import InputError, UnreachableError
from skyctl.files import recent_profiles
from skyctl.jobs.node_sessions import NodeSessions
from skyctl.jobs.profile_recheck import profile_changes
from skyctl.jobs.profiles import find_profile, probe_cluster, profile_misfit
from skyctl.jobs.training_request import TrainingRequest
from skyctl.probe.cluster_probe import ProbeOptions, Recheck, measure_cluster
from skyctl.probe.layer_shapes import shape_profiles
from skyctl.records.base import parse
from skyctl.records.cluster import Cluster, Node
from skyctl.records.profile import Profile
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions
from skyctl.remote.session_factory import open_sessions
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import make_spec

FACTS = {
    "event": "facts",
    "device": "cpu:0",
    "hostname": "h",
    "platform": "Linux",
    "python": "3.11.0",
    "torch": "2.6.0",
    "cpu_model": "a cpu",
    "cpus": 1.5,
    "threads": 2,
    "memory_total_bytes": 16 * 2**30,
    "memory_available_bytes": 8 * 2**30,
    "devices": [{"id": "cpu:0", "name": "a cpu"}],
}
TIMINGS = {
    "event": "timings",
    "threads": 2,
    "timings": [],
    "flops_per_s": 1e9,
    "memory_bytes": 8 * 2**30,
    "memory_from": "free memory",
    "memory_scope": "pot",
    "reserved_bytes": 2**28,
    "own_bytes": 2**27,
}


class FakeTask:
    """A node's process that follows a script: by order, the events it sends back."""

    def __init__(self, script: dict[str, list[dict[str, Any]]]) -> None:
        self._script = script
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.killed = False
        self.sent: list[dict[str, Any]] = []
        for event in script.get("start", []):
            self._events.put(event)

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        self.sent.append(message)
        order = "link " + message["role"] if message["op"] == "link" else message["op"]
        for event in self._script.get(order, []):
            self._events.put(event)

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes] | None:
        event = self._events.get()
        return None if event is None else (event, b"")

    def kill(self) -> None:
        self.killed = True
        self._events.put(None)


class FakeSession:
    def __init__(self, node: Node, script: dict[str, list[dict[str, Any]]]) -> None:
        self.node = node
        self.host = "127.0.0.1"
        self.hello = SimpleNamespace(hostname="h", addresses=[["lo", "127.0.0.1"]])
        self.tasks: list[FakeTask] = []
        self._script = script

    def start_task(self, module: str, message: dict[str, Any], **_: Any) -> FakeTask:
        assert module == "skyctl.probe.node.probe_task"
        self.tasks.append(FakeTask(self._script))
        return self.tasks[-1]


LINK = {"event": "link", "latency_s": 0.001, "bandwidth_bytes_per_s": 1e7}
GOOD = {
    "start": [FACTS],
    "measure": [{"event": "progress", "done": 1, "of": 2, "what": "x"}, {"event": "passed"}],
    "count": [{"event": "measured"}],
    "stop": [TIMINGS],
    "link listen": [{"event": "listening", "address": "127.0.0.1", "port": 5}, LINK],
    "link connect": [LINK],
}


def cluster(*names: str, **more: Any) -> Cluster:
    return Cluster(name="c", nodes=[Node(name=name, transport="local", **more) for name in names])


def test_a_bad_node_hides_no_other() -> None:
    no_torch = {
        "event": "error",
        "type": "ModuleNotFoundError",
        "message": "No module named 'torch'",
        "module": "torch",
        "skyctl": False,
    }
    killed = {"event": "exit", "returncode": None, "signal": "SIGKILL", "tail": []}
    scripts: dict[str, dict[str, list[dict[str, Any]]]] = {
        "a": GOOD,
        "bare": {"start": [no_torch]},
        "killed": {**GOOD, "measure": [{"event": "log", "text": "noise\n" * 9}, killed]},
        "silent": {**GOOD, "measure": []},
        "b": GOOD,
    }
    them = cluster(*scripts, "gone", "never")
    sessions: dict[str, Any] = {name: FakeSession(them.node(name), s) for name, s in scripts.items()}
    sessions["gone"] = UnreachableError("node gone: no route", node="gone", hint="switch it on")
    progress: list[tuple[str, str, float]] = []
    profile = measure_cluster(
        them,
        sessions,
        on_progress=lambda *news: progress.append(news),
        options=ProbeOptions(start_s=20.0, cap_s=5.0),
    )
    assert [d.id for d in profile.devices] == ["a/cpu:0", "b/cpu:0"]
    failures = {failure.node: failure for failure in profile.failures}
    assert list(failures) == ["bare", "killed", "silent", "gone", "never"]
    assert "no torch" in failures["bare"].error
    assert failures["bare"].hint is not None
    assert "SIGKILL" in failures["killed"].error
    assert "no result within 5 s" in failures["silent"].error
    assert failures["gone"].hint == "switch it on"
    assert [(k.source, k.target, k.latency_s) for k in profile.links] == [
        ("a", "b", 0.001),
        ("b", "a", 0.001),
    ]
    assert ("a", "x", 0.5) in progress
    assert all(task.killed for s in sessions.values() if isinstance(s, FakeSession) for task in s.tasks)
    assert profile.devices[0].memory_from == "free memory, shared by 2 devices"


def test_what_counts_is_measured_once_all_have_been_through_their_layers() -> None:
    """Those that were lost meanwhile, and those that have no layers and are done at once, hold nobody up."""
    scripts: dict[str, dict[str, list[dict[str, Any]]]] = {
        "a": GOOD,
        "quick": {**GOOD, "measure": [{"event": "measured"}], "count": []},
        "killed": {**GOOD, "measure": [{"event": "exit", "returncode": 1, "signal": None, "tail": []}]},
    }
    them = cluster(*scripts)
    sessions = {name: FakeSession(them.node(name), script) for name, script in scripts.items()}
    profile = measure_cluster(them, sessions, options=ProbeOptions(budget_s=0.5, cap_s=20.0))
    assert [device.id for device in profile.devices] == ["a/cpu:0", "quick/cpu:0"]
    for name in ("a", "quick"):
        orders = [
            order for order in sessions[name].tasks[0].sent if order["op"] in ("measure", "count", "stop")
        ]
        assert [order["op"] for order in orders] == ["measure", "count", "stop"]
        assert orders[1]["seconds"] >= 0.5


def test_a_pair_that_can_not_connect_is_an_error_of_that_pair() -> None:
    deaf = {**GOOD, "link connect": [{"event": "link", "error": "no connection within 10 s"}]}
    deaf["link listen"] = [{"event": "link", "error": "can't listen"}]
    waits = {**GOOD, "link listen": [GOOD["link listen"][0], {"event": "link", "error": "nobody came"}]}
    them = cluster("a", "b", "c")
    sessions = {"a": waits, "b": deaf, "c": GOOD}
    profile = measure_cluster(them, {name: FakeSession(them.node(name), s) for name, s in sessions.items()})
    errors = {(link.source, link.target): link.error for link in profile.links}
    assert len(errors) == 6
    assert "no connection" in (errors["a", "b"] or "")
    assert "nobody came" in (errors["b", "a"] or "")
    assert not profile.failures


def test_every_device_of_a_node_has_its_process_and_one_pair_is_measured() -> None:
    devices = [{"id": f"cuda:{i}", "name": "gpu"} for i in range(3)]
    them = cluster("a")

    class Many(FakeSession):
        def start_task(self, module: str, message: dict[str, Any], **_: Any) -> FakeTask:
            device = message["device"] or "cuda:0"
            self._script = {**GOOD, "start": [{**FACTS, "device": device, "devices": devices}]}
            return super().start_task(module, message)

    profile = measure_cluster(them, {"a": Many(them.node("a"), {})})
    assert [d.id for d in profile.devices] == ["a/cuda:0", "a/cuda:1", "a/cuda:2"]
    assert [d.threads for d in profile.devices] == [None] * 3
    assert [(link.source, link.target) for link in profile.links] == [("a", "a")]


def test_a_recheck_fails_no_device_of_which_it_measures_too_little_to_tell_its_speed() -> None:
    """One whose costliest layer has no counted flops, and one that the profile does not have."""
    then = measure_cluster(cluster("a"), {"a": FakeSession(cluster("a").node("a"), GOOD)})
    then = then.model_copy(update={"devices": (then.devices[0].model_copy(update={"flops_per_s": 5e9}),)})
    them = cluster("a", "b")
    untold = {**GOOD, "stop": [{**TIMINGS, "flops_per_s": None}]}
    sessions = {"a": FakeSession(them.node("a"), untold), "b": FakeSession(them.node("b"), GOOD)}
    now = measure_cluster(them, sessions, options=ProbeOptions(recheck=Recheck(then, lambda _: True)))
    assert not now.failures
    assert [(d.id, d.flops_per_s) for d in now.devices] == [("a/cpu:0", 5e9), ("b/cpu:0", 1e9)]
    orders = {name: session.tasks[0].sent[0] for name, session in sessions.items()}
    assert {name: order["generic"] for name, order in orders.items()} == {"a": False, "b": True}
    changes = [(change.where, change.what, change.then) for change in profile_changes(then, now)]
    assert ("b/cpu:0", "device", "not measured before") in changes


def test_an_interrupted_probe_keeps_layer_times_for_the_next_and_for_no_plan() -> None:
    spec = make_spec("gpt:layers=1,hidden=16,heads=1,context=8", batch_size=4)
    workload, request = load_workload(spec), TrainingRequest(spec, 2, compare_cut=False)
    figures = {"forward_s": 1e-3, "backward_s": 2e-3, "spread": 0.01, "interval": 0.01, "repeats": 9}
    timings = [
        {"signature": layer.signature, "microbatch_size": shape.microbatch_size, **figures}
        for shape in shape_profiles(workload, spec, [2])
        for layer in {layer.signature: layer for layer in shape.layers}.values()
    ]
    script = {**GOOD, "stop": [{**TIMINGS, "timings": timings}]}
    them = cluster("a", "b")

    def probe(on_node: Callable[[str, str, float], None]) -> tuple[Profile, list[dict[str, Any]]]:
        sessions: Any = {node.name: FakeSession(node, script) for node in them.nodes}
        probed, _ = probe_cluster(
            them, NodeSessions(sessions, {}), request, workload, lambda _text: None, on_node
        )
        return probed, sessions["a"].tasks[0].sent[0]["layers"]

    def interrupt(node: str, _what: str, _done: float) -> None:
        if node == "links":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as interrupted:
        probe(interrupt)
    assert interrupted.value.__notes__ == ["the layer times are kept: the next probe measures the links"]
    (kept,) = recent_profiles("c", interrupted=True)
    assert kept.interrupted
    assert not kept.links
    with pytest.raises(InputError, match="has no profile yet"):
        find_profile(them, None, request, workload.digest)
    assert "interrupted" in str(profile_misfit(kept, request, workload.digest, them.nodes))
    whole, layers = probe(lambda *_: None)
    assert all(layer["known_sizes"] == [int(size) for size in layer["signatures"]] for layer in layers)
    assert [device.timings for device in whole.devices] == [device.timings for device in kept.devices]
    assert len(whole.links) == 2
    assert find_profile(them, None, request, workload.digest)[0] == whole


@pytest.mark.slow
def test_local_nodes_for_real() -> None:
    them = Cluster(
        name="real",
        nodes=[
            Node(name="n 1; touch x", transport="local", python=sys.executable, threads=1),
            Node(
                name="n2", transport="local", python=sys.executable, threads=1, slowdown=3.0, memory_gib=0.5
            ),
        ],
    )
    spec = make_spec("gpt:layers=2,hidden=32,heads=2,context=16", batch_size=8)
    workload = load_workload(spec)
    before = threading.active_count()
    sessions = open_sessions(them.nodes, ConnectOptions())
    try:
        profile = measure_cluster(
            them, sessions, workload, spec, [2, 4, 8], options=ProbeOptions(budget_s=0.5)
        )
    finally:
        for session in sessions.values():
            assert isinstance(session, Session)
            session.close()
    assert not profile.failures
    assert parse(Profile, profile.to_json(), "it") == profile
    assert profile.workload is not None
    assert [(s.microbatches, s.microbatch_size) for s in profile.workload.shapes] == [(2, 4), (4, 2), (8, 1)]
    for device in profile.devices:
        measured = {(t.signature, t.microbatch_size): t for t in device.timings}
        for shape in profile.workload.shapes:
            for layer in shape.layers:
                timing = measured[layer.signature, shape.microbatch_size]
                assert timing.forward_s
                assert timing.backward_s
        assert device.threads == 1
        assert 0 < device.reserved_bytes < device.memory_bytes
    assert profile.devices[1].memory_bytes == 2**29
    assert profile.devices[1].memory_from == "memory_gib"
    names = [node.name for node in them.nodes]
    assert [(k.source, k.target) for k in profile.links] == [(names[0], names[1]), (names[1], names[0])]
    assert all(link.error is None and link.latency_s for link in profile.links)
    assert threading.active_count() - before < 20
