"""Keepers and who is none: strangers, damaged frames, peers that lie."""

from __future__ import annotations

import contextlib
import hashlib
import random
import shutil
import socket
import threading
from pathlib import Path

import pytest
from tests.checkpoint.replicator_process import PATIENCE_S, SECRET, Nodes, credentials, put

from skyctl.agent.frames import encode_frame
from skyctl.checkpoint.node import layout
from skyctl.checkpoint.node.shard_client import (
    ReplicatorAddress,
    ReplicatorUnreachableError,
    ShardClient,
    ShardMissingError,
)
from skyctl.checkpoint.node.shard_server import handshake_purpose
from skyctl.errors import RecordError, SkyctlError
from skyctl.remote.credentials import make_tls_certificate
from skyctl.transport.handshake import connect_authenticated


def test_strangers_get_nothing_and_keep_nobody_out(nodes: Nodes, tmp_path: Path) -> None:
    node, other = nodes("n1"), nodes("n2")
    shas = put(node.folder, 60, range(1))
    stalling = [socket.create_connection(("127.0.0.1", node.port)) for _ in range(40)]
    try:
        for data in (b"GET / HTTP/1.1\r\n\r\n", encode_frame({"op": "list"}), b""):
            with socket.create_connection(("127.0.0.1", node.port), 10) as stranger:
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(100) == b""
        where = ReplicatorAddress("127.0.0.1", node.port, "n1")
        for wrong in (credentials("another"), credentials(run_id="s")):
            with pytest.raises(
                ReplicatorUnreachableError,
                match=r"no connection with the checkpoint replicator of n1 .* does not know",
            ):
                ShardClient(where, wrong)
        assert other.ask("pull", step=60, layers=shas, **node.address)["done"] == [0]
    finally:
        for sock in stalling:
            sock.close()


def test_under_tls_another_certificate_and_none_are_refused(nodes: Nodes, tmp_path: Path) -> None:
    right, wrong = make_tls_certificate(), make_tls_certificate()
    node = nodes("n1", tls=right)
    shas = put(node.folder, 60, range(1))
    where = ReplicatorAddress("127.0.0.1", node.port, "n1")
    with ShardClient(where, credentials(identity=right)) as peer:
        assert peer.list()[60][0].sha256 == shas["0"]
    with pytest.raises(ReplicatorUnreachableError):
        ShardClient(where, credentials(identity=wrong))
    with pytest.raises(ReplicatorUnreachableError), ShardClient(where, credentials()) as peer:
        peer.list()


def test_mutated_frames_end_their_connection_and_no_more(nodes: Nodes, tmp_path: Path) -> None:
    """1,000 of peers that know the secret; the server answers or disconnects, and serves others on."""
    node = nodes("n1")
    shas = put(node.folder, 60, range(2), size=100)
    chance = random.Random(3)
    asked = [
        {"op": "list", "newest": 1},
        {"op": "get", "step": 60, "layer": 1},
        {"op": "get", "step": "../../etc", "layer": "passwd"},
        {"op": "get", "step": 60, "layer": 10**30},
        {"op": "get"},
        {"op": ["list"]},
    ]
    sock: socket.socket | None = None
    for _ in range(1000):
        if sock is None:
            sock = connect_authenticated(
                "127.0.0.1", node.port, SECRET, purpose=handshake_purpose("r", "n1"), timeout_s=10
            ).sock
            sock.settimeout(PATIENCE_S)
        frame = bytearray(encode_frame(chance.choice(asked)))
        for _ in range(chance.randint(0, 3)):
            frame[chance.randrange(8 if chance.random() < 0.2 else len(frame))] = chance.randrange(256)
        with contextlib.suppress(OSError):
            sock.sendall(frame[: chance.randint(1, len(frame))] if chance.random() < 0.1 else frame)
            if chance.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
                sock.close()
                sock = None
    if sock is not None:
        sock.close()
    with ShardClient(ReplicatorAddress("127.0.0.1", node.port, "n1"), credentials()) as peer:
        assert {str(n): file.sha256 for n, file in peer.list()[60].items()} == shas


def test_a_peer_that_lies_ends_in_our_own_errors(tmp_path: Path) -> None:
    """The peer that answers knows the secret, and answers anything."""
    from skyctl.transport.handshake import AuthenticatingListener, open_listener

    layout.make_step_folder(tmp_path, 60)
    chance = random.Random(4)
    sha = hashlib.sha256(b"x").hexdigest()
    frames = [
        encode_frame({"steps": {"60": {"0": {"sha256": sha, "bytes": 1}}}}),
        encode_frame({"steps": {"../x": {}}}),
        encode_frame({"steps": {"60": {"0": {"sha256": "../../x", "bytes": 1}}}}),
        encode_frame({"steps": [1]}),
        encode_frame({"bytes": 1}) + encode_frame({}, b"y") + b"y",
        encode_frame({"bytes": 1}) + encode_frame({}, b"xyz") + b"xyz",
        encode_frame({"bytes": 3}) + encode_frame({}, b"") + b"",
        encode_frame({"bytes": -1}),
        encode_frame({"missing": ["x"] * 1000}),
        encode_frame({}),
    ]

    def serve() -> None:
        while True:
            try:
                got = gate.accept(PATIENCE_S).sock
            except OSError:
                return
            with got:
                answer = bytearray(chance.choice(frames))
                for _ in range(chance.randint(0, 2)):
                    answer[chance.randrange(len(answer))] = chance.randrange(256)
                with contextlib.suppress(OSError):
                    got.recv(1000)
                    got.sendall(answer)

    gate = AuthenticatingListener(
        open_listener("127.0.0.1"), SECRET, purpose=handshake_purpose("r", "n1"), log=lambda _line: None
    )
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        where, seen = ReplicatorAddress("127.0.0.1", gate.port, "n1"), set()
        for number in range(300):
            with ShardClient(where, credentials()) as peer:
                try:
                    peer.list() if number % 2 else peer.get(tmp_path, 60, 0, sha, 1 << 20)
                except SkyctlError as exc:
                    seen.add(type(exc))
        assert seen == {ReplicatorUnreachableError, ShardMissingError, RecordError}
    finally:
        gate.close()
        thread.join(10)
    assert not list(tmp_path.rglob("*.part"))
    shutil.rmtree(tmp_path / "step-00000060")
