"""Data files that are shipped: which names count, what is refused, and what changes a plan's workload."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from skyctl.errors import WorkloadError
from skyctl.jobs.training_request import digest_training, shipped_data_changed
from skyctl.workload import user_code
from skyctl.workload.ship_list import find_data_files, listed_names
from skyctl.workload.shipped_files import digest_workload, files_to_ship
from skyctl.workload.workload import Workload
from skyctl.workload.workload_spec import make_spec

MODEL = "def model(): return [nn.Linear(6, 4)]\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A train.py with data files beside it."""
    folder = tmp_path / "work"
    (folder / "images" / "cats").mkdir(parents=True)
    (folder / "images" / "__pycache__").mkdir()
    for name in ("points.csv", "more.csv", "images/1.png", "images/cats/2.png", "images/__pycache__/x.pyc"):
        (folder / name).write_text(name)
    path = folder / "train.py"
    path.write_text("def model(): pass\n")
    return path


def test_files_folders_and_globs_are_named_relative_to_the_file(script: Path) -> None:
    assert list(find_data_files(script, ["points.csv"])) == ["points.csv"]
    assert list(find_data_files(script, ["*.csv"])) == ["more.csv", "points.csv"]
    assert list(find_data_files(script, ["images/"])) == ["images/1.png", "images/cats/2.png"]
    assert list(find_data_files(script, ["images/cats", "images/*.png"])) == [
        "images/1.png",
        "images/cats/2.png",
    ]
    script.write_text('ship = ["points.csv"]\n')
    assert list(find_data_files(script, ["images/1.png"])) == ["images/1.png", "points.csv"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("x = 1\n", []),
        ('ship = ["a", "b"]\n', ["a", "b"]),
        ('ship: list[str] = ["a"]\n', ["a"]),
        ('ship = "a"\n', ["a"]),
        ("ship = ()\n", []),
        ("def f():\n    ship = name()\n", []),
    ],
)
def test_the_files_own_list_is_read_without_running_it(script: Path, text: str, names: list[str]) -> None:
    script.write_text(text + "1 / 0\n")
    assert listed_names(script) == names


@pytest.mark.parametrize("value", ["glob('*.csv')", "[NAME]", "3", "['a', 4]", "{'a': 1}", "[f'{x}']"])
def test_a_list_that_has_to_be_computed_is_refused_with_its_line(script: Path, value: str) -> None:
    script.write_text(f"import os\nship = {value}\n")
    with pytest.raises(WorkloadError, match=r"train\.py, line 2: ship must be a list of file names"):
        listed_names(script)


def test_what_can_not_be_shipped_is_refused_by_name(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = script.parent
    (folder.parent / "secret.txt").write_text("x")
    (folder / "link.txt").symlink_to(folder.parent / "secret.txt")
    (folder / "links").mkdir()
    (folder / "links" / "all").symlink_to(folder / "images")
    (folder / "broken").symlink_to("nowhere")
    (folder / "empty").mkdir()
    (folder / ".manifest.json").write_text("{}")
    os.mkfifo(folder / "pipe")
    refused = {
        "../secret.txt": "only what is in the folder",
        "/etc/hosts": "only what is in the folder",
        "": "only what is in the folder",
        "nothing.csv": "there is no such file in",
        "*.parquet": "there is no such file in",
        "link.txt": "link.txt is a link that leads out of",
        "links": "links/all is a link to a folder",
        "broken": "broken",
        "empty": "the folder is empty",
        ".manifest.json": "can't be shipped",
        "pipe": "no regular file",
    }
    for name, words in refused.items():
        with pytest.raises(WorkloadError, match=words) as error:
            find_data_files(script, [name])
        assert name in error.value.message
    monkeypatch.setattr(user_code, "SHIP_LIMIT_BYTES", 1 << 20)
    (folder / "big.bin").write_bytes(bytes(3 << 19))
    with pytest.raises(WorkloadError, match=r"1\.5 MiB, 2 files \(the largest: big\.bin\); 1 MiB") as error:
        find_data_files(script, ["big.bin", "points.csv"])
    assert "same absolute path on every node" in str(error.value.hint)


def test_shipped_data_is_part_of_a_plans_workload_not_of_its_profiles(script: Path) -> None:
    """As with ``--data``: what was measured still holds; a plan goes with the data it was made with."""
    spec = make_spec(str(script), ship=("points.csv",))
    assert sorted(files_to_ship(spec)) == ["points.csv", "train.py"]
    before = digest_workload(spec)
    planned = digest_training(spec, before)
    assert planned != before == digest_workload(make_spec(str(script)))
    begun = replace(spec, data_digest=None)
    assert shipped_data_changed(begun)
    (script.parent / "points.csv").write_text("others")
    assert digest_workload(spec) == before
    assert digest_training(spec, before) != planned


def test_ship_is_for_a_users_file() -> None:
    with pytest.raises(WorkloadError, match=r"--ship points\.csv is for data files beside"):
        make_spec("gpt", ship=("points.csv",))


def test_a_run_knows_the_data_that_it_began_with(user: Callable[..., Workload], tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_text("1,2")
    spec = user(MODEL, ship=("points.csv",)).spec
    assert not shipped_data_changed(spec)
    (tmp_path / "points.csv").write_text("3,4")
    assert shipped_data_changed(spec)
