"""A run's supervisor without a terminal: ``python -m skyctl.control.background RUN_ID``.

``handing.py`` starts it. What it says goes to the run's ``supervisor.log``. SIGTERM, which a machine sends
that shuts down, leaves the run to whoever attaches to it next; its nodes hold meanwhile.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from types import FrameType

from skyctl.control.saying import say
from skyctl.control.supervisors import claim
from skyctl.errors import SkyctlError
from skyctl.files import RunPaths
from skyctl.launch.events import Progress, Watcher

CLAIM_S = 30.0
STEP_EVERY_S = 60.0
"""How often a step is mentioned; all of them stand in ``metrics.jsonl``."""


class _Ending:
    """Whether SIGTERM has come. While the run trains, it is taken up as Ctrl-C is."""

    def __init__(self) -> None:
        self.wanted = False
        for signum in (signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self.wanted = True
        signal.raise_signal(signal.SIGINT)

    def answer(self) -> str:
        """What is to become of the run."""
        return "detach" if self.wanted else "go on"


def watcher_of(paths: RunPaths, ending: _Ending) -> Watcher:
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

    return Watcher(step=step, interrupted=ending.answer)


def supervise(run_id: str) -> int:
    """Supervises the run to its end; an exit code."""
    from skyctl.control.adopting import take_over
    from skyctl.control.charge import Charge

    paths = RunPaths(run_id)
    ending = _Ending()
    try:
        with claim(paths, attached=False, wait_s=CLAIM_S) as held:
            if take_over(held, watcher_of(paths, ending), Charge.leave) is not None:
                return 0
        say(paths.supervisor_log, "note", "this process was told to end; the run goes on on its nodes")
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        # It was told to end while it went back to the nodes, or between two attempts.
        say(paths.supervisor_log, "note", "this process was told to end")
        return 128 + signal.SIGTERM
    except SkyctlError as exc:
        say(paths.supervisor_log, "error", str(exc))
        return exc.exit_code
    except BaseException:
        say(paths.supervisor_log, "error", traceback.format_exc())
        raise


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1]))
