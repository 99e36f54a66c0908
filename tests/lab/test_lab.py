"""A lab as it is made, used, and taken down. Real namespaces, cgroups, links and sshd."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.lab import fault_injection

from skyctl.errors import InputError, SkyctlError
from skyctl.inventory.cluster_file import read_cluster
from skyctl.lab import traffic_shaping
from skyctl.lab.lab_setup import status, up
from skyctl.lab.lab_spec import LabSpec
from skyctl.lab.lab_state import is_running, load_state
from skyctl.lab.teardown import down, leftovers

TWO = {"nodes": [{"name": "n1", "cpus": 0.5}, {"name": "n2", "cpus": 0.5}]}


def test_up_status_and_down(lab, ssh):
    state = lab(TWO, name="pair")
    now = status(state)
    assert now["faults"] == []
    assert [(n["alive"], n["sshd"]) for n in now["nodes"]] == [(True, True)] * 2
    assert all(n["cpu_s"] > 0 and n["memory_bytes"] > 0 for n in now["nodes"])
    assert load_state("pair") == state

    cluster = read_cluster(state.cluster)
    assert [(n.name, n.host, n.user, n.threads) for n in cluster.nodes] == [
        ("n1", state.nodes[0].address, "root", 1),
        ("n2", state.nodes[1].address, "root", 1),
    ]
    assert {n.python for n in cluster.nodes} == {sys.executable}

    for node in ("n1", "n2"):
        done = ssh(state, node, "hostname; echo $HOME; whoami")
        assert (done.returncode, done.stdout.split()[0], done.stdout.split()[2]) == (0, node, "root"), (
            done.stderr
        )
    done = ssh(state, "n1", f"{sys.executable} -c 'import torch, os; print(torch.__version__, os.getpid())'")
    assert done.returncode == 0, done.stderr

    assert leftovers("pair")
    assert down("pair") is True
    assert leftovers("pair") == []
    assert down("pair") is False


def test_up_again_is_the_same_lab_and_another_spec_is_refused(lab):
    state = lab(TWO, name="same")
    assert up(LabSpec.model_validate(TWO), name="same") == state
    other = {"nodes": [{"name": "n1", "cpus": 0.25}]}
    with pytest.raises(InputError, match="'same' already: it was made"):
        up(LabSpec.model_validate(other), name="same")
    assert status(state)["faults"] == []


def test_nothing_is_shared_by_accident(lab, ssh):
    state = lab(TWO)
    marks = ["~/mark", "/tmp/mark", "/var/tmp/mark", "/dev/shm/mark", "/run/mark"]
    assert ssh(state, "n1", f"touch {' '.join(marks)}").returncode == 0
    for mark in marks:
        assert ssh(state, "n1", f"test -e {mark}").returncode == 0, mark
        assert ssh(state, "n2", f"test -e {mark}").returncode == 1, mark
        assert not Path(mark).expanduser().exists(), mark
    assert (state.node_folder("n1") / "home" / "mark").exists()
    # The rest of the file system can be seen but not written to, and the labs' own files not even seen.
    assert "Read-only" in ssh(state, "n1", "touch /usr/mark").stderr
    assert ssh(state, "n1", f"test -e {state.identity_file}").returncode == 1
    # Processes, peers and names.
    listed = ssh(state, "n1", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; cat /etc/hosts; ls /sys/class/net")
    assert str(os.getpid()) not in ssh(state, "n1", "ls /proc").stdout.split()
    assert f"{state.node('n2').address} n2" in listed.stdout
    assert "eth0" in listed.stdout
    assert not any(name in listed.stdout for name in state.launcher)
    # No way out: nothing but the lab's own network.
    assert "default" not in fault_injection.run_in_node(state, "n1", ["ip", "route"]).stdout


@pytest.mark.alone
def test_cpu_quotas_hold_their_ratio(lab, traffic):
    state = lab({"nodes": [{"name": "fast", "cpus": 0.2}, {"name": "slow", "cpus": 0.05}]})
    with traffic.burning(state, ["fast", "slow"]):
        before = [node["cpu_s"] for node in status(state)["nodes"]]
        time.sleep(3.0)
        after = [node["cpu_s"] for node in status(state)["nodes"]]
    fast, slow = (b - a for a, b in zip(before, after, strict=True))
    assert fast / slow == pytest.approx(4.0, rel=0.15)


def test_memory_is_limited(lab):
    state = lab({"nodes": [{"name": "n1", "cpus": 1.0, "memory_gib": 0.125}]})
    done = fault_injection.run_in_node(state, "n1", [sys.executable, "-I", "-S", "-c", "b'x' * (300 << 20)"])
    assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert status(state)["faults"] == []


@pytest.mark.alone
@pytest.mark.slow
def test_links_carry_what_they_should_both_ways(lab, traffic):
    nodes = [
        {"name": "free", "cpus": 1.0},
        {"name": "n20", "cpus": 1.0, "rate_mbit": 20},
        {"name": "n100", "cpus": 1.0, "rate_mbit": 100},
    ]
    state = lab({"nodes": nodes})
    for name, expected in (("n20", 2.5e6), ("n100", 12.5e6)):
        assert traffic.bytes_per_s(state, "free", name) == pytest.approx(expected, rel=0.2)
        assert traffic.bytes_per_s(state, name, "free") == pytest.approx(expected, rel=0.2)
    fault_injection.set_rate(state, "n100", 50)
    assert traffic.bytes_per_s(state, "free", "n100") == pytest.approx(6.25e6, rel=0.2)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("carrier", ["user", "netem"])
def test_sites_are_as_far_apart_as_they_should_be(lab, traffic, carrier):
    if carrier == "netem" and not has_netem():
        pytest.skip("this kernel has no netem")
    nodes = [
        {"name": f"{site}{i}", "cpus": 1.0, "rate_mbit": 100, "site": site} for site in "ab" for i in (1, 2)
    ]
    spec = {"nodes": nodes, "sites": {"latency_ms": 5, "uplink_mbit": {"b": 20}}}
    state = lab(spec, carrier=carrier)
    assert state.switch == carrier
    near, far = traffic.round_trip_s(state, "a1", "a2"), traffic.round_trip_s(state, "a1", "b1")
    assert far - near == pytest.approx(0.010, abs=0.001)
    # The uplink is one for the whole site, and one for each direction.
    into = traffic.bytes_per_s_together(state, [("a1", "b1"), ("a2", "b2")])
    assert sum(into) == pytest.approx(2.5e6, rel=0.2)
    out = traffic.bytes_per_s_together(state, [("b1", "a1"), ("b2", "a2")])
    assert sum(out) == pytest.approx(2.5e6, rel=0.2)
    # Inside a site nothing of it is felt.
    assert traffic.bytes_per_s_together(state, [("b1", "b2")])[0] == pytest.approx(12.5e6, rel=0.2)
    switch = status(state)["switch"]
    assert switch["kind"] == carrier
    assert switch["cpu_s"] >= 0


MESH = {("n1", "n2"): 40, ("n1", "n3"): 20, ("n2", "n3"): 5}


@pytest.mark.alone
@pytest.mark.parametrize("latency_ms", [0, 3])
def test_a_pairs_own_line_carries_what_it_should(lab, traffic, latency_ms):
    """All pairs at once, each direction by itself; the node's `rate_mbit` has no part in it."""
    nodes = [{"name": f"n{i}", "cpus": 1.0, "rate_mbit": 2} for i in (1, 2, 3)]
    rates = MESH | {(b, a): rate for (a, b), rate in MESH.items()} | {("n2", "n1"): 10}
    links = [
        {"source": a, "target": b, "rate_mbit": rate, "latency_ms": latency_ms * (a < b)}
        for (a, b), rate in rates.items()
    ]
    state = lab({"nodes": nodes, "links": links})
    assert (state.switch == "none") == (latency_ms == 0)
    if latency_ms:
        assert traffic.round_trip_s(state, "n1", "n2") == pytest.approx(latency_ms / 1000, abs=0.002)
    ways = [*MESH, ("n2", "n1")]
    seen = traffic.bytes_per_s_together(state, ways, seconds=1.5)
    assert seen == pytest.approx([rates[way] * 125_000 for way in ways], rel=0.25)
    assert status(state)["faults"] == []


def test_a_link_that_can_not_be_made_leaves_nothing(lab, monkeypatch):
    def broken(*_, **__):
        return ["link set nosuchline up"]

    monkeypatch.setattr(traffic_shaping, "line_commands", broken)
    ends = {"n1": "n2", "n2": "n1"}
    links = [{"source": a, "target": b, "rate_mbit": 10, "latency_ms": 1} for a, b in ends.items()]
    with pytest.raises(SkyctlError, match="nosuchline"):
        lab(TWO | {"links": links}, name="broken-line", carrier="user")
    assert leftovers("broken-line") == []


def has_netem() -> bool:
    program = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms"
    return (
        subprocess.run(["unshare", "-n", "sh", "-c", program], capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.alone
@pytest.mark.slow
def test_the_launcher_reaches_every_site_without_the_switch(lab):
    spec = {
        "nodes": [{"name": "a", "cpus": 1.0, "site": "a"}, {"name": "b", "cpus": 1.0, "site": "b"}],
        "sites": {"latency_ms": 10_000},
    }
    state = lab(spec, carrier="user")
    import socket

    for node in state.nodes:
        with socket.create_connection((node.address, 22), timeout=10) as sock:  # there and back takes 20 s
            assert sock.recv(100).startswith(b"SSH-")


@pytest.mark.slow
def test_two_labs_side_by_side(lab, ssh):
    first, second = lab(TWO, name="one"), lab(TWO, name="two")
    assert first.subnet != second.subnet
    for state in (first, second):
        assert ssh(state, "n1", "hostname").stdout == "n1\n"
    reach = "import socket; socket.create_connection(('{}', 22), 2)"
    program = reach.format(second.node("n1").address)
    assert fault_injection.run_in_node(first, "n1", [sys.executable, "-c", program]).returncode == 1
    down("one")
    assert leftovers("one") == []
    assert status(second)["faults"] == []
    assert ssh(second, "n2", "hostname").stdout == "n2\n"


def test_a_dead_sshd_and_a_dead_node_are_seen_and_leave_nothing(lab, ssh):
    state = lab(TWO, name="dead")
    left = "setsid sleep 1000 & setsid sh -c 'sleep 1000 & exit' & kill -9 $(cat /run/sshd.pid)"
    program = f"({left}) </dev/null >/dev/null 2>&1"
    ssh(state, "n1", program)
    wait_for(lambda: status(state)["faults"] == ["node n1 has no sshd"])
    fault_injection.kill_node(state, "n2")
    wait_for(lambda: status(state)["faults"] == ["node n1 has no sshd", "node n2 is gone"])
    down("dead")
    assert leftovers("dead") == []
    assert not is_running(state.nodes[0].process)


def wait_for(condition, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.02)


def test_nodes_can_be_cut_off_and_come_back(lab):
    state = lab({"nodes": [{"name": f"n{i}", "cpus": 0.5} for i in (1, 2)]})
    target, launcher = state.node("n2").address, next(iter(state.launcher.values()))

    def reaches(node: str | None, address: str) -> bool:
        program = f"import socket; socket.create_connection(('{address}', 22), 1.5)"
        if node is None:
            return (
                subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode
                == 0
            )
        return fault_injection.run_in_node(state, node, [sys.executable, "-c", program]).returncode == 0

    assert reaches(None, target)
    assert reaches("n1", target)
    fault_injection.disconnect_launcher(state, "n2")
    assert not reaches(None, target)
    assert reaches("n1", target)
    fault_injection.reconnect(state, "n2")
    assert reaches(None, target)
    fault_injection.disconnect(state, "n2")
    assert not reaches(None, target)
    assert not reaches("n1", target)
    fault_injection.reconnect(state, "n2")
    assert reaches(None, target)
    assert reaches("n1", target)
    assert launcher.startswith(target.rsplit(".", 1)[0])


def test_a_failure_half_way_is_rolled_back(lab, monkeypatch):
    def broken(*_):
        return ["qdisc add dev eth0 root nosuchthing"]

    monkeypatch.setattr(traffic_shaping, "node_shaping_commands", broken)
    with pytest.raises(SkyctlError, match="qdisc kind is unknown"):
        lab(TWO, name="broken")
    assert leftovers("broken") == []


def test_a_node_that_can_not_start_is_named(lab):
    spec = {"nodes": [{"name": "n1", "cpus": 1.0}, {"name": "tiny", "cpus": 1.0, "memory_gib": 0.0005}]}
    with pytest.raises(SkyctlError, match="tiny did not come up"):
        lab(spec, name="tiny")
    assert leftovers("tiny") == []


def test_bad_interpreters_are_refused_before_anything_is_made(lab):
    for pythons, words in (({"n1": "/nowhere/python"}, "no program here"), ({"n9": sys.executable}, "n9")):
        with pytest.raises(InputError, match=words):
            lab(TWO, name="nopython", pythons=pythons)
    assert leftovers("nopython") == []


@pytest.mark.slow
def test_one_nodes_environment_holds_torch_alone(lab, ssh, tmp_path):
    from .torch_only_venv import make_torch_only_venv

    bare = make_torch_only_venv(tmp_path / "bare environment")
    state = lab(TWO, pythons={"n2": str(bare)})
    assert read_cluster(state.cluster).node("n2").python == str(bare)
    assert (
        ssh(state, "n2", f"'{bare}' -W ignore -c 'import torch; print(torch.ones(2).sum())'").stdout
        == "tensor(2.)\n"
    )
    for missing in ("pydantic", "numpy", "skyctl", "yaml"):
        done = ssh(state, "n2", f"'{bare}' -c 'import {missing}'")
        assert f"No module named '{missing}'" in done.stderr


@pytest.mark.parametrize("after_s", [0.02, 0.1, 0.2, 0.3, 0.4])
def test_a_making_that_is_killed_can_be_taken_down(lab, after_s):
    name = f"killed-{after_s}"
    program = (
        "from skyctl.lab.lab_setup import up; from skyctl.lab.lab_spec import LabSpec\n"
        "print('go', flush=True)\n"
        f"up(LabSpec.model_validate({TWO!r}), name={name!r})"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(after_s)
        child.kill()
    time.sleep(0.05)
    try:
        down(name)
    finally:
        down(name)
    assert leftovers(name) == []


@pytest.mark.slow
@pytest.mark.parametrize("write", [1, 2, 3])
def test_a_making_that_is_killed_while_it_writes_can_be_taken_down(lab, write):
    name = f"killed-writing-{write}"
    program = (
        "import os, signal; from skyctl.lab.lab_setup import up; from skyctl.lab.lab_spec import LabSpec\n"
        "real, count = os.fsync, 0\n"
        "def fsync(fd):\n"
        "    global count\n"
        "    count += 1\n"
        f"    os.kill(os.getpid(), signal.SIGKILL) if count == {write} else real(fd)\n"
        "os.fsync = fsync\n"
        f"up(LabSpec.model_validate({TWO!r}), name={name!r})"
    )
    try:
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
        assert any(".tmp" in there for there in leftovers(name))
    finally:
        down(name)
    assert leftovers(name) == []
