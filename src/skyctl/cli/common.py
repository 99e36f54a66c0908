"""What the commands share: options, output, and how an error ends a command.

A command is a function decorated with ``command``. Its first parameter is the ``Output``, made from
``--json``, ``-q`` and ``-v``, which the decorator adds::

    @command
    def check(out: Output, *, cluster: ClusterOption = None, limit: LimitOption = None) -> None: ...

It returns None or an exit code, or raises; ``guarded`` turns what it raises into a message and an exit code.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from skyctl.cli.naming import complete_nodes
from skyctl.cli.output import Output, ReaderGoneError
from skyctl.errors import InputError, NodeError, SkyctlError

if TYPE_CHECKING:
    from skyctl.records.cluster import Cluster, Node
    from skyctl.remote.base import ConnectOptions

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "AcceptNewHostKeysOption",
    "ClusterOption",
    "DryRunOption",
    "LimitOption",
    "Output",
    "OutputOption",
    "Target",
    "Terminated",
    "TimeoutOption",
    "YesOption",
    "ask",
    "command",
    "confirm",
    "connect_options",
    "guarded",
    "interactive",
    "load_target",
]

ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "-c",
        "--cluster",
        envvar="SKYCTL_CLUSTER",
        metavar="FILE",
        help="The cluster file; default ./cluster.yaml.",
    ),
]
LimitOption = Annotated[
    str | None,
    typer.Option(
        "--limit",
        metavar="PATTERN",
        help="Only these nodes: names, globs, groups, !left-out.",
        autocompletion=complete_nodes,
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")]
YesOption = Annotated[bool, typer.Option("-y", "--yes", help="Ask nothing.")]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write the result.")
]
AcceptNewHostKeysOption = Annotated[
    bool,
    typer.Option(
        "--accept-new-host-keys", help="Trust and remember hosts never seen before (changed keys: never)."
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", min=0.1, help="How long to wait for a node to answer."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, the rest on stderr.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="No progress and no notes.")]
VerboseOption = Annotated[bool, typer.Option("-v", "--verbose", help="More detail, and tracebacks.")]

DEFAULT_TIMEOUT_S = 15.0


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came: whatever stops a run on Ctrl-C stops it on these too."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Target(NamedTuple):
    """The cluster in use, the file it came from, and all nodes of that file."""

    path: Path
    cluster: Cluster
    everyone: Sequence[Node]


def load_target(cluster: Path | None, limit: str | None = None, *, set_up: bool = True) -> Target:
    """The cluster file in use, read and limited.

    Args:
        set_up: nodes run the Python that `skyctl setup` has made there; else the one that the file names.

    Raises:
        InputError: no such file, a fault in it, or a limit that matches nothing.
    """
    from skyctl.inventory.read import cluster_path, read_cluster, select
    from skyctl.inventory.setups import with_setups

    path = cluster_path(cluster)
    whole = read_cluster(path)
    if set_up:
        whole = with_setups(whole)
    return Target(path, select(whole, limit), whole.nodes)


def connect_options(
    cluster_file: Path | None, *, accept_new_host_keys: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
) -> ConnectOptions:
    """How to connect. A ``known_hosts`` file beside the cluster file is read too (labs write one)."""
    from skyctl.remote.base import ConnectOptions

    beside = cluster_file.parent / "known_hosts" if cluster_file else None
    return ConnectOptions(
        accept_new_host_keys=accept_new_host_keys,
        timeout_s=timeout_s,
        known_hosts=str(beside) if beside and beside.is_file() else None,
    )


def check_output(path: Path | None) -> None:
    """Raises InputError, before any work is done, where the result could not be written to ``path``."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"-o {path} is a folder; give a file")
    if not path.absolute().parent.is_dir():
        folder = path.absolute().parent
        raise InputError(f"-o {path}: the folder {folder} does not exist", hint="make it first")


def command(function: Callable[..., int | None]) -> Callable[..., None]:
    """Makes a typer command of a function whose first parameter is the ``Output`` (see the module)."""
    signature = inspect.signature(function, eval_str=True)
    own = list(signature.parameters.values())[1:]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in (
            ("as_json", JsonOption),
            ("quiet", QuietOption),
            ("verbose", VerboseOption),
        )
    ]

    @functools.wraps(function)
    def wrapper(*, as_json: bool, quiet: bool, verbose: bool, **arguments: Any) -> None:
        out = Output(as_json=as_json, quiet=quiet, verbose=verbose)
        code = guarded(out, lambda: function(out, **arguments))
        if code:
            sys.exit(code)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
    wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=None
    )
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return wrapper


def guarded(out: Output, work: Callable[[], int | None]) -> int:
    """Runs ``work`` and gives the exit code; what it raises becomes one message on stderr.

    With ``--json`` and nothing printed yet, the error is the one document: ``{"error": {...}}``.
    """
    previous = _install_signals()
    try:
        try:
            # What the user's own code prints must not get into the one document.
            with contextlib.redirect_stdout(sys.stderr) if out.as_json else contextlib.nullcontext():
                code = work() or 0
            out.finish()
        except ReaderGoneError:
            raise
        except KeyboardInterrupt as exc:
            code = _exit_code(exc)
            fail(out, "; ".join(["interrupted", *getattr(exc, "__notes__", ())]), code)
        except SkyctlError as exc:
            code = _exit_code(exc)
            fail(out, exc, code)
            if out.verbose:
                out.trace(traceback.format_exc())
        except Exception as exc:  # noqa: BLE001
            code = 1
            fail(out, f"{type(exc).__name__}: {exc}", code, hint=_BUG)
            if out.verbose:
                out.trace(traceback.format_exc())
        return code
    except ReaderGoneError:
        out.discard()
        return 1
    finally:
        for signum, handler in previous.items():
            # After one of them came they stay ignored: the process is ending, and with the right code.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, handler)


_BUG = "this is a bug in skyctl; -v shows the traceback, please report it with that"


def fail(out: Output, error: SkyctlError | str, code: int, *, hint: str | None = None) -> None:
    """Says an error: ``error: …`` with hint and log on stderr; as JSON too where ``--json`` was given."""
    known = error if isinstance(error, SkyctlError) else SkyctlError(str(error), hint=hint)
    out.error(known)
    if out.as_json and not out.has_document:
        node = known.node if isinstance(known, NodeError) else None
        document = {"message": known.message, "hint": known.hint, "log": known.log, "node": node}
        changes = getattr(known, "changes", None)  # a table of differences, where there is one
        more = {} if changes is None else {"changes": changes}
        out.json({"error": {**document, "exit_code": code, **more}})


def _exit_code(exc: BaseException) -> int:
    """128 and the signal's number for a signal, 130 for Ctrl-C, else the error's own."""
    if isinstance(exc, Terminated):
        return 128 + exc.signum
    return exc.exit_code if isinstance(exc, SkyctlError) else 130


def _install_signals() -> dict[int, Any]:
    """SIGTERM and SIGHUP raise ``Terminated``, once: a second one must not cut the clean-up short."""

    def terminate(signum: int, _frame: FrameType | None) -> None:
        for other in previous:
            signal.signal(other, signal.SIG_IGN)
        raise Terminated(signum)

    previous: dict[int, Any] = {}
    for signum in (signal.SIGTERM, signal.SIGHUP):
        # Not where it is ignored (nohup) or somebody else's.
        if signal.getsignal(signum) is signal.SIG_DFL:
            try:
                previous[signum] = signal.signal(signum, terminate)
            except ValueError:  # not the main thread (a test, a notebook)
                return {}
    return previous


def interactive() -> bool:
    """Whether there is somebody to ask: a terminal on both stdin and stderr."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def confirm(out: Output, question: str, *, yes: bool, otherwise: bool = False) -> bool:
    """Asks on a terminal; with ``-y`` it is yes, and without a terminal it is ``otherwise``."""
    if yes:
        return True
    if not interactive():
        return otherwise
    out.pause()
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def ask(out: Output, question: str, default: str, *, yes: bool) -> str:
    """One line from the terminal; ``default`` with ``-y``, without a terminal, or for an empty line."""
    if yes or not interactive():
        return default
    out.pause()
    print(f"{question} ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() or default
