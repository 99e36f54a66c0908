"""A run's watching, with scripted tasks: who is named when something goes wrong, and what Ctrl-C does."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.agent.task_orders import read_order
from skyctl.errors import ProtocolError, RunError, SkyctlError
from skyctl.files import RunPaths
from skyctl.records.cluster import Cluster, Node
from skyctl.run.attempt import Attempt
from skyctl.run.attempt_orders import AttemptOrders
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.health_monitor import FIRST_CAUSE_GRACE_S, Deadlines
from skyctl.run.live_run import LiveRun
from skyctl.run.rank_spec import rank_of_task
from skyctl.run.restart_policy import classify
from skyctl.run.run_options import RunOptions
from skyctl.worker.rank_order import RANK_ORDERS, AnyRankOrder

from ..helpers.events import step_message
from ..helpers.orders import beside as sums_beside
from ..helpers.orders import helper_order, rank_order, rank_spec
from ..helpers.processes import until

QUICK = Deadlines(start_s=0.6, silence_s=0.6, stall_s=0.6, stall_steps=0.0)


class Scripted:
    """A task that says what it is told to; ``sent`` is what the launcher told it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sent: list[dict[str, Any]] = []
        self.killed = False
        self.done = False
        self._events: queue.Queue[dict[str, Any] | SkyctlError | None] = queue.Queue()

    def say(self, *events: dict[str, Any] | SkyctlError | None) -> None:
        for event in events:
            self._events.put(event)

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes] | None:
        event = self._events.get()
        if isinstance(event, SkyctlError):
            raise event
        return None if event is None else (event, b"")

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def kill(self) -> None:
        self.killed = True
        self.say(None)


class Journal:
    """As much of a run's journal as an attempt needs: what ranks print."""

    reported = 0

    def __init__(self) -> None:
        self.paths = RunPaths.new()

    def heard(self, _node: str, who: str, message: Mapping[str, Any]) -> bool:
        rank = rank_of_task(who)
        if rank is not None and message.get("event") == "log":
            with self.paths.log(rank).open("a") as log:
                log.write(f"{message['text']}\n")
        return True


class Listener:
    """A listener in the run's place: passes steps on."""

    def __init__(self, watcher: RunCallbacks) -> None:
        self.step = watcher.step

    def checkpoint(self, step: int) -> None:
        pass

    def tick(self) -> None:
        pass


NO_CHECKPOINTS: Any = SimpleNamespace(
    start_replicators=lambda _nodes, *, wait: None,
    replicate=lambda _plan: None,
    change_writers=lambda _nodes: None,
    written=lambda _step, _loss: None,
)
PLAN: Any = SimpleNamespace(
    predicted=SimpleNamespace(iteration_s=0.0),
    problem=SimpleNamespace(rhythm=SimpleNamespace(round_deadline_s=None)),
    encrypted=False,
    placed_stages=(),
    helpers=(),
)


class Stage:
    """Ranks 0 … n−1, one a node."""

    def __init__(
        self,
        ranks: int,
        steps: int = 2,
        watcher: RunCallbacks | None = None,
        *,
        beside: bool = False,
        helpers: int = 0,
        checkpoints: bool = False,
    ) -> None:
        self.tasks = [Scripted(f"rank-{i}") for i in range(ranks)]
        self.secrets: dict[int, Mapping[int, str]] = {}
        orders: list[AnyRankOrder] = [rank_order(i, ranks, steps=steps) for i in range(ranks)]
        if beside:  # a pipeline each, and each sums with each
            peers = [[peer for peer in range(ranks) if peer != rank] for rank in range(ranks)]
            held = rank_order(steps=steps, ranks=ranks)
            orders = [sums_beside(held, rank, peers[rank]) for rank in range(ranks)]
        for rank in range(ranks - helpers, ranks):
            orders[rank] = helper_order(orders[rank])
        specs = [rank_spec(rank, f"n{rank}", order) for rank, order in enumerate(orders)]
        sessions: Any = {
            f"n{i}": SimpleNamespace(
                node=Node(name=f"n{i}", transport="local"),
                host="127.0.0.1",
                start_task=self._starter(i),
                lost=None,
                silent_s=0.0,
                disconnected_s=0.0,
            )
            for i in range(ranks)
        }
        watcher = watcher or RunCallbacks()
        journal: Any = Journal()
        nodes = tuple(session.node for session in sessions.values())
        self.attempt = Attempt(
            LiveRun(journal, Cluster(name="here", nodes=nodes), sessions, watcher),
            AttemptOrders(PLAN, 1, specs, first=0),
            RunOptions(steps=steps, checkpoint_every=None if checkpoints else 0),
            NO_CHECKPOINTS,
            Listener(watcher),
        )
        self.state = self.attempt.state

    def _starter(self, rank: int) -> Any:
        def start(module: str, message: dict[str, Any], *, name: str) -> Scripted:
            secrets = read_order(RANK_ORDERS, message).world.secrets
            assert all(len(secret) == 32 for secret in secrets.values())
            self.secrets[rank] = secrets
            return self.tasks[rank]

        return start

    def limit(self, limits: Deadlines) -> None:
        self.attempt._monitor.deadlines = limits
        self.attempt._monitor._stall_s = limits.stall_s

    def ready(self) -> None:
        for i, task in enumerate(self.tasks):
            if i + 1 < len(self.tasks):
                task.say({"event": "stored", "key": f"at/{i}/{i + 1}", "value": f"0{i}"})
            if i:
                task.say({"event": "wanted", "key": f"at/{i - 1}/{i}"})
            task.say({"event": "ready"})
        self.attempt.start()

    def step(self, step: int, loss: float = 1.0) -> None:
        for task in self.tasks:
            task.say(step_message(step, loss=loss))


@pytest.fixture
def stages():
    made: list[Stage] = []

    def make(*args: Any, **kwargs: Any) -> Stage:
        made.append(Stage(*args, **kwargs))
        return made[-1]

    yield make
    for stage in made:
        stage.attempt.end()
        assert all(task.killed for task in stage.tasks)


def test_the_rendezvous_is_relayed_and_all_start_together(stages) -> None:
    stage = stages(3)
    stage.ready()
    assert stage.tasks[1].sent == [
        {"op": "stored", "key": "at/0/1", "value": "00"},
        {"op": "start"},
    ]
    assert [sorted(told) for told in stage.secrets.values()] == [[1], [0, 2], [1]]
    assert stage.secrets[0][1] == stage.secrets[1][0] != stage.secrets[1][2]
    stage.step(0)
    stage.step(1)
    for i, task in enumerate(stage.tasks):
        task.say({"event": "result", "weights": f"/w{i}", "steps": 2})
    stage.attempt.watch()
    assert [result.weights for result in stage.state.results.values()] == ["/w0", "/w1", "/w2"]
    assert stage.state.collected.reported == 2


def test_a_rank_that_never_speaks_is_named(stages) -> None:
    stage = stages(2)
    stage.limit(QUICK)
    stage.tasks[0].say({"event": "stored", "key": "at/0/1", "value": "00"}, {"event": "ready"})
    with pytest.raises(RunError, match=r"no sign of life from rank [01] on n[01]/cpu:0"):
        stage.attempt.start()


def test_the_silent_rank_is_named_and_not_one_that_waits_for_it(stages) -> None:
    stage = stages(2)
    stage.ready()
    stage.limit(QUICK)
    stage.state.ranks[0].heard_at += 3600  # rank 0 goes on beating
    with pytest.raises(RunError, match=r"no sign of life from rank 1 on n1/cpu:0 \(node n1\)"):
        stage.attempt.watch()


def test_ranks_that_all_wait_for_each_other_are_all_named(stages) -> None:
    stage = stages(2)
    stage.ready()
    for i, task in enumerate(stage.tasks):
        task.say({"event": "alive", "phase": f"step 0, forward of microbatch {i}", "waiting": True})
    stage.limit(Deadlines(stall_s=0.6, stall_steps=0.0))
    with pytest.raises(RunError, match="every rank has waited for another") as caught:
        stage.attempt.watch()
    assert "rank 0 on n0/cpu:0 (node n0) waits in step 0, forward of microbatch 0" in caught.value.message


def test_a_rank_that_computes_may_take_its_time(stages) -> None:
    stage = stages(1, steps=1)
    stage.ready()
    rank = stage.state.ranks[0]
    rank.enter_phase("step 0, forward of microbatch 0")
    rank.phase_since -= 3600
    stage.attempt._check_health()


def test_the_first_cause_is_named_and_not_the_neighbour_that_lost_its_peer(stages) -> None:
    stage = stages(2)
    stage.ready()
    lost = {"event": "error", "type": "PeerLostError", "message": "rank 1 is gone", "skyctl": True}
    stage.tasks[0].say(lost)
    stage.tasks[1].say(
        {"event": "log", "text": "about to fail"},
        {"event": "exit", "returncode": -9, "signal": "SIGKILL", "tail": []},
    )
    with pytest.raises(RunError, match=r"rank 1 on n1/cpu:0.*SIGKILL") as caught:
        stage.attempt.watch()
    assert "about to fail" in caught.value.message
    assert "about to fail" in Path(str(caught.value.log)).read_text()


def test_a_signal_that_is_told_late_goes_before_lost_connections(stages) -> None:
    """The agent speaks of a dead rank only when nothing that it has started is left."""
    stage = stages(3)
    stage.ready()
    lost = {"event": "error", "type": "PeerLostError", "message": "rank 1 is gone", "skyctl": True}
    stage.tasks[0].say(lost)
    stage.tasks[2].say(lost)
    died = {"event": "exit", "returncode": -4, "signal": "SIGILL", "tail": []}
    threading.Timer(FIRST_CAUSE_GRACE_S + 1.0, lambda: stage.tasks[1].say(died)).start()
    with pytest.raises(RunError, match=r"rank 1 on n1/cpu:0.*SIGILL") as caught:
        stage.attempt.watch()
    assert "skyctl check --limit n1" in str(caught.value.hint)


def test_a_connection_that_breaks_between_living_ranks_is_told_soon(stages) -> None:
    stage = stages(3)
    stage.ready()
    lost = {"event": "error", "type": "PeerLostError", "message": "rank 1 is gone", "skyctl": True}
    stage.tasks[0].say(lost)
    alive = {"event": "alive", "phase": "step 1", "waiting": False}
    timer = threading.Timer(0.5, lambda: [task.say(alive) for task in stage.tasks[1:]])
    timer.start()
    waited_s: list[float] = []
    grace_s = stage.attempt._monitor.grace_s
    stage.attempt._monitor.grace_s = lambda *of: waited_s.append(grace_s(*of)) or waited_s[-1]
    with pytest.raises(RunError, match="rank 0 on n0/cpu:0"):
        stage.attempt.watch()
    assert waited_s[0] > waited_s[-1] == FIRST_CAUSE_GRACE_S, "until the others say that they live"


def test_a_message_that_is_no_event_of_ours_is_the_ranks_failure(stages) -> None:
    stage = stages(1)
    stage.ready()
    stage.tasks[0].say({"event": "step", "step": 0})
    with pytest.raises(ProtocolError, match="node n0 sent 'step' with no iteration_s"):
        stage.attempt.watch()
    assert stage.state.failure is not None
    assert stage.state.failure.ranks == (0,)


def test_a_loss_that_is_not_finite_ends_the_run(stages) -> None:
    stage = stages(1)
    stage.ready()
    stage.step(0, loss=float("nan"))
    with pytest.raises(RunError, match="loss of step 1 is nan"):
        stage.attempt.watch()


def test_ctrl_c_asks_and_loses_no_event(stages) -> None:
    answers = ["go on", "stop"]
    seen: list[int] = []
    watcher = RunCallbacks(step=lambda p: seen.append(p.step), interrupted=lambda: answers.pop(0))
    stage = stages(1, watcher=watcher)
    stage.ready()
    stage.step(0)
    handler = signal.getsignal(signal.SIGINT)

    def log(_spec: Any, text: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    watcher.log = log
    stage.tasks[0].say({"event": "log", "text": "first"})
    stage.step(1)
    stage.tasks[0].say({"event": "log", "text": "second"})
    with pytest.raises(KeyboardInterrupt):
        stage.attempt.watch()
    assert seen == [0, 1]
    assert answers == []
    assert signal.getsignal(signal.SIGINT) is handler


def test_pipelines_side_by_side_are_connected_in_pairs_and_compared(stages) -> None:
    said: list[str] = []
    stage = stages(3, 2, RunCallbacks(warn=said.append), beside=True)
    for low, high in ((0, 1), (0, 2), (1, 2)):
        stage.tasks[high].say({"event": "wanted", "key": f"at/{low}/{high}"})
        stage.tasks[low].say({"event": "stored", "key": f"at/{low}/{high}", "value": f"0{low}0{high}"})
    for task in stage.tasks:
        task.say({"event": "ready"})
    stage.attempt.start()
    told = [[(m["key"], m["value"]) for m in task.sent if m["op"] == "stored"] for task in stage.tasks]
    assert list(map(sorted, told)) == [[], [("at/0/1", "0001")], [("at/0/2", "0002"), ("at/1/2", "0102")]]
    stage.step(0, loss=0.25)
    for task, norm in zip(stage.tasks, (2.0, 2.001, 2.1), strict=True):
        layers = {"0": {"sha256": "a" * 64, "bytes": 4}} if task is stage.tasks[0] else {}
        sketch = {"whole": None, "norm": norm, "sums": [norm, 0.0]}
        checkpoint = {"event": "checkpoint", "step": 1, "layers": layers, "wall_s": 0.1}
        task.say({**checkpoint, "sketches": {"0": [sketch]}})
    stage.step(1, loss=0.25)
    for task in stage.tasks:
        task.say({"event": "result", "steps": 2})
    stage.attempt.watch()
    assert stage.state.collected.loss(1) == 0.75
    [drift] = said
    assert drift.startswith("after 1 steps layer 0 on n2/cpu:0 has drifted from that on n0/cpu:0")


SUMS = {"layers": [5, 0, 7], "parameters": 3, "figures": 0}


def with_helper(stages, *sums: Any) -> Stage:
    """Holders that have said what they sum, and a helper."""
    stage: Stage = stages(len(sums) + 1, 2, beside=True, helpers=1, checkpoints=True)
    for task, said in zip(stage.tasks, (*sums, None), strict=True):
        task.say({"event": "ready", **({"sums": said} if said else {})})
    return stage


def test_a_helper_is_told_what_is_summed_and_tells_of_its_end_alone(stages) -> None:
    stage = with_helper(stages, SUMS, SUMS)
    stage.attempt.start()
    assert [task.sent[-1].get("sums") for task in stage.tasks] == [None, None, SUMS]
    for step in range(2):
        for task in stage.tasks[:2]:
            task.say(step_message(step, loss=0.25))
        if not step:
            for task in stage.tasks[:2]:
                layers = {"0": {"sha256": "a" * 64, "bytes": 4}} if task is stage.tasks[0] else {}
                task.say({"event": "checkpoint", "step": 1, "layers": layers, "wall_s": 0.1})
    for task in stage.tasks:
        task.say({"event": "result", "steps": 2})
    stage.attempt.watch()
    assert (stage.state.collected.reported, stage.state.collected.loss(1)) == (2, 0.5)


OTHER, FEWER = {**SUMS, "parameters": 4}, {**SUMS, "layers": [5, 0, 6]}


@pytest.mark.parametrize(
    ("sums", "planned", "liar"),
    [
        ((SUMS, FEWER), (5, 0, 7), 1),  # as the plan counts it
        ((FEWER, SUMS), (5, 0, 7), 0),
        ((FEWER, FEWER, SUMS), (5, 0, 7), 0),
        ((SUMS, None), (5, 0, 7), 1),
        ((SUMS, OTHER, SUMS), (5, 0, 7), 1),  # the plan does not know that: by the word of most
        ((FEWER, SUMS, SUMS), None, 0),
    ],
)
def test_who_says_what_is_wrong_of_its_gradients_is_named_and_nobody_else(
    stages, sums: Any, planned: Any, liar: int
) -> None:
    stage = with_helper(stages, *sums)
    stage.state.specs[:] = [replace(spec, summed_numels=planned) for spec in stage.state.specs]
    with pytest.raises(ProtocolError, match=f"node n{liar} says what is wrong of the gradients") as found:
        stage.attempt.start()
    assert found.value.node == f"n{liar}"
    fault = classify(found.value, stage.state.failure)
    assert (fault.kind, fault.lost) == ("node", (f"n{liar}",))


@pytest.mark.parametrize("sums", [(SUMS, OTHER), (SUMS, OTHER, {**SUMS, "figures": 9})])
def test_where_nothing_tells_who_is_wrong_all_are_named_and_stay(stages, sums: Any) -> None:
    stage = with_helper(stages, *sums)
    with pytest.raises(RunError, match="nothing tells which of them is wrong") as found:
        stage.attempt.start()
    assert not isinstance(found.value, ProtocolError)
    assert all(
        f"rank {rank} on n{rank}/cpu:0 (node n{rank}) sums 12" in found.value.message for rank in (0, 1)
    )
    assert classify(found.value, stage.state.failure).kind == "final"


LOST_PEER = {"event": "error", "type": "PeerLostError", "message": "it is gone", "skyctl": True}


def ended(by: int | None) -> dict[str, Any]:
    """A rank's word that it has ended with the first step, as that one told it."""
    return {"event": "result", "steps": 1, "ended_by": by}


def watched(stage: Stage, *words: tuple[int, dict[str, Any]]) -> SkyctlError:
    """The error that ends the attempt when ranks say that after their first step, one after the other."""
    stage.attempt.start()
    for task in stage.tasks[:2]:
        task.say(step_message(0, loss=0.25))
    arrived = stage.attempt._tasks._events._events.qsize
    for count, (rank, said) in enumerate(words, start=3):
        stage.tasks[rank].say(said)
        until(lambda count=count: arrived() == count)  # in this order
    with pytest.raises(SkyctlError) as found:
        stage.attempt.watch()
    return found.value


@pytest.mark.parametrize(
    "words",
    [
        [(0, ended(2)), (1, ended(2)), (2, LOST_PEER)],
        [(1, ended(0)), (0, ended(2)), (2, LOST_PEER)],  # the one that passes it on is honest
        [(0, ended(2)), (1, ended(2)), (2, ended(None))],
        [(2, ended(None)), (0, ended(2)), (1, ended(2))],
    ],
)
def test_a_helper_that_says_that_the_run_ends_is_named_and_no_honest_holder(stages, words: Any) -> None:
    stage = with_helper(stages, SUMS, SUMS)
    error = watched(stage, *words)
    assert isinstance(error, ProtocolError)
    assert error.node == "n2"
    assert classify(error, stage.state.failure).lost == ("n2",)


def test_two_that_say_that_the_run_ends_by_the_others_word_are_both_named_and_stay(stages) -> None:
    stage = with_helper(stages, SUMS, SUMS)
    error = watched(stage, (0, ended(2)), (2, ended(0)), (1, LOST_PEER))
    assert (
        "(node n0) and rank 2 on n2/cpu:0 (node n2)" in error.message
        or "(node n2) and rank 0" in error.message
    )
    fault = classify(error, stage.state.failure)
    assert (fault.kind, fault.lost) == ("network", ())


def failed(kind: str, peer: int) -> dict[str, Any]:
    """A rank's word that it has ended by what that peer did."""
    return {"event": "error", "type": kind, "message": "so it is", "skyctl": True, "peer_rank": peer}


PART, WHOLE, LOST = "SpoiltPartError", "SpoiltSumError", "PeerLostError"


@pytest.mark.parametrize(
    ("words", "liar"),
    [
        ([(0, failed(WHOLE, 2)), (1, failed(WHOLE, 2)), (2, LOST_PEER)], 2),
        ([(0, failed(WHOLE, 2)), (2, failed(PART, 1)), (1, failed(WHOLE, 2))], 1),  # it came round
        ([(1, failed(WHOLE, 2)), (0, failed(WHOLE, 2)), (2, failed(PART, 1))], 1),
        ([(0, failed(WHOLE, 2)), (2, failed(LOST, 0))], 2),
    ],
)
def test_who_spoils_a_sum_is_named_and_nobody_who_passed_it_on(stages, words: Any, liar: int) -> None:
    stage = with_helper(stages, SUMS, SUMS)
    error = watched(stage, *words)
    assert isinstance(error, ProtocolError)
    assert (error.node, classify(error, stage.state.failure).lost) == (f"n{liar}", (f"n{liar}",))


@pytest.mark.parametrize(
    "words",
    [
        [(0, failed(WHOLE, 2)), (2, failed(WHOLE, 0)), (1, failed(LOST, 0))],
        [(0, failed(LOST, 2)), (2, failed(LOST, 0)), (1, failed(LOST, 0))],
        [(0, failed(LOST, 2)), (2, failed(LOST, 1)), (1, failed(LOST, 0))],
    ],
)
def test_where_either_end_may_be_wrong_both_are_named_and_stay(stages, words: Any) -> None:
    stage = with_helper(stages, SUMS, SUMS)
    error = watched(stage, *words)
    assert all(f"(node n{rank}" in error.message for rank in (0, 2))
    fault = classify(error, stage.state.failure)
    assert (fault.kind, fault.lost) == ("network", ())
    assert {"n0", "n2"} <= set(stage.state.failure.nodes)


def test_a_run_that_is_asked_to_end_does_so_whoever_passes_that_on(stages) -> None:
    stage = with_helper(stages, SUMS, SUMS)
    stage.attempt.start()
    stage.attempt.end_early()
    for task in stage.tasks[:2]:
        task.say(step_message(0, loss=0.25))
    for rank, by in enumerate((None, 2, 0)):
        stage.tasks[rank].say(ended(by))
    stage.attempt.watch()
    assert {result.steps for result in stage.state.results.values()} == {1}


def test_helpers_that_tell_of_steps_are_refused(stages) -> None:
    stage = with_helper(stages, SUMS, SUMS)
    stage.attempt.start()
    stage.tasks[2].say(step_message(0, loss=0.25))
    with pytest.raises(ProtocolError, match="node n2 sent 'step' for rank 2, but it holds no layers"):
        stage.attempt.watch()


@pytest.mark.parametrize("message", [{"event": "wanted"}, {"event": "stored", "value": ""}])
def test_a_rank_that_fills_the_store_is_refused(stages, message: Any) -> None:
    stage = stages(2, beside=True)
    stage.tasks[1].say(*({**message, "key": f"at/1/{number}"} for number in range(200)))
    with pytest.raises(ProtocolError, match="it has used 80 keys, the most") as caught:
        stage.attempt.start()
    assert caught.value.node == "n1"


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        (["listening/0/1"], "'listening/0/1' is not its own to set"),
        (["0"], "'0' is not its own to set"),
        (["at/1/0", "at/1/0"], "it had set that key before"),
    ],
)
def test_a_rank_speaks_for_itself_alone_in_the_store(stages, keys: list[str], fault: str) -> None:
    stage = stages(2)
    stage.tasks[1].say(*({"event": "stored", "key": key, "value": "5b5d"} for key in keys))
    with pytest.raises(ProtocolError, match=fault) as caught:
        stage.attempt.start()
    assert caught.value.node == "n1"
