"""A Python for a node whose own is too old to run anything of skyctl's: uv brings it, started by a shell.

It goes to ``skyctl/python`` beside the environments, and goes with the last of them (``setup.node``). The
shell removes what it does not finish, because the connection ends or uv fails.
"""

from __future__ import annotations

import gzip
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace

from skyctl.errors import ProtocolError, PythonTooOldError, UnfitError
from skyctl.records.cluster import Node
from skyctl.remote.base import CommandChannel, ConnectOptions
from skyctl.remote.bootstrap import NONCE_CHARS, open_channel, read_marked_line, write_all
from skyctl.remote.session_factory import connect_node
from skyctl.setup.wheels import WheelFetcher, WheelTarget

BRING_TIMEOUT_S = 1800.0
OLDEST_GLIBC = "2.17"
"""Of the uv that is sent where it is not known what the node has."""

# Programs that lie there are run. So every folder on the way must be this user's or root's, and closed to
# others but the user's own group. Whether that has other members, the setup that follows finds.
_SCRIPT = r"""
umask 077
say() { printf '\nNONCE %s\n' "$1"; }
fail() { say "failed $1"; exit 1; }
finish() {
    kill $watch 2>/dev/null
    [ -z "$work" ] || rm -rf "$work"
    [ -n "$brought" ] && return
    rm -rf "$home/.temp"
    ls -d "$home"/cpython* >/dev/null 2>&1 || { rm -rf "$home"; rmdir "$data/skyctl"; } 2>/dev/null
}
work= brought= watch=
case "$XDG_DATA_HOME" in /*) data=$XDG_DATA_HOME ;; *) data=$HOME/.local/share ;; esac
home=$data/skyctl/python
mkdir -p "$home" && home=$(cd -P "$home" && pwd -P) || fail "$home can't be made"
at=$home group=
[ "$(id -gn)" != "$(id -un)" ] || group="-o -group $(id -g)"
while :; do
    safe=$(find "$at" -prune \( -user "$(id -u)" -o -user 0 \) \
        \( -perm -1000 -o ! -perm -0002 \( ! -perm -0020 $group \) \) -print)
    [ -n "$safe" ] || fail "others can write to $at"
    [ "$at" = / ] && break
    at=$(dirname "$at")
done
trap finish EXIT
trap 'exit 143' HUP INT TERM PIPE
say "$(uname -s) $(uname -m)"
read -r size || exit 1
work=$(mktemp -d "$home/.new-XXXXXX") || fail "$home can't be written to"
head -c "$size" | gzip -dc >"$work/uv" && chmod 700 "$work/uv" || fail "there is no room in $home"
export UV_CACHE_DIR="$work/cache" TMPDIR="$work" UV_PYTHON_INSTALL_DIR="$home"
export UV_NO_CONFIG=1 UV_NO_PROGRESS=1 NO_COLOR=1
cd "$work"
exec 3<&0
"$work/uv" python install --managed-python --no-bin VERSION </dev/null >said 2>&1 &
job=$!
{ cat <&3; kill "$job"; } >/dev/null 2>&1 &
watch=$!
wait "$job" || fail "$(tail -c 1000 said | tr '\n' ' ')"
found=$("$work/uv" python find --managed-python VERSION) || fail "uv does not find what it has installed"
brought=1
say "at $found"
"""


def bring_python(
    node: Node,
    options: ConnectOptions,
    old: PythonTooOldError,
    wheels: WheelFetcher,
    say: Callable[[str, float], None],
) -> str:
    """Installs a Python as new as this machine's on the node, unless it is there; gives its path there.

    Raises:
        UnfitError: it can't be had; nothing of it is left.
        NodeError: the node can't be reached.
    """
    version = ".".join(map(str, sys.version_info[:2]))

    def script(nonce: str) -> bytes:
        exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in node.env.items())
        return (exports + _SCRIPT.replace("VERSION", version).replace("NONCE", nonce)).encode()

    def exchange(channel: CommandChannel, nonce: str) -> str:
        write_all(channel, script(nonce))
        system, _, machine = read_answer(channel, nonce).partition(" ")
        target = WheelTarget(version, system, machine, OLDEST_GLIBC if system == "Linux" else None)
        say(f"bringing Python {version}", 0.0)
        program = gzip.compress(wheels.program(node.name, target)[0].read_bytes(), 1)
        write_all(channel, b"%d\n" % len(program) + program)
        path = read_answer(channel, nonce).removeprefix("at ")
        if not path.startswith("/"):
            raise ProtocolError(f"node {node.name} says of no Python that it was brought", node=node.name)
        return path

    def read_answer(channel: CommandChannel, nonce: str) -> str:
        answer = read_marked_line(node, channel, nonce).decode(errors="replace")
        if answer.startswith("failed "):
            raise UnfitError(
                f"{old.message}, and it can't get one: {answer.removeprefix('failed ').strip()}",
                node=node.name,
                hint="name a newer one in cluster.yaml: `python: /path/to/python3`, or a mirror that it "
                "reaches: `env: {UV_PYTHON_INSTALL_MIRROR: URL}`",
            )
        return answer

    length = len(script("0" * NONCE_CHARS))
    command = f"/bin/sh -c 'eval \"$(dd bs=1 count={length} 2>/dev/null)\"'"
    node_connection = connect_node(node, options)
    try:
        patient = replace(options, start_timeout_s=BRING_TIMEOUT_S)
        channel, python = open_channel(node_connection, patient, exchange, command=command)
        channel.close()
        return python
    finally:
        node_connection.close()
