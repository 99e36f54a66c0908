"""Ansible's inventories and hostfiles, taken as nodes of a cluster.yaml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyctl.errors import InputError
from skyctl.inventory.cluster_file import parse_cluster
from skyctl.inventory.cluster_template import NewNode, apply_slots, render_cluster_file
from skyctl.inventory.foreign import ansible_listing
from skyctl.inventory.foreign.foreign_inventory import ForeignInventory, read_foreign
from skyctl.inventory.yaml_document import parse_yaml
from skyctl.records.cluster import Cluster

from ..helpers.processes import after_a_moment, command

YAML = """\
all:
  vars:
    ansible_user: ada
    ansible_python_interpreter: auto_silent
    ansible_become_password: sesame
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
            "x:22": {ansible_user: eve, http_url: "{{ x }}"}
            y: {ansible_ssh_common_args: -J j1, ansible_python_interpreter: /opt/py/bin/python}
          vars: {ansible_user: inner}
    win: {hosts: {w1: {ansible_connection: winrm}}}
    me: {hosts: {here: {ansible_connection: local, ansible_user: ignored}}}
"""


@pytest.fixture(autouse=True)
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All of PATH: no Ansible is installed unless a test puts a program in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def install(folder: Path, body: str) -> None:
    """An ansible-inventory that does only that."""
    program = folder / "ansible-inventory"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


def imported(folder: Path, name: str, text: str) -> ForeignInventory:
    (folder / name).write_text(text)
    return read_foreign(folder / name)


def cluster(inventory: ForeignInventory) -> Cluster:
    """The cluster that init would write, read back."""
    return parse_cluster(parse_yaml(render_cluster_file(inventory.nodes, "c", inventory.groups), "c"))


def test_ansible_in_yaml(tmp_path: Path) -> None:
    inventory = imported(tmp_path, "inventory.yml", YAML)
    read = cluster(inventory)
    assert [n.name for n in read.nodes] == ["lone", "g08.lan", "g10.lan", "big", "x", "y", "here"]
    assert {n.name: n.user for n in read.nodes} == {
        "lone": "ada",
        "g08.lan": "grace",
        "g10.lan": "grace",
        "big": "grace",
        "x": "eve",
        "y": "inner",
        "here": None,
    }
    big, here = read.node("big"), read.node("here")
    assert (big.host, big.port, big.identity_file, big.proxy_jump, big.python) == (
        "192.0.2.10",
        2222,
        "~/.ssh/id_gpu",
        "eve@bastion",
        "python3",
    )
    assert (read.node("y").proxy_jump, read.node("y").python) == ("j1", "/opt/py/bin/python")
    assert (read.node("x").port, here.transport) == (22, "local")
    assert read.groups == {
        "gpu": ("g08.lan", "g10.lan", "big", "x", "y"),
        "inner": ("x", "y"),
        "me": ("here",),
    }


def test_what_is_left_out_is_said_without_values(tmp_path: Path) -> None:
    notes = "\n".join(imported(tmp_path, "inventory.yml", YAML).notes)
    assert "winrm" in notes
    assert "(w1)" in notes
    assert "passwords are not taken" in notes
    assert "ansible_become is not taken" in notes
    assert "hunter2" not in notes
    assert "sesame" not in notes


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
    read = cluster(imported(tmp_path, "hosts", text))
    assert [(n.name, n.host, n.port, n.user, n.identity_file) for n in read.nodes] == [
        ("mail", "192.0.2.1", None, "root", None),
        ("web1.lan", "web1.lan", 2200, "ada", "/keys/k"),
        ("web2.lan", "web2.lan", 2200, "ada", "/keys/k"),
        ("2001:db8::1", "2001:db8::1", 22, "root", "/keys/k"),
        ("db-a", "db-a", None, "root", "/keys/k"),
    ]
    assert read.groups["sites"] == ("web1.lan", "web2.lan", "2001:db8::1", "db-a")


LISTING = """\
{"_meta": {"hostvars": {
   "a": {"ansible_host": "192.0.2.7", "ansible_port": 77, "ansible_user": "{{ who }}"},
   "b": {"ansible_password": {"__ansible_vault": "$ANSIBLE_VAULT;1.1;AES256\\n6162\\n"},
         "ansible_user": {"__ansible_vault": "$ANSIBLE_VAULT;1.1;AES256\\n6162\\n"}}},
  "profile": "inventory_legacy"},
 "all": {"children": ["ungrouped", "x"]}, "g": {"hosts": ["b", "a"]}, "x": {"children": ["g"]},
 "ungrouped": {"hosts": ["c"]}}
"""
"""As ansible-core 2.19 prints it."""
PRINT_LISTING = f"/bin/cat <<'E'\n{LISTING}E"


@pytest.mark.parametrize("name", ["hosts", "inventory.yml", "listing.json"])
def test_a_listing_is_read_wherever_it_comes_from(name: str, tmp_path: Path, bin_folder: Path) -> None:
    install(bin_folder, f'[ "$1 $2" = "--list -i" ] && [ -f "$3" ] || exit 3\n{PRINT_LISTING}')
    inventory = imported(tmp_path, name, LISTING if name == "listing.json" else "plugin: aws_ec2\n")
    read = cluster(inventory)
    assert [(n.name, n.host, n.port, n.user) for n in read.nodes] == [
        ("c", "c", None, None),
        ("b", "b", None, None),
        ("a", "192.0.2.7", 77, None),
    ]
    assert read.groups == {"g": ("b", "a"), "x": ("b", "a")}
    assert "ansible_user is a template, which only ansible can fill in (a)" in inventory.notes
    assert "ansible_user is sealed by ansible-vault (b)" in inventory.notes
    assert "6162" not in str(inventory.notes)


def test_scripts_and_folders_are_read_by_ansible(tmp_path: Path, bin_folder: Path) -> None:
    install(bin_folder, PRINT_LISTING)
    script = tmp_path / "dynamic"
    script.write_text("#!/usr/bin/python\nmain()\n")
    script.chmod(0o755)
    for path in (script, tmp_path):
        assert [node.name for node in read_foreign(path).nodes] == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo '[WARNING]: odd' >&2; echo '[ERROR]: no group' >&2; exit 1", "failed: [ERROR]: no group"),
        ("echo first >&2; echo second >&2; exit 5", "failed: first"),
        ("exit 5", "failed: exit code 5"),
        ("kill -9 $$", "failed: exit code -9"),
        ("echo hosts", "is not JSON"),
        ("true", "is not JSON"),
        ("echo '[]'", "'the whole' is no mapping"),
        ("echo '{\"all\": 3}'", "'all' is no mapping"),
        ('echo \'{"all": {"hosts": "a"}}\'', "hosts of group 'all' are no list"),
        ('echo \'{"all": {"hosts": ["a"]}, "_meta": {"hostvars": {"a": 1}}}\'', "'a' is no mapping"),
        ('echo \'{"all": {"hosts": ["a"], "vars": {"x": 1}}}\'', "variables of its own"),
        ('echo \'{"all": {"children": ["g"]}, "g": {"children": ["all"]}}\'', "holds itself"),
        ("echo '{\"all\": {}}'", "has no host"),
    ],
)
def test_faults_of_ansible_inventory_are_named(
    body: str, words: str, tmp_path: Path, bin_folder: Path
) -> None:
    install(bin_folder, body)
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        imported(tmp_path, "inventory.yml", "all: {}\n")
    assert "inventory.yml" in str(caught.value)


def test_an_ansible_inventory_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ansible_listing, "TIMEOUT_S", 5.0)
    install(bin_folder, f"/bin/sleep 600 &\necho $! > {tmp_path}/child\nwait")
    with pytest.raises(InputError, match=r"did not end within 5 s"):
        imported(tmp_path, "inventory.yml", "all: {}\n")
    child = int((tmp_path / "child").read_text())
    assert not after_a_moment(lambda: command(child))


def test_an_ansible_inventory_that_can_not_start_is_named(tmp_path: Path, bin_folder: Path) -> None:
    install(bin_folder, "")
    (bin_folder / "ansible-inventory").write_text("#!/nowhere\n")
    with pytest.raises(InputError, match="can't be started"):
        imported(tmp_path, "inventory.yml", "all: {}\n")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("i.yml", "# hosts\nplugin: aws_ec2\n", "i.yml:2: this is an order for a plugin"),
        ("i.yml", "all:\n  vars:\n    x: !vault |\n      6162\n", "i.yml:3: this is a value with a tag"),
        ("i.yml", "$ANSIBLE_VAULT;1.1;AES256\n00\n", "i.yml:1: this is sealed by ansible-vault"),
        (
            "i.yml",
            "all:\n  hosts:\n    a: {ansible_host: '{{ x }}'}\n",
            "i.yml:3: ansible_host is a tem",
        ),
        ("hosts", "[g]\na ansible_user='{{ x }}'\n", "hosts:2: ansible_user is a template"),
        ("hosts", "[g]\na\n[g:vars]\nansible_user={% x %}\n", "hosts:4: ansible_user is a template"),
        ("hosts", "[g]\na\n[g:vars]\nansible_group_priority=2\n", "hosts:4: ansible_group_priority is not"),
        ("hosts", "#!/bin/sh\ntouch ran\n", "hosts:1: this is a program"),
        (".", "", "is a folder"),
        ("with_vars", "[g]\na\n", "group_vars has variables of its hosts"),
    ],
)
def test_a_file_that_takes_ansible_is_refused_by_line(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    if name == "with_vars":
        (tmp_path / "group_vars").mkdir()
    path = tmp_path / name
    if text:
        path.write_text(text)
        path.chmod(0o755)
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        read_foreign(path)
    assert "install ansible-core, then ansible-inventory reads it" in (caught.value.hint or "")
    assert not (tmp_path / "ran").exists()


def test_a_group_may_be_called_nodes(tmp_path: Path) -> None:
    assert imported(tmp_path, "i.yml", "nodes:\n  hosts:\n    a:\n").groups == {"nodes": ("a",)}
    with pytest.raises(InputError, match="this is a cluster"):
        imported(tmp_path, "c.yml", "name: c\nnodes:  # all\n  # of them\n  - a\n")


def test_inner_groups_win_and_the_host_itself(tmp_path: Path) -> None:
    text = (
        "[a]\nh\n[b]\nh ansible_host=192.0.2.1\n[c]\nh\n[outer:children]\nc\n[a:vars]\nansible_user=a\n"
        "ansible_port=7\n[b:vars]\nansible_user=b\nansible_port=8\nansible_host=b\n[c:vars]\nansible_user=c\n"
    )
    node = imported(tmp_path, "hosts", text).nodes[0]
    assert (node.user, node.port, node.host) == ("c", 8, "192.0.2.1")


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
    inventory = imported(tmp_path, "hostfile", text)
    assert inventory.kind == "a hostfile"
    assert [(n.name, n.user, n.slots) for n in inventory.nodes] == nodes
    assert len(cluster(inventory).nodes) == len(nodes)


def test_slots_are_gpus_or_threads_where_asked() -> None:
    nodes = [NewNode("a", slots=2), NewNode("b")]
    assert [n.devices for n in apply_slots(nodes, "cuda")] == [("cuda:0", "cuda:1"), ()]
    assert [n.threads for n in apply_slots(nodes, "threads")] == [2, None]
    assert apply_slots(nodes, "ignore") == nodes


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("i.yml", "nodes: [a]\n", "this is a cluster.yaml already"),
        ("i.yml", "- a\n", "a mapping of groups"),
        ("i.yml", "g:\n  hosts:\n    a: 3\n", "i.yml:3: host 'a'"),
        ("i.yml", "g: {children: {h: {children: {g: {}}}}, hosts: {a: }}\n", "holds itself"),
        ("i.yml", "g: {hosts: {'a[1:99999999]': }}\n", "more than 10,000 hosts"),
        ("i.yml", "g: {hosts: {a: {ansible_port: 99999}}}\n", "ansible_port"),
        ("i.yml", "g: {hosts: {}}\n", "has no host"),
        ("hosts", "[g\na\n", "hosts:1: a section is"),
        ("hosts", "[g:children]\nnone\n", "hosts:2: there is no group [none]"),
        ("hosts", "[g]\na b\n", "hosts:2: a variable is KEY=VALUE"),
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


def test_defaults_are_what_all_have_alike() -> None:
    alike = [NewNode(f"n{i}", user="ada", python="/opt/p y/python", port=2200 + i) for i in range(2)]
    text = render_cluster_file([*alike, NewNode("me", local=True)], "c")
    assert 'defaults: {user: ada, python: "/opt/p y/python"}' in text
    read = parse_cluster(parse_yaml(text, "c"))
    assert [(n.user, n.port) for n in read.nodes] == [("ada", 2200), ("ada", 2201), (None, None)]
