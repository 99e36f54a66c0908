"""skyctl as a user runs it: a process with its output in files, or on a pseudo-terminal of its own."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from skyctl.cli.app import main
from skyctl.probe import cluster_probe
from skyctl.remote import session_factory
from skyctl.remote.forkserver_client import PRELOADED_MODULES, ForkServerClient

from .processes import until
from .warm_python import ForkedCommand, warm_python

COMMAND_S = 400.0
"""How long a command may take, on a machine that does much else."""

BRIEF_S = 0.3
"""How long layers are measured where their times matter to no test."""

LIBRARY = "transformers.models.llama.modeling_llama"

PROCESS_ONLY = ("SKYCTL_TEST_TAG", "PYTEST_CURRENT_TEST")
"""The variables that this process keeps of its own, though a command's environment was copied before."""

SKYCTL = [sys.executable, "-m", "skyctl"]
Done = subprocess.CompletedProcess[str]


def run_here(capsys: pytest.CaptureFixture[str], *words: str) -> Done:
    """skyctl in this process, which has imported torch already, to any end; bugs come out as they are."""
    capsys.readouterr()
    code: object = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["skyctl", *words])
        try:
            main()
        except SystemExit as exc:
            code = exc.code or 0
    out, err = capsys.readouterr()
    return subprocess.CompletedProcess(words, int(str(code)), out, err)


def run_in(folder: Path, *words: str, **env: str) -> Done:
    """skyctl as a process of its own in that folder, to any end; ``env`` is added to the environment."""
    with tempfile.TemporaryDirectory() as said:
        command = Command([*SKYCTL, *words], {**os.environ, **env}, folder, Path(said) / "it")
        try:
            return command.wait()
        finally:
            command.close()


def run_inside(folder: Path, *words: str, **env: str) -> Done:
    """As ``run_in``, in this process, which has imported torch already: half of a command's CPU time.

    For commands that nothing happens to, and whose own process no test looks at.
    """
    out, err = io.StringIO(), io.StringIO()
    ends = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    ended: object = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["skyctl", *words])
        for name, value in env.items():
            patch.setenv(name, value)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main()
        except SystemExit as exc:
            ended = exc.code or 0
        finally:
            for number, handler in ends.items():  # else what is started from here would inherit them
                signal.signal(number, handler)
    return subprocess.CompletedProcess(words, int(str(ended)), out.getvalue(), err.getvalue())


@contextlib.contextmanager
def brief_probes() -> Iterator[None]:
    """Probes of this process take as little time as they can, and do not compare a cut with its model."""
    brief = functools.partial(cluster_probe.ProbeOptions, budget_s=BRIEF_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_probe, "ProbeOptions", lambda **asked: brief(**asked | {"compare_cut": False}))
        yield


@contextlib.contextmanager
def library_preloaded() -> Iterator[None]:
    """Local nodes' fork server imports ``transformers`` first, else each task spends 3 CPU seconds on it."""

    def client(modules: Sequence[str]) -> ForkServerClient:
        return ForkServerClient((*modules, LIBRARY) if modules == PRELOADED_MODULES else modules)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_factory, "ForkServerClient", client)
        yield


def run_briefly(folder: Path, *words: str, **env: str) -> Done:
    """``run_inside`` with ``brief_probes``: for whole jobs of which no test looks at what was measured."""
    with brief_probes():
        return run_inside(folder, *words, **env)


def run_hub_briefly(folder: Path, *words: str, **env: str) -> Done:
    """``run_briefly`` with ``library_preloaded``, for models of a Hub folder."""
    with library_preloaded():
        return run_briefly(folder, *words, **env)


class Command:
    """A process. Its output goes to files, which can be read at any time: it never waits for a reader."""

    def __init__(self, argv: list[str], env: Mapping[str, str], folder: Path, said: Path) -> None:
        self._out, self._err = said.with_suffix(".out"), said.with_suffix(".err")
        with self._out.open("w+b") as out, self._err.open("wb") as err:
            self.process: subprocess.Popen[bytes] | ForkedCommand
            if argv[:3] == SKYCTL and warm_python().can_run(env):
                self.process = warm_python().start(argv[3:], env, folder, out.fileno(), err.fileno())
            else:
                self.process = subprocess.Popen(
                    argv, env=dict(env), cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err
                )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def text(self) -> str:
        """All of it, for a failed test."""
        return f"exit code {self.process.poll()}\n{self.err}\n{self.out}"

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def wait(self, timeout_s: float = COMMAND_S) -> Done:
        """To its end, whatever that is."""
        code = self.process.wait(timeout_s)
        return subprocess.CompletedProcess(self.process.args, code, self.out, self.err)

    def end(self, code: int = 0, timeout_s: float = COMMAND_S) -> Done:
        """To its end, which must be with that exit code, and without a traceback."""
        done = self.wait(timeout_s)
        assert done.returncode == code, self.text
        assert "Traceback" not in done.stderr, self.text
        return done

    def kill(self) -> None:
        """SIGKILL, where it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Nothing of it goes on."""
        self.kill()


class Terminal:
    """A command on a pseudo-terminal of its own, in a session of its own, as a terminal's shell starts it."""

    def __init__(self, argv: list[str], env: Mapping[str, str], folder: Path) -> None:
        self._fd, child = pty.openpty()
        self.process = subprocess.Popen(
            argv,
            cwd=folder,
            env={**env, "TERM": "dumb"},
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - as a terminal's shell does
        )
        os.close(child)
        self.text = ""
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while not self._closing.is_set():
                if select.select([self._fd], [], [], 0.1)[0]:
                    self.text += os.read(self._fd, 4096).decode(errors="replace")
        except OSError:  # nobody has the other end any more
            return

    def types(self, keys: str, *, answered: str | None = None) -> None:
        """Types that; waits until there is one more of the words that it is answered with."""
        before = self.text.count(answered) if answered else 0
        os.write(self._fd, keys.encode())
        if answered:
            until(lambda: self.text.count(answered) > before, lambda: self.text)

    def hang_up(self) -> None:
        """The terminal is closed."""
        if not self._closing.is_set():
            self._closing.set()
            self._reader.join()
            os.close(self._fd)

    def end(self, code: int = 0, timeout_s: float = COMMAND_S) -> Done:
        """As ``Command.end``; what it printed is in ``stderr``."""
        self.process.wait(timeout_s)
        assert self.process.returncode == code, self.text
        return subprocess.CompletedProcess(self.process.args, code, "", self.text)

    def close(self) -> None:
        """Nothing of it goes on."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.hang_up()


class Skyctl:
    """skyctl in a folder of its own (``folder``), with a state folder of its own (``state``)."""

    def __init__(self, folder: Path, state: Path, cluster: Path | None = None) -> None:
        self.folder = folder
        self.state = state
        self.env = {**os.environ, "SKYCTL_HOME": str(state), "NO_COLOR": "1"}
        if cluster is not None:
            self.env["SKYCTL_CLUSTER"] = str(cluster)
        self.started: list[Command | Terminal] = []
        self._said = state.parent / f"{state.name}-said"
        self._said.mkdir()
        self._count = 0

    def start(self, *words: str, program: tuple[str, ...] = ("-m", "skyctl"), **env: str) -> Command:
        """``program``: what Python is given, else skyctl itself; ``env`` is added to the environment."""
        self._count += 1
        said = self._said / f"{self._count:03d}"
        made = Command([sys.executable, *program, *words], {**self.env, **env}, self.folder, said)
        self.started.append(made)
        return made

    def run(self, *words: str, code: int | None = 0, **env: str) -> Done:
        """To its end, which must be with that exit code (None: any)."""
        child = self.start(*words, **env)
        return child.wait() if code is None else child.end(code)

    def run_inside(self, *words: str, code: int | None = 0, **env: str) -> Done:
        """As ``run``, by the function ``run_inside``."""
        kept = {name: value for name, value in self.env.items() if name not in PROCESS_ONLY}
        done = run_inside(self.folder, *words, **{**kept, **env})
        text = f"{done.returncode}\n{done.stderr}\n{done.stdout}"
        assert code is None or (done.returncode == code and "Traceback" not in done.stderr), text
        return done

    def probe_briefly(self, workload: str, *words: str) -> None:
        """Probes it inside this process, for figures that matter to no test."""
        with brief_probes():
            self.run_inside("probe", workload, *words)

    def on_terminal(self, *words: str) -> Terminal:
        made = Terminal([*SKYCTL, *words], self.env, self.folder)
        self.started.append(made)
        return made

    def end(self) -> None:
        """Nothing that was started here goes on; for tests that failed half-way."""
        while self.started:
            self.started.pop().close()
