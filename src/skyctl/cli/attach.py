"""``skyctl attach``: watch a run again, and supervise it where nobody does."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from skyctl.cli import common
from skyctl.cli.common import Output, command
from skyctl.cli.naming import RunArgument
from skyctl.errors import RunError, SkyctlError

if TYPE_CHECKING:
    from skyctl.supervise.custody.runs import Seen
    from skyctl.supervise.custody.supervisors import Claim


@command
def attach(out: Output, run: RunArgument = None, yes: common.YesOption = False) -> int:
    """Show a run as `launch` does, until it ends.

    A run whose supervisor is gone gets this process as its supervisor: its ranks, where they go on, are taken
    over without a gap; where nothing of it is left, it goes on from its last checkpoint.
    Ctrl-C asks whether to stop the run, to detach from it or to go on; without a terminal and with -y it
    stops it. SIGTERM and a closed terminal detach.
    """
    from skyctl.supervise.custody.runs import of, refuse_unfinished, seen
    from skyctl.supervise.custody.supervisors import claim

    found = seen(run)
    refuse_unfinished(found)
    name = found.paths.run_id
    if run is None:
        out.note(f"run {name}")
    while not found.ended:
        if found.standing == "alive":
            if (code := _view(out, found, yes=yes)) is not None:
                return code
        else:
            try:
                claimed = claim(found.paths, attached=True)
            except SkyctlError:
                if of(name).standing != "alive":
                    raise
                # Somebody else was quicker; that one can be watched.
            else:
                return _become(out, claimed, yes=yes)
        found = of(name)
    return _end(out, found)


def _view(out: Output, found: Seen, *, yes: bool) -> int | None:
    """Shows what another process supervises; an exit code, or None where that is for the run to say."""
    from skyctl.cli.surviving import show_over
    from skyctl.cli.viewing import View
    from skyctl.supervise.custody.runs import of

    name = found.paths.run_id
    outcome = View(out, found, yes=yes).watch()
    if outcome == "detached":
        show_over(out, name, None)
        return 0
    if outcome == "stopped":
        status = of(name).state.status
        out.note(f"run {name} is {status}")
        out.json({"run_id": name, "status": status})
        return 130
    if outcome == "alone":
        out.warn("its supervisor is gone; this process goes on with it")
    return None


def _become(out: Output, claimed: Claim, *, yes: bool) -> int:
    """Supervises the run from here on, until it ends or is left."""
    from skyctl.cli.surviving import show_over
    from skyctl.cli.watching import watcher
    from skyctl.supervise.custody.adopting import take_over
    from skyctl.supervise.custody.handing import hand_over
    from skyctl.supervise.custody.leaving import Leaving

    leaving = Leaving()
    with (
        claimed,
        out.progress("attach") as progress,
        leaving.on((signal.SIGHUP, signal.SIGTERM)),
    ):
        watch = leaving.beside(watcher(out, progress, yes=yes, leaving=True))
        over = take_over(claimed, watch, lambda charge: hand_over(charge, watch.phase))
    show_over(out, claimed.paths.run_id, over)
    return 0


def _end(out: Output, found: Seen) -> int:
    """What became of a run that is over. Raises RunError where it failed."""
    from skyctl.cli.surviving import show_run
    from skyctl.files import read_record
    from skyctl.records.measurement import Measurement

    name, state = found.paths.run_id, found.state
    if state.status == "failed":
        raise RunError(
            f"run {name} failed: {state.detail or 'it does not say why'}", log=str(found.paths.folder)
        )
    if state.status == "stopped" or not found.paths.measurement.is_file():
        out.line(f"run {name} was {state.status} after {state.step} of {state.steps} steps")
        out.json({"run_id": name, "status": state.status})
        return 0 if state.status == "done" else 1
    show_run(out, read_record(Measurement, found.paths.measurement), found.paths)
    return 0
