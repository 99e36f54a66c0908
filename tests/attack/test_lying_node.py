"""A node that lies: whatever it sends is refused with its name, or does no harm.

Here at the level where what it sends arrives, without processes; ``test_lying_rank`` has runs in which a rank
really does so.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.agent.frames import FrameError
from skyctl.checkpoint.launcher.replicator_group import ReplicatorGroup
from skyctl.checkpoint.launcher.replicator_messages import ReplicatorEnded
from skyctl.checkpoint.node.replicator_requests import ListRequest
from skyctl.errors import ProtocolError, RunError, SkyctlError, WorkloadError
from skyctl.planner.plan_record import pipeline_simulations
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.records.run_state import NodeSession
from skyctl.remote.agent_messages import AgentHello, parse_agent_message
from skyctl.run.plan_update import observed_slowdowns
from skyctl.run.step_metrics import build_measurement, with_differences

from . import lies
from .lying_ranks import (
    NODES,
    SEED,
    Ranks,
    honest_events,
    make_plan,
    names_the_liar,
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan()


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
        if ranks.state.collected.reported > 1:
            figures_hold(ranks, plan)
    assert names[ProtocolError] > 35, names
    assert set(names) <= {ProtocolError, RunError, None}, names


def figures_hold(ranks: Ranks, plan: Plan) -> None:
    """Figures that were taken can be computed with and written down."""
    observed_slowdowns(plan, ranks.state.collected.settled_events())
    (play,) = pipeline_simulations(plan)
    done = build_measurement("r", plan, ranks.specs, ranks.state.collected, None, [play])
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
        (2, {"event": "stored", "key": "0/1", "value": "00"}, "it is ready already"),
        (1, {"event": "stored", "key": "0/1", "value": "not hex"}, "not hex"),
        (1, {"event": "wanted", "key": "x" * 1000}, "1000 characters, more than"),
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
        number = group._send(lies.LIAR, ListRequest())
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
        ({"id": 2}, "request 2, which it was not made"),
        ({"id": 1, "steps": {"5": {"7": {"sha256": lies.SHA, "bytes": 1}}}}, "there is no such layer"),
        ({"id": 1, "steps": {"5": {"0": {"sha256": lies.SHA, "bytes": 1 << 30}}}}, "1000 are the most"),
        ({"id": 1, "steps": {"../5": {}}}, "'../5' is no number"),
    ],
)
def test_an_answer_that_none_would_give(answer: lies.Message, words: str) -> None:
    from skyctl.checkpoint.launcher.replicator_messages import REPLICATOR_KINDS, ReplicatorRequests
    from skyctl.remote.remote_task import read_task_message

    orders = ReplicatorRequests({0: 1000})
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
