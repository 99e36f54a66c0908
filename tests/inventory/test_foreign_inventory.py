"""Ansible's inventories and hostfiles, taken as nodes of a cluster.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.errors import InputError
from skyctl.inventory.cluster_file import parse_cluster
from skyctl.inventory.cluster_template import NewNode, apply_slots, render_cluster_file
from skyctl.inventory.foreign.foreign_inventory import ForeignInventory, read_foreign
from skyctl.inventory.yaml_document import parse_yaml
from skyctl.records.cluster import Cluster

YAML = """\
all:
  vars:
    ansible_user: ada
    ansible_python_interpreter: auto_silent
    ansible_become_password: !vault |
      $ANSIBLE_VAULT;1.1;AES256
      6162
    http_port: 80
  hosts:
    lone:
  children:
    gpu:
      hosts:
        g[08:10:2].lan:
        big:
          ansible_host: 192.0.2.10
          ansible_port: 2222
          ansible_password: hunter2
      vars:
        ansible_user: grace
        ansible_ssh_private_key_file: ~/.ssh/id_gpu
        ansible_ssh_common_args: '-o ProxyCommand="ssh -W %h:%p -q eve@bastion"'
      children:
        inner:
          hosts:
            "x:22": {ansible_user: "{{ who }}"}
            y: {ansible_ssh_common_args: -J j1, ansible_python_interpreter: /opt/py/bin/python}
          vars: {ansible_user: inner}
    win: {hosts: {w1: {ansible_connection: winrm}}}
    me: {hosts: {here: {ansible_connection: local, ansible_user: ignored}}}
"""


def imported(folder: Path, name: str, text: str) -> ForeignInventory:
    (folder / name).write_text(text)
    return read_foreign(folder / name)


def cluster(found: ForeignInventory) -> Cluster:
    """What init would write, read back."""
    return parse_cluster(parse_yaml(render_cluster_file(found.nodes, "c", found.groups), "c"))


def test_ansible_in_yaml(tmp_path: Path) -> None:
    found = imported(tmp_path, "inventory.yml", YAML)
    made = cluster(found)
    assert [n.name for n in made.nodes] == ["lone", "g08.lan", "g10.lan", "big", "x", "y", "here"]
    assert {n.name: n.user for n in made.nodes} == {
        "lone": "ada",
        "g08.lan": "grace",
        "g10.lan": "grace",
        "big": "grace",
        "x": None,
        "y": "inner",
        "here": None,
    }
    big, here = made.node("big"), made.node("here")
    assert (big.host, big.port, big.identity_file, big.proxy_jump, big.python) == (
        "192.0.2.10",
        2222,
        "~/.ssh/id_gpu",
        "eve@bastion",
        "python3",
    )
    assert (made.node("y").proxy_jump, made.node("y").python) == ("j1", "/opt/py/bin/python")
    assert (made.node("x").port, here.transport) == (22, "local")
    assert made.groups == {
        "gpu": ("g08.lan", "g10.lan", "big", "x", "y"),
        "inner": ("x", "y"),
        "me": ("here",),
    }


def test_what_is_left_out_is_said_without_values(tmp_path: Path) -> None:
    notes = "\n".join(imported(tmp_path, "inventory.yml", YAML).notes)
    assert "winrm" in notes
    assert "(w1)" in notes
    assert "ansible_user is a template" in notes
    assert "passwords are not taken" in notes
    assert "ansible_become is not taken" in notes
    assert "hunter2" not in notes
    assert "6162" not in notes


INI = """\
# a comment
mail ansible_host=192.0.2.1   ; another
[web]
web[1:2].lan:2200 ansible_user="ada"  # its port
[2001:db8::1]:22
[db]
db-a
[all:vars]
ansible_user = root
[sites:children]
web
db
[sites:vars]
ansible_ssh_private_key_file='/keys/k'
"""


def test_ansible_in_ini(tmp_path: Path) -> None:
    text = INI.replace("   ; another", "")
    made = cluster(imported(tmp_path, "hosts", text))
    assert [(n.name, n.host, n.port, n.user, n.identity_file) for n in made.nodes] == [
        ("mail", "192.0.2.1", None, "root", None),
        ("web1.lan", "web1.lan", 2200, "ada", "/keys/k"),
        ("web2.lan", "web2.lan", 2200, "ada", "/keys/k"),
        ("2001:db8::1", "2001:db8::1", 22, "root", "/keys/k"),
        ("db-a", "db-a", None, "root", "/keys/k"),
    ]
    assert made.groups["sites"] == ("web1.lan", "web2.lan", "2001:db8::1", "db-a")


def test_what_ansible_inventory_prints(tmp_path: Path) -> None:
    made = cluster(
        imported(
            tmp_path,
            "all.json",
            '{"_meta": {"hostvars": {"a": {"ansible_host": "192.0.2.7"}}},'
            ' "all": {"children": ["ungrouped", "g"]}, "g": {"hosts": ["a", "b"]}}',
        )
    )
    assert [(n.name, n.host) for n in made.nodes] == [("a", "192.0.2.7"), ("b", "b")]
    assert made.groups == {"g": ("a", "b")}


def test_variables_beside_the_file(tmp_path: Path) -> None:
    for path, text in {
        "group_vars/all.yml": "ansible_user: fromall\nansible_port: 1\n",
        "group_vars/g/x.yml": "ansible_port: 2\n",
        "host_vars/b": "ansible_port: 3\n",
        "group_vars/z.yml": "$ANSIBLE_VAULT;1.1;AES256\n00\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    text = "[g]\na ansible_port=9\nb ansible_port=9\nc\n[g:vars]\nansible_user=infile\n[z]\nc\n"
    found = imported(tmp_path, "hosts.ini", text)
    ports = {node.name: (node.port, node.user) for node in found.nodes}
    assert ports == {"a": (9, "fromall"), "b": (3, "fromall"), "c": (2, "fromall")}
    assert found.notes == ("group_vars/z.yml is sealed by ansible-vault",)


def test_deeper_groups_and_priorities_win(tmp_path: Path) -> None:
    text = (
        "[a]\nh\n[b]\nh\n[c]\nh\n[outer:children]\nc\n[a:vars]\nansible_user=a\nansible_port=7\n"
        "ansible_group_priority=5\n[b:vars]\nansible_user=b\nansible_port=8\n[c:vars]\nansible_user=c\n"
    )
    node = imported(tmp_path, "hosts", text).nodes[0]
    assert (node.user, node.port) == ("c", 7)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("worker-1 slots=4\nworker-2 slots=2 # note\n", [("worker-1", None, 4), ("worker-2", None, 2)]),
        (
            "n1 slots = 2 max_slots=4\nn1 slots=1\nada@n2\n^n3\n",
            [("n1", None, 3), ("n2", "ada", None)],
        ),
        ("n1:4\nn2:2 binding=user:0\n", [("n1", None, 4), ("n2", None, 2)]),
        ("[::1]:2\n", [("::1", None, 2)]),
        ("n1\nn2 username=ada port=22\n", [("n1", None, None), ("n2", "ada", None)]),
    ],
)
def test_hostfiles(tmp_path: Path, text: str, nodes: list[tuple[str, str | None, int | None]]) -> None:
    found = imported(tmp_path, "hostfile", text)
    assert found.kind == "a hostfile"
    assert [(n.name, n.user, n.slots) for n in found.nodes] == nodes
    assert len(cluster(found).nodes) == len(nodes)


def test_slots_are_gpus_or_threads_where_asked() -> None:
    nodes = [NewNode("a", slots=2), NewNode("b")]
    assert [n.devices for n in apply_slots(nodes, "cuda")] == [("cuda:0", "cuda:1"), ()]
    assert [n.threads for n in apply_slots(nodes, "threads")] == [2, None]
    assert apply_slots(nodes, "ignore") == nodes


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("i.yml", "nodes: [a]\n", "this is a cluster.yaml already"),
        ("i.yml", "plugin: aws_ec2\n", "asks a plugin"),
        ("i.yml", "- a\n", "a mapping of groups"),
        ("i.yml", "g:\n  hosts:\n    a: 3\n", "i.yml:3: host 'a'"),
        ("i.yml", "g: {children: {h: {children: {g: {}}}}, hosts: {a: }}\n", "holds itself"),
        ("i.yml", "g: {hosts: {'a[1:99999999]': }}\n", "more than 10,000 hosts"),
        ("i.yml", "g: {hosts: {a: {ansible_port: 99999}}}\n", "ansible_port"),
        ("i.yml", "g: {hosts: {}}\n", "has no host"),
        ("hosts", "[g\na\n", "hosts:1: a section is"),
        ("hosts", "[g:children]\nnone\n", "hosts:2: there is no group [none]"),
        ("hosts", "[g]\na b\n", "hosts:2: behind a host"),
        ("hosts", "[g:vars]\nx\n", "KEY=VALUE"),
        ("hostfile", "a slots=x\n", "hostfile:1: slots of a"),
        ("hostfile", "a\nn[9-2]\n", "hostfile:2: the range in 'n[9-2]' is empty"),
        ("hostfile", "n[1-99999999]\n", "more than 10,000 hosts"),
    ],
)
def test_faults_are_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        imported(tmp_path, name, text)
    assert words in str(caught.value)


def test_programs_and_folders_are_not_run(tmp_path: Path) -> None:
    script = tmp_path / "dynamic"
    script.write_text("#!/bin/sh\ntouch ran\n")
    script.chmod(0o755)
    for path in (script, tmp_path):
        with pytest.raises(InputError, match="ansible-inventory"):
            read_foreign(path)
    assert not (tmp_path / "ran").exists()


def test_defaults_are_what_all_have_alike() -> None:
    alike = [NewNode(f"n{i}", user="ada", python="/opt/p y/python", port=2200 + i) for i in range(2)]
    text = render_cluster_file([*alike, NewNode("me", local=True)], "c")
    assert 'defaults: {user: ada, python: "/opt/p y/python"}' in text
    made = parse_cluster(parse_yaml(text, "c"))
    assert [(n.user, n.port) for n in made.nodes] == [("ada", 2200), ("ada", 2201), (None, None)]
