"""``skyctl init``: a first cluster.yaml."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from skyctl.cli.common import ClusterOption, DryRunOption, YesOption, ask, command, confirm
from skyctl.cli.output import Output
from skyctl.errors import InputError

_NOTHING = "name them, as in `skyctl init tower ada@192.0.2.10`, or use this machine: `skyctl init --local 1`"


@command
def init(
    out: Output,
    *,
    hosts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOST]...", help="ssh aliases or [user@]host[:port]; default: ~/.ssh/config."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The file to write; default ./cluster.yaml."),
    ] = None,
    cluster: ClusterOption = None,
    local: Annotated[
        int, typer.Option("--local", min=0, metavar="N", help="Add this machine, as that many nodes.")
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it is there.")] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Write a cluster.yaml from hosts, or from the aliases of ~/.ssh/config."""
    from skyctl.files import write_atomic
    from skyctl.inventory.init import local_nodes, node_of, render
    from skyctl.inventory.read import DEFAULT_PATH, default_name

    path = output or cluster or Path(DEFAULT_PATH)
    nodes = [node_of(host) for host in hosts or ()]
    if not nodes and not local:
        nodes = [node_of(alias) for alias in _chosen_aliases(out, yes)]
    nodes += local_nodes(local) if local else []
    to_stdout = dry_run or str(path) == "-"
    text = render(nodes, "home" if str(path) == "-" else default_name(path))
    if to_stdout:
        out.line(text.rstrip())
    else:
        if path.exists() and path.is_file() and not force:
            _may_overwrite(out, path, yes)
        write_atomic(path, text, mode=None)
        out.line(f"wrote {path} with {len(nodes)} node{'s' if len(nodes) != 1 else ''}")
        check = "skyctl check" if str(path) == DEFAULT_PATH else f"skyctl check -c {shlex.quote(str(path))}"
        out.note(f"next: {check}")
    names = [node.name for node in nodes]
    out.json({"path": None if to_stdout else str(path), "nodes": names, "text": text})


def _may_overwrite(out: Output, path: Path, yes: bool) -> None:
    if not confirm(out, f"{path} is there already; overwrite it?", yes=yes):
        raise InputError(f"{path} is there already", hint="--force overwrites it; -o names another file")


def _chosen_aliases(out: Output, yes: bool) -> list[str]:
    from skyctl.inventory.init import ssh_aliases

    aliases = ssh_aliases()
    if not aliases:
        raise InputError("no host was given, and ~/.ssh/config names none", hint=_NOTHING)
    if yes or not sys.stdin.isatty():
        return aliases
    for number, alias in enumerate(aliases, 1):
        print(f"  {number:3}  {alias}", file=sys.stderr)
    answer = ask(out, "which of these? (numbers or names; empty: all)", "", yes=yes)
    words = [word for word in re.split(r"[\s,]+", answer) if word]
    chosen = []
    for word in words:
        if word in aliases:
            chosen.append(word)
        elif word.isdigit() and 1 <= int(word) <= len(aliases):
            chosen.append(aliases[int(word) - 1])
        else:
            raise InputError(f"{word!r} is none of them", hint=f"give numbers from 1 to {len(aliases)}")
    return list(dict.fromkeys(chosen)) or aliases
