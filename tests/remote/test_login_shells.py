"""Login shells that are not bash, over a real sshd: as a user's shell gets the command from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyctl.errors import UnfitError
from skyctl.records.cluster import Node
from skyctl.remote.session_factory import open_session

from .answers import run_node_task

SHELLS = ("bash", "dash", "fish", "tcsh", "zsh")
STARTUP = {
    "bash": ".bashrc",
    "fish": ".config/fish/config.fish",
    "tcsh": ".tcshrc",
    "zsh": ".zshenv",
}
"""The file that each reads before any command; dash reads nothing."""


@pytest.fixture
def shell_node(sshd) -> Iterator[Callable[..., Node]]:
    """``shell_node(shell, startup)``: a node with that login shell, and these lines in its start-up file.

    A forced command gives this shell what sshd gives a user's own one. bash needs none.
    """
    keys = sshd.folder / "authorized_keys"
    kept = keys.read_text()

    def make(shell: str, startup: str = "", **changes: object) -> Node:
        program = shutil.which(shell)
        if program is None:
            pytest.skip(f"{shell} is not installed")
        if startup and shell in STARTUP:
            file = sshd.home / STARTUP[shell]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(startup)
        forced = f'command="exec {program} -c \\"$SSH_ORIGINAL_COMMAND\\""'
        if shell == "bash":
            forced = "restrict"
        keys.write_text(f"{kept}{forced} {(sshd.folder / 'other.pub').read_text()}")
        return sshd.node(identity_file=str(sshd.folder / "other"), **changes)

    yield make
    keys.write_text(kept)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_banner_and_a_python_in_a_home_with_blanks(sshd, shell_node, task_env, shell: str) -> None:
    (sshd.home / "my env").mkdir()
    (sshd.home / "my env/python").symlink_to(shutil.which("python3") or "/usr/bin/python3")
    node = shell_node(shell, "echo 'Grüße, a prompt> '\nls /nowhere\n", python="~/my env/python")
    with open_session(node, sshd.options()) as session:
        assert session.hello.home == str(sshd.home)
        assert run_node_task(session, {"do": "noisy"}, 20, task_env(session)) == {}


@pytest.mark.parametrize("shell", SHELLS)
def test_no_python_there(sshd, shell_node, shell: str) -> None:
    with pytest.raises(UnfitError) as refused:
        open_session(shell_node(shell, python="python-of-nobody"), sshd.options())
    csh = "ended with status 1 before python-of-nobody had run: python-of-nobody: "
    assert (csh if shell == "tcsh" else "has no python-of-nobody: ") in refused.value.message
    assert "python: /path/to/python3" in str(refused.value.hint)
    assert "import" not in refused.value.message  # fish repeats the whole command


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_startup_file_that_misses_something_and_exits(sshd, shell_node, shell: str) -> None:
    """It is not the Python that was not found, though the shell's last words are of something else."""
    node = shell_node(shell, "module-of-nobody load cuda\nexit 7\n")
    with pytest.raises(UnfitError, match="ended with status 7 before") as refused:
        open_session(node, sshd.options())
    assert "module-of-nobody" in refused.value.message
    assert Path(STARTUP[shell]).name in str(refused.value.hint)
