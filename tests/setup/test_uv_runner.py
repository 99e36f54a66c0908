"""Requirements files, settings of uv and pip, and what a Python lacks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from skyctl.errors import InputError
from skyctl.setup.installer import missing_requirements
from skyctl.setup.node import uv_runner
from skyctl.setup.wheels import WheelTarget
from skyctl.setup.workload_requirements import merge_requirements, read_workload_requirements

GOOD = {"torch": "2.13.0+cpu", "distributed": True, "fault": None, "versions": {}}


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
    ],
)
def test_lacks(changes: dict, words: tuple[str, ...]) -> None:
    assert missing_requirements({**GOOD, **changes}, "2.13.0") == words


@pytest.mark.parametrize(
    ("line", "unmet"),
    [
        ("a", False),
        ("A_b>=2", True),
        ("a >= 1, < 2", False),
        ("a==1.5 --hash=sha256:00", False),
        ("a @ https://example.org/a.whl", False),
        ("a>2 ; sys_platform == 'win32'", False),
        ("a>2 ; python_version >= '3.8'", True),
        ("none", True),
        ("odd>1", True),
    ],
)
def test_which_requirements_are_lacking(line: str, unmet: bool) -> None:
    versions = {"a": "1.5", "A_b": "1.5", "none": None, "odd": "no version"}
    found = {**GOOD, "versions": versions, "version": "3.9.1", "system": "Linux", "machine": "x86_64"}
    assert missing_requirements(found, "2.13.0", (line,)) == ((line,) if unmet else ())


def test_what_uv_says() -> None:
    full = uv_runner.UvResult(2, ("Resolved 2", "error: Failed", "  cause: kein Platz (os error 28)"))
    assert full.is_disk_full
    assert full.words == "Failed cause: kein Platz (os error 28)"
    assert not uv_runner.UvResult(1, ("error: No solution (os error 2)",)).is_disk_full
    assert uv_runner.UvResult(2, ("odd",)).words == "odd"
    assert uv_runner.UvResult(2, ()).words == "status 2"


def test_uv_is_told_of_pips_settings_and_led_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for key in [key for key in os.environ if key.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(key)
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "pip.conf").write_text(
        "[global]\nindex_url = http://file\ntimeout = 7\nfind-links = /a\n  /b\n[install]\ntarget = /x\n"
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "http://one http://two")
    for key, value in {
        "PIP_TARGET": "/x",
        "PYTHONPATH": "/y",
        "UV_TARGET": "/z",
        "UV_CONFIG_FILE": "/z",
        "UV_HTTP_TIMEOUT": "9",
    }.items():
        monkeypatch.setenv(key, value)
    found = uv_runner.uv_environment(tmp_path, {"index_url": None, "extra_index_url": None})
    assert (found["UV_DEFAULT_INDEX"], found["UV_INDEX"]) == ("http://file", "http://one http://two")
    assert (found["UV_FIND_LINKS"], found["UV_HTTP_TIMEOUT"]) == ("/a,/b", "9")
    assert not {"PYTHONPATH", "UV_TARGET", "UV_CONFIG_FILE"} & set(found)
    found = uv_runner.uv_environment(tmp_path, {"index_url": "http://mine", "extra_index_url": "http://more"})
    assert (found["UV_DEFAULT_INDEX"], found["UV_INDEX"]) == ("http://mine", "http://more")
    found = uv_runner.uv_environment(tmp_path, None)
    assert not {"UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS"} & set(found)
    assert (found["UV_OFFLINE"], found["TMPDIR"]) == ("1", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert "UV_DEFAULT_INDEX" not in uv_runner.uv_environment(tmp_path, {})


def test_options_of_pip_that_uv_has_under_another_name() -> None:
    lines, arguments = uv_runner.split_options(
        [
            "--pre",
            "--trusted-host=a.b",
            "--trusted-host c.d",
            "--prefer-binary",
            "--extra-index-url https://x",
        ]
    )
    assert lines == ["--extra-index-url https://x"]
    assert arguments == [
        "--prerelease",
        "allow",
        "--allow-insecure-host",
        "a.b",
        "--allow-insecure-host",
        "c.d",
    ]


@pytest.mark.parametrize(
    ("system", "machine", "glibc", "name"),
    [
        ("Linux", "x86_64", "2.35", "x86_64-manylinux_2_35"),
        ("Linux", "aarch64", "2.30", "aarch64-manylinux_2_28"),
        ("Linux", "x86_64", "2.99", "x86_64-manylinux_2_40"),
        ("Linux", "x86_64", "2.12", None),
        ("Linux", "x86_64", None, None),
        ("Linux", "ppc64le", "2.35", None),
        ("Darwin", "arm64", None, "aarch64-apple-darwin"),
    ],
)
def test_what_uv_calls_a_nodes_system(system: str, machine: str, glibc: str | None, name: str | None) -> None:
    assert WheelTarget("3.11.7", system, machine, glibc).platform == name
