"""One node set up: looked at, and given an environment of its own where it lacks something."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyctl.agent.node_cache import file_digest
from skyctl.errors import ProtocolError, UnfitError
from skyctl.inventory.environment_registry import register_environment
from skyctl.records.cluster import Node, PreparedEnvironment
from skyctl.remote.agent_session import Session
from skyctl.setup.fleet import NodeOutcome, Status, run_setup_task
from skyctl.setup.node.setup_orders import LookOrder, MakeOrder, RemoveOrder
from skyctl.setup.node.uv_runner import is_url_reachable
from skyctl.setup.wheels import WheelFetcher, WheelTarget, unpacked_bytes
from skyctl.setup.workload_requirements import (
    Requirements,
    is_plain_requirement,
    merge_requirements,
    parse_requirement,
    without_address,
)

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""The index that has torch without CUDA; on PyPI, for Linux, torch comes with several GB of it."""
UNPACKED_SIZE_FACTOR = 1.1
"""An environment takes this much more than its wheels hold: bytecode."""

ReportProgress = Callable[[str, float], None]


@dataclass(frozen=True)
class SetupJob:
    """The environment that is wanted on every node.

    Attributes:
        cluster: its name, under which environments are kept.
        torch: this machine's version, without what stands after its ``+``.
        here: this launcher; nodes note who counts on an environment.
        index_url, extra_index_url: as given; then torch's CPU index is not asked beside them.
        push: ask no index on the nodes; push wheels.
    """

    cluster: str
    torch: str
    requirements: Requirements
    here: str
    index_url: str | None = None
    extra_index_url: str | None = None
    push: bool = False
    dry_run: bool = False

    @property
    def index(self) -> dict[str, str | None]:
        """The package indexes that uv is told to use, by the names that setup orders have for them."""
        return {"index_url": self.index_url, "extra_index_url": self.extra_index_url}

    def owner(self, node: str) -> str:
        """The name of this launcher's use of a node's environment, which stays while it has any."""
        return f"{self.cluster}/{node} of {self.here}"


def missing_requirements(found: Mapping[str, Any], torch: str, lines: Sequence[str] = ()) -> tuple[str, ...]:
    """Packages that a Python lacks, in words, from what ``inspect_python`` found of it; none if it is fit.

    As ``launch`` and ``check`` see it, a torch of the same first two numbers will do. The function
    does not look at what the requirements require in turn.
    """
    words = []
    if found["fault"] is not None:
        words.append(f"a torch that works ({found['fault']})")
    elif found["torch"] is None:
        words.append("torch")
    elif _major_minor(found["torch"]) != _major_minor(torch):
        words.append(f"torch {_major_minor(torch)} (it has {found['torch']})")
    elif not found["distributed"]:
        words.append(f"a torch with torch.distributed (its {found['torch']} has none)")
    return (*words, *(line for line in lines if _is_unmet(line, found)))


def _is_unmet(line: str, found: Mapping[str, Any]) -> bool:
    wanted = parse_requirement(line)
    there = {
        "platform_machine": found["machine"],
        "platform_system": found["system"],
        "python_full_version": found["version"],
        "python_version": _major_minor(found["version"]),
        "sys_platform": found["system"].lower(),
    }
    try:
        if wanted.marker is not None and not wanted.marker.evaluate(there):
            return False
        version = found["versions"].get(wanted.name)
        return version is None or not wanted.specifier.contains(version, prereleases=True)
    except ValueError:  # no version that packaging knows
        return True


def _major_minor(version: str) -> str:
    return ".".join(re.findall(r"\d+", version)[:2])


class NodeInstaller:
    """One node.

    Args:
        session: with the Python that the cluster file names, or where that is too old with one that setup
            has brought, not with one that it has made.
        node: as the cluster file describes it.
        entry: what setup has made there before, if that still counts.
    """

    def __init__(
        self,
        session: Session,
        node: Node,
        entry: PreparedEnvironment | None,
        job: SetupJob,
        wheels: WheelFetcher,
        say: ReportProgress,
    ) -> None:
        self._session, self._node, self._entry = session, node, entry
        self._job, self._wheels, self._say = job, wheels, say
        self._facts: dict[str, Any] = {}
        self._requirements = job.requirements.lines
        self._anew = False

    def install(self) -> NodeOutcome:
        """Looks, and makes what is lacking.

        Raises:
            SkyctlError: it can't be had; nothing of it is left on the node.
        """
        began = time.monotonic()
        self._say("looking", 0.0)
        done = self._already()
        if done is not None:
            return done
        found = self._look(None)
        words = missing_requirements(found, self._job.torch, self._requirements)
        python = str(found["python"])
        if not words:
            if self._entry is not None and not self._job.dry_run:
                register_environment(self._job.cluster, self._node.name, None)
                self._release(None)
            return NodeOutcome(node=self._node.name, status="fine", python=python, torch=found["torch"])
        root = f"{found['root']}/{self._name()}"
        if self._job.dry_run:
            return NodeOutcome(
                node=self._node.name, status="lacking", python=python, lacks=words, environment=root
            )
        made, pushed = self._make()
        register_environment(
            self._job.cluster,
            self._node.name,
            PreparedEnvironment.of(self._node, str(made["python"]), self._job.owner(self._node.name)),
        )
        note = self._release(str(made["path"]))
        if "+cu" in str(made["torch"]) and self._cpu_index() is not None:
            note = (
                f"this torch comes with CUDA, of no use there: {CPU_INDEX} was not reached; "
                "`setup --remove`, then --extra-index-url of an index that has a CPU build, saves the room"
            )
        return NodeOutcome(
            node=self._node.name,
            status="made" if made["made"] else "ready",
            python=str(made["python"]),
            torch=str(made["torch"]),
            lacks=words,
            environment=str(made["path"]),
            size_bytes=float(made["size_bytes"]),
            took_s=time.monotonic() - began,
            pushed=pushed,
            note=note,
        )

    def _look(self, python: str | None) -> dict[str, Any]:
        order = LookOrder(python, tuple(parse_requirement(line).name for line in self._requirements))
        self._facts = run_setup_task(self._session, order, self._say)
        return self._facts

    def _already(self) -> NodeOutcome | None:
        """Whether what was made before lacks nothing; else what it was made with is wanted again too."""
        if self._entry is None:
            return None
        found = self._look(self._entry.python)
        if not missing_requirements(found, self._job.torch, self._requirements):
            return NodeOutcome(
                node=self._node.name, status="ready", python=self._entry.python, torch=found["torch"]
            )
        had = tuple(line for line in found["had"] if is_plain_requirement(line))
        self._requirements = merge_requirements(self._requirements, had)
        self._anew = True
        return None

    def _name(self) -> str:
        """The same for the same Python, torch and requirements."""
        parts = [self._facts["base"], self._job.torch, sorted(self._requirements)]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]
        torch = re.sub(r"[^A-Za-z0-9.]", "-", self._job.torch)
        return f"py{_major_minor(self._facts['version'])}-torch{torch}-{digest}"

    def _make(self) -> tuple[dict[str, Any], bool]:
        """The node's answer about what was made, and whether wheels were pushed for it."""
        if not self._job.push:
            answer = self._ask_make(None)
            if answer.get("offline") is None:
                return answer, False
            self._say("it gets no packages from an index: fetching wheels here", 0.1)
        cpu_index = self._cpu_index()
        if cpu_index is not None and not is_url_reachable(cpu_index):
            cpu_index = None
        self._say("fetching wheels here", 0.1)
        wanted = [f"torch=={self._job.torch}", *self._requirements]
        options = self._job.requirements.options
        wheels = self._wheels.fetch(self._node.name, self._target, wanted, options, cpu_index)
        return self._ask_make(wheels), True

    @property
    def _target(self) -> WheelTarget:
        return WheelTarget(*(self._facts[key] for key in ("version", "system", "machine", "glibc")))

    def _push(self, wheels: Sequence[Path]) -> dict[str, str]:
        """Pushes them; file name → path there. Raises UnfitError where there is no room to unpack them."""
        need = sum(path.stat().st_size + UNPACKED_SIZE_FACTOR * unpacked_bytes(path) for path in wheels)
        free = self._facts["free_bytes"]
        if free is not None and free < need:
            raise UnfitError(
                f"node {self._node.name} has no room for an environment with torch in {self._facts['root']}: "
                f"it has {free / 2**20:.0f} MiB free, {need / 2**20:.0f} MiB are needed",
                node=self._node.name,
                hint="make room there, or name another disk: `env: {XDG_DATA_HOME: /path}` in cluster.yaml",
            )
        pushed = {}
        for number, path in enumerate(wheels):
            self._say(f"pushing {path.name}", 0.1 + 0.4 * number / len(wheels))
            pushed[path.name] = self._session.push(path, file_digest(path), keep=False)
        return pushed

    def _ask_make(self, wheels: Sequence[Path] | None) -> dict[str, Any]:
        program, digest = self._wheels.program(self._node.name, self._target)
        lines = self._requirements
        order = MakeOrder(
            name=self._name(),
            torch=self._job.torch,
            requirements=lines if wheels is None else tuple(map(without_address, lines)),
            options=self._job.requirements.options,
            anew=self._anew,
            owner=self._job.owner(self._node.name),
            uv=self._session.push(program, digest),
            index=self._job.index,
            cpu_index=self._cpu_index(),
            wheels=self._push(wheels) if wheels is not None else None,
        )
        answer = run_setup_task(self._session, order, self._say)
        if answer.get("refused") is not None:
            source = self._job.requirements.source
            wanted = f"torch {self._job.torch}" + (f" and {source}" if source else "")
            raise UnfitError(
                f"node {self._node.name}: {wanted} can't be installed for Python {self._facts['version']} "
                f"there: {answer['refused']}",
                node=self._node.name,
                hint="--index-url or --extra-index-url names another index; `skyctl setup --remove` forgets "
                "what earlier workloads required",
            )
        if answer.get("offline") is None and not {"path", "python", "made", "torch", "size_bytes"} <= set(
            answer
        ):
            raise ProtocolError(
                f"node {self._node.name} says neither what it made nor why not", node=self._node.name
            )
        return answer

    def _cpu_index(self) -> str | None:
        """Torch's index without CUDA, for a node that has no accelerator or is to use none."""
        if self._job.index_url is not None or self._job.extra_index_url is not None:
            return None
        named = self._node.devices
        cards = self._facts["cards"] if named is None else [d for d in named if not d.startswith("cpu")]
        return None if cards else CPU_INDEX

    def _release(self, path: str | None) -> str | None:
        """Ends our claim to all that was made before ``path``; what is to be said of that."""
        order = RemoveOrder(tuple(_owners(self._job, self._node, self._entry)), keep=path)
        busy = run_setup_task(self._session, order, lambda *_: None)["busy"]
        some = next(iter(busy), None)
        return None if some is None else f"{some} is still in use; the next `skyctl setup` removes it"


def remove_environments(
    session: Session,
    node: Node,
    entry: PreparedEnvironment | None,
    job: SetupJob,
    say: ReportProgress,
) -> NodeOutcome:
    """Removes what setup made on that node, and forgets it.

    Raises:
        UnfitError: something runs in it.
    """
    began = time.monotonic()
    say("removing", 0.1)
    order = RemoveOrder(tuple(_owners(job, node, entry)), dry_run=job.dry_run)
    done = run_setup_task(session, order, say)
    if job.dry_run:
        status: Status = "lacking" if done["removed"] or done["shared"] or entry is not None else "nothing"
        path = entry.python if entry else next(iter(done["removed"]), None)
        size = float(done["freed_bytes"])
        return NodeOutcome(node=node.name, status=status, environment=path, size_bytes=size)
    for path, pids in done["busy"].items():
        raise UnfitError(
            f"node {node.name}: {path} is in use by {_process_list(pids)}; it stays",
            node=node.name,
            hint="end the run that uses it, then `skyctl setup --remove` again",
        )
    register_environment(job.cluster, node.name, None)
    others = f"{len(done['shared'])} others count on it: it stays there" if done["shared"] else None
    gone = bool(done["removed"] or done["shared"] or entry is not None)
    return NodeOutcome(
        node=node.name,
        status="removed" if gone else "nothing",
        python=node.python,
        environment=next(iter([*done["removed"], *done["shared"]]), None),
        size_bytes=float(done["freed_bytes"]),
        took_s=time.monotonic() - began,
        note=others,
    )


def _owners(job: SetupJob, node: Node, entry: PreparedEnvironment | None) -> list[str]:
    """Our names there: now, and when the entry was made (the host's name may have changed since)."""
    return list(dict.fromkeys([job.owner(node.name), *([entry.owner] if entry is not None else [])]))


def _process_list(pids: Sequence[int]) -> str:
    some = ", ".join(map(str, pids[:5]))
    more = f" and {len(pids) - 5} more" if len(pids) > 5 else ""
    return f"process{'es' if len(pids) > 1 else ''} {some}{more}"


def current_environment(kept: Mapping[str, PreparedEnvironment], node: Node) -> PreparedEnvironment | None:
    """The environment that setup has made for that node, if it still counts."""
    entry = kept.get(node.name)
    return entry if entry is not None and entry.serves(node) else None
