"""Orders to tasks as records: what is written is what is read, and all else is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyctl.agent.node_package import code_digest
from skyctl.agent.task_orders import read_order, read_request, write_order, write_request
from skyctl.checkpoint.node.replicator_order import ReplicatorOrder
from skyctl.checkpoint.node.replicator_requests import (
    AdoptRequest,
    FollowedPeer,
    FollowRequest,
    PullRequest,
    PushedFile,
)
from skyctl.errors import MismatchError, RecordError, SkyctlError
from skyctl.probe.node.probe_order import ProbeOrder
from skyctl.probe.node.probe_requests import (
    PROBE_REQUESTS,
    DistinctLayer,
    FlowPair,
    FlowRequest,
    LinkRequest,
    MeasureRequest,
)
from skyctl.records.cluster import Node
from skyctl.remote.base import ConnectOptions
from skyctl.remote.credentials import make_tls_certificate
from skyctl.remote.node_archive import node_package_archive
from skyctl.remote.session_factory import open_session
from skyctl.worker import rank
from skyctl.worker.rank_events import RankResult, SumSizes
from skyctl.worker.rank_order import (
    RANK_ORDERS,
    CheckpointOptions,
    ResumePoint,
    RoundOptions,
    RoutePlace,
    Staleness,
    SumGroupOrder,
    SumOrder,
)
from skyctl.worker.rank_requests import StartRequest, StoredRequest
from skyctl.workload.workload_spec import WorkloadSpec

from ..helpers.orders import beside, helper_order, rank_order

ORDERS = (*RANK_ORDERS, ReplicatorOrder, ProbeOrder)
PLACE = RoutePlace(0.5, (1, 2), None, None, (1,))
GROUP = SumGroupOrder(1, 6, (PLACE, PLACE), start=1, stop=3, agreement=PLACE)
SUMS = SumOrder("int8", 128, (GROUP, SumGroupOrder(2, 12, (PLACE,), tie=(0, 4))), staleness=Staleness(None))
TLS = make_tls_certificate()
WORKLOAD = WorkloadSpec(
    "train.py", path="/n/train.py", arguments={"width": "8"}, ship=("a.txt",), example={"inputs": [{"n": 1}]}
)
PLAIN = rank_order(1, 3)
FULL = beside(
    PLAIN,
    0,
    [1, 2],
    sync=SUMS,
    secrets={"1": "one", "2": "two"},
    tls=TLS,
    workload=WORKLOAD,
    rounds=RoundOptions(3, owner="a", index=1, owners=2, deadline_s=0.5),
    checkpoint={"folder": "/kept", "every": 5},
    resume={"step": 4, "folder": "/kept", "layers": {"0": "ab" * 32}},
)


def over_the_wire(order: Any) -> dict[str, Any]:
    return json.loads(json.dumps(write_order(order)))


@pytest.mark.parametrize(
    "order",
    [
        PLAIN,
        FULL,
        helper_order(FULL),
        ReplicatorOrder("r", "n1", Path("/kept"), "s", address="192.0.2.1", poll_s=0.5, tls=TLS),
        ProbeOrder("cuda:1", ("cuda:0", "cuda:1"), 2, 1.5, WORKLOAD, TLS),
        ProbeOrder(None, None, None, 1.0),
    ],
    ids=lambda order: order.kind,
)
def test_what_the_launcher_writes_is_what_the_task_reads(order: Any) -> None:
    assert read_order(ORDERS, over_the_wire(order)) == order


def test_paths_and_what_is_left_out_are_read_as_what_they_are() -> None:
    order = read_order(RANK_ORDERS, over_the_wire(FULL))
    assert order == FULL
    assert FULL.checkpoint == CheckpointOptions(Path("/kept"), every=5)
    assert FULL.resume == ResumePoint(4, Path("/kept"), {0: "ab" * 32})
    assert not {"sync", "rounds", "checkpoint", "resume"} & over_the_wire(PLAIN).keys()


def without(*path: str | int) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        *way, last = path
        for key in way:
            message = message[key]
        del message[last]

    return change


def having(value: Any, *path: str | int) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        *way, last = path
        for key in way:
            message = message[key]
        message[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("steps"), "the order 'rank' can't be followed: no steps"),
        (having("soon", "steps"), "steps: 'soon' is no int"),
        (having(0, "steps"), "steps: 0 is not from 1"),
        (having(True, "haste"), "there is no field 'haste'"),
        (without("world", "hosts"), "world: no hosts"),
        (having(1.5, "sync", "groups", 0, "routes", 1, "share"), "sync: groups: routes: share: 1.5 is not"),
        (having(0, "sync", "groups", 1, "weight"), "sync: groups: there is no field 'weight'"),
        (having("x", "world", "hosts", "one"), "world: hosts: 'one' is no number"),
        (having([1], "layers"), "layers: 1 items, not 2"),
        (having("gpu", "workload", "device"), "workload: there is no field 'device'"),
        (having("../..", "resume", "layers", "0"), "resume: layers: '../..' is not of the form"),
        (having(7, "checkpoint", "folder"), "checkpoint: folder: 7 is no str"),
        (having("probe", "order"), "the order is 'probe'; this task takes 'rank' or 'helper'"),
        (without("order"), "the order is None"),
    ],
)
def test_a_field_that_is_missing_wrong_or_unknown_is_refused_by_name(
    change: Callable[[Any], None], words: str
) -> None:
    message = over_the_wire(FULL)
    change(message)
    with pytest.raises(RecordError) as refused:
        read_order(RANK_ORDERS, message)
    assert words in refused.value.message


@pytest.mark.parametrize(("code", "named"), [("0123456789abcdef" * 4, "0123456789ab,"), (None, "None,")])
def test_an_order_by_another_version_is_refused_and_both_are_named(code: str | None, named: str) -> None:
    """Even if each field could be read, and before torch is asked for."""
    with pytest.raises(MismatchError) as refused:
        rank.main(over_the_wire(PLAIN) | {"code": code}, None)  # type: ignore[arg-type]
    assert f"the launcher's skyctl {named}" in refused.value.message
    assert f"skyctl {code_digest()[:12]} runs here" in refused.value.message
    assert refused.value.hint is not None


MEASURE = MeasureRequest(
    budget_s=1.0,
    cap_s=9.0,
    layers=(
        DistinctLayer(0, "embedding", {2: "a"}, {2: 8.0}),
        DistinctLayer(1, "block", {2: "b"}, {2: 4.0}, (2,)),
    ),
    kinds={2: (0, 1, 1)},
    threads=None,
    generic=False,
    handling=True,
    gloo=False,
    memory_bytes=None,
    crowding=1.0,
    gradient_bytes=24.0,
)


@pytest.mark.parametrize(
    "request_",
    [
        MEASURE,
        LinkRequest("b", "s", "192.0.2.1", "connect", 5.0, "192.0.2.2", 4000),
        FlowRequest("a", "192.0.2.1", "hub", (FlowPair("b", "s", 3, 10, 20),), 1.0, 2.0, hold=True),
        PullRequest("192.0.2.2", 4000, "b", 60, 1, {3: "ab" * 32}, {3: 1 << 30}, id=7),
        AdoptRequest(60, 1, {3: PushedFile(Path("/pushed"), "ab" * 32)}, id=8),
        FollowRequest((FollowedPeer("192.0.2.2", 4000, "b"),), 2, {3: 1 << 30}),
        StartRequest(SumSizes((7_000_000_000, 5), 200, 0)),
        StoredRequest("listening/1/0", "00ff"),
    ],
    ids=lambda request: request.kind,
)
def test_what_is_asked_of_a_task_that_runs_is_what_it_reads(request_: Any) -> None:
    message = json.loads(json.dumps(write_request(request_)))
    assert read_request((*PROBE_REQUESTS[:1], type(request_)), message) == request_


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"op": "link", "peer": "b"}, "the request 'link' can't be followed: no "),
        ({**write_request(MEASURE), "haste": 1}, "can't be followed: there is no field 'haste'"),
        ({**write_request(MEASURE), "kinds": {"two": []}}, "kinds: 'two' is no number"),
        ({"op": "rest"}, "the request is 'rest'; this task takes 'measure' or 'count' or"),
    ],
)
def test_a_wrong_request_is_refused_by_name(message: dict[str, Any], words: str) -> None:
    with pytest.raises(RecordError) as refused:
        read_request(PROBE_REQUESTS, message)
    assert words in refused.value.message


def test_the_code_that_was_sent_to_a_node_knows_its_own_digest() -> None:
    """A real session's task reads the launcher's order, and refuses what another launcher has made."""
    assert code_digest() == node_package_archive()[0]
    here = code_digest()[:12]
    with open_session(Node(name="here", transport="local"), ConnectOptions()) as session:

        def refused(message: dict[str, Any], error: type[SkyctlError]) -> str:
            with pytest.raises(error) as raised:
                session.run_task("skyctl.worker.rank", message, 60.0, answer=RankResult)
            return raised.value.message

        error = refused(over_the_wire(PLAIN) | {"code": "0" * 64}, MismatchError)
        assert error.startswith("on node here: the order ('rank') was made by the launcher's skyctl 00000")
        assert f"and skyctl {here} runs here" in error
        wrong = over_the_wire(PLAIN)
        wrong["world"]["rank"] = -1
        assert "the order 'rank' can't be followed: world: rank: -1 is" in refused(wrong, RecordError)
