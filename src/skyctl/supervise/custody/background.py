"""A run's supervisor without a terminal: ``python -m skyctl.supervise.custody.background RUN_ID``.

``handing.py`` starts it. What it says goes to the run's ``supervisor.log``. SIGTERM, which a machine sends
that shuts down, leaves the run to whoever attaches to it next; its nodes hold meanwhile.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback

from skyctl.errors import SkyctlError
from skyctl.files import RunPaths
from skyctl.launch.events import Progress, Watcher
from skyctl.supervise.custody.leaving import Leaving
from skyctl.supervise.custody.saying import say
from skyctl.supervise.custody.supervisors import claim

CLAIM_S = 30.0
STEP_EVERY_S = 60.0
"""How often a step is mentioned; all of them stand in ``metrics.jsonl``."""


def watcher_of(paths: RunPaths) -> Watcher:
    """What is worth a line of its own in the log, beside what ``saying.kept`` keeps."""
    said_at = float("-inf")

    def step(progress: Progress) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= STEP_EVERY_S or progress.step + 1 == progress.steps:
            said_at = time.monotonic()
            say(
                paths.supervisor_log,
                "note",
                f"step {progress.step + 1} of {progress.steps} · loss {progress.loss:.4f} "
                f"· {progress.iteration_s:.3f} s",
            )

    return Watcher(step=step, interrupted=lambda: "go on")


def supervise(run_id: str) -> int:
    """Supervises the run to its end; an exit code."""
    from skyctl.supervise.custody.adopting import take_over
    from skyctl.supervise.custody.charge import Charge

    paths = RunPaths(run_id)
    leaving = Leaving()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ``leaving`` goes by it
    try:
        with claim(paths, attached=False, wait_s=CLAIM_S) as held, leaving.on((signal.SIGTERM,)):
            over = take_over(held, leaving.beside(watcher_of(paths)), Charge.leave)
        if over is None:
            say(paths.supervisor_log, "note", "this process was told to end; the run goes on on its nodes")
            return 128 + signal.SIGTERM
    except KeyboardInterrupt as exc:
        say(paths.supervisor_log, "note", "; ".join(["stopped", *getattr(exc, "__notes__", ())]))
        return 0
    except SkyctlError as exc:
        say(paths.supervisor_log, "error", str(exc))
        return exc.exit_code
    except BaseException:
        say(paths.supervisor_log, "error", traceback.format_exc())
        raise
    return 0


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1]))
