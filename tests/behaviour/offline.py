"""Commands that need no node: help, plans from problem files, verify, inventories, wrong words."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from tests.behaviour import instances
from tests.behaviour.observing import HERE, Room, normal

GROUPS = ("checkpoint", "lab")
CLUSTER = """\
name: three
nodes:
  - {name: a, transport: local, threads: 1}
  - {name: b, transport: local, threads: 1, slowdown: 2.0}
  - {name: c, transport: local, threads: 1, slowdown: 4.0}
groups: {fast: [a, b]}
"""
GPT = "gpt:layers=2,hidden=32,heads=2,context=16"
"""The workload that ``inputs/profile.json`` was measured for; its figures are set by hand."""

_BORDER = re.compile(r"^[\s│|]+", re.MULTILINE)
_OPTION = re.compile(r"--[a-z][a-z-]+")
_SHORT = re.compile(r"(?<![\w-])-[a-zA-Z](?![\w-])")


def help_pages(room: Room) -> Iterator[tuple[str, dict[str, Any]]]:
    """Options and commands of every command, as its help has all of them."""
    top = page(room)
    yield "skyctl", top
    for name in top["commands"]:
        found = page(room, name, flag="--help" if name in GROUPS else "--help-all")
        yield name, found
        for inner in found["commands"]:
            yield f"{name} {inner}", page(room, name, inner, flag="--help-all")


def page(room: Room, *words: str, flag: str = "--help") -> dict[str, Any]:
    done = room.run(*words, flag)
    options: set[str] = set()
    commands = []
    part = ""
    for line in done.stdout.splitlines():
        if heading := re.match(r"[╭+][─-]+ (\w+) ", line):
            part = heading[1]
        bare = _BORDER.sub("", line)
        names = re.match(r"\*?\s*((-{1,2}[\w-]+[ ,]*)+)", bare)
        if part not in ("", "Arguments", "Commands") and names:
            options.update(_OPTION.findall(names[1]), _SHORT.findall(names[1]))
        elif part == "Commands" and (name := re.match(r"[│|] ([a-z][a-z-]*)\s{2,}", line)):
            commands.append(name[1])
    return {
        "exit": done.returncode,
        "options": sorted(options),
        "commands": sorted(commands),
        "examples": "Examples:" in done.stdout,
    }


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """A forgery: that place holds that, or what that makes of what is there."""

    def forge(document: dict[str, Any]) -> None:
        at: Any = document
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = to(at[path[-1]]) if callable(to) else to

    return forge


def _both(*forgeries: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def forge(document: dict[str, Any]) -> None:
        for one in forgeries:
            one(document)

    return forge


PROOF = "certificate"
FORGED: dict[str, Callable[[dict[str, Any]], None]] = {
    "value lowered": _set(PROOF, "value_s", to=lambda x: x / 2),
    "value raised": _set(PROOF, "value_s", to=lambda x: x * 2),
    "bound raised": _set(PROOF, "lower_bound_s", to=lambda x: x * 1.5),
    "bound lowered": _set(PROOF, "lower_bound_s", to=lambda x: x / 2),
    "both lowered": _both(
        _set(PROOF, "value_s", to=lambda x: x / 2), _set(PROOF, "lower_bound_s", to=lambda x: x / 2)
    ),
    "all lowered": _both(
        _set(PROOF, "value_s", to=lambda x: x / 2),
        _set(PROOF, "lower_bound_s", to=lambda x: x / 2),
        _set("predicted", "iteration_s", to=lambda x: x / 2),
    ),
    "gap": _set(PROOF, "gap", to=0.5),
    "status feasible": _set(PROOF, "status", to="feasible"),
    "status bounded": _set(PROOF, "status", to="bounded"),
    "status unknown": _set(PROOF, "status", to="certain"),
    "stages overlap": _set("stages", 0, "stop", to=lambda x: x + 1),
    "stages end early": _set("stages", -1, "stop", to=lambda x: x - 1),
    "device twice": _set("stages", 0, "replicas", 0, "device", to="tiny/cpu:0"),
    "device unknown": _set("stages", 0, "replicas", 0, "device", to="nobody/cpu:0"),
    "in flight": _set("stages", 0, "replicas", 0, "in_flight", to=1),
    "microbatches": _set("stages", 0, "replicas", 0, "microbatches", to=3),
    "prediction": _set("predicted", "replicas", 0, "compute_s", to=lambda x: x * 0.9),
    "memory": _set("problem", "devices", 1, "memory_bytes", to=3e8),
    "unused": _set("unused", to=[{"device": "nobody/cpu:0", "reason": "none"}]),
    "newer": _set("version", to=99),
    "another kind": _set("kind", to="skyctl/problem"),
}

ANSIBLE = """\
all:
  vars: {ansible_user: ada}
  hosts: {lone: {}}
  children:
    gpu:
      hosts:
        g[08:10:2].lan:
        big: {ansible_host: 192.0.2.10, ansible_port: 2222, ansible_password: hunter2}
      vars: {ansible_user: grace, ansible_ssh_private_key_file: ~/.ssh/id_gpu}
      children:
        inner: {hosts: {y: {ansible_ssh_common_args: -J j1, ansible_python_interpreter: /opt/py/bin/python}}}
    win: {hosts: {w1: {ansible_connection: winrm}}}
    me: {hosts: {here: {ansible_connection: local}}}
"""
INI = """\
mail ansible_host=192.0.2.1
[web]
web[1:2].lan:2200 ansible_user="ada"
[db]
db-a
[all:vars]
ansible_user = root
[sites:children]
web
db
"""
HOSTFILE = "worker-1 slots=4\nworker-2 slots=2\n"
INVENTORIES = {"inventory.yml": ANSIBLE, "inventory.ini": INI, "hostfile": HOSTFILE, "mpi": "n1:4\nn2:8\n"}

Cases = Iterator[tuple[str, Callable[[Room], dict[str, Any]]]]


def furnish(room: Room) -> None:
    """The files that the cases below name."""
    room.write("cluster.yaml", CLUSTER)
    room.write("small.json", instances.small())
    room.write("handled.json", instances.handled())
    room.write("newer.json", instances.small(version=99))
    room.write("negative.json", instances.small(microbatches=-1))
    room.write("unknown.json", instances.small(first_stage=["nobody/cpu:0"]))
    room.write("extra.json", instances.small(colour="red"))
    tight = instances.small()
    tight["devices"] = [{**d, "memory_bytes": 3e8, "reserved_bytes": 0} for d in tight["devices"]]
    room.write("tight.json", tight)
    room.write("broken.json", "{")
    room.write("kindless.json", {"layers": []})
    room.write("train.py", "from torch import nn\n\n\ndef model():\n    return [nn.Linear(4, 4)]\n")
    for name, text in INVENTORIES.items():
        room.write(name, text)
    shutil.copy(HERE / "inputs" / "profile.json", room.folder / "profile.json")
    room.run("plan", "--problem", "small.json", "-o", "good.json")
    good = room.read("good.json")
    for name, forge in FORGED.items():
        forged = copy.deepcopy(good)
        forge(forged)
        room.write(f"forged {name}.json", forged)


def commands(name: str, *words: str) -> tuple[str, Callable[[Room], dict[str, Any]]]:
    return name, lambda room: room.observe(*words)


def plan_cases() -> Cases:
    for strategy in ("even", "heuristic", "optimal"):
        for problem in ("small", "handled"):
            words = ("plan", "--problem", f"{problem}.json", "--strategy", strategy, "--json")
            yield f"plan {problem} {strategy}", lambda room, w=words: without_ties(room.observe(*w))
    for name in ("tight", "newer", "negative", "unknown", "extra", "broken", "kindless", "nowhere"):
        yield commands(f"plan {name}", "plan", "--problem", f"{name}.json", "--json")
    small = ("plan", "--problem", "small.json")
    yield commands("plan tight even", "plan", "--problem", "tight.json", "--strategy", "even")
    yield commands("plan in words", *small)
    assign = ("--assign", "old=0:4,new=4:6,tiny=6:8", "--json")
    yield commands("plan assign", *small, *assign)
    yield commands("plan assign gpipe", *small, *assign, "--schedule", "gpipe")
    yield commands("plan assign bottleneck", *small, *assign, "--objective", "bottleneck")
    yield commands("plan assign microbatches", *small, *assign, "--microbatches", "3")
    yield commands("plan assign blocks", *small, *assign, "--whole-blocks")
    for wrong in ("old=0:4", "old=0:4,nobody=4:8", "old=0:5,new=4:8", "old", "old=0:9", "old=4:0"):
        yield commands(f"plan assign {wrong}", *small, "--assign", wrong, "--json")
    for trainer in ("torchtitan", "megatron", "nothing"):
        export = (*small, "--assign", "old=0:3,new=3:5,tiny=5:8", "--export", trainer)
        yield commands(f"plan export {trainer}", *export, "--json")
        yield f"plan export {trainer} alone", lambda room, w=export: exported(room, *w)
    cut = ("--assign", "old=0:4,new=4:5,tiny=5:8", "--export", "megatron", "--json")
    yield commands("plan export inside a block", *small, *cut)
    yield commands("plan pinned", *small, "--pin-first", "tiny", "--strategy", "heuristic", "--json")
    yield commands("plan pinned to nobody", *small, "--pin-first", "nobody", "--json")
    yield commands("plan schedule", *small, "--schedule", "bogus")
    yield commands("plan strategy", *small, "--strategy", "bogus")
    yield commands("plan both", "plan", "train.py", "--problem", "small.json")
    yield commands("plan nothing", "plan")
    yield commands("plan dry", *small, "--strategy", "even", "-o", "dry.json", "--dry-run", "--json")
    yield "plan dry writes nothing", lambda room: {"there": (room.folder / "dry.json").exists()}


def without_ties(found: dict[str, Any]) -> dict[str, Any]:
    """A plan by ``optimal`` keeps its figures; which of several plans of that value it is, is open."""
    document = found.get("json", {})
    if document.get("strategy") == "optimal":
        for key in ("stages", "unused", "predicted"):
            document[key] = "…"
        proof = document["certificate"]
        if proof["status"] != "optimal":
            document["certificate"] = {"status": proof["status"], "keys": sorted(proof)}
    return found


def exported(room: Room, *words: str) -> dict[str, Any]:
    done = room.run(*words)
    return {"exit": done.returncode, "stdout": done.stdout.strip()}


def verify_cases() -> Cases:
    yield commands("verify good", "verify", "good.json", "--json")
    yield commands("verify in words", "verify", "good.json")
    for name in FORGED:
        yield commands(f"verify {name}", "verify", f"forged {name}.json", "--json")
    for name in ("broken", "nowhere", "small"):
        yield commands(f"verify {name}", "verify", f"{name}.json", "--json")


def init_cases() -> Cases:
    for name in INVENTORIES:
        yield f"init {name}", lambda room, n=name: written(room, "--from", n)
    for slots in ("cuda", "threads", "ignore", "bogus"):
        yield f"init slots {slots}", lambda room, s=slots: written(room, "--from", "hostfile", "--slots", s)
    yield "init hosts", lambda room: written(room, "tower", "ada@192.0.2.10:2222", "--local", "2")
    yield "init nothing", written
    yield "init twice", lambda room: written(room, "tower", "tower")
    yield "init from nowhere", lambda room: written(room, "--from", "nowhere")
    yield "init dry", lambda room: written(room, "tower", "--dry-run")
    yield commands("init over", "init", "tower", "-o", "cluster.yaml", "--json")


def written(room: Room, *words: str) -> dict[str, Any]:
    """The answer of ``init``, and the file that it writes."""
    out = room.folder / f"init-{abs(hash(words)):x}.yaml"
    found = room.observe("init", *words, "-o", out.name, "--json")
    if "json" in found:
        found["json"] = _renamed(found["json"], out.stem)
    if out.exists():
        document = yaml.safe_load(out.read_text())
        found["file"] = _renamed(normal(document), out.stem)
    return found


def _renamed(value: Any, stem: str) -> Any:
    if isinstance(value, dict):
        return {k: _renamed(v, stem) for k, v in value.items()}
    if isinstance(value, list):
        return [_renamed(v, stem) for v in value]
    return value.replace(stem, "<name>") if isinstance(value, str) else value


def wrong_cases() -> Cases:
    """Usage errors, and clusters, nodes, runs that are not there: exit 2."""
    alone = ["init", "check", "setup", "probe", "plan", "verify", "launch", "compare", "ps", "logs"]
    alone += ["attach", "stop", "join", "demo", "bug-report"]
    pairs = ["checkpoint ls", "checkpoint export", "checkpoint rm", "lab up", "lab status", "lab down"]
    for name in alone + pairs:
        yield commands(f"{name} --bogus", *name.split(), "--bogus")
    for line in (
        "", "bogus", "checkpoint", "checkpoint list", "lab", "verify", "join", "join x", "launch", "compare",
        "logs", "logs nowhere", "attach", "attach nowhere", "stop nowhere", "stop", "stop x --all",
        "join nowhere a", "checkpoint ls nowhere", "checkpoint export nowhere", "checkpoint rm nowhere -y",
        "bug-report nowhere", "ps --json", "ps -a --offline --json", "ps x", "logs -f --json",
        "launch nowhere.json", "launch nowhere.py", "launch gpt:layers=x", "launch small.json",
        "launch good.json --dry-run --json", "launch good.json --json", "launch --resume nowhere",
        "launch train.py --steps 0", "launch train.py --dtype float16", "launch train.py --keep 1",
        "launch train.py --lr-schedule bogus", "launch train.py --schedule bogus",
        "launch train.py --link-dtype int4", "launch train.py --limit nobody",
        "launch train.py --steps 5 --resume nowhere", "launch train.py --checkpoint-every -1",
        "compare train.py --strategy bogus", "compare train.py --microbatches 4,x",
        "compare train.py --nodes 3..2", "compare train.py --paper", "probe train.py extra",
        "probe train.py --links bogus", "probe train.py --microbatches 0", "probe nowhere.py",
        "probe hf:nowhere", "probe bert:hidden=7,heads=2", "probe train.py --batch-size 4 --microbatches 8",
        "check -c nowhere.yaml", "check --limit nobody", "check --limit '['", "probe --limit nobody",
        "setup -c nowhere.yaml", "setup --limit nobody --dry-run", "setup --wheels nowhere",
        "setup nowhere.py --dry-run", "lab up nowhere.yaml", "lab down nosuchlab", "lab down",
        "lab status nosuchlab", "plan train.py", "plan train.py --profile nowhere.json",
        "plan train.py --profile small.json", "plan --from-run nowhere", "plan gpt:layers=2",
        "demo --steps 0", "verify good.json extra",
    ):  # fmt: skip
        yield commands(f"$ {line}", *line.split())
    yield commands("check dry", "check", "--dry-run", "--json")
    yield commands("probe dry", "probe", "--dry-run", "--json")
    yield commands("lab status", "lab", "status", "--json")
    yield commands("bug-report dry", "bug-report", "--dry-run", "--json")
    yield "version", lambda room: {"exit": room.run("--version").returncode}
    for name, text in {
        "unknown key": "nodes:\n  - {name: a, prot: 22}\n",
        "twice": "nodes:\n  - a\n  - a\n",
        "port": "nodes:\n  - {name: a, port: 99999}\n",
        "tab": "nodes:\n\t- a\n",
        "empty": "",
        "group": "nodes: [a]\ngroups: {g: [b]}\n",
        "slowed ssh": "nodes:\n  - {name: a, host: h, slowdown: 2.0}\n",
    }.items():
        yield f"cluster {name}", lambda room, n=name, t=text: faulty(room, n, t)
    for name, text in {
        "refused": "nodes:\n  - {name: a, host: 127.0.0.1, port: 1}\n",
        "no host": "nodes:\n  - {name: a, host: no-such-host.invalid}\n",
        "no python": "nodes:\n  - {name: a, transport: local, python: /nonexistent/python3}\n",
        "no key": "nodes:\n  - {name: a, host: 127.0.0.1, port: 1, identity_file: /nonexistent/key}\n",
    }.items():
        for command in ("check", "probe", "setup"):
            yield (
                f"{command} {name}",
                lambda room, n=name, t=text, c=command: faulty(room, n, t, c, "--timeout", "5"),
            )
    lab = "nodes:\n  - {name: n1, cpus: 0.5}\n  - {name: n2, cpus: 0.5, rate_mbits: 50}\n"
    yield "lab up unknown key", lambda room: faulty(room, "lab", lab, "lab", "up", cluster=False)


def faulty(room: Room, name: str, text: str, *words: str, cluster: bool = True) -> dict[str, Any]:
    path = room.write(f"faulty {name}.yaml", text)
    option = ("-c", path.name) if cluster else (path.name,)
    return room.observe(*(words or ("check",)), *option, "--json", shape=True)


def fast_cases() -> Cases:
    """Some of everything, for the ordinary suite."""
    for i, case in enumerate([*plan_cases(), *verify_cases(), *init_cases()]):
        if i % 4 == 0:
            yield case
    for i, case in enumerate(wrong_cases()):
        if i % 12 == 0:
            yield case


def all_cases() -> Cases:
    for make in (plan_cases, verify_cases, init_cases, wrong_cases):
        yield from make()
