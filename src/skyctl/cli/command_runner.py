"""How a command is run: its options, its output, and how an error ends it.

A command is a function decorated with ``command``. Its first parameter is the ``Output``, made from
``--json``, ``-q`` and ``-v``, which the decorator adds; a parameter whose type is a group of options (a
dataclass, see ``options``) stands for all options of the group::

    @command
    def check(out: Output, nodes: ClusterOptions, dry_run: DryRunOption = False) -> None: ...

It returns None or an exit code, or raises; ``run_guarded`` makes message and exit code of what it raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, get_type_hints

import typer

from skyctl.cli.command_output import Output, ReaderGoneError
from skyctl.cli.help_panels import HelpAllOption
from skyctl.cli.progress_display import strip_control
from skyctl.errors import InputError, NodeError, SkyctlError


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The options that every command takes: how it prints."""

    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, the rest on stderr.")
    ] = False
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress and no notes.")] = False
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="More detail, and tracebacks.")] = False


HELP_ALL = "help_all"
"""The parameter of ``--help-all``, which no command looks at."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived. A KeyboardInterrupt, so that what stops at Ctrl-C stops at these, too."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


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
    groups: dict[str, type[Any]] = {
        p.name: p.annotation
        for p in own
        if isinstance(p.annotation, type) and dataclasses.is_dataclass(p.annotation)
    }

    @functools.wraps(function)
    def wrapper(**arguments: Any) -> None:
        del arguments[HELP_ALL]
        out = Output(**_pop_values(arguments, OutputOptions))
        for name, group in groups.items():
            arguments[name] = group(**_pop_values(arguments, group))
        code = run_guarded(out, lambda: function(out, **arguments))
        if code:
            sys.exit(code)

    parameters: list[inspect.Parameter] = []
    for parameter in own:
        if parameter.name in groups:
            parameters += _expand_group(groups[parameter.name])
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    parameters += _expand_group(OutputOptions)
    parameters.append(
        inspect.Parameter(HELP_ALL, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=HelpAllOption)
    )
    wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=None
    )
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    # typer keeps the line breaks of a docstring, which a narrower terminal would break once more.
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    wrapper.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return wrapper


def _expand_group(group: type[Any]) -> list[inspect.Parameter]:
    """The options of a group, in the order of its fields."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    ]


def _pop_values(arguments: dict[str, Any], group: type[Any]) -> dict[str, Any]:
    """The values of a group's options, taken out of ``arguments``."""
    return {field.name: arguments.pop(field.name) for field in dataclasses.fields(group)}


def is_given(context: typer.Context, parameter: str, *, in_file: bool = False) -> bool:
    """Whether a parameter was given on the command line (not by the environment or a default).

    Args:
        in_file: or in the file of defaults.
    """
    source = context.get_parameter_source(parameter)
    return source is not None and source.name in ("COMMANDLINE", *(["DEFAULT_MAP"] if in_file else []))


def run_guarded(out: Output, work: Callable[[], int | None]) -> int:
    """Runs ``work`` and returns the exit code; what it raises becomes one message on stderr.

    With ``--json`` and nothing printed yet, the error is the one document: ``{"error": {...}}``.
    """
    previous = _install_signals()
    try:
        try:
            # Text that the user's own code prints must not end up in the one document.
            with contextlib.redirect_stdout(sys.stderr) if out.as_json else contextlib.nullcontext():
                code = work() or 0
            out.finish()
        except ReaderGoneError:
            raise
        except KeyboardInterrupt as exc:
            code = _exit_code(exc)
            report_error(out, "; ".join(["interrupted", *getattr(exc, "__notes__", ())]), code)
        except SkyctlError as exc:
            code = _exit_code(exc)
            report_error(out, exc, code)
            if out.verbose:
                out.trace(traceback.format_exc())
        except Exception as exc:  # noqa: BLE001
            code = 1
            report_error(out, f"{type(exc).__name__}: {exc}", code, hint=_BUG_HINT)
            if out.verbose:
                out.trace(traceback.format_exc())
        return code
    except ReaderGoneError:
        out.discard()
        return 1
    finally:
        for signum, handler in previous.items():
            # Once one of them has arrived they stay ignored: the process is ending, with the right code.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, handler)


_BUG_HINT = "this is a bug in skyctl; -v shows the traceback, please report it with that"


def report_error(out: Output, error: SkyctlError | str, code: int, *, hint: str | None = None) -> None:
    """Prints ``error: …`` with hint and log on stderr, and the JSON document where ``--json`` was given."""
    failure = error if isinstance(error, SkyctlError) else SkyctlError(str(error), hint=hint)
    out.error(failure)
    if out.as_json and not out.has_document:
        node = failure.node if isinstance(failure, NodeError) else None
        document = {"message": failure.message, "hint": failure.hint, "log": failure.log, "node": node}
        changes = getattr(failure, "changes", None)  # a table of differences, where there is one
        more = {} if changes is None else {"changes": changes}
        out.json({"error": {**document, "exit_code": code, **more}})


def _exit_code(exc: BaseException) -> int:
    """The exit code: 128 + number for a signal, 130 for Ctrl-C, else the error's own."""
    if isinstance(exc, Terminated):
        return 128 + exc.signum
    return exc.exit_code if isinstance(exc, SkyctlError) else 130


def _install_signals() -> dict[int, Any]:
    """Makes SIGTERM and SIGHUP raise ``Terminated``, once: a second one must not cut the clean-up short.

    Returns:
        The handlers that were replaced, by signal.
    """

    def terminate(signum: int, _frame: FrameType | None) -> None:
        for other in previous:
            signal.signal(other, signal.SIG_IGN)
        raise Terminated(signum)

    previous: dict[int, Any] = {}
    for signum in (signal.SIGTERM, signal.SIGHUP):
        # Not where the signal is ignored (nohup) or handled by someone else.
        if signal.getsignal(signum) is signal.SIG_DFL:
            try:
                previous[signum] = signal.signal(signum, terminate)
            except ValueError:  # not the main thread (a test, a notebook)
                return {}
    return previous


def is_interactive() -> bool:
    """Whether somebody can be asked: both stdin and stderr are terminals."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def confirm(out: Output, question: str, *, yes: bool, otherwise: bool = False) -> bool:
    """Asks a yes-or-no question on a terminal.

    Args:
        yes: do not ask; the answer is yes (``-y``).
        otherwise: the answer without a terminal.
    """
    if yes:
        return True
    if not is_interactive():
        return otherwise
    out.pause()
    print(f"{strip_control(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def ask(out: Output, question: str, default: str, *, yes: bool) -> str:
    """Asks for a line on the terminal; ``default`` with ``-y``, without a terminal, or if it is empty."""
    if yes or not is_interactive():
        return default
    out.pause()
    print(f"{strip_control(question)} ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() or default
