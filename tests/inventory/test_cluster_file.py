"""cluster.yaml, good and bad."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from skyctl.errors import InputError, InventoryError
from skyctl.inventory.cluster_file import cluster_path, parse_cluster, read_cluster
from skyctl.inventory.yaml_document import parse_yaml

CONTRACT = """\
name: home
defaults: {user: ada, identity_file: ~/.ssh/id_ed25519, python: python3}
nodes:
  - alias-from-ssh-config           # `ssh alias` works, so this does
  - name: tower
    host: 192.0.2.10
    port: 22
    proxy_jump: bastion
    devices: [cuda:0, cuda:1]       # default: all accelerators, else cpu
    threads: 8                      # cpu device: torch threads
    memory_gib: 20                  # cap; default: what is free, the cgroup's limit obeyed
    interface: tailscale0           # default: the route to its peers
    env: {OMP_NUM_THREADS: "8"}
  - {name: laptop, transport: local, slowdown: 2.0}   # local only: every layer made to take twice its time
groups: {fast: [tower], data: [laptop]}               # usable wherever nodes are named
"""


def cluster(text: str):
    return parse_cluster(parse_yaml(text, "cluster.yaml"))


def test_the_contracts_example() -> None:
    read = cluster(CONTRACT)
    alias, tower, laptop = read.nodes
    assert (alias.name, alias.host, alias.user) == ("alias-from-ssh-config", "alias-from-ssh-config", "ada")
    assert alias.port is None
    assert tower.devices == ("cuda:0", "cuda:1")
    assert tower.memory_gib == 20.0
    assert tower.identity_file == "~/.ssh/id_ed25519"
    assert tower.env == {"OMP_NUM_THREADS": "8"}
    assert (laptop.host, laptop.user, laptop.identity_file, laptop.slowdown) == (None, None, None, 2.0)
    assert laptop.python == sys.executable
    assert read.groups == {"fast": ("tower",), "data": ("laptop",)}


def test_the_shipped_example_is_valid_and_shows_every_key() -> None:
    from skyctl.inventory.cluster_file import NODE_KEYS

    path = Path(__file__).parents[2] / "cluster.example.yaml"
    read = read_cluster(path)
    assert [node.name for node in read.nodes] == ["workstation", "tower", "laptop"]
    assert [key for key in NODE_KEYS if f"{key}:" not in path.read_text()] == []


def test_a_cluster_file_may_say_what_carries_tensors() -> None:
    assert cluster("nodes: [a]\n").backend is None
    read = cluster("backend: gloo\nnodes: [a]\n")
    assert read.backend == "gloo"
    assert read.digest == cluster("nodes: [a]\n").digest  # its nodes are what they were
    with pytest.raises(
        InventoryError, match=r"cluster.yaml:1: .*backend.*'auto', 'gloo', 'nccl' or 'skyctl'"
    ):
        cluster("backend: mpi\nnodes: [a]\n")


def test_a_local_node_takes_no_default_python_but_may_name_one() -> None:
    read = cluster(
        "defaults: {python: /opt/python}\nnodes:\n  - h\n  - {name: l, transport: local}\n"
        "  - {name: m, transport: local, python: /mine/python}\n"
    )
    assert [node.python for node in read.nodes] == ["/opt/python", sys.executable, "/mine/python"]


def test_defaults_fill_and_env_merges() -> None:
    read = cluster(
        'defaults: {port: 2200, slowdown: 3, env: {A: "1", B: "1"}}\n'
        'nodes:\n  - bob@h\n  - {name: b, port: 22, env: {B: "2"}}\n  - {name: l, transport: local}\n'
    )
    bare, b, local = read.nodes
    assert (bare.name, bare.host, bare.user, bare.port) == ("h", "h", "bob", 2200)
    assert (b.host, b.port, b.env, b.slowdown) == ("b", 22, {"A": "1", "B": "2"}, 1.0)
    assert (local.port, local.slowdown, local.env) == (None, 3.0, {"A": "1", "B": "1"})


def test_local_by_default() -> None:
    read = cluster("defaults: {transport: local}\nnodes: [a, {name: b}, {name: c, transport: ssh}]\n")
    assert [(n.transport, n.host) for n in read.nodes] == [("local", None), ("local", None), ("ssh", "c")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes:\n  - name: tower\n    prot: 22\n",
         "cluster.yaml:3: unknown key 'prot' in node 'tower'; did you mean 'port'?"),
        ("nodez: [a]\n", "cluster.yaml:1: unknown key 'nodez' in the file; did you mean 'nodes'?"),
        ("defaults:\n  usr: ada\nnodes: [a]\n",
         "cluster.yaml:2: unknown key 'usr' in defaults; did you mean 'user'?"),
        ("defaults: {host: x}\nnodes: [a]\n", "cluster.yaml:1: unknown key 'host' in defaults"),
        ("defaults:\n  port: 70000\nnodes: [a]\n", "cluster.yaml:2: 'port' in defaults: input should"),
        ("nodes: [a, b, a]\n", "cluster.yaml:1: duplicate node 'a' (first on line 1)"),
        ("nodes:\n  - a\n  - name: a\n    host: x\n", "cluster.yaml:3: duplicate node 'a' (first on line 2)"),
        ("nodes:\n  - name: a\n    port: 70000\n",
         "cluster.yaml:3: 'port' in node 'a': input should be less than or equal to 65535, it is 70000"),
        ("nodes:\n  - name: a\n    port: ssh\n", "cluster.yaml:3: 'port' in node 'a': input should be a v"),
        ("nodes:\n  - name: a\n    user: 7\n",
         "cluster.yaml:3: 'user' in node 'a': input should be a valid string, it is 7 (YAML reads it"),
        ("nodes:\n  - name: a\n    env: {N: 8}\n", "cluster.yaml:3: 'env.N' in node 'a': input should be"),
        ("nodes:\n  - name: a\n    devices: [gpu0]\n", "cluster.yaml:3: 'devices' in node 'a': a device is"),
        ("nodes:\n  - name: a\n    slowdown: 2\n", "cluster.yaml:2: node 'a': slowdown is for nodes"),
        ("nodes:\n  - name: a/b\n", "cluster.yaml:2: 'name' in node 'a/b': a node's name holds no '/'"),
        ("nodes:\n  - name: a\n    transport: telnet\n", "cluster.yaml:3: 'transport' in node 'a'"),
        ("nodes:\n  - name: a\n    transport: local\n    host: x\n",
         "cluster.yaml:4: 'host' in node 'a' has no meaning with 'transport: local'"),
        ("nodes:\n  - port: 1\n", "cluster.yaml:2: node 1 has no name"),
        ("nodes:\n  - no\n", "cluster.yaml:2: a node is an ssh alias or a mapping with a name, it is Fals"),
        ("nodes:\n  - 'a b'\n", "cluster.yaml:2: 'a b' is no ssh alias"),
        ("nodes:\n  - -oProxyCommand=id\n", "cluster.yaml:2: 'name' in node '-oProxyCommand=id' may n"),
        ("nodes:\n  - name: a\n    host: -oProxyCommand=id\n", "cluster.yaml:3: 'host' in node 'a' may not"),
        ("nodes: []\n", "cluster.yaml:1: nodes is empty"),
        ("", "cluster.yaml:1: nodes is empty"),
        ("- a\n", "cluster.yaml:1: the file must be a mapping"),
        ("nodes: {a: b}\n", "cluster.yaml:1: nodes must be a list"),
        ("name: 3\nnodes: [a]\n", "cluster.yaml:1: name must be a text, it is 3"),
        ("nodes: [a]\ngroups:\n  g: [b]\n", "cluster.yaml:3: group 'g' names 'b', which is no node"),
        ("nodes: [tower]\ngroups:\n  g:\n    - towr\n", "cluster.yaml:4: group 'g' names 'towr'"),
        ("nodes: [a]\ngroups: {a: [a]}\n", "cluster.yaml:2: group 'a' has the name of a node"),
        ("nodes: [a]\ngroups: {g: [h], h: [g]}\n", "cluster.yaml:2: group 'g' holds itself"),
        ("nodes: [a]\ngroups: {all: [a]}\n", "cluster.yaml:2: a group can't be called 'all'"),
        ("nodes:\n\t- a\n", "cluster.yaml:2: a tab"),
    ],
)  # fmt: skip
def test_errors_name_file_and_line(text: str, message: str) -> None:
    with pytest.raises(InventoryError) as caught:
        cluster(text)
    assert caught.value.message.startswith(message), caught.value.message
    assert caught.value.exit_code == 2


def test_groups_of_groups() -> None:
    read = cluster("nodes: [a, b, c]\ngroups: {x: [a, b], y: [x, c, a]}\n")
    assert read.groups == {"x": ("a", "b"), "y": ("a", "b", "c")}


def test_name_by_default(tmp_path: Path) -> None:
    for folder, file, name in [("my lab", "cluster.yaml", "my lab"), ("x", "office.yaml", "office")]:
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / file
        path.write_text("nodes: [a]\n")
        assert read_cluster(path).name == name


def test_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"cluster\.yaml does not exist") as caught:
        cluster_path()
    assert "skyctl init" in str(caught.value)
    assert "skyctl demo" in str(caught.value)
    for name in ("cluster.yaml", "env.yaml", "flag.yaml"):
        (tmp_path / name).touch()
    assert cluster_path() == Path("cluster.yaml")
    monkeypatch.setenv("SKYCTL_CLUSTER", "env.yaml")
    assert cluster_path() == Path("env.yaml")
    assert cluster_path(Path("flag.yaml")) == Path("flag.yaml")
    with pytest.raises(InputError, match="is not a file"):
        cluster_path(tmp_path)
