"""The data that show on the wire, by reading it: every byte between nodes and launcher while a plan trains.

A raw socket in the lab's own network keeps what passes at each node's end of its cable. Inputs lie on the
first stage's node only, targets on the last one's; neither may pass, encrypted or not. A layer's output is
known too: it must be found in the clear, so that this test is known to see, and not through TLS.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.lab import fault_injection

from skyctl.lab.lab_state import LabState

from . import clusters

SPEC = {"nodes": [{"name": name, "cpus": 0.6, "memory_gib": 3} for name in ("n1", "n2", "n3")]}
SIZES = ("--batch-size", "16", "--microbatches", "4")
BATCH, WIDTH, IDS, OUT = 16, 64, 16, 8
MOST_BYTES = 256 << 20
MOST_S = 240

TRAIN = """
from pathlib import Path

import torch
from torch import nn

PRIVATE = Path("/tmp/private")
WIDTH, IDS, OUT = 64, 16, 8


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        values, ids = given
        return self.linear(values * 0.5 + ids.to(torch.float32).mean(1, keepdim=True) * 1e-20)


class Known(nn.Module):
    def forward(self, x):
        return x * 0.0 + torch.arange(WIDTH, dtype=torch.float32) * 0.731 + 0.123


def model():
    return [First(), Known(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)]


def read(name, dtype, *shape):
    path = PRIVATE / name
    if not path.exists():
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=dtype).reshape(shape)


def batch(size):
    inputs = read("values", torch.float32, size, WIDTH), read("ids", torch.int64, size, IDS)
    return inputs, (read("wanted", torch.float32, size, OUT), read("classes", torch.int64, size, 1))


def example(batch_size):
    return batch(batch_size)


def data(batch_size, seed):
    while True:
        yield batch(batch_size)


def loss(outputs, targets):
    wanted, classes = targets
    return (outputs - wanted).square().mean() + classes.to(torch.float32).mean() * 1e-20
"""

CAPTURE = """
import json, select, socket, struct, sys, time
path, most, ports = sys.argv[1], int(sys.argv[2]), sys.argv[4:]
end = time.monotonic() + float(sys.argv[3])
socks = []
for port in ports:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
    sock.bind((port, 3))  # ETH_P_ALL
    sock.setblocking(False)
    socks.append(sock)
print("ready", flush=True)
total, is_asked = 0, False
with open(path, "wb") as out:
    while total < most and time.monotonic() < end and not is_asked:
        ready = select.select([*socks, sys.stdin], [], [], 1.0)[0]
        is_asked = sys.stdin in ready
        for sock in socks:
            try:
                while total < most:
                    frame = sock.recv(1 << 17)
                    out.write(struct.pack(">I", len(frame)) + frame)
                    total += len(frame)
            except BlockingIOError:
                pass
lost = sum(struct.unpack("II", sock.getsockopt(263, 6, 8))[1] for sock in socks)  # PACKET_STATISTICS
print(json.dumps({"bytes": total, "lost": lost, "whole": is_asked}), flush=True)
"""

Flow = tuple[str, int, str, int]


class Wire:
    """The bytes that have passed, put together as the streams that they were."""

    def __init__(self, path: Path) -> None:
        pieces: dict[Flow, dict[int, bytes]] = {}
        raw = path.read_bytes()
        at = 0
        while at < len(raw):
            size = struct.unpack_from(">I", raw, at)[0]
            self._take(raw[at + 4 : at + 4 + size], pieces)
            at += 4 + size
        self.streams = {flow: self._joined(parts) for flow, parts in pieces.items()}

    @staticmethod
    def _take(frame: bytes, pieces: dict[Flow, dict[int, bytes]]) -> None:
        if frame[12:14] != b"\x08\x00" or frame[23] != 6:  # IPv4, TCP
            return
        packet = frame[14 : 14 + struct.unpack_from(">H", frame, 16)[0]]
        segment = packet[4 * (packet[0] & 15) :]
        source, target = (".".join(map(str, packet[a : a + 4])) for a in (12, 16))
        ports = struct.unpack_from(">HH", segment)
        body = segment[4 * (segment[12] >> 4) :]
        if body:
            sequence = struct.unpack_from(">I", segment, 4)[0]
            flow = source, ports[0], target, ports[1]
            flow_parts = pieces.setdefault(flow, {})
            flow_parts[sequence] = max(body, flow_parts.get(sequence, b""), key=len)

    @staticmethod
    def _joined(parts: dict[int, bytes]) -> bytes:
        """In order, sent again or not; a gap would show that not everything was seen."""
        base = next(iter(parts))
        out = bytearray()
        start: int | None = None
        for place, body in sorted((((s - base + 2**31) % 2**32) - 2**31, b) for s, b in parts.items()):
            start = place if start is None else start
            fresh = start + len(out) - place
            assert fresh >= 0, "a part of a stream was not captured"
            out += body[fresh:]
        return bytes(out)

    def between(self, source: str, target: str) -> bytes:
        return b"|".join(
            data for flow, data in self.streams.items() if (flow[0], flow[2]) == (source, target)
        )

    def holds(self, pattern: bytes) -> list[Flow]:
        return [flow for flow, data in self.streams.items() if pattern in data]


class Cluster(clusters.Cluster):
    """The lab, its data, and skyctl run against it."""

    def __init__(self, lab: LabState, folder: Path) -> None:
        super().__init__(lab, folder)
        (folder / "train.py").write_text(TRAIN)
        generator = torch.Generator().manual_seed(os.getpid())
        self.values = torch.randn(BATCH, WIDTH, generator=generator)
        self.ids = torch.randint(-(2**62), 2**62, (BATCH, IDS), generator=generator)
        self.wanted = torch.randn(BATCH, OUT, generator=generator)
        self.classes = torch.randint(-(2**62), 2**62, (BATCH, 1), generator=generator)
        self._put("n1", values=self.values, ids=self.ids)
        self._put("n3", wanted=self.wanted, classes=self.classes)

    def prepare(self) -> None:
        """Probes, and plans with the data's owners at both ends."""
        self.probe_briefly("train.py", *SIZES, "--links", "none")
        words = ("--strategy", "even", "--pin-first", "n1", "--pin-last", "n3", "-o", "plan.json")
        self.run_inside("plan", "train.py", *SIZES, *words)
        stages = json.loads((self.folder / "plan.json").read_text())["stages"]
        assert [stage["replicas"][0]["device"] for stage in stages] == ["n1/cpu:0", "n2/cpu:0", "n3/cpu:0"]
        assert stages[0]["stop"] == 2

    def _put(self, node: str, **tensors: torch.Tensor) -> None:
        program = (
            "import sys; from pathlib import Path; "
            "folder = Path('/tmp/private'); folder.mkdir(exist_ok=True); "
            "[(folder / n).write_bytes(bytes.fromhex(h)) for n, h in zip(sys.argv[1::2], sys.argv[2::2])]"
        )
        words = [word for name, t in tensors.items() for word in (name, as_bytes(t).hex())]
        done = fault_injection.run_in_node(
            self.lab, node, [sys.executable, "-I", "-S", "-c", program, *words]
        )
        assert done.returncode == 0, done.stderr

    @contextmanager
    def captured(self, path: Path) -> Iterator[None]:
        """Keeps in that file all that passes meanwhile; nothing may be lost."""
        assert self.lab.fabric is not None
        ports = [node.port for node in self.lab.nodes]
        argv = ["nsenter", "-t", str(self.lab.fabric.pid), "-n", sys.executable, "-I", "-S", "-c", CAPTURE]
        child = subprocess.Popen(
            [*argv, str(path), str(MOST_BYTES), str(MOST_S), *ports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield
            out, _ = child.communicate(timeout=60)  # closes its stdin, which ends it
            answer = json.loads(out)
            assert answer["whole"]
            assert answer["lost"] == 0
        finally:
            child.kill()
            child.communicate()

    def train(self, name: str, *flags: str) -> Wire:
        path = self.folder / f"{name}.frames"
        with self.captured(path):
            self.run_inside("launch", "plan.json", "--steps", "3", *flags, "-o", f"{name}.json")
        wire = Wire(path)
        path.unlink()
        address = {node.name: node.address for node in self.lab.nodes}
        for target in address.values():  # the sessions were seen as well, from both sides
            assert sum(len(d) for flow, d in wire.streams.items() if flow[2:] == (target, 22)) > 3_000
            assert any(flow[:2] == (target, 22) for flow in wire.streams)
        return wire

    def secrets(self) -> Iterator[bytes]:
        """Any four floats, or any one integer, of inputs and targets, as they lie in memory and as floats."""
        for tensor in (self.values, self.wanted, self.ids.to(torch.float32)):
            raw = as_bytes(tensor)
            yield from (raw[at : at + 16] for at in range(0, len(raw), 16))
        for tensor in (self.ids, self.classes):
            raw = as_bytes(tensor)
            yield from (raw[at : at + 8] for at in range(0, len(raw), 8))


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


@pytest.fixture(scope="module")
def cluster(
    shared_lab: Callable[..., LabState], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    cluster = Cluster(shared_lab(SPEC, name="privacy"), tmp_path_factory.mktemp("privacy"))
    try:
        cluster.prepare()
        yield cluster
    finally:
        cluster.end()


def sample_bytes() -> bytes:
    """One sample of what the second layer gives to the next stage."""
    return as_bytes(torch.arange(WIDTH, dtype=torch.float32) * 0.731 + 0.123)


@pytest.mark.slow
def test_in_the_clear_activations_pass_and_private_data_do_not(cluster: Cluster) -> None:
    wire = cluster.train("clear")
    n1, n2 = (cluster.lab.node(name).address for name in ("n1", "n2"))
    assert sample_bytes() in wire.between(n1, n2)
    assert [pattern for pattern in cluster.secrets() if wire.holds(pattern)] == []


@pytest.mark.slow
def test_encrypted_nothing_can_be_read(cluster: Cluster) -> None:
    wire = cluster.train("encrypted", "--encrypt")
    n1, n2 = (cluster.lab.node(name).address for name in ("n1", "n2"))
    assert len(wire.between(n1, n2)) > 3 * BATCH * WIDTH * 4  # three steps' activations, and more
    assert wire.holds(sample_bytes()[:16]) == []
    assert [pattern for pattern in cluster.secrets() if wire.holds(pattern)] == []
    losses = [
        [step["loss"] for step in json.loads((cluster.folder / f"{name}.json").read_text())["steps"]]
        for name in ("clear", "encrypted")
    ]
    assert losses[0] == losses[1]
