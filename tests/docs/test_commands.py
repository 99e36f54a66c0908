"""Every command that README, CONTRIBUTING and docs/ show: skyctl's parser takes it, and it was run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs import command_runs as runs
from tests.docs.documented_commands import ROOT, Shown, command_of, inline, options_of, parse, shown

from skyctl.cli.examples import EXAMPLES

from ..helpers.commands import brief_probes, run_here

COMMANDS = shown()
CLUSTER = """\
name: home
nodes:
  - {name: tower, transport: local, threads: 1}
  - {name: oldbox, transport: local, threads: 1, slowdown: 2.0}
"""
TARGETS = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_there_are_some() -> None:
    assert len(COMMANDS) > 40
    assert {command.page for command in COMMANDS} >= {"README.md", "docs/quickstart.md", "docs/runs.md"}


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_it_can_be_typed(command: Shown) -> None:
    if command.words[0].endswith("skyctl"):
        parse(command.words[1:])
    elif command.words[0] == "make":
        assert command.words[1] in TARGETS
    else:
        file = next((word for word in command.words[1:] if word.endswith(".py")), None)
        assert file is None or (ROOT / file).is_file()


@pytest.mark.parametrize(
    "words",
    [("bogus",), ("plan", "x", "--startegy", "even"), ("checkpoint", "list", "x"), ("probe", "a", "b")],
)
def test_the_parser_refuses_what_is_wrong(words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse(words)


def test_commands_in_the_text_have_no_options_that_are_not_there() -> None:
    wrong = []
    for command in inline():
        # Words after a placeholder, a choice or -- are not skyctl's command line any more.
        words = [word.rstrip(",.;:") for word in command.words[1:]]
        plain = next((i for i, w in enumerate(words) if w == "--" or re.search(r"[|…\[\]]", w)), len(words))
        if not words or words[0] == "COMMAND":
            continue
        try:
            _, parser, rest = command_of(tuple(words[:plain]))
        except ValueError as exc:
            wrong.append(f"{command}: {exc}")
            continue
        known = options_of(parser)
        wrong += [f"{command}: {w}" for w in rest if w.startswith("-") and w.split("=")[0] not in known]
    assert not wrong


def test_each_is_run_or_says_what_it_needs() -> None:
    known = {*runs.RUN, *runs.ELSEWHERE}
    for page, file in runs.PAGES.items():
        assert page in (ROOT / file).read_text(encoding="utf-8")
    unmarked = [one for one in COMMANDS if one.needs is None and one.page not in runs.PAGES]
    missing = [str(command) for command in unmarked if command.text not in known]
    assert not missing, (
        "neither run (tests/docs/command_runs.py) nor marked (<!-- needs: … -->):\n" + "\n".join(missing)
    )
    stale = sorted(set(runs.RUN) - {command.text for command in COMMANDS})
    assert not stale, f"in tests/docs/command_runs.py, but in no document: {stale}"


@pytest.mark.parametrize("command", sorted({command.text for command in COMMANDS} & {*runs.ELSEWHERE}))
def test_what_is_run_elsewhere_is_there(command: str) -> None:
    file, text = runs.ELSEWHERE[command]
    assert text in (ROOT / file).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the documents assume: a train.py, a book, other tools' inventories, the example."""
    made = tmp_path_factory.mktemp("documented")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(# train\.py.*?)```", readme, re.DOTALL)
    assert found is not None
    (made / "train.py").write_text(found[1])
    (made / "book.txt").write_text("It was a bright cold day in April. " * 200)
    (made / "inventory.yml").write_text("all: {hosts: {tower: {ansible_user: ada}}}\n")
    (made / "hostfile").write_text("worker-1 slots=4\nworker-2 slots=2\n")
    (made / "docs" / "examples").mkdir(parents=True)
    for name in ("problem.json", "problem-data.json"):
        text = (ROOT / "docs" / "examples" / name).read_bytes()
        (made / "docs" / "examples" / name).write_bytes(text)
    return made


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs skyctl in the folder: its exit code, and all that it said."""
    (folder / "home").mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    for name, where in (("HOME", "home"), ("SKYCTL_HOME", "state"), ("XDG_CACHE_HOME", "cache")):
        monkeypatch.setenv(name, str(folder / where))

    def call(*words: str) -> tuple[int, str]:
        with brief_probes():
            ran = run_here(capsys, *words)
        return ran.returncode, ran.stdout + ran.stderr

    return call


@pytest.mark.slow
def test_they_run(folder: Path, run: Run) -> None:
    done: set[tuple[str, ...]] = set()
    for text in runs.RUN:
        words = tuple(runs.small(_words(text)))
        if words in done:
            continue
        done.add(words)
        cluster = folder / "cluster.yaml"
        if words[0] == "init":
            cluster.unlink(missing_ok=True)
        elif words[0] == "check":
            cluster.write_text(CLUSTER)
        code, said = run(*words)
        assert code == 0, f"{text}\n{said}"
        assert said, text


def _words(text: str) -> list[str]:
    return shlex.split(text)[1:]


@pytest.mark.alone  # how much advice is found in its time depends on what else runs
def test_what_the_faq_says_of_adding_a_machine_is_what_is_printed(folder: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "skyctl", "plan", "--problem", "docs/examples/problem.json"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    for page in ("faq.md", "planning.md", "planner.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for line in ran.stdout.splitlines():
            if line.startswith(("unused:", "what would help:", "  ", "what binds", "step:", "    0")):
                assert line in text or page == "faq.md", f"{page} lacks: {line}"
    unused = next(line for line in ran.stdout.splitlines() if line.startswith("unused"))
    assert unused in (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")


def test_what_the_data_parallel_page_shows_is_what_is_printed(folder: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "skyctl", "plan", "--problem", "docs/examples/problem-data.json"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    text = (ROOT / "docs" / "data-parallel.md").read_text(encoding="utf-8")
    for line in ran.stdout.splitlines():
        assert line in text or line.startswith("how sure"), line  # which has the seconds it took


def test_every_command_has_examples_that_parse() -> None:
    from typer.main import get_command

    from skyctl.cli.app import app

    names = []
    for name, command in get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        names += [name] if inner is None else [f"{name} {one}" for one in inner]
    assert sorted(names) == sorted(EXAMPLES)
    for name, examples in EXAMPLES.items():
        assert 2 <= len(examples) <= 4
        for example in examples:
            words = tuple(_words(example))
            assert " ".join(words).startswith(name)
            parse(words)
