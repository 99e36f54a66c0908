"""Requirements files, pip's words, and what a Python lacks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyctl.errors import InputError
from skyctl.setup.installer import missing_requirements
from skyctl.setup.node import pip_runner
from skyctl.setup.workload_requirements import merge_requirements, read_workload_requirements

GOOD = {"torch": "2.13.0+cpu", "distributed": True, "missing": [], "fault": None}


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def test_requirements_are_read_as_pip_would(train: Path) -> None:
    (train.parent / "more.txt").write_text("c[extra]==1.0 ; python_version >= '3.8'\n")
    (train.parent / "requirements.txt").write_text(
        "# comment\n\na >= 1, \\\n  < 2\nb @ https://example.org/b.whl#sha256=ab  # why\n"
        "--extra-index-url https://example.org/simple\n--pre\n-r more.txt\na >= 1,   < 2\n"
    )
    found = read_workload_requirements(str(train))
    assert found.lines == (
        "a >= 1,   < 2",
        "b @ https://example.org/b.whl#sha256=ab",
        "c[extra]==1.0 ; python_version >= '3.8'",
    )
    assert found.options == ("--extra-index-url https://example.org/simple", "--pre")


def test_nothing_is_required(train: Path) -> None:
    assert read_workload_requirements(None).lines == read_workload_requirements("gpt:layers=2").lines == ()
    assert read_workload_requirements(str(train)).lines == ()


@pytest.mark.parametrize(
    "line", ["-e .", "./x.whl", "/x.whl", "https://x/y.whl", "--hash-all", "-c more.txt", "-r ."]
)
def test_lines_that_nodes_can_not_have(train: Path, line: str) -> None:
    (train.parent / "requirements.txt").write_text(f"a\n{line}\n")
    with pytest.raises(InputError) as caught:
        read_workload_requirements(str(train))
    assert "requirements.txt:2" in str(caught.value) or line == "-r ."


def project(train: Path, text: str) -> None:
    (train.parent / "pyproject.toml").write_text(text)


def test_a_projects_dependencies_are_read(train: Path) -> None:
    project(
        train,
        '[project]\nname = "x"\ndependencies = ["a >= 1", "c[extra]==1 ; python_version >= \'3.8\'",'
        ' "b @ https://example.org/b.whl", "a >= 1", "t_o.rch"]\n'
        '[project.optional-dependencies]\nmore = ["d"]\n[dependency-groups]\ndev = ["e"]\n'
        '[tool.uv.sources]\nT-o-rch = [{index = "cpu", marker = "x"}]\nother = {path = "../other"}\n',
    )
    found = read_workload_requirements(str(train))
    assert found.lines == (
        "a >= 1",
        "c[extra]==1 ; python_version >= '3.8'",
        "b @ https://example.org/b.whl",
        "t_o.rch",
    )
    assert found.source == str(train.parent / "pyproject.toml")
    assert ["project.dependencies of" in found.notes[0], "t_o.rch: its index" in found.notes[1]] == [True] * 2


def test_requirements_txt_goes_before_a_project(train: Path) -> None:
    project(train, "no TOML at all")
    (train.parent / "requirements.txt").write_text("a\n")
    found = read_workload_requirements(str(train))
    assert found.lines == ("a",)
    assert found.notes == (
        f"requirements are read from {train.parent}/requirements.txt, not from pyproject.toml",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[project]\ndynamic = ["version", "dependencies"]\n', "dynamic dependencies, which setup does not"),
        ("[tool.ruff]\n", "names no project.dependencies"),
        ("[project]\ndependencies = []\n", "names no project.dependencies"),
    ],
)
def test_a_project_that_requires_nothing_says_so(train: Path, text: str, said: str) -> None:
    project(train, text)
    found = read_workload_requirements(str(train))
    assert (found.lines, found.source) == ((), None)
    assert said in found.notes[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[project\n", "is no TOML"),
        ('[project]\ndependencies = "a"\n', "has to be a list of texts"),
        ("[project]\ndependencies = [1]\n", "has to be a list of texts"),
        ('[project]\ndependencies = ["a @ file:///x"]\n', "lies on this machine"),
        ('[project]\ndependencies = ["-e ."]\n', "lies on this machine"),
        ('[project]\ndependencies = ["--index-url https://x"]\n', "does not know the option '--index-url'"),
        (
            '[project]\ndependencies = ["a.b>=1"]\n[tool.uv.sources]\nA_b = {git = "https://x"}\n',
            "tool.uv.sources says where 'a.b>=1' comes from",
        ),
    ],
)
def test_projects_that_nodes_can_not_have(train: Path, text: str, said: str) -> None:
    project(train, text)
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        read_workload_requirements(str(train))
    assert "pyproject.toml" in str(caught.value)


def test_files_that_include_each_other(train: Path) -> None:
    (train.parent / "requirements.txt").write_text("-r requirements.txt\n")
    with pytest.raises(InputError, match="include each other"):
        read_workload_requirements(str(train))


def test_what_is_new_wins() -> None:
    assert merge_requirements(("a==2", "b"), ("A==1", "c-d", "C_d")) == ("a==2", "b", "c-d", "C_d")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ()),
        ({"torch": "2.13.1"}, ()),
        ({"torch": None}, ("torch",)),
        ({"torch": "2.4.1"}, ("torch 2.13 (it has 2.4.1)",)),
        ({"distributed": False}, ("a torch with torch.distributed (its 2.13.0+cpu has none)",)),
        ({"torch": None, "fault": "OSError: libx"}, ("a torch that works (OSError: libx)",)),
        ({"missing": ["a>=1"]}, ("a>=1",)),
    ],
)
def test_lacks(changes: dict, words: tuple[str, ...]) -> None:
    assert missing_requirements({**GOOD, **changes}, "2.13.0") == words


def test_what_pip_says() -> None:
    refused = "WARNING: Retrying (Retry(0)) after connection broken by 'NewConnectionError(...)': /torch/"
    gone = "ERROR: No matching distribution found for nosuch==1 (from torch)"
    offline = pip_runner.PipResult(1, (refused, gone))
    assert offline.offline == refused
    assert offline.unmatched == "nosuch==1"
    assert pip_runner.PipResult(1, (gone,)).offline is None
    full = pip_runner.PipResult(
        1, ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",)
    )
    assert full.disk_full
    assert "No space left" in full.why
    assert pip_runner.PipResult(2, ("odd", "")).why == "odd"
    parse = pip_runner.parse_pip_activity
    assert parse("  Downloading https://x/y/torch-2.13.0.whl (190.5 MB)") == (
        "downloading torch-2.13.0.whl (190.5 MB)",
        False,
    )
    assert parse("Collecting torch==2.13.0") == ("looking for torch==2.13.0", False)
    assert parse("Installing collected packages: a, b, c") == ("installing 3 packages", True)
    assert parse("Looking in links: /x") is None


def test_pip_is_led_nowhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key, value in {"PIP_TARGET": "/x", "PIP_INDEX_URL": "http://own", "PYTHONPATH": "/y"}.items():
        monkeypatch.setenv(key, value)
    found = pip_runner.pip_environment(
        tmp_path, {"index_url": None, "extra_index_url": "http://more"}, offline=False
    )
    assert "PIP_TARGET" not in found
    assert "PYTHONPATH" not in found
    assert (found["PIP_INDEX_URL"], found["PIP_EXTRA_INDEX_URL"]) == ("http://own", "http://more")
    found = pip_runner.pip_environment(tmp_path, {"index_url": "http://x"}, offline=True)
    assert "PIP_INDEX_URL" not in found
    assert found["TMPDIR"] == str(tmp_path)
