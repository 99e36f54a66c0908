"""The host that a node's name leads to, and which host keys are known."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest

from skyctl.errors import InputError
from skyctl.records.cluster import Node
from skyctl.remote import ssh, ssh_authentication
from skyctl.remote.base import ConnectOptions
from skyctl.remote.ssh_config import SshTarget, resolve_ssh_target

BLOB = b"\0\0\0\x0bssh-ed25519" + b"k" * 36
KEY = base64.b64encode(BLOB).decode()


def target(tmp_path: Path, config: str, **node: object) -> SshTarget:
    path = tmp_path / "config"
    path.write_text(config)
    return resolve_ssh_target(
        Node(**{"name": "n", **node}), ConnectOptions(ssh_config=str(path)), ssh._read_config_with_paramiko
    )  # type: ignore[arg-type]


def test_configuration_and_what_wins(tmp_path: Path) -> None:
    config = (
        "Host tower\n  HostName tower.example\n  Port 2222\n  User ada\n"
        "  IdentitiesOnly yes\n  IdentityFile ~/.ssh/%h\n"
        "  ConnectTimeout 3\n  UserKnownHostsFile /a /b\n"
        "  HostKeyAlias t\n  StrictHostKeyChecking accept-new\n"
        "Match user bob host tower.example\n  ProxyJump gate\n"
    )
    ssh_target = target(tmp_path, config, name="tower")
    assert (ssh_target.hostname, ssh_target.port, ssh_target.user, ssh_target.key_name) == (
        "tower.example",
        2222,
        "ada",
        "t",
    )
    assert ssh_target.identities_only
    assert ssh_target.identity_files[0].endswith("/.ssh/tower.example")
    assert ssh_target.timeout_s == 3
    assert ssh_target.known_hosts[:2] == ("/a", "/b")
    assert ssh_target.accept_new
    assert ssh_target.jumps == ()
    over = target(tmp_path, config, name="x", host="tower", port=23, user="bob", identity_file="~/k")
    assert (over.hostname, over.port, over.user) == ("tower.example", 23, "bob")
    assert over.identity_file == str(Path("~/k").expanduser())
    assert [hop.hostname for hop in over.jumps] == ["gate"]


def test_jumps(tmp_path: Path) -> None:
    config = "Host gate\n  HostName gate.example\n  ProxyJump outer\nHost n\n  ProxyJump gate\n"
    assert [hop.hostname for hop in target(tmp_path, config).jumps] == ["outer", "gate.example"]
    assert target(tmp_path, config, proxy_jump="none").jumps == ()
    hops = target(tmp_path, config, proxy_jump="eve@a:24, [::1]:25, gate").jumps
    assert [(hop.hostname, hop.port) for hop in hops] == [("a", 24), ("::1", 25), ("gate.example", 22)]
    assert hops[0].user == "eve"
    assert hops[1].address == "[::1]:25"
    for circle in (
        "Host n\n  ProxyJump n\n",
        "Host a\n  ProxyJump b\nHost b\n  ProxyJump a\nHost n\n  ProxyJump a\n",
    ):
        with pytest.raises(InputError, match=r"circle|loop"):
            target(tmp_path, circle)
    for bad in ("a b", "host:0", "host:99999", "-oX"):
        with pytest.raises(InputError, match="is not a"):
            target(tmp_path, "", proxy_jump=bad)


def test_bad_configuration(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`ssh -G n` failed"):
        target(tmp_path, "Nonsense yes\n")
    with pytest.raises(InputError, match="does not exist"):
        resolve_ssh_target(
            Node(name="n"), ConnectOptions(ssh_config="/no/such"), ssh._read_config_with_paramiko
        )


def test_known_hosts(tmp_path: Path) -> None:
    path = tmp_path / "known hosts"
    path.write_text(
        f"# comment\n\nother ssh-ed25519 {KEY}\n*.example,!bad.example ssh-ed25519 {KEY}\n"
        f"@revoked [h]:23 ssh-ed25519 {KEY}\nh ssh-ed25519 not*base64\nshort\n[h]:22?? ecdsa {KEY} comment\n"
    )
    keys = ssh_authentication.find_known_keys([str(path), "/no/such"], "A.example")
    assert [(key.line, key.kind, key.blob, key.marker) for key in keys] == [(4, "ssh-ed25519", BLOB, "")]
    assert ssh_authentication.find_known_keys([str(path)], "bad.example") == []
    assert [key.marker for key in ssh_authentication.find_known_keys([str(path)], "[h]:23")] == ["@revoked"]
    assert [key.line for key in ssh_authentication.find_known_keys([str(path)], "[h]:2222")] == [8]
    assert ssh_authentication.find_known_keys([str(path)], "h") == []


def test_hashed_known_hosts(tmp_path: Path) -> None:
    path = tmp_path / "kh"
    path.write_text(
        f"tower.example ssh-ed25519 {KEY}\n[tower.example]:23 ssh-ed25519 {KEY}\n|1|x|y ssh-ed25519 {KEY}\n"
    )
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(path)], check=True, capture_output=True)
    assert "tower" not in path.read_text()
    assert [key.line for key in ssh_authentication.find_known_keys([str(path)], "tower.example")] == [1]
    assert [key.line for key in ssh_authentication.find_known_keys([str(path)], "[tower.example]:23")] == [2]


def test_append(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kh"
    ssh_authentication.append_known_key(str(path), "h", "ssh-ed25519", BLOB)
    path.write_text(path.read_text().rstrip("\n"))
    ssh_authentication.append_known_key(str(path), "i", "ssh-ed25519", BLOB)
    assert path.read_text() == f"h ssh-ed25519 {KEY}\ni ssh-ed25519 {KEY}\n"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    ssh_authentication.append_known_key("/dev/null", "h", "ssh-ed25519", BLOB)
