"""A file beside the script that is opened here and not shipped is refused when the workload is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from skyctl.errors import WorkloadError
from skyctl.workload.opened_files import note_opened_files
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import make_spec

Make = Callable[..., Workload]
HERE = "from pathlib import Path\nHERE = Path(__file__).parent\n"
MODEL = "def model(): return [nn.Linear(6, 4)]\n"
READING = """
from pathlib import Path
def data(batch_size, seed):
    text = {opened}.read_text()
    while True: yield torch.zeros(batch_size, 6), torch.zeros(batch_size).long()
"""
BESIDE = "(Path(__file__).parent / 'points.csv')"


@pytest.fixture
def points(tmp_path: Path) -> Path:
    path = tmp_path / "points.csv"
    path.write_text("1,2,3")
    return path


def test_a_file_that_is_not_shipped_is_refused_with_both_ways_out(user: Make, points: Path) -> None:
    with pytest.raises(WorkloadError) as error:
        user(MODEL, data=READING.format(opened=BESIDE))
    assert "train.py opens points.csv beside it, which no node would have" in error.value.message
    assert error.value.exit_code == 2
    for words in ("--ship points.csv", "ship = ['points.csv']", "same absolute path"):
        assert words in str(error.value.hint)


def test_it_is_not_where_it_is_shipped_or_no_node_opens_it(user: Make, points: Path) -> None:
    data = READING.format(opened=BESIDE)
    assert user(MODEL, data=data, ship=("points.csv",)).spec.ship == ("points.csv",)
    user('ship = ["*.csv"]\n' + MODEL, data=data)
    user(MODEL, data=data, random_inputs=True)
    spec = user(MODEL, data=data, ship=("points.csv",)).spec
    load_workload(spec)  # as a node does: nothing is looked for


def test_what_model_and_validation_open_counts_too(user: Make, points: Path) -> None:
    opening = f"open({BESIDE}).close()"
    model = f"{HERE}def model():\n    {opening}\n    return [nn.Linear(6, 4)]\n"
    with pytest.raises(WorkloadError, match=r"opens points\.csv beside it"):
        user(model, random_inputs=True)
    with pytest.raises(WorkloadError, match=r"opens points\.csv beside it"):
        user(f"{HERE}{opening}\n{MODEL}")
    validation = (
        f"{HERE}def validation(batch_size, seed):\n    {opening}\n    yield from data(batch_size, seed)\n"
    )
    user(MODEL + validation)
    with pytest.raises(WorkloadError, match=r"opens points\.csv beside it"):
        user(MODEL + validation, validated=True)


def test_files_of_a_folder_are_named_by_the_folder(user: Make, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for i in range(5):
        (tmp_path / "images" / f"{i}.txt").write_text("x")
    opening = "for p in sorted((HERE / 'images').iterdir()): open(p, 'rb').close()"
    with pytest.raises(WorkloadError, match=r"opens images/0\.txt, .* and 2 more beside it") as error:
        user(f"{HERE}{opening}\n{MODEL}")
    assert "--ship images/," in str(error.value.hint)


def test_a_relative_path_is_refused_shipped_or_not(
    user: Make, points: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = READING.format(opened="Path('points.csv')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        WorkloadError, match=r"opens points\.csv relative to the folder that skyctl was started"
    ):
        user(MODEL, data=data, ship=("points.csv",))
    with pytest.raises(WorkloadError, match=r"opens points\.csv beside it"):
        user(MODEL, data=data)
    with pytest.raises(WorkloadError, match=r"opens points\.csv relative to the folder") as error:
        user(MODEL, data=data, folder=tmp_path / "elsewhere")
    assert "Path(__file__).parent" in str(error.value.hint)


def test_what_is_elsewhere_written_out_or_only_written_is_left_alone(
    user: Make, points: Path, tmp_path: Path
) -> None:
    user(MODEL, data=READING.format(opened="Path(torch.__file__)"))
    user(MODEL, data=READING.format(opened=f"Path({str(points)!r})"))
    user(f"{HERE}(HERE / 'made.txt').write_text('x')\n{MODEL}")


def test_files_are_noted_in_one_thread_and_inside_only(points: Path) -> None:
    points.read_text()
    with note_opened_files() as outer:
        with note_opened_files() as inner:
            points.read_text()
        points.write_text("x")
    points.read_text()
    assert (inner, outer) == ({str(points): False}, {})


def test_a_file_that_a_node_lacks_is_named_with_the_ways_out(user: Make, points: Path) -> None:
    workload = user(MODEL, data=READING.format(opened=BESIDE), ship=("points.csv",))
    points.unlink()
    with pytest.raises(
        WorkloadError, match=r"train\.py, line \d+: data\(\) failed: FileNotFoundError"
    ) as error:
        next(workload.batches())
    assert "'points.csv'" in error.value.message
    assert str(points.parent) not in error.value.message
    assert "--ship points.csv" in str(error.value.hint)
    with pytest.raises(WorkloadError) as error:
        load_workload(make_spec(str(points.parent / "train.py")))
    assert "define example(batch_size)" in str(error.value.hint)
