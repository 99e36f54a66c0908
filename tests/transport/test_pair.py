"""Pairs between real processes over real sockets."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from skyctl.errors import RunError
from skyctl.transport.addresses import address_towards
from skyctl.transport.pair import FIRST_TAG, Pair, PeerLostError

PEER = """
import sys, warnings
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch
from skyctl.transport.pair import FIRST_TAG, Pair
pair = Pair("rank 0", 30.0, secret=sys.argv[2])
pair.connect("127.0.0.1", int(sys.argv[1]), timeout_s=float(sys.argv[3]))
print("connected", flush=True)
for line in sys.stdin:
    exec(line)
"""


@pytest.fixture(scope="module")
def peer() -> Iterator[tuple[Pair, subprocess.Popen[str]]]:
    """Both ends: this process is rank 0; lines written to the other one's stdin run there."""
    pair = Pair("rank 1", 30.0, secret="s")
    port = pair.listen("127.0.0.1")
    process = _start(port, "s")
    try:
        pair.accept(30.0)
        yield pair, process
        pair.close()
    finally:
        process.kill()
        process.communicate()


def _start(port: int, secret: str, timeout_s: float = 30.0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PEER, str(port), secret, str(timeout_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def test_messages_of_any_dtype_go_both_ways(peer: tuple[Pair, subprocess.Popen[str]]) -> None:
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


def test_order_is_kept_within_a_tag_and_tags_are_told_apart(peer: tuple[Pair, subprocess.Popen[str]]) -> None:
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


def test_round_trip_is_known_to_both_ends(peer: tuple[Pair, subprocess.Popen[str]]) -> None:
    pair, process = peer
    _tell(process, "print(pair.round_trip_s(3), flush=True)")
    here = pair.round_trip_s(3)
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    assert lines[0] == "connected\n"
    assert float(lines[1]) == here > 0


def test_a_peer_that_dies_is_named_as_lost() -> None:
    pair = Pair("rank 7 (n7)", 30.0)
    process = _start(pair.listen("127.0.0.1"), "")
    try:
        pair.accept(30.0)
        work = pair.recv(torch.empty(1), FIRST_TAG)
        process.kill()
        with pytest.raises(PeerLostError, match=r"the connection to rank 7 \(n7\) is gone") as caught:
            work.wait()
        assert caught.value.secondary
        with pytest.raises(PeerLostError):
            pair.recv(torch.empty(1), FIRST_TAG).wait()
    finally:
        pair.close()
        process.kill()
        process.communicate()


def test_silence_is_an_error_after_the_limit_and_close_ends_waits() -> None:
    pair = Pair("rank 1", 30.0)
    process = _start(pair.listen("127.0.0.1"), "")
    try:
        pair.accept(30.0)
        ended: list[RunError] = []

        def wait() -> None:
            try:
                pair.recv(torch.empty(1), FIRST_TAG).wait()
            except RunError as exc:
                ended.append(exc)

        waiter = threading.Thread(target=wait)
        waiter.start()
        with pytest.raises(RunError, match="nothing came through between this rank and rank 1"):
            pair.recv(torch.empty(1), FIRST_TAG + 1).wait(0.05)
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


def test_polite_close_delivers_what_was_sent(peer: tuple[Pair, subprocess.Popen[str]]) -> None:
    pair = Pair("rank 1", 30.0, secret="p")
    process = _start(pair.listen("127.0.0.1"), "p")
    try:
        pair.accept(30.0)
        _tell(
            process,
            "a = torch.empty(1000000); pair.recv(a, 16).wait(); pair.close(politely=True); print(a.sum())",
        )
        work = pair.send(torch.ones(1_000_000), FIRST_TAG)
        pair.close(politely=True)
        work.wait()
        out, err = process.communicate(timeout=30)
        assert "tensor(1000000.)" in out, err
        assert process.returncode == 0, err
    finally:
        process.kill()
        process.wait()


def test_another_secret_does_not_get_in() -> None:
    pair = Pair("rank 1", 30.0, secret="right")
    process = _start(pair.listen("127.0.0.1"), "wrong", timeout_s=1.0)
    try:
        with pytest.raises(RunError, match=r"no connection with rank 1 over 127\.0\.0\.1:\d+ within 1 s"):
            pair.accept(1.0)
        _, err = process.communicate(timeout=30)
        assert "no connection with rank 0" in err
    finally:
        pair.close()
        process.kill()
        process.wait()


def test_nobody_listening_is_an_error_with_a_hint() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pair = Pair("rank 3", 5.0)
    with pytest.raises(RunError, match="no connection with rank 3") as caught:
        pair.connect("127.0.0.1", port, timeout_s=0.5)
    assert "firewall" in str(caught.value.hint)
    pair.close()


def test_own_address() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("192.0.2.1", "lo") == "127.0.0.1"
    with pytest.raises(RunError, match=r"no network interface 'wg7'.*it has .*lo"):
        address_towards("127.0.0.1", "wg7")
    with pytest.raises(RunError, match="no route from this machine to its peer 'no such host'"):
        address_towards("no such host")
    with pytest.raises(RunError, match=r"can't listen on 192\.0\.2\.1"):
        Pair().listen("192.0.2.1")
