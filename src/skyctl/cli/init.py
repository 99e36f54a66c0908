"""``skyctl init``: a first cluster.yaml."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from skyctl.cli.common import ClusterOption, DryRunOption, YesOption, ask, command, confirm, interactive
from skyctl.cli.naming import choices
from skyctl.cli.output import Output
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.inventory.init import NewNode, SlotsAs

_NOTHING = "name them, as in `skyctl init tower ada@192.0.2.10`, or use this machine: `skyctl init --local 1`"
_SLOTS = ("ignore", "cuda", "threads")
_FOREIGN = (
    "inventory.yml",
    "inventory.yaml",
    "inventory.ini",
    "inventory",
    "hosts.yml",
    "hosts.ini",
    "hostfile",
)


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
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="An Ansible inventory (YAML, INI), or a DeepSpeed or MPI hostfile."
        ),
    ] = None,
    slots: Annotated[
        str,
        typer.Option(
            "--slots",
            metavar="MEANING",
            help="What a hostfile's slots are: cuda (so many GPUs), threads (of the CPU), or ignore.",
            autocompletion=choices(*_SLOTS),
        ),
    ] = "ignore",
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
    """Write a cluster.yaml from hosts, ~/.ssh/config, an Ansible inventory or a hostfile.

    On a terminal it asks which machines to use. Nothing is connected to: `skyctl check` does that.
    """
    from skyctl.cli.training import one_of
    from skyctl.files import write_atomic
    from skyctl.inventory.init import local_nodes, node_of, render, with_slots
    from skyctl.inventory.read import DEFAULT_PATH, default_name

    meant = cast("SlotsAs", one_of("--slots", slots, _SLOTS))
    path = output or cluster or Path(DEFAULT_PATH)
    nodes = [node_of(host) for host in hosts or ()]
    groups: dict[str, tuple[str, ...]] = {}
    if source is not None:
        imported, groups = _imported(out, source, slots)
        nodes += with_slots(imported, meant)
    elif not nodes and not local:
        nodes = _asked(out, yes)
    nodes += local_nodes(local) if local else []
    to_stdout = dry_run or str(path) == "-"
    text = render(nodes, "home" if str(path) == "-" else default_name(path), groups)
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


def _imported(out: Output, source: Path, slots: str) -> tuple[list[NewNode], dict[str, tuple[str, ...]]]:
    """The nodes and groups of another tool's file; what was left out of it is said."""
    from skyctl.inventory.foreign.imported import read_foreign

    found = read_foreign(source)
    groups = f" in {len(found.groups)} groups" if found.groups else ""
    out.note(f"{source}: {found.kind}, {len(found.nodes)} nodes{groups}")
    for note in found.notes:
        out.warn(note)
    counted = [node for node in found.nodes if node.slots]
    if counted and slots == "ignore":
        out.warn(
            f"slots are not taken ({counted[0].name} has {counted[0].slots}): a node uses all its "
            "accelerators, else its CPU; --slots cuda or --slots threads says what they count"
        )
    return list(found.nodes), found.groups


def _asked(out: Output, yes: bool) -> list[NewNode]:
    """Nodes that somebody at the terminal names; without one, all aliases of ~/.ssh/config."""
    from skyctl.inventory.init import local_nodes, node_of, ssh_aliases

    aliases = ssh_aliases()
    if yes or not interactive():
        if not aliases:
            raise InputError("no host was given, and ~/.ssh/config names none", hint=_NOTHING)
        return [node_of(alias) for alias in aliases]
    for name in _FOREIGN:
        if Path(name).is_file():
            out.note(f"{name} is here: `skyctl init --from {name}` takes its hosts")
    for number, alias in enumerate(aliases, 1):
        print(f"  {number:3}  {alias}", file=sys.stderr)
    what = "which of these?" if aliases else "which machines?"
    hint = "numbers or names, other hosts as user@host:port"
    answer = ask(out, f"{what} ({hint}; empty: {'all' if aliases else 'none'})", "", yes=yes)
    chosen = list(dict.fromkeys(_word(word, aliases) for word in re.split(r"[\s,]+", answer) if word))
    nodes = [node_of(host) for host in chosen or aliases]
    if confirm(out, "this machine too, as a node of its own?", yes=False):
        nodes += local_nodes(1)
    if not nodes:
        raise InputError("no machine was named", hint=_NOTHING)
    return nodes


def _word(word: str, aliases: list[str]) -> str:
    """A number of the list, a name in it, or a host of its own."""
    if word in aliases or not word.isdigit():
        return word
    if 1 <= int(word) <= len(aliases):
        return aliases[int(word) - 1]
    raise InputError(
        f"{word!r} is none of them", hint=f"give numbers from 1 to {len(aliases)}, names, or user@host"
    )
