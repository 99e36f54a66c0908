"""One of three members: each line on stdin is a case of torch's own test of reconfigurable groups, and a file
where members find each other. Says how it ended, in a line of JSON."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from skyctl.transport.mesh_process_group import MeshOptions
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.transport.torch_backend import register

SIZE = 3


class Member:
    """A fresh group, of which nothing is connected."""

    def __init__(self, number: int, file: str, identity: TlsIdentity | None) -> None:
        self.number, self.store = number, dist.FileStore(file, SIZE)
        self.store.set_timeout(timedelta(seconds=240))  # the others import torch first
        options = MeshOptions(b"a secret of this test", identity=identity, enable_reconfigure=True)
        dist.init_process_group(
            "skyctl",
            store=self.store,
            rank=number,
            world_size=SIZE,
            pg_options=options,  # type: ignore[arg-type]
        )
        self.group: Any = dist.group.WORLD
        assert self.group.supports_reconfigure

    def handles(self, name: str) -> list[str]:
        self.store.set(f"{name}/{self.number}", self.group.get_reconfigure_handle())
        return [self.store.get(f"{name}/{number}").decode() for number in range(SIZE)]

    def all_have(self, name: str) -> None:
        """Returns once all members have come to that place."""
        self.handles(name)

    def reconfigure(self, uuid: int, handles: Sequence[str]) -> None:
        opts = SimpleNamespace(uuid=uuid, handles=list(handles), timeout=timedelta(seconds=30))
        assert self.group.reconfigure(opts).wait()

    def alone(self, uuid: int) -> None:
        self.reconfigure(uuid, [self.group.get_reconfigure_handle()])
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)

    def all_together(self, uuid: int) -> list[str]:
        handles = self.handles(f"before {uuid}")
        self.reconfigure(uuid, handles)
        assert (dist.get_rank(), dist.get_world_size()) == (self.number, SIZE)
        self.all_have(f"after {uuid}")  # who goes on to abort must not cut off who is not yet done
        return handles


def assert_sums(size: int) -> None:
    assert dist.get_world_size() == size
    tensor = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size * (size + 1) / 2] * 4
    tensor = torch.full((4,), 42.0 if dist.get_rank() == 0 else 0.0)
    dist.broadcast(tensor, group_src=0)
    assert tensor.tolist() == [42.0] * 4


def basic(member: Member) -> None:
    member.all_together(100)


def all_reduce(member: Member) -> None:
    member.all_together(200)
    assert_sums(SIZE)


def send_recv(member: Member) -> None:
    member.all_together(300)
    rank = dist.get_rank()
    received = torch.zeros(4)
    works = [
        member.group.recv([received], (rank - 1) % SIZE, 0),
        member.group.send([torch.full((4,), rank + 1.0)], (rank + 1) % SIZE, 0),
    ]
    for work in works:
        work.wait()
    assert received.tolist() == [(rank - 1) % SIZE + 1.0] * 4


def _shrink(member: Member, uuid: int, excluded: int) -> None:
    handles = member.all_together(uuid)
    if member.number != excluded:
        del handles[excluded]
        member.reconfigure(uuid + 1, handles)
        assert dist.get_rank() == member.number - (member.number > excluded)
        assert_sums(SIZE - 1)
    member.all_have("done")


def shrink_last(member: Member) -> None:
    _shrink(member, 400, SIZE - 1)


def shrink_middle(member: Member) -> None:
    _shrink(member, 500, 1)


def down_and_up(member: Member) -> None:
    member.alone(600 + member.number)
    member.all_together(603)
    member.alone(604 + member.number)
    member.all_have("done")


def single_to_all(member: Member) -> None:
    member.alone(700 + member.number)
    member.all_together(703)
    assert_sums(SIZE)


def identity(member: Member) -> None:
    member.all_together(800)
    member.all_together(801)
    assert_sums(SIZE)


def late_join(member: Member) -> None:
    first = member.handles("first")
    if member.number < SIZE // 2:
        member.reconfigure(900, first[: SIZE // 2])
    member.all_together(901)
    assert_sums(SIZE)


def merge_and_split(member: Member) -> None:
    first = member.handles("first")
    if member.number < 1:
        member.reconfigure(1000, first[:1])
    else:
        member.reconfigure(1001, first[1:])
        assert_sums(SIZE - 1)
    member.all_together(1002)
    assert_sums(SIZE)


def after_abort(member: Member) -> None:
    member.all_together(1200)
    member.group.abort()
    member.all_together(1201)
    assert_sums(SIZE)


def reused_number(member: Member) -> None:
    member.alone(1100 + member.number)
    error = ""
    try:
        member.alone(1100 + member.number)
    except RuntimeError as exc:
        error = str(exc)
    assert "already used" in error


def other_order(member: Member) -> None:
    """Ranks are the places of handles, whatever they were."""
    handles = member.all_together(1300)
    member.reconfigure(1301, handles[::-1])
    assert dist.get_rank() == SIZE - 1 - member.number
    assert_sums(SIZE)


CASES: dict[str, Callable[[Member], None]] = {
    case.__name__: case
    for case in (
        basic,
        all_reduce,
        send_recv,
        shrink_last,
        shrink_middle,
        down_and_up,
        single_to_all,
        identity,
        late_join,
        merge_and_split,
        after_abort,
        reused_number,
        other_order,
    )
}


if __name__ == "__main__":
    register()
    order = json.loads(sys.stdin.readline())
    tls = order["identity"] and TlsIdentity(**order["identity"])
    for line in sys.stdin:
        name, file = json.loads(line)
        try:
            CASES[name](Member(order["number"], file, tls))
            ended = "well"
        except BaseException:
            ended = traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
        print(json.dumps(ended), flush=True)
