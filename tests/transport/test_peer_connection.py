"""Pairs between real processes over real sockets, in the clear and through TLS."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from skyctl.agent.network_interfaces import local_address_towards
from skyctl.errors import RunError
from skyctl.remote.credentials import make_tls_certificate
from skyctl.transport.peer_connection import FIRST_TAG, PeerConnection
from skyctl.transport.socket_transport import SocketTransport
from skyctl.transport.transfer_errors import PeerLostError

from ..helpers.processes import PATIENCE_S

PEER = """
import json, sys, warnings
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.transport.peer_connection import FIRST_TAG, PeerConnection
fields = json.loads(sys.stdin.readline())
tls = TlsIdentity(**fields) if fields else None
pair = PeerConnection("rank 0", 30.0, secret=sys.argv[2], identity=tls)
pair.connect("127.0.0.1", int(sys.argv[1]), timeout_s=float(sys.argv[3]))
print("connected", flush=True)
for line in sys.stdin:
    exec(line)
"""

Tls = dict[str, str] | None


@pytest.fixture(scope="module", params=["clear", "tls"])
def tls(request: pytest.FixtureRequest) -> Tls:
    """Every test that takes this runs both ways."""
    return make_tls_certificate() if request.param == "tls" else None


@pytest.fixture(scope="module")
def peer(tls: Tls) -> Iterator[tuple[PeerConnection, subprocess.Popen[str]]]:
    """Both ends: this process is rank 0; lines written to the other one's stdin run there."""
    pair = PeerConnection("rank 1", 30.0, secret="s", identity=tls)
    port = pair.listen("127.0.0.1")
    process = _start(port, "s", tls)
    try:
        pair.accept(PATIENCE_S)
        yield pair, process
        pair.close()
    finally:
        pair.close()
        process.kill()
        process.communicate()


def _start(port: int, secret: str, tls: Tls, timeout_s: float = 30.0) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PEER, str(port), secret, str(timeout_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _tell(process, json.dumps(tls and asdict(tls)))
    return process


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def test_messages_of_any_dtype_go_both_ways(peer: tuple[PeerConnection, subprocess.Popen[str]]) -> None:
    pair, process = peer
    _tell(process, "a = torch.empty(3, 5); w = pair.recv(a, FIRST_TAG)")
    _tell(process, "w.wait(); pair.send(a * 2, FIRST_TAG).wait()")
    back = torch.empty(3, 5)
    work = pair.recv(back, FIRST_TAG)
    sent = torch.arange(15.0).reshape(5, 3).t()  # not contiguous
    pair.send(sent, FIRST_TAG).wait()
    work.wait()
    assert torch.equal(back, sent * 2)
    for dtype in ("int64", "bool", "bfloat16", "uint8"):
        _tell(
            process,
            f"b = torch.empty(4, dtype=torch.{dtype}); pair.recv(b, 17).wait(); pair.send(b, 17).wait()",
        )
        value = torch.tensor([0, 1, 1, 0]).to(getattr(torch, dtype))
        got = torch.empty_like(value)
        work = pair.recv(got, 17)
        pair.send(value, 17).wait()
        work.wait()
        assert torch.equal(got, value)


def test_order_is_kept_within_a_tag_and_tags_are_told_apart(
    peer: tuple[PeerConnection, subprocess.Popen[str]],
) -> None:
    pair, process = peer
    _tell(
        process, "ws = [pair.send(torch.tensor([i]), 20 + i % 2) for i in range(6)]; [w.wait() for w in ws]"
    )
    odd = [torch.empty(1, dtype=torch.int64) for _ in range(3)]
    even = [torch.empty(1, dtype=torch.int64) for _ in range(3)]
    works = [pair.recv(t, 21) for t in odd] + [pair.recv(t, 20) for t in even]
    for work in works:
        work.wait()
    assert [int(t) for t in even] == [0, 2, 4]
    assert [int(t) for t in odd] == [1, 3, 5]


def test_what_is_started_together_leaves_in_one_system_call(
    peer: tuple[PeerConnection, subprocess.Popen[str]],
) -> None:
    pair, process = peer
    _tell(process, "got = [torch.empty(n) for n in (4, 0, 700, 9000)]")
    _tell(process, "ws = [pair.recv(t, 50) for t in got]; pair.send(torch.ones(1), 51)")
    ready = pair.recv(torch.empty(1), 51)
    ready.wait()  # every receive is posted, so the sends may leave at once
    calls = _count_system_calls(pair)
    with pair.together():
        works = [pair.send(torch.full((n,), float(n)), 50) for n in (4, 0, 700, 9000)]
        assert not calls
    for work in works:
        work.wait()
    assert len(calls) == (2 if isinstance(pair._transport, SocketTransport) else 0)  # 36 KB are not short
    answer = pair.recv(sums := torch.empty(4), 51)
    _tell(process, "[w.wait() for w in ws]; pair.send(torch.tensor([t.sum() for t in got]), 51).wait()")
    answer.wait()
    assert sums.tolist() == [16.0, 0.0, 490000.0, 81000000.0]


def _count_system_calls(pair: PeerConnection) -> list[int]:
    """Grows by one number for each write to the connection's socket, which is none of Python's under TLS."""
    calls: list[int] = []
    transport = pair._transport
    if isinstance(transport, SocketTransport):
        inner = transport._sock

        class Counted:
            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

            def sendmsg(self, *parts: Any) -> int:
                calls.append(1)
                return inner.sendmsg(*parts)

        transport._sock = Counted()  # type: ignore[assignment]
    return calls


def test_much_sent_both_ways_at_once_arrives_whole(
    peer: tuple[PeerConnection, subprocess.Popen[str]],
) -> None:
    """More than any socket's buffers: both ends send first and receive afterwards."""
    pair, process = peer
    _tell(process, "out = [torch.arange(3_000_000, dtype=torch.float32) + n for n in range(4)]")
    _tell(process, "ws = [pair.send(t, 30 + n % 2) for n, t in enumerate(out)]")
    _tell(process, "got = [torch.empty(3_000_000) for _ in out]")
    _tell(process, "rs = [pair.recv(t, 40 + n % 2) for n, t in enumerate(got)]; [w.wait() for w in ws + rs]")
    _tell(process, "print('same', all(torch.equal(a, b + 7) for a, b in zip(got, out)), flush=True)")
    mine = [torch.arange(3_000_000, dtype=torch.float32) + n + 7 for n in range(4)]
    sends = [pair.send(t, 40 + n % 2) for n, t in enumerate(mine)]
    got = [torch.empty(3_000_000) for _ in mine]
    works = sends + [pair.recv(t, 30 + n % 2) for n, t in enumerate(got)]
    for work in works:
        work.wait()
    assert all(torch.equal(t + 7, m) for t, m in zip(got, mine, strict=True))
    assert process.stdout is not None
    assert "same True\n" in (process.stdout.readline(), process.stdout.readline())


def test_a_peer_that_dies_is_named_as_lost(tls: Tls) -> None:
    pair = PeerConnection("rank 7 (n7)", 30.0, secret="s", identity=tls)
    process = _start(pair.listen("127.0.0.1"), "s", tls)
    try:
        pair.accept(PATIENCE_S)
        work = pair.recv(torch.empty(1), FIRST_TAG)
        process.kill()
        with pytest.raises(PeerLostError, match=r"the connection to rank 7 \(n7\) is gone"):
            work.wait()
        with pytest.raises(PeerLostError):
            pair.recv(torch.empty(1), FIRST_TAG).wait()
    finally:
        pair.close()
        process.kill()
        process.communicate()


def test_silence_is_an_error_after_the_limit_and_close_ends_waits(tls: Tls) -> None:
    pair = PeerConnection("rank 1", 30.0, secret="s", identity=tls)
    process = _start(pair.listen("127.0.0.1"), "s", tls)
    try:
        pair.accept(PATIENCE_S)
        ended: list[RunError] = []

        def wait() -> None:
            try:
                pair.recv(torch.empty(1), FIRST_TAG).wait()
            except RunError as exc:
                ended.append(exc)

        waiter = threading.Thread(target=wait)
        waiter.start()
        with pytest.raises(RunError, match="nothing came through between this rank and rank 1"):
            pair.recv(torch.empty(1), FIRST_TAG + 1).wait(timedelta(seconds=0.05))
        pair.close()
        waiter.join(10)
        assert not waiter.is_alive()
        assert len(ended) == 1
        pair.close()
        with pytest.raises(PeerLostError, match="closed"):
            pair.send(torch.zeros(1), FIRST_TAG)
    finally:
        process.kill()
        process.communicate()


def test_closing_ends_what_another_thread_waits_for(tls: Tls) -> None:
    pair = PeerConnection("rank 1", 30.0, secret="s", identity=tls)
    process = _start(pair.listen("127.0.0.1"), "s", tls)
    try:
        pair.accept(PATIENCE_S)
        work, ended = pair.recv(torch.empty(1), FIRST_TAG), threading.Event()

        def wait() -> None:
            with pytest.raises(RunError):
                work.wait()
            ended.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        pair.close()
        assert ended.wait(10)
        waiter.join()
    finally:
        pair.close()
        process.kill()
        process.communicate()


def test_polite_close_delivers_what_was_sent(tls: Tls) -> None:
    pair = PeerConnection("rank 1", 30.0, secret="p", identity=tls)
    process = _start(pair.listen("127.0.0.1"), "p", tls)
    try:
        pair.accept(PATIENCE_S)
        _tell(
            process,
            "a = torch.empty(1000000); pair.recv(a, 16).wait(); pair.close(graceful=True); print(a.sum())",
        )
        work = pair.send(torch.ones(1_000_000), FIRST_TAG)
        pair.close(graceful=True)
        work.wait()
        out, err = process.communicate(timeout=PATIENCE_S)
        assert "tensor(1000000.)" in out, err
        assert process.returncode == 0, err
    finally:
        pair.close()
        process.kill()
        process.wait()


def test_another_secret_does_not_get_in(tls: Tls) -> None:
    logged: list[str] = []
    ended: list[RunError] = []
    pair = PeerConnection("rank 1", 30.0, secret="hush-hush", identity=tls, log=logged.append)

    def accept() -> None:
        try:
            pair.accept(PATIENCE_S)
        except RunError as exc:
            ended.append(exc)

    process = _start(pair.listen("127.0.0.1"), "wrong", tls, timeout_s=20.0)
    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        _, err = process.communicate(timeout=PATIENCE_S)
        assert "no connection with rank 0 over" in err
        assert "does not know the secret" in err
        assert len(logged) == 1
        assert "hush" not in logged[0] + err
        pair.close()
        accepting.join(10)
        assert "no connection with rank 1 over" in str(ended[0])
    finally:
        pair.close()
        accepting.join(10)
        process.kill()
        process.wait()


def test_nobody_listening_is_an_error_with_a_hint() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pair = PeerConnection("rank 3", 5.0, secret="s")
    with pytest.raises(
        RunError, match=r"no connection with rank 3 over .* 0 s: Connection refused"
    ) as caught:
        pair.connect("127.0.0.1", port, timeout_s=0.3)
    assert "firewall" in str(caught.value.hint)
    pair.close()


def test_closing_ends_the_wait_for_a_peer() -> None:
    pair = PeerConnection("rank 1", 30.0, secret="s")
    pair.listen("127.0.0.1")
    ended: list[RunError] = []

    def accept() -> None:
        try:
            pair.accept(60.0)
        except RunError as exc:
            ended.append(exc)

    accepting = threading.Thread(target=accept)
    accepting.start()
    pair.close()
    accepting.join(10)
    assert not accepting.is_alive()
    assert "no connection with rank 1" in str(ended[0])


def test_another_certificate_does_not_get_in() -> None:
    """The secret alone is not enough where the run is encrypted."""
    pair = PeerConnection("rank 1", 30.0, secret="s", identity=make_tls_certificate())
    process = _start(pair.listen("127.0.0.1"), "s", make_tls_certificate(), timeout_s=5.0)
    try:
        with pytest.raises(RunError, match="no connection with rank 1"):
            pair.accept(PATIENCE_S)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert "no connection with rank 0" in err
    finally:
        pair.close()
        process.kill()
        process.wait()


def test_one_end_in_the_clear_does_not_get_in() -> None:
    pair = PeerConnection("rank 1", 30.0, secret="s", identity=make_tls_certificate())
    listener = pair.open_listener("127.0.0.1")
    process = _start(listener.port, "s", None, timeout_s=2.0)
    try:
        admitted = listener.accept(PATIENCE_S)
        with pytest.raises(RunError, match="no connection with rank 1"):
            pair.take(admitted, 5.0)
    finally:
        listener.close()
        pair.close()
        process.kill()
        process.communicate()


def listeners() -> set[str]:
    """The addresses that this process listens on, as ``/proc/net/tcp`` has them (v4 and v6)."""
    sockets = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(str(entry.readlink()))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                addresses.add(fields[1].partition(":")[0])
    return addresses


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux's /proc")
def test_a_pair_listens_on_its_own_address_alone_and_no_longer_than_until_its_peer_is_there(tls: Tls) -> None:
    before = listeners()
    pair = PeerConnection("rank 1", 30.0, secret="s", identity=tls)
    process = _start(pair.listen("127.0.0.1"), "s", tls)
    try:
        assert listeners() - before <= {"0100007F"}
        pair.accept(PATIENCE_S)
        assert not listeners() - before
    finally:
        pair.close()
        process.kill()
        process.communicate()


def test_own_address() -> None:
    assert local_address_towards("127.0.0.1") == "127.0.0.1"
    assert local_address_towards("192.0.2.1", "lo") == "127.0.0.1"
    with pytest.raises(RunError, match=r"no network interface 'wg7'.*it has .*lo"):
        local_address_towards("127.0.0.1", "wg7")
    with pytest.raises(RunError, match="no route from this machine to its peer 'no such host'"):
        local_address_towards("no such host")
    with pytest.raises(RunError, match=r"can't listen on 192\.0\.2\.1"):
        PeerConnection(secret="s").listen("192.0.2.1")
