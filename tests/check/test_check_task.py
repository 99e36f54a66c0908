"""The node's side on real sockets, without a node."""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from skyctl.agent.node_cache import default_cache_root
from skyctl.agent.task_orders import write_order
from skyctl.check import check_task
from skyctl.check.check_orders import ServeOrder, TorchOrder


class Line:
    """A task's channel to a launcher that is this test."""

    def __init__(self, cache: Path) -> None:
        self.cache = self.folder = cache
        self.to_task: queue.Queue[dict[str, Any]] = queue.Queue()
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes]:
        return self.to_task.get(timeout=timeout_s), b""

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        self.answers.put(message)

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        self.to_task.put({"op": op, "id": 1, **arguments})
        return self.answers.get(timeout=30)


@contextlib.contextmanager
def serving(cache: Path):
    line = Line(cache)
    thread = threading.Thread(target=check_task.main, args=(write_order(ServeOrder()), line))
    thread.start()
    try:
        yield line
    finally:
        line.ask("stop")
        thread.join(30)


def test_peers_meet_and_strangers_are_told_apart(tmp_path: Path) -> None:
    with socket.socket() as closed, socket.socket() as silent:
        closed.bind(("127.0.0.1", 0))
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with serving(tmp_path) as a, serving(tmp_path) as b:
            port = a.ask("listen", address="127.0.0.1", secret="s")["port"]
            peers = {
                "right": {"host": "127.0.0.1", "port": port, "secret": "s"},
                "stranger": {"host": "127.0.0.1", "port": port, "secret": "other"},
                "closed": {"host": "127.0.0.1", "port": closed.getsockname()[1], "secret": "s"},
                "silent": {"host": "127.0.0.1", "port": silent.getsockname()[1], "secret": "s"},
            }
            results = b.ask("connect", peers=peers, wait_s=0.5)["results"]
    assert results["right"]["connect_s"] >= 0
    assert results["stranger"] == {"error": "something else answered there"}
    assert results["closed"] == {"error": "Connection refused"}
    assert results["silent"] == {"error": "no answer in 0.5 s"}


def test_an_address_that_is_not_ours_is_an_answer_not_a_crash(tmp_path: Path) -> None:
    with serving(tmp_path) as line:
        assert "error" in line.ask("listen", address="192.0.2.77", secret="s")
        assert line.ask("clock")["time_s"] > 0


def test_the_hosts_environment(tmp_path: Path) -> None:
    with serving(tmp_path / "not" / "made") as line:
        environment = line.ask("facts")
    assert environment["executable"] == sys.executable
    assert environment["cpus"] >= 1
    assert environment["cache"]["free_bytes"] > 0
    if sys.platform == "linux":
        assert 0 < environment["memory_available_bytes"] <= environment["memory_total_bytes"]


def test_torchs_environment() -> None:
    pytest.importorskip("torch")
    answer = check_task.main(write_order(TorchOrder(("cpu", "cuda:77"))), Line(default_cache_root()))
    assert [trial["dtype"] for trial in answer["dtypes"]] == ["bfloat16"]
    assert answer["missing"] == ["cuda:77"]
    assert answer["faults"] == {}
    assert answer["distributed"] is True
    assert answer["devices"][-1]["id"] == "cpu:0"


def test_route() -> None:
    assert check_task.main({"op": "route", "towards": []}, None) == {"address": None}
    assert check_task.main({"op": "route", "towards": ["127.0.0.1"]}, None) == {"address": None}


def test_all_but_torch_is_the_standard_library_alone() -> None:
    code = (
        "import sys; from pathlib import Path; import skyctl.check.check_task as n\n"
        "n._host_environment(Path('.'))\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'pydantic', 'numpy', 'yaml')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_gpus_are_counted_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'GPU 0: X (UUID: GPU-a)'\necho '  MIG 1g'\necho 'GPU 1: X (UUID: GPU-b)'\n"
    )
    program.chmod(0o755)
    monkeypatch.delitem(sys.modules, "skyctl.device.accelerator", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_task.count_accelerators() == {"count": 2, "source": "nvidia-smi"}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert check_task.count_accelerators() == {"count": 0, "source": "nvidia-smi"}
