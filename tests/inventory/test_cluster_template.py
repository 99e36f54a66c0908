"""A first cluster.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.errors import InputError
from skyctl.inventory.cluster_file import parse_cluster
from skyctl.inventory.cluster_template import (
    NewNode,
    local_nodes,
    parse_host,
    parse_hosts,
    render_cluster_file,
    ssh_aliases,
)
from skyctl.inventory.yaml_document import parse_yaml


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("tower", NewNode("tower")),
        ("ada@192.0.2.10", NewNode("192.0.2.10", "192.0.2.10", "ada")),
        ("h:2222", NewNode("h", "h", None, 2222)),
        ("a@h:22", NewNode("h", "h", "a", 22)),
        ("[2001:db8::1]:22", NewNode("2001:db8::1", "2001:db8::1", None, 22)),
        ("2001:db8::1", NewNode("2001:db8::1", "2001:db8::1")),
    ],
)
def test_hosts(text: str, node: NewNode) -> None:
    assert parse_host(text) == node


@pytest.mark.parametrize(
    "text", ["", "a b", "a/b", "-oProxyCommand=id", "x@-oA", "h:0", "h:65536", "@h", "a@", "'; ls"]
)
def test_no_hosts(text: str) -> None:
    with pytest.raises(InputError):
        parse_host(text)


def test_several_hosts_in_one_word() -> None:
    hosts = parse_hosts("ada@gpu[1-2,7]:22,cpu01")
    assert [(node.name, node.user, node.port) for node in hosts] == [
        *((f"gpu{i}", "ada", 22) for i in (1, 2, 7)),
        ("cpu01", None, None),
    ]


@pytest.mark.parametrize("text", ["", "n[3-1]", "n[1-99999999]"])
def test_no_hosts_in_a_word(text: str) -> None:
    with pytest.raises(InputError):
        parse_hosts(text)


@pytest.mark.parametrize("name", ["büro", "Büro 2", "机器", "🖥"])
def test_names_are_written_as_they_are(name: str) -> None:
    node = NewNode(name, local=True)
    text = render_cluster_file([node], name, {"grün": [name]})
    assert text.count(name) == 3
    assert "grün: [" in text
    assert [n.name for n in parse_cluster(parse_yaml(text, "f")).nodes] == [name]


@pytest.mark.parametrize("name", ["home", "two words", "no", "1e3", "#x", "a: b", "q\"'", "ümlaut"])
def test_what_is_written_is_read_back(name: str) -> None:
    hosts = [parse_host(t) for t in ("tower", "ada@192.0.2.10", "no", "0x10", "h:22", "::1")]
    read = parse_cluster(parse_yaml(render_cluster_file([*hosts, *local_nodes(2)], name), "f"))
    assert read.name == name
    assert [n.name for n in read.nodes] == [
        "tower",
        "192.0.2.10",
        "no",
        "0x10",
        "h",
        "::1",
        "local-1",
        "local-2",
    ]
    assert [n.transport for n in read.nodes][-2:] == ["local", "local"]
    assert read.nodes[1].user == "ada"


def test_render_refuses_doubles_and_nothing() -> None:
    with pytest.raises(InputError, match="'a' is given twice"):
        render_cluster_file([NewNode("a"), NewNode("a", "a", "b")], "x")
    with pytest.raises(InputError):
        render_cluster_file([], "x")


def test_ssh_aliases(tmp_path: Path) -> None:
    ssh = tmp_path / ".ssh"
    (ssh / "conf.d").mkdir(parents=True)
    (ssh / "config").write_text(
        "Include conf.d/*.conf missing/*\n"
        "# Host commented\n"
        'Host tower "two words" *.lan !x tow?r\n  HostName 192.0.2.1\n'
        "host=bastion\n"
        "Host github.com\n  User git\n"
        "Match host foo\n  User git\n"
        'Host broken "quote\n'
        "Host tower again # note\n"
        "Host -oEvil\n"
    )
    (ssh / "conf.d" / "a.conf").write_text("Host one\nInclude conf.d/a.conf\n")
    assert ssh_aliases(ssh / "config") == ["one", "tower", "two words", "bastion", "again"]
    assert ssh_aliases(tmp_path / "none") == []
