"""``skyctl lab``: a heterogeneous cluster emulated on this machine."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import command
from skyctl.cli.examples import format_examples
from skyctl.cli.mistyped_words import SkyctlCommand, SkyctlGroup
from skyctl.cli.option_values import complete_lab
from skyctl.errors import InputError, SkyctlError

if TYPE_CHECKING:
    from skyctl.lab.lab_state import LabState

app = typer.Typer(
    cls=SkyctlGroup,
    no_args_is_help=True,
    help="A heterogeneous cluster emulated on this Linux machine, reached over real SSH (needs root).",
)

LabsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LAB.yaml|NAME", help="Which labs; default: every one.", autocompletion=complete_lab
    ),
]


@command
def up(
    out: Output,
    *,
    file: Annotated[Path, typer.Argument(metavar="LAB.yaml", help="What to emulate.")],
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
    """Bring up the lab that a lab.yaml describes."""
    from skyctl.lab import lab_setup
    from skyctl.lab import lab_state as states
    from skyctl.lab.lab_spec import read_lab

    spec = read_lab(file)
    state = states.find_lab(file) if name is None else None
    chosen = name or (state.name if state else states.free_name(file))
    began = time.monotonic()
    with out.progress("lab up") as progress:
        progress(f"{len(spec.nodes)} nodes")
        state = lab_setup.up(spec, output, chosen, source=file, pythons=_parse_pythons(python or []))
    status = lab_setup.status(state)
    for warning in state.warnings:
        out.warn(warning)
    out.line(f"lab {state.name} is up: {len(state.nodes)} nodes ({time.monotonic() - began:.1f} s)")
    _show_nodes(out, status)
    out.note(f"next: skyctl check -c {shlex.quote(str(state.cluster))}", wrap=False)
    out.note(f"      ssh -F {shlex.quote(str(state.ssh_config))} {state.nodes[0].name}")
    out.json(status)


def _parse_pythons(given: list[str]) -> dict[str, str]:
    """``NODE=PATH`` texts as a map. Raises InputError for anything else."""
    result = {}
    for text in given:
        node, equals, path = text.partition("=")
        if not (node and equals and path):
            raise InputError(f"--python takes NODE=PATH, not {text!r}")
        result[node] = path
    return result


@command
def status(out: Output, *, labs: LabsArgument = None) -> int:
    """Show which labs are up, and whether they are healthy (exit 1 where not)."""
    from skyctl.lab import lab_setup
    from skyctl.lab import lab_state as states

    chosen = [_find_lab(text) for text in labs] if labs else states.list_labs()
    shown = [lab_setup.status(state) for state in chosen]
    for shown_lab in shown:
        out.line(f"lab {shown_lab['name']}: {shown_lab['cluster']}")
        _show_nodes(out, shown_lab)
        switch = shown_lab["switch"]
        if switch["kind"] == "user" and switch["cpu_s"] is not None:
            out.line(f"between sites: a user-space switch, {switch['cpu_s']:.2f} s of CPU so far")
        elif switch["kind"] == "netem":
            out.line("between sites: netem")
        for fault in shown_lab["faults"]:
            out.line(f"✗ {fault}", style="red")
    if not shown:
        out.line("no lab is up")
    out.json({"labs": shown})
    return 1 if any(shown_lab["faults"] for shown_lab in shown) else 0


@command
def down(
    out: Output,
    *,
    labs: Annotated[
        list[str] | None,
        typer.Argument(metavar="LAB.yaml|NAME", help="Which labs to take down.", autocompletion=complete_lab),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every lab that is up.")] = False,
) -> None:
    """Take labs down, and clean up after them."""
    from skyctl.lab import lab_state as states
    from skyctl.lab import teardown

    if bool(labs) == everything:
        raise InputError("name a lab (its lab.yaml or its name), or give --all", hint="skyctl lab status")
    names = {text: _lab_name(text) for text in labs or ()}
    if everything:
        names = {state.name: state.name for state in states.list_labs()}
    taken_down = []
    for text, name in names.items():
        if name is not None and teardown.down(name):
            taken_down.append(name)
            out.line(f"lab {name} is down; nothing of it is left")
        else:
            out.line(f"no lab of {text} is up")
    out.json({"down": taken_down})


def _lab_name(text: str) -> str | None:
    """The name of the lab that a lab.yaml or a name means; None where no lab of that lab.yaml is up.

    Raises:
        InputError: the text is neither a file nor the name of a lab.
    """
    from skyctl.files import lab_folder
    from skyctl.lab import lab_state as states

    state = states.find_lab(text)
    if state is not None:
        return state.name
    if Path(text).is_file():
        return None
    name = states.check_name(text)
    if lab_folder(name).exists():
        return name  # its state file can't be read; it can be taken down nevertheless
    raise InputError(f"there is no lab and no file called {text!r}", hint="skyctl lab status")


def _find_lab(text: str) -> LabState:
    """The lab that is up under that name, or of that lab.yaml. Raises SkyctlError where there is none."""
    from skyctl.lab import lab_state as states

    state = states.find_lab(text)
    if state is None:
        raise SkyctlError(f"no lab of {text} is up", hint="skyctl lab up LAB.yaml")
    return state


def _show_nodes(out: Output, status: dict[str, Any]) -> None:
    """Prints a table of a lab's nodes."""
    rows = []
    for node in status["nodes"]:
        state = "up" if node["sshd"] else ("no sshd" if node["alive"] else "gone")
        memory = None if node["memory_gib"] is None else f"{node['memory_gib']:g} GiB"
        rate = None if node["rate_mbit"] is None else f"{node['rate_mbit']:g} Mbit/s"
        used = None if node["cpu_s"] is None else f"{node['cpu_s']:.1f} s"
        rows.append(
            [node["name"], node["address"], node["site"], f"{node['cpus']:g}", memory, rate, used, state]
        )
    out.table(["node", "address", "site", "cpus", "memory", "link", "CPU used", "state"], rows)


for function in (up, status, down):
    app.command(function.__name__, cls=SkyctlCommand, epilog=format_examples(f"lab {function.__name__}"))(
        function
    )
