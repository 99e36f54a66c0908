"""Machines as they are found: interfaces, hosts, clocks, versions, shells, ports, one row of the table each.

Over a lab's real SSH; the table is in docs/faults.md. Losses are held against a run that nothing is odd in.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.lab import fault_injection

from skyctl.lab import traffic_shaping
from skyctl.lab.lab_state import host_key

from ..helpers.runs import Run
from .clocks import constant_shift
from .clusters import Cluster
from .torch_only_venv import make_torch_only_venv

pytestmark = pytest.mark.matrix

SPEC = {"nodes": [{"name": f"n{i}", "cpus": 0.66, "memory_gib": 2} for i in (1, 2, 3)]}
STEPS = 12
RUN = ("--steps", str(STEPS), "--checkpoint-every", "5")
ELSEWHERE = "192.0.2.7"
"""An address that the launcher has a way to, and no node."""
QUARTER_S = 900


@pytest.fixture(scope="module")
def shared_cluster(planned_cluster: Callable[..., Cluster]) -> Cluster:
    return planned_cluster(SPEC, "machines", sleep_s=0.01, layers=6)


@pytest.fixture(scope="module")
def losses(shared_cluster: Cluster) -> list[float]:
    return shared_cluster.losses(STEPS)


@pytest.fixture
def lab3(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster. Afterwards nothing is left on any node, not even of what was odd."""
    try:
        yield shared_cluster
        assert shared_cluster.settled() == {}
    finally:
        shared_cluster.end()
        for node in shared_cluster.nodes:
            (shared_cluster.home(node) / ".bashrc").unlink(missing_ok=True)


def checked(cluster: Cluster, file: Path, code: int = 0) -> dict[str, Any]:
    """The report of ``check``: each node's ticks by name, and ``pairs`` that can't talk."""
    document = json.loads(cluster.run("check", "--json", "-c", str(file), code=code).stdout)
    report: dict[str, Any] = {
        node["node"]: {tick["name"]: tick for tick in node["ticks"]} for node in document["nodes"]
    }
    return report | {"pairs": [pair for pair in document["pairs"] if pair["error"]]}


def ends_well(cluster: Cluster, file: Path, losses: list[float], *words: str, **env: str) -> Run:
    """It is launched on that cluster and ends with those losses, in one attempt."""
    run = cluster.launch("-c", str(file), *RUN, *words, **env)
    run.end()
    run.is_as(losses, 1)
    return run


# interfaces and names


@pytest.fixture
def two_interfaces(lab3: Cluster) -> Iterator[Cluster]:
    """n2 has an interface more, with an address that the launcher reaches and no other node."""
    inside_n2 = [
        "link add far0 type veth peer name far1",
        f"addr add {ELSEWHERE}/24 dev far0",
        "link set far0 up",
        "link set far1 up",
    ]
    (own,) = lab3.lab.launcher
    node = lab3.lab.node("n2").process
    assert node is not None
    traffic_shaping.run_batch("ip", inside_n2, pid=node.pid)
    traffic_shaping.run_batch("ip", [f"route add {ELSEWHERE}/32 dev {own}"])
    try:
        yield lab3
    finally:
        traffic_shaping.run_batch("ip", [f"route del {ELSEWHERE}/32 dev {own}"])
        traffic_shaping.run_batch("ip", ["link del far0"], pid=node.pid)


def with_key(cluster: Cluster, file: Path) -> Path:
    known_hosts = file.with_name("known_hosts")
    known_hosts.write_text(f"{known_hosts.read_text()}{ELSEWHERE} {host_key(cluster.lab, 'n2')}\n")
    return file


@pytest.mark.slow
def test_it_is_dialled_by_an_interface_that_no_peer_reaches(
    two_interfaces: Cluster, losses: list[float]
) -> None:
    """``check`` names the pairs; ``interface:`` is what to do."""
    there = with_key(two_interfaces, two_interfaces.changed("far", n2={"host": ELSEWHERE}))
    report = checked(two_interfaces, there, code=4)
    assert report["n2"]["address"]["found"] == f"{ELSEWHERE} (far0)"
    assert {(pair["source"], pair["target"]) for pair in report["pairs"]} == {("n1", "n2"), ("n3", "n2")}
    assert all("interface" in pair["hint"] for pair in report["pairs"])
    chosen = {"host": ELSEWHERE, "interface": "eth0"}
    there = with_key(two_interfaces, two_interfaces.changed("chosen", n2=chosen))
    assert checked(two_interfaces, there)["n2"]["address"]["found"].endswith(" (eth0)")
    ends_well(two_interfaces, there, losses)


@pytest.mark.slow
def test_its_own_name_is_127_0_1_1_and_its_route_is_taken(
    two_interfaces: Cluster, losses: list[float]
) -> None:
    """As Debian sets machines up. n2 is dialled through n1 by its name, so its address is not known here."""
    cluster = two_interfaces
    files = {node: cluster.lab.node_folder(node) / "etc" / "hosts" for node in cluster.nodes}
    before = {node: file.read_text() for node, file in files.items()}
    try:
        for node, file in files.items():
            others = [line for line in before[node].splitlines() if not line.endswith(f" {node}")]
            file.write_text("\n".join([*others, f"127.0.1.1 {node}", ""]))  # in place: it is mounted there
        looked_up = fault_injection.run_in_node(cluster.lab, "n2", ["getent", "hosts", "n2"])
        assert looked_up.stdout.split()[0] == "127.0.1.1", looked_up
        through = f"root@{cluster.lab.node('n1').address}"
        there = cluster.changed("debian", n2={"host": "n2", "proxy_jump": through})
        address = cluster.lab.node("n2").address
        assert checked(cluster, there)["n2"]["address"]["found"] == f"{address} (eth0)"
        ends_well(cluster, there, losses)
    finally:
        for node, file in files.items():
            file.write_text(before[node])


# clocks


@pytest.mark.slow
def test_a_nodes_clock_is_a_quarter_of_an_hour_ahead(lab3: Cluster, losses: list[float]) -> None:
    python = odd_python(lab3, "n2", constant_shift(QUARTER_S))
    there = lab3.changed("ahead", n2={"python": python})
    report = checked(lab3, there)
    assert report["n2"]["clock"]["status"] == "warning"
    assert ahead_s(report["n2"]["clock"]) == pytest.approx(QUARTER_S, abs=5)
    assert (report["n1"]["clock"]["status"], report["n3"]["clock"]["status"]) == ("ok", "ok")
    run = ends_well(lab3, there, losses, "--trace", "--encrypt")
    assert clock_error_s(run) < 1.0


@pytest.mark.slow
def test_the_launchers_clock_is_a_quarter_of_an_hour_behind(lab3: Cluster, losses: list[float]) -> None:
    """The run's certificate is made by this clock, and looked at by those of the nodes."""
    folder = lab3.folder / "behind-clock"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(constant_shift(-QUARTER_S))
    shifted = {"PYTHONPATH": str(folder)}
    document = json.loads(lab3.run("check", "--json", **shifted).stdout)
    clocks = [tick for node in document["nodes"] for tick in node["ticks"] if tick["name"] == "clock"]
    assert [tick["status"] for tick in clocks] == ["warning"] * 3
    assert [ahead_s(tick) for tick in clocks] == pytest.approx([QUARTER_S] * 3, abs=5)
    run = ends_well(lab3, lab3.lab.cluster, losses, "--trace", "--encrypt", **shifted)
    assert clock_error_s(run) < 1.0


def ahead_s(tick: dict[str, Any]) -> float:
    words = tick["found"].split()
    assert words[1:] == ["s", "ahead", "of", "this", "machine"]
    return float(words[0])


def clock_error_s(run: Run) -> float:
    """How far the trace says that its clocks may be off."""
    errors_s = json.loads((run.folder / "trace.json").read_text())["otherData"]["clock_error_s"]
    return max(errors_s.values()) if isinstance(errors_s, dict) else float(errors_s)


# versions


@pytest.mark.slow
def test_another_version_of_torch(lab3: Cluster, losses: list[float]) -> None:
    """``check`` warns; a plan that was measured with another one is refused, and trains where told to."""
    python = odd_python(lab3, "n3", torch="2.99.0")
    there = lab3.changed("newer", n3={"python": python})
    tick = checked(lab3, there)["n3"]["torch"]
    assert tick["status"] == "warning"
    assert tick["found"].startswith("2.99.0, while others have")
    refused = lab3.run("launch", "plan.json", "-c", str(there), *RUN, code=5).stderr
    assert "n3/cpu:0  torch" in refused
    assert "2.99.0" in refused
    run = ends_well(lab3, there, losses, "--ignore-changes")
    assert "2.99.0" in run.child.text


def odd_python(
    cluster: Cluster, node: str, sitecustomize: str | None = None, torch: str | None = None
) -> str:
    """A Python in that node's HOME: with a ``sitecustomize.py``, or with a torch that says that version."""
    name = "odd-clock" if sitecustomize else "odd-torch"
    python = make_torch_only_venv(cluster.home(node) / name)
    packages = next(python.parents[1].glob("lib/python3*/site-packages"))
    if sitecustomize:
        (packages / "sitecustomize.py").write_text(sitecustomize)
    if torch:
        real = (packages / "torch").resolve()
        (packages / "torch").unlink()
        (packages / "torch").mkdir()
        for entry in real.iterdir():
            if entry.name not in ("version.py", "__pycache__"):
                (packages / "torch" / entry.name).symlink_to(entry)
        version = (real / "version.py").read_text()
        (packages / "torch" / "version.py").write_text(f"{version}\n__version__ = {torch!r}\n")
    return f"~/{name}/bin/python"


# shells


@pytest.mark.slow
def test_start_up_files_that_print_exit_or_set_the_path(lab3: Cluster, losses: list[float]) -> None:
    """A Python that only interactive shells find is named, as is a shell that exits; then both are mended."""
    noise = "echo 'Welcome!'\nhead -c 100000 /dev/zero | tr '\\0' x\necho 'disk quota: 81%' >&2\n"
    lab3.at_home("n1", ".bashrc", noise)
    (lab3.home("n2") / "tools").mkdir(exist_ok=True)
    tool = lab3.home("n2") / "tools" / "training-python"
    tool.write_text(f'#!/bin/sh\nexec {lab3.lab.node("n2").python} "$@"\n')
    tool.chmod(0o755)
    guard = "case $- in *i*) ;; *) return ;; esac\n"  # as Debian's has it
    lab3.at_home("n2", ".bashrc", f"{guard}PATH=$PATH:$HOME/tools\n")
    lab3.at_home("n3", ".bashrc", "exit 7\n")

    there = lab3.changed("shells", n2={"python": "training-python"})
    report = checked(lab3, there, code=4)
    assert report["n1"]["python"]["status"] == "ok"
    assert "n2 has no training-python" in report["n2"]["python"]["found"]
    assert "python: /path/to/python3" in report["n2"]["python"]["hint"]
    assert "ended with status 7" in report["n3"]["python"]["found"]
    assert ".bashrc" in report["n3"]["python"]["hint"]
    refused = lab3.run("launch", "plan.json", "-c", str(there), *RUN, code=4).stderr
    assert refused.count("error:") == 1
    assert "has no training-python" in refused
    assert "ended with status 7" in refused

    lab3.at_home("n3", ".bashrc", f"{guard}exit 7\n")
    ends_well(lab3, lab3.changed("mended", n2={"python": "~/tools/training-python"}), losses)


# ports


@pytest.mark.slow
def test_all_ports_are_taken(lab3: Cluster, losses: list[float]) -> None:
    """Nothing of a run has a port of its own: the system picks one, and may have none."""
    with taken_ports(lab3, "n2"):
        report = checked(lab3, lab3.lab.cluster, code=4)
        assert report["n2"]["port"]["status"] == "failed"
        assert "Address already in use" in report["n2"]["port"]["found"]
        printed = lab3.run("launch", "plan.json", *RUN, "--max-restarts", "0", code=1).stderr
        assert "rank 1 on n2/cpu:0" in printed
        assert "Address already in use" in printed
    ends_well(lab3, lab3.lab.cluster, losses)


@contextmanager
def taken_ports(cluster: Cluster, node: str) -> Iterator[None]:
    """The system has eight ports to give there, and another program listens on all of them."""
    first, last = 61000, 61007
    ports = "/proc/sys/net/ipv4/ip_local_port_range"
    before = fault_injection.run_in_node(cluster.lab, node, ["cat", ports]).stdout
    program = (
        "import socket, sys\n"
        f"held = [socket.create_server(('', port)) for port in range({first}, {last + 1})]\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    python = cluster.lab.node(node).python
    argv = fault_injection.command_in_node(cluster.lab, node, [python, "-I", "-S", "-c", program])
    holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        done = fault_injection.run_in_node(cluster.lab, node, ["sh", "-c", f"echo {first} {last} > {ports}"])
        assert done.returncode == 0, done.stderr
        yield
    finally:
        fault_injection.run_in_node(cluster.lab, node, ["sh", "-c", f"echo {before} > {ports}"])
        holder.communicate(timeout=30)
