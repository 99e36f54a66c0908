"""Groups of one's own scripts that get other members, as torch.distributed asks for it since 2.14."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from skyctl.errors import RunError
from skyctl.remote.credentials import make_tls_certificate
from skyctl.transport.collectives import CollectiveWork
from skyctl.transport.mesh_process_group import MeshOptions, MeshProcessGroup
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.transport.torch_backend import make_group
from skyctl.transport.transfer_errors import PeerLostError, PeerUnreachableError

from .user_scripts.reconfigures import CASES

SCRIPT = Path(__file__).parent / "user_scripts" / "reconfigures.py"
SIZE, LIMIT = 3, timedelta(seconds=30)
SECRET = b"a secret of this test"


@pytest.fixture(scope="module", params=["clear", "tls"])
def tls(request: pytest.FixtureRequest) -> TlsIdentity | None:
    """Every test that takes this runs both ways."""
    return make_tls_certificate() if request.param == "tls" else None


@pytest.fixture(scope="module")
def members(tls: TlsIdentity | None) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that go through cases together, with a fresh group for each."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(SIZE)
    ]
    try:
        for number, process in enumerate(processes):
            say(process, {"number": number, "identity": tls and asdict(tls)})
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def say(process: subprocess.Popen[str], what: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()


@pytest.mark.parametrize("case", CASES)
def test_torchs_own_cases_end_well(case: str, members: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    for process in members:
        say(process, [case, str(tmp_path / "store")])
    ends = [json.loads(process.stdout.readline()) for process in members]  # type: ignore[union-attr]
    assert ends == ["well"] * SIZE, "\n".join(ends)


Make = Callable[..., MeshProcessGroup]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Members of this process, which are not connected."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    groups: list[MeshProcessGroup] = []

    def start(secret: bytes = SECRET) -> MeshProcessGroup:
        asked = SimpleNamespace(
            group_rank=len(groups), group_size=SIZE, timeout=LIMIT, global_ranks_in_group=[], store=None
        )
        group = make_group(asked, MeshOptions(secret, enable_reconfigure=True))
        assert isinstance(group, MeshProcessGroup)
        groups.append(group)
        return group

    yield start
    for group in groups:
        group.close()
        group.shutdown()


def start_reconfigure(
    group: MeshProcessGroup, uuid: int, handles: Sequence[str], timeout: timedelta | None = None
) -> CollectiveWork:
    return group.reconfigure(SimpleNamespace(uuid=uuid, handles=list(handles), timeout=timeout))


def together(groups: Sequence[MeshProcessGroup], uuid: int) -> None:
    handles = [group.get_reconfigure_handle() for group in groups]
    for work in [start_reconfigure(group, uuid, handles) for group in groups]:
        work.wait(LIMIT)


def assert_sums(groups: Sequence[MeshProcessGroup]) -> None:
    tensors = [torch.full((3,), group.rank() + 1.0) for group in groups]
    for work in [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]:
        work.wait()
    assert [tensor.tolist() for tensor in tensors] == [[len(groups) * (len(groups) + 1) / 2] * 3] * len(
        groups
    )


def test_a_handle_says_where_its_member_is_and_no_secret(make: Make) -> None:
    group = make()
    handle = group.get_reconfigure_handle()
    where, _, own = handle.partition("/")
    assert where.startswith("127.0.0.1:")
    assert len(own) == 16
    assert handle == group.get_reconfigure_handle()
    assert SECRET.hex() not in handle
    assert SECRET.decode() not in handle


def test_nothing_is_exchanged_before_the_first_time(make: Make) -> None:
    group = make()
    with pytest.raises(RunError, match="rank 0 is not connected to rank 1 yet"):
        group.send([torch.zeros(1)], 1, 0)
    with pytest.raises(RunError, match="not connected"):
        group.allreduce([torch.zeros(1)]).wait()


def test_handles_that_are_none_or_anothers_are_refused(make: Make) -> None:
    group = make()
    own = group.get_reconfigure_handle()
    for handles in ([], ["127.0.0.1:1/00"], [own, own], [own, "127.0.0.1:1/00", "127.0.0.1:1/00"]):
        with pytest.raises(RunError, match="this member's handle is"):
            start_reconfigure(group, 1, handles)
    with pytest.raises(RunError, match="says that it listens at"):
        start_reconfigure(group, 1, [own, "evil.example:1/00"])
    start_reconfigure(group, 1, [own]).wait()


def test_members_with_other_handles_or_another_secret_never_meet(make: Make) -> None:
    groups = [make(), make(), make(b"another secret of somebody")]
    first, second, third = (group.get_reconfigure_handle() for group in groups)
    moment = timedelta(seconds=1)
    for members, lists in [
        (groups[:2], [[first, second], [second, first]]),
        (groups[1:], [[second, third], [second, third]]),
    ]:
        works = [
            start_reconfigure(group, len(lists[0]), handles, moment)
            for group, handles in zip(members, lists, strict=True)
        ]
        for work in works:
            with pytest.raises(PeerUnreachableError):
                work.wait()
        groups[1]._used.clear()
    together(groups[:2], 9)
    assert_sums(groups[:2])


def test_collectives_under_way_fail_and_later_ones_meet_none_of_them(make: Make) -> None:
    groups = [make(), make(), make()]
    together(groups, 1)
    tensor = torch.zeros(1 << 20)
    waiting = [groups[rank].allreduce([tensor.clone()]) for rank in (0, 0, 0, 2)]  # rank 1 never calls them
    together(groups[:2], 2)
    for work in waiting:
        with pytest.raises(PeerLostError):
            work.wait(LIMIT)
    assert_sums(groups[:2])
    together(groups, 3)
    assert_sums(groups)


def test_another_thread_ends_it_and_it_can_be_called_again(make: Make) -> None:
    groups = [make(), make()]
    handles = [group.get_reconfigure_handle() for group in groups]
    for group in groups:
        work = start_reconfigure(group, 1, handles, timedelta(hours=1))
        while not group._meeting.locked():
            assert not work.is_completed()
        with pytest.raises(RunError, match="being reconfigured"):
            group.barrier()
        group.abort()
        with pytest.raises(PeerLostError, match="has closed its connections"):
            work.wait(LIMIT)
    together(groups, 2)
    assert_sums(groups)


def test_a_closed_group_gets_no_other_members(make: Make) -> None:
    group = make()
    handle = group.get_reconfigure_handle()
    group.shutdown()
    with pytest.raises(RunError, match="the group is closed"):
        start_reconfigure(group, 1, [handle])


def test_a_group_that_has_connected_by_itself_gets_other_members_too(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    groups: dict[int, MeshProcessGroup] = {}

    def meet(rank: int) -> None:
        asked: Any = SimpleNamespace(
            group_rank=rank, group_size=2, timeout=LIMIT, global_ranks_in_group=[], store=store, group_id="0"
        )
        groups[rank] = MeshProcessGroup.meet(asked, MeshOptions(SECRET))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    try:
        together([groups[1], make(), groups[0]], 1)
        assert (groups[0].rank(), groups[1].rank()) == (2, 0)
    finally:
        for group in groups.values():
            group.close()
            group.shutdown()


def test_torchs_own_options_can_ask_for_it() -> None:
    asked = SimpleNamespace(group_rank=1, group_size=2, timeout=LIMIT, global_ranks_in_group=[], store=None)
    group = make_group(asked, SimpleNamespace(enable_reconfigure=True))
    assert group.supports_reconfigure  # type: ignore[attr-defined]
    assert (group.rank(), group.size(), group.peers) == (1, 2, [])
    group.shutdown()
