"""Keepers as processes of their own: they list, verify, pull, follow, and talk to no stranger."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import queue
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyctl.agent.wire import encode, read_frame, write_frame
from skyctl.checkpoint import layout
from skyctl.checkpoint.atomic import Written
from skyctl.checkpoint.fetching import Address, Credentials, MissingError, Peer, PeerError
from skyctl.checkpoint.serving import purpose
from skyctl.errors import RecordError, SkyctlError
from skyctl.transport.gate import enter
from skyctl.transport.identity import Identity

SECRET = "between the two of us"
PATIENCE_S = 30.0
CHILD = """
import socket, sys
from pathlib import Path
from skyctl.agent.task import TaskChannel, error_event
from skyctl.agent.wire import write_frame
from skyctl.checkpoint import keeper
channel = TaskChannel(socket.socket(fileno=int(sys.argv[1])), Path("."), Path("."))
try:
    result = keeper.main(channel.recv()[0], channel)
    channel.send({"event": "result", "torch": "torch" in sys.modules, **result})
except EOFError:
    pass
except Exception as exc:
    channel.send(error_event(exc))
channel.close()
"""


class Node:
    """A keeper's process, and the launcher's side of its line."""

    def __init__(self, name: str, folder: Path, **payload: Any) -> None:
        ours, theirs = socket.socketpair()
        self.name, self.folder = name, folder
        self.events: list[dict[str, Any]] = []
        self._news: queue.Queue[dict[str, Any]] = queue.Queue()
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", CHILD, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
        )
        theirs.close()
        self._socket, self._file = ours, ours.makefile("rwb", buffering=0)
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()
        self.port = 0
        self._printed: str | None = None
        self._payload = {"run_id": "r", "folder": str(folder), "secret": SECRET, "poll_s": 0.05, **payload}

    def start(self) -> None:
        """Returns once it listens."""
        self.send({"address": "127.0.0.1", **self._payload})
        self.port = int(self.wait("listening")["port"])

    @property
    def address(self) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": self.port, "node": self.name}

    def send(self, message: dict[str, Any]) -> None:
        write_frame(self._file, message)  # type: ignore[arg-type]

    def wait(self, kind: str, fits: Callable[[dict[str, Any]], bool] = lambda _event: True) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = self._news.get(timeout=left_s)
                self.events.append(event)
                if event["event"] == kind and fits(event):
                    return event
        raise AssertionError(f"{self.name}: no {kind} within {PATIENCE_S:.0f} s, only {self.events}")

    def ask(self, op: str, **more: Any) -> dict[str, Any]:
        number = random.randrange(10**9)
        self.send({"op": op, "id": number, **more})
        return self.wait("answer", lambda event: event["id"] == number)

    def close(self) -> str:
        """What it has printed to its standard error. Idempotent."""
        if self._printed is not None:
            return self._printed
        if self.popen.poll() is None:
            with contextlib.suppress(OSError):
                self.send({"op": "stop"})
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(10)
        self.popen.kill()
        _, printed = self.popen.communicate()
        self._thread.join(5)
        self._file.close()
        self._socket.close()
        self._printed = printed.decode()
        return self._printed

    def _pump(self) -> None:
        with contextlib.suppress(OSError, ValueError, EOFError):
            while (frame := read_frame(self._file)) is not None:  # type: ignore[arg-type]
                self._news.put(frame[0])


Nodes = Callable[..., Node]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Starts keepers; at the end none has printed anything that was not expected."""
    started: list[Node] = []

    def start(name: str, **payload: Any) -> Node:
        started.append(Node(name, tmp_path / name, **payload))
        started[-1].start()
        return started[-1]

    try:
        yield start
    finally:
        printed = [(node.name, node.close()) for node in started]
    for name, text in printed:
        lines = [line for line in text.splitlines() if not line.startswith("refused a stranger")]
        assert not lines, f"{name}:\n{text}"


def put(
    folder: Path, step: int, layers: range, *, rank: int = 0, size: int = 100_000, seed: int = 0
) -> dict[str, str]:
    """Random files as a rank would write them; by layer, their SHA-256."""
    chance = random.Random(f"{seed} {step} {layers}")
    layout.make_step(folder, step)
    files = {}
    for layer in layers:
        data = chance.randbytes(size + layer)
        layout.layer_path(folder, step, layer).write_bytes(data)
        files[layer] = Written(len(data), hashlib.sha256(data).hexdigest())
    layout.write_part(folder, layout.Part("r", rank, step, 0, layers.start, layers.stop, "w", files))
    return {str(layer): file.sha256 for layer, file in files.items()}


def whole(folder: Path, step: int, shas: dict[str, str]) -> bool:
    return not any(layout.fault(folder, step, int(layer), sha) for layer, sha in shas.items())


def credentials(secret: str = SECRET, run_id: str = "r", identity: Identity | None = None) -> Credentials:
    return Credentials(run_id, secret, identity)


def certificate() -> dict[str, str]:
    """A self-signed one, as the launcher makes it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "skyctl run")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {"cert": made.public_bytes(serialization.Encoding.PEM).decode(), "key": private.decode()}


def test_list_verify_prune_pin_forget(nodes: Nodes, tmp_path: Path) -> None:
    node = nodes("n1")
    assert node.ask("list")["steps"] == {}
    shas = put(node.folder, 60, range(3))
    for step in (20, 40, 80):
        put(node.folder, step, range(1))
    steps = node.ask("list")["steps"]
    assert steps["60"]["1"] == {"sha256": shas["1"], "bytes": 100_001, "attempt": 0, "own": True}
    layout.layer_path(node.folder, 60, 1).write_bytes(b"short")
    data = bytearray(layout.layer_path(node.folder, 60, 2).read_bytes())
    data[777] ^= 1
    layout.layer_path(node.folder, 60, 2).write_bytes(data)
    answer = node.ask("verify", step=60, layers={**shas, "7": None})
    assert answer["whole"] == [0]
    assert sorted(answer["damaged"]) == ["1", "2", "7"]
    assert "layer-00001.safetensors is truncated" in answer["damaged"]["1"]
    assert "layer-00002.safetensors is damaged" in answer["damaged"]["2"]
    assert "layer-00007.safetensors is missing" in answer["damaged"]["7"]
    assert node.ask("pin", steps=[20])["pinned"] == [20]
    assert layout.prune(node.folder, 2) == [40]
    assert node.ask("prune", keep_steps=[60])["removed"] == [20, 80]
    assert "prune" in node.ask("prune")["error"]
    assert "knows no 'dance'" in node.ask("dance")["error"]
    assert node.ask("forget")["removed"] == [60]
    assert not node.folder.exists()
    node.send({"op": "stop"})
    assert node.wait("result")["torch"] is False


@pytest.mark.parametrize("encrypted", [False, True])
def test_one_pulls_from_another(encrypted: bool, nodes: Nodes, tmp_path: Path) -> None:
    tls = certificate() if encrypted else None
    one, two = nodes("n1", tls=tls), nodes("n2", tls=tls)
    shas = put(one.folder, 60, range(4), size=3_000_000)
    wanted = {**shas, "9": "0" * 64, "1": "0" * 64}
    answer = two.ask("pull", step=60, layers=wanted, attempt=3, **one.address)
    assert answer["done"] == [0, 2, 3]
    assert "its SHA-256 is" in answer["failed"]["1"]
    assert "does not have step-00000060/layer-00009" in answer["failed"]["9"]
    del shas["1"]
    assert whole(two.folder, 60, shas)
    held = two.ask("list")["steps"]["60"]
    assert sorted(held) == ["0", "2", "3"]
    assert held["0"] == {"sha256": shas["0"], "bytes": 3_000_000, "attempt": 3, "own": False}
    for path in two.folder.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    assert two.ask("pull", step=60, layers=shas, attempt=3, **one.address)["done"] == [0, 2, 3]
    one.close()
    gone = two.ask("pull", step=60, layers={**shas, "1": "0" * 64}, attempt=3, **one.address)
    assert gone["done"] == [0, 2, 3]
    assert "no connection with the keeper of n1 (127.0.0.1:" in gone["failed"]["1"]


def test_a_file_that_came_another_way(nodes: Nodes, tmp_path: Path) -> None:
    node = nodes("n1", address=None, towards="127.0.0.1", interface="lo")
    (tmp_path / "pushed").write_bytes(b"over the launcher")
    sha = hashlib.sha256(b"over the launcher").hexdigest()
    files = {
        "2": {"path": str(tmp_path / "pushed"), "sha256": sha},
        "3": {"path": str(tmp_path / "no"), "sha256": sha},
    }
    answer = node.ask("adopt", step=60, layers=files)
    assert answer["done"] == [2]
    assert "can't be read" in answer["failed"]["3"]
    assert whole(node.folder, 60, {"2": sha})
    assert not (tmp_path / "pushed").exists()


def test_strangers_get_nothing_and_keep_nobody_out(nodes: Nodes, tmp_path: Path) -> None:
    node, other = nodes("n1"), nodes("n2")
    shas = put(node.folder, 60, range(1))
    stalling = [socket.create_connection(("127.0.0.1", node.port)) for _ in range(40)]
    try:
        for data in (b"GET / HTTP/1.1\r\n\r\n", encode({"op": "list"}), b""):
            with socket.create_connection(("127.0.0.1", node.port), 10) as stranger:
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(100) == b""
        where = Address("127.0.0.1", node.port, "n1")
        for wrong in (credentials("another"), credentials(run_id="s")):
            with pytest.raises(PeerError, match=r"no connection with the keeper of n1 .* does not know"):
                Peer(where, wrong)
        assert other.ask("pull", step=60, layers=shas, **node.address)["done"] == [0]
    finally:
        for sock in stalling:
            sock.close()


def test_under_tls_another_certificate_and_none_are_refused(nodes: Nodes, tmp_path: Path) -> None:
    right, wrong = certificate(), certificate()
    node = nodes("n1", tls=right)
    shas = put(node.folder, 60, range(1))
    where = Address("127.0.0.1", node.port)
    with Peer(where, credentials(identity=Identity.of(right))) as peer:
        assert peer.list()[60][0].sha256 == shas["0"]
    with pytest.raises(PeerError):
        Peer(where, credentials(identity=Identity.of(wrong)))
    with pytest.raises(PeerError), Peer(where, credentials()) as peer:
        peer.list()


def test_a_follower_takes_what_a_source_goes_on_writing(nodes: Nodes, tmp_path: Path) -> None:
    one, two = nodes("n1"), nodes("n2")
    wrote: dict[int, dict[str, str]] = {20: put(one.folder, 20, range(3))}
    two.ask("follow", peers=[one.address], keep=2)
    first = two.wait("replicated")
    assert (first["step"], first["from"]) == (20, "n1")
    assert first["bytes"] == 300_003
    for step in range(40, 400, 20):
        wrote[step] = put(one.folder, step, range(2))
        wrote[step] |= put(one.folder, step, range(2, 3), rank=1)
        layout.prune(one.folder, 2)
        time.sleep(0.01)
    two.wait("replicated", lambda event: event["step"] == 380 and "2" in event["layers"])
    held = layout.held(two.folder)
    assert len(held) == 2, "older ones are pruned"
    assert sorted(held[380]) == [0, 1, 2]
    assert whole(two.folder, 380, wrote[380])
    # copies are not copied on, or two that follow each other would never end
    one.ask("follow", peers=[two.address], keep=2)
    put(two.folder, 380, range(5, 6), rank=5)
    assert list(one.wait("replicated")["layers"]) == ["5"]


def test_a_pinned_step_is_taken_to_its_end_before_newer_ones(nodes: Nodes, tmp_path: Path) -> None:
    one, two = nodes("n1"), nodes("n2")
    for step in (20, 40, 60):
        put(one.folder, step, range(2))
    put(one.folder, 20, range(2, 3), rank=1)
    two.ask("pin", steps=[20])
    two.ask("follow", peers=[one.address], keep=2)
    assert [two.wait("replicated")["step"] for _ in range(2)] == [20, 60]
    assert sorted(layout.held(two.folder)[20]) == [0, 1, 2]


def test_a_peer_that_comes_and_goes(nodes: Nodes, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    two = nodes("n2")
    two.ask("follow", peers=[{"host": "127.0.0.1", "port": port, "node": "later"}], keep=2)
    assert "no connection with the keeper of later" in two.wait("unreplicated")["error"]
    one = nodes("n1")
    put(one.folder, 20, range(1))
    two.ask("follow", peers=[one.address], keep=2)
    two.wait("replicated")
    one.popen.kill()
    assert "n1" in two.wait("unreplicated")["error"]
    assert two.ask("follow", peers=[], keep=2)["following"] == []


def test_pruned_in_the_middle_of_a_pull(nodes: Nodes, tmp_path: Path) -> None:
    """What is being sent arrives whole; what was not yet asked for is told to be missing."""
    one, two = nodes("n1"), nodes("n2")
    shas = put(one.folder, 60, range(6), size=20_000_000)
    two.send({"op": "pull", "id": 1, "step": 60, "layers": shas, **one.address})
    deadline = time.monotonic() + PATIENCE_S
    while not list(two.folder.rglob("*.part")) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert one.ask("prune", keep_steps=[])["removed"] == [60]
    answer = two.wait("answer", lambda event: event["id"] == 1)
    assert sorted(answer["done"] + [int(layer) for layer in answer["failed"]]) == list(range(6))
    assert whole(two.folder, 60, {str(layer): shas[str(layer)] for layer in answer["done"]})
    assert not list(two.folder.rglob("*.part"))
    assert all("does not have" in why for why in answer["failed"].values())


def test_pruned_where_it_is_pulled_to(nodes: Nodes, tmp_path: Path) -> None:
    one, two = nodes("n1"), nodes("n2")
    shas = put(one.folder, 60, range(6), size=20_000_000)
    two.send({"op": "pull", "id": 1, "step": 60, "layers": shas, **one.address})
    deadline = time.monotonic() + PATIENCE_S
    while not list(two.folder.rglob("*.part")) and time.monotonic() < deadline:
        time.sleep(0.001)
    two.ask("prune", keep_steps=[])
    answer = two.wait("answer", lambda event: event["id"] == 1)
    assert sorted(answer["done"] + [int(layer) for layer in answer["failed"]]) == list(range(6))
    assert not two.folder.exists() or not list(two.folder.rglob("*.part"))


def test_a_full_disk_where_it_is_pulled_to_is_told(nodes: Nodes, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a full disk is a small one that root mounts")
    one = nodes("n1")
    (tmp_path / "n2").mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(tmp_path / "n2")]
    subprocess.run(small, check=True)
    try:
        two = nodes("n2")
        shas = put(one.folder, 60, range(4))
        answer = two.ask("pull", step=60, layers=shas, **one.address)
        assert "No space left" in next(iter(answer["failed"].values()))
        assert answer["done"]
        done = {str(layer): shas[str(layer)] for layer in answer["done"]}
        assert whole(two.folder, 60, done)
        assert not list(two.folder.rglob("*.part"))
        two.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "n2")], check=True)


def test_mutated_frames_end_their_connection_and_no_more(nodes: Nodes, tmp_path: Path) -> None:
    """1,000 of peers that know the secret; the keeper answers or lets go, and serves others on."""
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
            sock = enter("127.0.0.1", node.port, SECRET, purpose=purpose("r"), timeout_s=10).sock
            sock.settimeout(PATIENCE_S)
        frame = bytearray(encode(chance.choice(asked)))
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
    with Peer(Address("127.0.0.1", node.port), credentials()) as peer:
        assert {str(n): file.sha256 for n, file in peer.list()[60].items()} == shas


def test_a_peer_that_lies_ends_in_our_own_errors(tmp_path: Path) -> None:
    """What answers knows the secret, and answers anything."""
    from skyctl.transport.gate import Gate, listening

    layout.make_step(tmp_path, 60)
    chance = random.Random(4)
    sha = hashlib.sha256(b"x").hexdigest()
    frames = [
        encode({"steps": {"60": {"0": {"sha256": sha, "bytes": 1}}}}),
        encode({"steps": {"../x": {}}}),
        encode({"steps": {"60": {"0": {"sha256": "../../x", "bytes": 1}}}}),
        encode({"steps": [1]}),
        encode({"bytes": 1}) + encode({}, b"y") + b"y",
        encode({"bytes": 1}) + encode({}, b"xyz") + b"xyz",
        encode({"bytes": 3}) + encode({}, b"") + b"",
        encode({"bytes": -1}),
        encode({"missing": ["x"] * 1000}),
        encode({}),
    ]

    def serve() -> None:
        while True:
            try:
                got = gate.admit(PATIENCE_S).sock
            except OSError:
                return
            with got:
                answer = bytearray(chance.choice(frames))
                for _ in range(chance.randint(0, 2)):
                    answer[chance.randrange(len(answer))] = chance.randrange(256)
                with contextlib.suppress(OSError):
                    got.recv(1000)
                    got.sendall(answer)

    gate = Gate(listening("127.0.0.1"), SECRET, purpose=purpose("r"), tell=lambda _line: None)
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        where, seen = Address("127.0.0.1", gate.port), set()
        for number in range(300):
            with Peer(where, credentials()) as peer:
                try:
                    peer.list() if number % 2 else peer.get(tmp_path, 60, 0, sha)
                except SkyctlError as exc:
                    seen.add(type(exc))
        assert seen == {PeerError, MissingError, RecordError}
    finally:
        gate.close()
        thread.join(10)
    assert not list(tmp_path.rglob("*.part"))
    shutil.rmtree(tmp_path / "step-00000060")
