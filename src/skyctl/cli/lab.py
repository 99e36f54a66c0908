"""``skyctl lab``: a heterogeneous cluster emulated on this machine."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyctl.cli.common import command
from skyctl.cli.examples import epilog
from skyctl.cli.naming import complete_lab
from skyctl.cli.output import Output
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.lab.state import LabState

app = typer.Typer(
    no_args_is_help=True,
    help="A heterogeneous cluster emulated on this Linux machine, reached over real SSH (needs root).",
)

FileArgument = Annotated[Path, typer.Argument(metavar="LAB.yaml", help="What to emulate.")]
LabsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[LAB.yaml|NAME]...", help="Which labs; default: every one.", autocompletion=complete_lab
    ),
]


@command
def up(
    out: Output,
    *,
    file: FileArgument,
    name: Annotated[
        str | None, typer.Option("--name", help="The lab's name; default: the file's, numbered if taken.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FOLDER", help="Where cluster.yaml, known_hosts and ssh_config go."
        ),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option("--python", metavar="NODE=PATH", help="A node's interpreter; may be given often."),
    ] = None,
) -> None:
    """Bring a lab up."""
    from skyctl.lab import lab
    from skyctl.lab import state as states
    from skyctl.lab.spec import read_lab

    spec = read_lab(file)
    known = states.find(file) if name is None else None
    chosen = name or (known.name if known else states.free_name(file))
    begun = time.monotonic()
    with out.progress("lab up") as tick:
        tick(f"{len(spec.nodes)} nodes")
        state = lab.up(spec, output, chosen, source=file, pythons=_pythons(python or []))
    now = lab.status(state)
    for warning in state.warnings:
        out.warn(warning)
    out.line(f"lab {state.name} is up: {len(state.nodes)} nodes ({time.monotonic() - begun:.1f} s)")
    _table(out, now)
    out.note(f"next: skyctl check -c {shlex.quote(str(state.cluster))}")
    out.note(f"      ssh -F {shlex.quote(str(state.ssh_config))} {state.nodes[0].name}")
    out.json(now)


def _pythons(given: list[str]) -> dict[str, str]:
    result = {}
    for text in given:
        node, equals, path = text.partition("=")
        if not (node and equals and path):
            raise InputError(f"--python takes NODE=PATH, not {text!r}")
        result[node] = path
    return result


@command
def status(out: Output, *, labs: LabsArgument = None) -> int:
    """Show which labs are up and whether all is well with them (exit 1 where not)."""
    from skyctl.lab import lab
    from skyctl.lab import state as states

    found = [_known(text) for text in labs] if labs else states.labs()
    shown = [lab.status(state) for state in found]
    for now in shown:
        out.line(f"lab {now['name']}: {now['cluster']}")
        _table(out, now)
        switch = now["switch"]
        if switch["kind"] == "user" and switch["cpu_s"] is not None:
            out.line(f"between sites: a user-space switch, {switch['cpu_s']:.2f} s of CPU so far")
        elif switch["kind"] == "netem":
            out.line("between sites: netem")
        for fault in now["faults"]:
            out.line(f"✗ {fault}", style="red")
    if not shown:
        out.line("no lab is up")
    out.json({"labs": shown})
    return 1 if any(now["faults"] for now in shown) else 0


@command
def down(
    out: Output,
    *,
    labs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LAB.yaml|NAME]...", help="Which labs to take down.", autocompletion=complete_lab
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every lab that is up.")] = False,
) -> None:
    """Take labs down; nothing of them is left."""
    from skyctl.lab import lab
    from skyctl.lab import state as states

    if bool(labs) == everything:
        raise InputError("name a lab (its lab.yaml or its name), or give --all", hint="skyctl lab status")
    names = {text: _name(text) for text in labs or ()}
    if everything:
        names = {state.name: state.name for state in states.labs()}
    gone = []
    for text, name in names.items():
        if name is not None and lab.down(name):
            gone.append(name)
            out.line(f"lab {name} is down; nothing of it is left")
        else:
            out.line(f"no lab of {text} is up")
    out.json({"down": gone})


def _name(text: str) -> str | None:
    """The lab meant by a lab.yaml or a name; None where that lab.yaml has none. Raises InputError."""
    from skyctl.files import lab_folder
    from skyctl.lab import state as states

    state = states.find(text)
    if state is not None:
        return state.name
    if Path(text).is_file():
        return None
    name = states.check_name(text)
    if lab_folder(name).exists():
        return name  # its state file can't be read; it can be taken down all the same
    raise InputError(f"there is no lab and no file called {text!r}", hint="skyctl lab status")


def _known(text: str) -> LabState:
    from skyctl.lab import state as states

    state = states.find(text)
    if state is None:
        from skyctl.errors import SkyctlError

        raise SkyctlError(f"no lab of {text} is up", hint="skyctl lab up LAB.yaml")
    return state


def _table(out: Output, now: dict[str, Any]) -> None:
    rows = []
    for node in now["nodes"]:
        fit = "up" if node["sshd"] else ("no sshd" if node["alive"] else "gone")
        memory = None if node["memory_gib"] is None else f"{node['memory_gib']:g} GiB"
        rate = None if node["rate_mbit"] is None else f"{node['rate_mbit']:g} Mbit/s"
        used = None if node["cpu_s"] is None else f"{node['cpu_s']:.1f} s"
        rows.append(
            [node["name"], node["address"], node["site"], f"{node['cpus']:g}", memory, rate, used, fit]
        )
    out.table(["node", "address", "site", "cpus", "memory", "link", "CPU used", "state"], rows)


for function in (up, status, down):
    app.command(function.__name__, epilog=epilog(f"lab {function.__name__}"))(function)
