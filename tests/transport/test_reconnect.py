"""Ranks that go on without some of them, or with them again: over new connections, and no old ones."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from skyctl.errors import RunError
from skyctl.remote.credentials import make_tls_certificate
from skyctl.transport.peer_connection import PeerConnection
from skyctl.transport.planned_process_group import PairOptions
from skyctl.transport.process_group import SkyctlProcessGroup, run_in_thread, wait_for_all
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.transport.torch_backend import make_group
from skyctl.transport.transfer_errors import PeerLostError, PeerUnreachableError

from ..helpers.processes import PATIENCE_S, until

HERE = "127.0.0.1"
LIMIT_S = 30.0
Groups = dict[int, SkyctlProcessGroup]


@pytest.fixture(scope="module", params=["clear", "tls"])
def tls(request: pytest.FixtureRequest) -> TlsIdentity | None:
    """Every test that takes this runs both ways."""
    return make_tls_certificate() if request.param == "tls" else None


def options_of(rank: int, size: int, identity: TlsIdentity | None) -> PairOptions:
    peers = [peer for peer in range(size) if peer != rank]
    secrets = {peer: f"{sorted((rank, peer))}" for peer in peers}
    hosts = dict.fromkeys(peers, HERE)
    return PairOptions(hosts, secrets, identity=identity, ready_s=PATIENCE_S, keeps_listening=True)


def group_of(rank: int, size: int, options: PairOptions) -> SkyctlProcessGroup:
    asked = SimpleNamespace(group_rank=rank, group_size=size, timeout=timedelta(seconds=LIMIT_S))
    group = make_group(asked, options)
    assert isinstance(group, SkyctlProcessGroup)
    return group


Make = Callable[..., Groups]


@pytest.fixture
def make() -> Iterator[Make]:
    """Connected ranks of this process, each a peer of each."""
    with ExitStack() as stack:

        def connect(size: int, identity: TlsIdentity | None, store: Any = None, **others: Any) -> Groups:
            store = store or dist.HashStore()  # type: ignore[attr-defined]
            groups, connecting = {}, []
            for rank in range(size):
                options = replace(options_of(rank, size, identity), **others)
                groups[rank] = group_of(rank, size, options)
                stack.callback(groups[rank].close)
                connecting.append(run_in_thread(lambda g=groups[rank], o=options: g.connect(store, o)))
            wait_for_all(connecting, LIMIT_S)
            return groups

        yield connect


def reconnecting(
    groups: Groups, uuid: int, members: Collection[int], timeout_s: float = LIMIT_S
) -> dict[int, Future[None]]:
    def reconnect(rank: int) -> Future[None]:
        peers = [peer for peer in members if peer != rank]
        return run_in_thread(lambda: groups[rank].reconnect(uuid, peers, timeout_s))

    return {rank: reconnect(rank) for rank in members if rank in groups}


def reconnect(groups: Groups, uuid: int, members: Collection[int]) -> None:
    wait_for_all(reconnecting(groups, uuid, members).values(), LIMIT_S)


def exchange(groups: Groups, members: Sequence[int]) -> None:
    """Each of them sends each other one a message of its own, and all arrive."""
    received = {(to, source): torch.zeros(1000) for to in members for source in members if to != source}
    works = [groups[to].recv([tensor], source, 3) for (to, source), tensor in received.items()]
    works += [
        groups[source].send([torch.full((1000,), 10.0 * source + to)], to, 3) for to, source in received
    ]
    for work in works:
        work.wait()
    assert all(tensor.eq(10 * source + to).all() for (to, source), tensor in received.items())


def test_ranks_shrink_and_grow_again_and_keep_their_numbers(tls: TlsIdentity | None, make: Make) -> None:
    groups = make(4, tls)
    for uuid, members in enumerate([[0, 1, 3], [1, 3], [0, 1, 2, 3], [2, 3], [1, 2, 3]]):
        reconnect(groups, uuid, members)
        exchange(groups, members)
        left_out = [rank for rank in range(4) if rank not in members]
        for peer in left_out:
            with pytest.raises(PeerLostError, match=f"rank {peer} .* is closed"):
                groups[members[0]].send([torch.zeros(1)], peer, 0)
    assert [group.rank() for group in groups.values()] == [0, 1, 2, 3]


def test_whatever_is_under_way_fails_at_once(tls: TlsIdentity | None, make: Make) -> None:
    groups = make(3, tls)
    waiting = [
        groups[0].recv([torch.zeros(1)], 1, 0),
        groups[0].send([torch.zeros(1 << 20)], 2, 0),  # nobody receives it
        groups[2].recv([torch.zeros(1)], 0, 1),
    ]
    waits = [run_in_thread(work.wait) for work in waiting]  # type: ignore[arg-type]
    reconnect(groups, 1, [0, 1, 2])
    for wait in waits:
        with pytest.raises(PeerLostError):
            wait.result(LIMIT_S)
    exchange(groups, [0, 1, 2])


RANK = """
import json, sys
from types import SimpleNamespace
from datetime import timedelta
import torch, torch.distributed as dist
from skyctl.transport.planned_process_group import PairOptions
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.transport.torch_backend import make_group

rank, size, file, secrets, identity = json.loads(sys.stdin.readline())
secrets = {int(peer): secret for peer, secret in secrets.items()}
identity = identity and TlsIdentity(**identity)
options = PairOptions(dict.fromkeys(secrets, "127.0.0.1"), secrets, identity=identity, keeps_listening=True)
group = make_group(SimpleNamespace(group_rank=rank, group_size=size, timeout=timedelta(seconds=60)), options)
group.connect(dist.FileStore(file, -1), options)
for line in sys.stdin:
    exec(line)
"""


def receive_forever(group: SkyctlProcessGroup, source: int) -> None:
    while True:
        group.recv([torch.zeros(1 << 24)], source, 5).wait()


def test_ranks_go_on_without_one_that_was_killed_in_the_middle_of_a_transfer(
    tls: TlsIdentity | None, make: Make, tmp_path: Path
) -> None:
    file = str(tmp_path / "store")
    order = [1, 3, file, options_of(1, 3, tls).secrets, tls and asdict(tls)]
    process = subprocess.Popen([sys.executable, "-c", RANK], stdin=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.write("while True: group.send([torch.ones(1 << 24)], 0, 5).wait()\n")
        process.stdin.flush()
        groups = {}
        for rank in (0, 2):
            groups[rank] = group_of(rank, 3, options_of(rank, 3, tls))
        store = dist.FileStore(file, -1)
        try:
            wait_for_all(
                [
                    run_in_thread(lambda r=rank: groups[r].connect(store, options_of(r, 3, tls)))
                    for rank in groups
                ],
                PATIENCE_S,
            )
            groups[0].recv([torch.zeros(1 << 24)], 1, 5).wait()
            blocked = run_in_thread(groups[2].recv([torch.zeros(1)], 0, 1).wait)  # type: ignore[arg-type]
            process.kill()
            with pytest.raises(PeerLostError, match="rank 1"):
                receive_forever(groups[0], 1)
            reconnect(groups, 1, [0, 2])
            with pytest.raises(PeerLostError, match="rank 0"):
                blocked.result(LIMIT_S)
            exchange(groups, [0, 2])
        finally:
            for group in groups.values():
                group.close()
    finally:
        process.kill()
        process.communicate()


def test_who_comes_with_an_old_number_is_refused_and_the_right_one_is_taken(
    tls: TlsIdentity | None, make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    groups = make(2, tls)
    host, port = groups[1]._where[0]
    thawed = PeerConnection("rank 0", secret=f"{[0, 1]}", peer_rank=0, identity=tls)
    thawed.restart(7)
    reconnect(groups, 7, [0, 1])
    waiting = run_in_thread(lambda: groups[0].reconnect(8, [1], LIMIT_S))
    for is_patient in (False, True):
        with pytest.raises(PeerUnreachableError, match="does not know the secret"):
            thawed.connect(host, port, timeout_s=1.0 if is_patient else LIMIT_S, is_patient=is_patient)
    thawed.close()
    assert not waiting.done()
    groups[1].reconnect(8, [0], LIMIT_S)
    waiting.result(LIMIT_S)
    exchange(groups, [0, 1])
    assert "or comes for something else" in capfd.readouterr().err


def test_ranks_of_different_numbers_never_meet(tls: TlsIdentity | None, make: Make) -> None:
    groups = make(2, tls)
    meetings = {
        0: run_in_thread(lambda: groups[0].reconnect(8, [1], 1.0)),
        1: run_in_thread(lambda: groups[1].reconnect(9, [0], 1.0)),
    }
    for rank, meeting in meetings.items():
        with pytest.raises(PeerUnreachableError, match=f"no connection with rank {1 - rank}") as caught:
            meeting.result(LIMIT_S)
        assert caught.value.peer_rank == 1 - rank
    with pytest.raises(RunError, match="the number 8 was already used"):
        groups[0].reconnect(8, [1], 1.0)
    reconnect(groups, 10, [0, 1])
    exchange(groups, [0, 1])


def test_who_does_not_come_is_named_and_the_others_go_on_without(tls: TlsIdentity | None, make: Make) -> None:
    groups = make(3, tls)
    present = {rank: group for rank, group in groups.items() if rank != 1}
    for meeting in reconnecting(present, 1, [0, 1, 2], 1.0).values():
        with pytest.raises(PeerUnreachableError) as caught:
            meeting.result(LIMIT_S)
        assert caught.value.peer_rank == 1
    for rank in present:
        with pytest.raises(PeerLostError):
            groups[rank].send([torch.zeros(1)], 2 - rank, 0)
    reconnect(groups, 2, [0, 2])
    exchange(groups, [0, 2])


@pytest.mark.parametrize("rank", [0, 1])
def test_another_thread_ends_it(rank: int, tls: TlsIdentity | None, make: Make) -> None:
    """The one that listens, and the one that calls."""
    groups = make(2, tls)
    for uuid, (end, named) in enumerate(
        [(groups[rank].abort, None), (lambda: groups[rank].close_pair(1 - rank), 1 - rank)]
    ):
        waiting = run_in_thread(lambda uuid=uuid: groups[rank].reconnect(uuid, [1 - rank], 600.0))
        until(groups[rank]._meeting.locked)
        with pytest.raises(RunError, match="reconnecting already"):
            groups[rank].reconnect(99, [1 - rank], 1.0)
        end()
        with pytest.raises(PeerLostError) as caught:
            waiting.result(LIMIT_S)
        assert caught.value.peer_rank == named
    reconnect(groups, 5, [0, 1])
    exchange(groups, [0, 1])
    waiting = run_in_thread(lambda: groups[rank].reconnect(6, [1 - rank], 600.0))
    until(groups[rank]._meeting.locked)
    groups[rank].close()
    with pytest.raises(RunError):
        waiting.result(LIMIT_S)
    with pytest.raises(RunError, match="its group is closed"):
        groups[rank].reconnect(7, [1 - rank], 1.0)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
def test_nothing_is_left_after_many(tls: TlsIdentity | None, make: Make) -> None:
    def all_have_met() -> bool:
        return not any(thread.name == "meets a peer" for thread in threading.enumerate())

    until(all_have_met)  # those of the test before
    before = threading.active_count(), open_files()
    groups = make(3, tls)
    reconnect(groups, 0, [0, 1, 2])
    until(all_have_met)
    connected = threading.active_count(), open_files()
    for uuid in range(1, 51):
        reconnect(groups, uuid, [0, 1, 2])
    exchange(groups, [0, 1, 2])
    until(lambda: (threading.active_count(), open_files()) == connected)
    for group in groups.values():
        group.close()
    until(lambda: (threading.active_count(), open_files()) == before)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
def test_strangers_at_a_listener_that_stays_cost_nothing_and_keep_nobody_out(
    tls: TlsIdentity | None, make: Make
) -> None:
    groups = make(2, tls)
    host, port = groups[1]._where[0]
    before = open_files()
    strangers = []
    for source in range(100):
        sock = socket.socket()
        strangers.append(sock)
        sock.bind((f"127.0.0.{10 + source % 5}", 0))
        sock.connect((host, port))
        sock.send(os.urandom(1 + source))
    try:
        assert open_files() == before + len(strangers), "their own ends"
        reconnect(groups, 1, [0, 1])
        exchange(groups, [0, 1])
    finally:
        for sock in strangers:
            sock.close()
    until(lambda: open_files() == before)


def test_only_ranks_that_go_on_listening_can_reconnect(make: Make) -> None:
    groups = make(2, None, keeps_listening=False)
    with pytest.raises(RunError, match="it has stopped listening"):
        groups[0].reconnect(1, [1], 1.0)
    exchange(groups, [0, 1])
    with pytest.raises(RunError, match="rank 0 exchanges nothing with rank 5"):
        groups[0].reconnect(2, [5], 1.0)


def test_two_groups_of_the_same_ranks_and_secrets_are_never_mixed_up(
    tls: TlsIdentity | None, make: Make
) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    groups, members = make(2, tls, store), make(2, tls, store, purpose="member")
    reconnect(groups, 1, [0, 1])
    exchange(members, [0, 1])
    exchange(groups, [0, 1])
    host, port = groups[1]._where[0]
    other = PeerConnection("rank 0", secret=f"{[0, 1]}", peer_rank=0, identity=tls, purpose="member")
    other.restart(2)
    waiting = run_in_thread(lambda: groups[0].reconnect(2, [1], LIMIT_S))
    with pytest.raises(PeerUnreachableError, match="does not know the secret"):
        other.connect(host, port, timeout_s=LIMIT_S)
    other.close()
    groups[1].reconnect(2, [0], LIMIT_S)
    waiting.result(LIMIT_S)
