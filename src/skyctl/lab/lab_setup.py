"""Sets up a lab and reports its status; ``teardown`` removes it.

The state file is written before anything is made, and every process carries the lab's token, so that a lab
whose making was cut short at any point can be taken down.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyctl.agent.process_tree import process_start_ticks
from skyctl.errors import InputError, SkyctlError
from skyctl.files import lab_folder, make_private, write_atomic
from skyctl.lab import cgroup_quotas, lab_state, prerequisites, traffic_shaping
from skyctl.lab.lab_spec import LabSpec
from skyctl.lab.lab_state import LabProcess, LabState, NodeState
from skyctl.lab.teardown import down

START_S = 60.0
_ROOT = Path(__file__).resolve().parents[2]
_RUN = "import sys; sys.path.insert(0, sys.argv[1]); from skyctl.lab.{0} import main; main()"


def up(
    spec: LabSpec,
    folder: str | Path | None = None,
    name: str = "lab",
    *,
    source: str | Path | None = None,
    pythons: Mapping[str, str] | None = None,
    carrier: str = "auto",
) -> LabState:
    """Makes the lab and returns when every node's sshd listens.

    Args:
        folder: where cluster.yaml, known_hosts and ssh_config go; None: the lab's state folder.
        source: the lab.yaml it is made from, by which ``find_lab`` finds it again.
        pythons: interpreter by node, which win over those of the spec and the launcher.
        carrier: what carries traffic between sites: ``netem``, ``user``, or ``auto``, the first that works.

    Returns:
        The lab's state; where the same lab is up already, that one's.

    Raises:
        InputError: the user is not root, the name is taken, or an interpreter does not exist.
        UnfitError: a program is missing.
        SkyctlError: the system refused something; everything made is taken down again.
    """
    programs = prerequisites.check_machine()
    state = _plan(spec, folder, lab_state.check_name(name), source, pythons or {})
    existing = lab_state.load_state(name)
    if existing is not None:
        faults = status(existing)["faults"]
        if _is_same_lab(existing, state) and not faults:
            return existing
        what = faults[0] if faults else "it was made from something else"
        raise InputError(
            f"there is a lab called {name!r} already: {what}",
            hint=f"`skyctl lab down {name}` first, or another --name",
        )
    make_private(Path(state.state_folder))
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        lab_state.save_state(state)
        return _make(state, programs, carrier)
    except BaseException:
        with contextlib.suppress(SkyctlError):
            down(name)
        raise


def _is_same_lab(existing: LabState, wanted: LabState) -> bool:
    pythons = [node.python for node in existing.nodes] == [node.python for node in wanted.nodes]
    return (
        existing.stage == "up"
        and pythons
        and (existing.spec, existing.folder) == (wanted.spec, wanted.folder)
    )


def _plan(
    spec: LabSpec, folder: str | Path | None, name: str, source: str | Path | None, pythons: Mapping[str, str]
) -> LabState:
    names = {node.name for node in spec.nodes}
    for given in pythons:
        if given not in names:
            raise InputError(f"--python names node {given!r}, which the lab has not")
    nodes = []
    for number, node in enumerate(spec.nodes):
        python = prerequisites.check_python(
            node.name, pythons.get(node.name) or node.python or sys.executable
        )
        site = LabSpec.site_of(node)
        nodes.append(
            NodeState(name=node.name, site=site, address="", mac="", port=f"n{number}", python=python)
        )
    cores = os.cpu_count() or 1
    total = sum(node.cpus for node in spec.nodes)
    warnings = []
    if total > cores:
        warnings.append(
            f"the nodes' cpus add up to {total:g} and this machine has {cores}: "
            "under full load they will be slower than lab.yaml says"
        )
    return LabState(
        name=name,
        token=lab_state.token_of(name),
        source=os.path.realpath(source) if source is not None else None,
        folder=os.path.abspath(folder) if folder is not None else str(lab_folder(name)),  # noqa: PTH100
        state_folder=str(lab_folder(name)),
        spec=spec,
        nodes=tuple(nodes),
        warnings=tuple(warnings),
    )


def _make(state: LabState, programs: dict[str, str], carrier: str) -> LabState:
    fabric, state = _start_network(state, programs, carrier)
    subnet = fabric["subnet"]
    _make_keys(state, programs["ssh-keygen"])
    state = _assign_addresses(state, subnet)
    lab_state.write_cluster_files(state)
    layout = cgroup_quotas.find_cgroups()
    state = state.model_copy(
        update={"cgroups": tuple(str(f) for f in cgroup_quotas.lab_cgroups(layout, state.token))}
    )
    lab_state.save_state(state)
    nodes = []
    for number, wanted in enumerate(state.spec.nodes):
        folders = cgroup_quotas.make_node_cgroups(layout, state.token, number, wanted.memory_gib)
        nodes.append(state.nodes[number].model_copy(update={"cgroups": tuple(map(str, folders))}))
    state = _start_nodes(state.model_copy(update={"nodes": tuple(nodes)}), subnet, programs["sshd"])
    _await_sshd(state)
    # The quota comes last: a node of 10% would take long to get up.
    for node, wanted in zip(state.nodes, state.spec.nodes, strict=True):
        spec = state.spec
        cgroup_quotas.set_quota(node.cgroups, wanted.cpus, spec.cpu_slice_ms, spec.cpu_period_ms)
    return lab_state.save_state(state.model_copy(update={"stage": "up"}))


def _start_nodes(state: LabState, subnet: int, sshd: str) -> LabState:
    """Starts every node's first process, connects the nodes, and waits until they report."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        for node in state.nodes:
            children.append(_start_node(state, node, sshd))
        pids = [
            _read_answer(child, node.name)["pid"] for child, node in zip(children, state.nodes, strict=True)
        ]
        nodes = [
            node.model_copy(update={"process": _process(pid)})
            for node, pid in zip(state.nodes, pids, strict=True)
        ]
        state = lab_state.save_state(state.model_copy(update={"nodes": tuple(nodes)}))
        _connect_node(state, subnet, pids)
        for child, node in zip(children, state.nodes, strict=True):
            _read_answer(child, node.name)
    finally:
        for child in children:
            _release(child)
    return state


def _spawn(module: str, config: dict[str, Any], token: str, log: Path) -> subprocess.Popen[bytes]:
    environment = {"PATH": os.environ.get("PATH", os.defpath), lab_state.TAG: token}
    make_private(log.parent)
    with log.open("ab") as errors:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _RUN.format(module), str(_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,
            cwd="/",
        )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(config).encode())
        child.stdin.close()
    return child


def _release(child: subprocess.Popen[bytes]) -> None:
    if child.stdout is not None:
        child.stdout.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=START_S)


def _read_answer(child: subprocess.Popen[bytes], who: str) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    answer: dict[str, Any] = json.loads(line) if line else {"error": "its process ended without a word"}
    if "error" in answer:
        raise SkyctlError(f"lab: {who} did not come up: {answer['error']}")
    return answer


def _process(pid: int) -> LabProcess:
    return LabProcess(pid=pid, started=process_start_ticks(pid) or 0)


def _start_network(
    state: LabState, programs: dict[str, str], carrier: str
) -> tuple[dict[str, Any], LabState]:
    config = {
        "subnets": traffic_shaping.free_subnets(int(state.token[:2], 16)),
        "rates": traffic_shaping.uplinks_bytes_per_s(state.spec) if state.spec.apart() else [],
        "latency_s": state.spec.sites.latency_ms / 1000,
        "nodes": traffic_shaping.node_places(state.spec),
        "lines": [
            [
                {
                    "interface": end.interface,
                    "mac": traffic_shaping.line_mac(end.interface),
                    "latency_s": end.link.latency_ms / 1000,
                }
                for end in pair
            ]
            for pair in traffic_shaping.delayed_lines(state.spec)
        ],
        "carrier": carrier,
        "tc": programs["tc"],
    }
    child = _spawn("network_process", config, state.token, Path(state.state_folder) / "fabric.log")
    try:
        answer = _read_answer(child, "its network")
    finally:
        _release(child)
    changes = {"fabric": _process(answer["pid"]), "switch": answer["switch"]}
    subnet = f"10.{answer['subnet']}.0.0/16"
    return answer, lab_state.save_state(state.model_copy(update={**changes, "subnet": subnet}))


def _assign_addresses(state: LabState, subnet: int) -> LabState:
    nodes = [
        node.model_copy(
            update={
                "address": traffic_shaping.node_address(subnet, *at),
                "mac": traffic_shaping.node_mac(subnet, *at),
            }
        )
        for node, at in zip(state.nodes, traffic_shaping.node_places(state.spec), strict=True)
    ]
    sites = sorted({site for site, _ in traffic_shaping.node_places(state.spec)})
    launcher = {
        traffic_shaping.launcher_interface(state.token, k): traffic_shaping.node_address(
            subnet, k, traffic_shaping.LAUNCHER
        )
        for k in sites
    }
    return state.model_copy(update={"nodes": tuple(nodes), "launcher": launcher})


def _make_keys(state: LabState, keygen: str) -> None:
    wanted = {state.identity_file: f"skyctl-lab-{state.name}"}
    for node in state.nodes:
        folder = state.node_folder(node.name)
        for part in ("home", "tmp", "vartmp", "nothing", "etc"):
            make_private(folder / part)
        for part in ("tmp", "vartmp"):
            (folder / part).chmod(0o1777)
        wanted[folder / "etc" / "host_key"] = node.name
    running = [
        subprocess.Popen(
            [keygen, "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for path, comment in wanted.items()
    ]
    codes = [child.wait() for child in running]
    if any(codes):
        raise SkyctlError(f"ssh-keygen could not write the lab's keys to {state.state_folder}")


def _start_node(state: LabState, node: NodeState, sshd: str) -> subprocess.Popen[bytes]:
    folder = state.node_folder(node.name)
    write_atomic(folder / "etc" / "hosts", lab_state.hosts(state), mode=0o644)
    # With UsePAM no, sshd lets nobody in whose password is locked with '!', as root's is on some systems.
    write_atomic(folder / "etc" / "shadow", "root:*:19000:0:99999:7:::\nsshd:*:19000:0:99999:7:::\n")
    config = {
        "hostname": node.name,
        "cgroups": node.cgroups,
        "private": prerequisites.private_folders(folder),
        "shown": prerequisites.visible_paths(node.python),
        "python": node.python,
        "sshd": sshd,
        "host_key": (folder / "etc" / "host_key").read_text(encoding="utf-8"),
        "authorized_key": Path(f"{state.identity_file}.pub").read_text(encoding="utf-8"),
    }
    return _spawn("node_process", config, state.token, folder / "console.log")


def _connect_node(state: LabState, subnet: int, pids: list[int]) -> None:
    assert state.fabric is not None
    spec, fabric = state.spec, state.fabric.pid
    lines = traffic_shaping.network_commands(
        spec, state.token, subnet=subnet, switch=state.switch, pids=pids, launcher_pid=os.getpid()
    )
    lines += traffic_shaping.line_commands(spec, switch=state.switch, pids=pids)
    traffic_shaping.run_batch("ip", lines, pid=fabric)
    traffic_shaping.run_batch("tc", traffic_shaping.network_shaping_commands(spec, state.switch), pid=fabric)
    for interface in state.launcher:
        own = Path("/proc/sys/net")
        with contextlib.suppress(OSError):
            # A launcher is in every site: it must not answer for one site's address in another.
            (own / "ipv4/conf" / interface / "arp_ignore").write_text("1", encoding="utf-8")
        with contextlib.suppress(OSError):
            (own / "ipv6/conf" / interface / "disable_ipv6").write_text("1", encoding="utf-8")
    traffic_shaping.run_batch("ip", traffic_shaping.launcher_commands(spec, state.token, subnet))
    for number, pid in enumerate(pids):
        traffic_shaping.run_batch("ip", traffic_shaping.node_commands(spec, subnet, number), pid=pid)
        shaping = traffic_shaping.node_shaping_commands(spec, number, state.switch)
        traffic_shaping.run_batch("tc", shaping, pid=pid)


def is_listening(node: NodeState) -> bool:
    """Whether something listens on the node's port 22 (its sshd)."""
    if node.process is None or not lab_state.is_running(node.process):
        return False
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{node.process.pid}/net/tcp").read_text(encoding="utf-8").splitlines()[1:]
        return any(f[1].endswith(":0016") and f[3] == "0A" for f in map(str.split, lines))
    return False


def _await_sshd(state: LabState) -> None:
    deadline = time.monotonic() + START_S
    for node in state.nodes:
        while not is_listening(node):
            if not lab_state.is_running(node.process) or time.monotonic() > deadline:
                log = state.node_folder(node.name) / "console.log"
                log_text = log.read_text(encoding="utf-8", errors="replace").strip()
                raise SkyctlError(f"lab: the sshd of {node.name} did not come up: {log_text[-300:]}")
            time.sleep(0.01)


def status(state: LabState) -> dict[str, Any]:
    """The lab's status as JSON values.

    Returns:
        ``nodes`` (each with alive, sshd, cpu_s, memory_bytes), ``switch`` (kind, alive, cpu_s), and
        ``faults``: a sentence for each thing that is wrong.
    """
    faults = [] if state.stage == "up" else ["its making was cut short"]
    nodes = []
    for node, spec in zip(state.nodes, state.spec.nodes, strict=True):
        alive, sshd = lab_state.is_running(node.process), is_listening(node)
        if not alive:
            faults.append(f"node {node.name} is gone")
        elif not sshd:
            faults.append(f"node {node.name} has no sshd")
        nodes.append(
            {
                "name": node.name,
                "address": node.address,
                "site": node.site,
                "cpus": spec.cpus,
                "memory_gib": spec.memory_gib,
                "rate_mbit": spec.rate_mbit,
                "alive": alive,
                "sshd": sshd,
                "cpu_s": cgroup_quotas.used_cpu_s(node.cgroups),
                "memory_bytes": cgroup_quotas.used_memory_bytes(node.cgroups),
            }
        )
    if not lab_state.is_running(state.fabric):
        faults.append("its network is gone")
    switch = {
        "kind": state.switch,
        "alive": lab_state.is_running(state.fabric),
        "cpu_s": lab_state.cpu_seconds(state.fabric),
    }
    return {
        "name": state.name,
        "source": state.source,
        "folder": state.folder,
        "cluster": str(state.cluster),
        "subnet": state.subnet,
        "switch": switch,
        "nodes": nodes,
        "warnings": list(state.warnings),
        "faults": faults,
    }
