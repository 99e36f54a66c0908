"""``skyctl init``: a first cluster.yaml."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from skyctl.cli.command_output import Output, format_count
from skyctl.cli.command_runner import ask, command, confirm, is_interactive
from skyctl.cli.option_values import complete_choices, require_choice
from skyctl.cli.options import ClusterOption, DryRunOption, YesOption
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.inventory.cluster_template import NewNode, SlotsAs

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


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Options that say where the nodes come from, and where their file goes."""

    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="An Ansible inventory (YAML, INI), or a DeepSpeed or MPI hostfile."
        ),
    ] = None
    slots: Annotated[
        str,
        typer.Option(
            "--slots",
            metavar="MEANING",
            help="What a hostfile's slots are: cuda (so many GPUs), threads (of the CPU), or ignore.",
            autocompletion=complete_choices(*_SLOTS),
        ),
    ] = "ignore"
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The file to write; default ./cluster.yaml."),
    ] = None
    cluster: ClusterOption = None
    local: Annotated[
        int, typer.Option("--local", min=0, metavar="N", help="Add this machine, as that many nodes.")
    ] = 0
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False
    dry_run: DryRunOption = False
    yes: YesOption = False


@command
def init(
    out: Output,
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="HOST", help="ssh aliases, user@host:port, or several as in gpu[1-3,7]."),
    ] = None,
    *,
    options: InitOptions,
) -> None:
    """Write a cluster.yaml from hosts, ~/.ssh/config, an Ansible inventory or a hostfile.

    Without any it asks which machines to use; -y takes all of ~/.ssh/config. Nothing is connected to:
    `skyctl check` does that.
    """
    from skyctl.inventory.cluster_file import DEFAULT_PATH, default_name
    from skyctl.inventory.cluster_template import apply_slots, local_nodes, parse_hosts, render_cluster_file

    slots_as = cast("SlotsAs", require_choice("--slots", options.slots, _SLOTS))
    path = options.output or options.cluster or Path(DEFAULT_PATH)
    nodes = [node for host in hosts or () for node in parse_hosts(host)]
    groups: dict[str, tuple[str, ...]] = {}
    if options.source is not None:
        imported, groups = _import_nodes(out, options.source, options.slots)
        nodes += apply_slots(imported, slots_as)
    elif not nodes and not options.local:
        nodes = _ask_hosts(out, options.yes)
    nodes += local_nodes(options.local) if options.local else []
    to_stdout = options.dry_run or str(path) == "-"
    text = render_cluster_file(nodes, "home" if str(path) == "-" else default_name(path), groups)
    if to_stdout:
        out.line(text.rstrip())
    else:
        _write(out, path, text, overwrite=options.force, yes=options.yes)
        out.line(f"wrote {path} with {format_count(len(nodes), 'node')}")
        cluster_option = "" if str(path) == DEFAULT_PATH else f" -c {shlex.quote(str(path))}"
        out.note(f"next: skyctl check{cluster_option}", wrap=False)
    names = [node.name for node in nodes]
    out.json({"path": None if to_stdout else str(path), "nodes": names, "text": text})


def _write(out: Output, path: Path, text: str, *, overwrite: bool, yes: bool) -> None:
    """Writes the file; asks before one is overwritten. Raises InputError where the answer is no."""
    from skyctl.files import write_atomic

    question = f"{path} is there already; overwrite it?"
    if path.is_file() and not overwrite and not confirm(out, question, yes=yes):
        raise InputError(f"{path} is there already", hint="--force overwrites it; -o names another file")
    write_atomic(path, text, mode=None)


def _import_nodes(out: Output, source: Path, slots: str) -> tuple[list[NewNode], dict[str, tuple[str, ...]]]:
    """The nodes and groups of another tool's file; warns of what was left out of it."""
    from skyctl.inventory.foreign.foreign_inventory import read_foreign

    inventory = read_foreign(source)
    groups = f" in {len(inventory.groups)} groups" if inventory.groups else ""
    out.note(f"{source}: {inventory.kind}, {len(inventory.nodes)} nodes{groups}")
    for note in inventory.notes:
        out.warn(note)
    with_slots = [node for node in inventory.nodes if node.slots]
    if with_slots and slots == "ignore":
        out.warn(
            f"slots are not taken ({with_slots[0].name} has {with_slots[0].slots}): a node uses all its "
            "accelerators, else its CPU; --slots cuda or --slots threads says what they count"
        )
    return list(inventory.nodes), inventory.groups


def _ask_hosts(out: Output, yes: bool) -> list[NewNode]:
    """The nodes that are named at the terminal; with ``-y`` all aliases of ~/.ssh/config."""
    from skyctl.inventory.cluster_template import local_nodes, parse_host, parse_hosts, ssh_aliases
    from skyctl.inventory.host_ranges import split_hosts

    aliases = ssh_aliases()
    if yes or not is_interactive():
        if not aliases:
            raise InputError("no host was given, and ~/.ssh/config names none", hint=_NOTHING)
        if not yes:
            named = f"{', '.join(aliases[:5])}{', …' if len(aliases) > 5 else ''}"
            raise InputError(
                f"which hosts? none was given; ~/.ssh/config names {len(aliases)}: {named}",
                hint=f"name them, as in `skyctl init {shlex.join(aliases[:2])}`; -y takes all {len(aliases)}",
            )
        return [parse_host(alias) for alias in aliases]
    for name in _FOREIGN:
        if Path(name).is_file():
            out.note(f"{name} is here: `skyctl init --from {name}` takes its hosts")
    for number, alias in enumerate(aliases, 1):
        print(f"  {number:3}  {alias}", file=sys.stderr)
    what = "which of these?" if aliases else "which machines?"
    hint = "numbers or names, other hosts as user@host:port"
    answer = ask(out, f"{what} ({hint}; empty: {'all' if aliases else 'none'})", "", yes=yes)
    words = [word for part in answer.split() for word in split_hosts(part)]
    chosen = list(dict.fromkeys(_resolve_word(word, aliases) for word in words))
    nodes = [node for host in chosen or aliases for node in parse_hosts(host)]
    if confirm(out, "this machine too, as a node of its own?", yes=False):
        nodes += local_nodes(1)
    if not nodes:
        raise InputError("no machine was named", hint=_NOTHING)
    return nodes


def _resolve_word(word: str, aliases: list[str]) -> str:
    """The host that an answer's word means: by its number in the list, its alias, or its address."""
    if word in aliases or not word.isdigit():
        return word
    if 1 <= int(word) <= len(aliases):
        return aliases[int(word) - 1]
    raise InputError(
        f"{word!r} is not in the list", hint=f"give numbers from 1 to {len(aliases)}, names, or user@host"
    )
