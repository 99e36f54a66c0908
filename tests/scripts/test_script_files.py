"""The files of a folder that go to the nodes with a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.errors import InputError
from skyctl.run.scripts import script_files
from skyctl.run.scripts.script_files import find_script_files, read_script_files


def made(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def sent(folder: Path, *named: str, left_out: Path | None = None) -> set[str]:
    files = find_script_files(folder, named, left_out=left_out)
    return set(read_script_files(folder, files))


def test_all_goes_but_what_is_ignored(tmp_path: Path) -> None:
    made(
        tmp_path, "train.py", "lib/a.py", "lib/__pycache__/a.pyc", ".git/config", "env/pyvenv.cfg", "env/b.py"
    )
    made(tmp_path, "data/x.bin", "data/keep.bin", "logs/l.txt", "sub/only/y.txt", "out/o.txt")
    (tmp_path / ".gitignore").write_text("*.bin\n!keep.bin\n/logs/\n")
    (tmp_path / "sub" / ".skyctlignore").write_text("only/\n")
    found = sent(tmp_path, left_out=tmp_path / "out")
    assert found == {".gitignore", "train.py", "lib/a.py", "data/keep.bin", "sub/.skyctlignore"}


def test_named_files_alone_go(tmp_path: Path) -> None:
    made(tmp_path, "train.py", "lib/a.py", "other.py")
    assert sent(tmp_path, "train.py", "lib") == {"train.py", "lib/a.py"}
    for name in ("nowhere.py", "../x"):
        with pytest.raises(InputError, match="--ship"):
            find_script_files(tmp_path, [name])


def test_links_that_lead_out_stay_here(tmp_path: Path) -> None:
    made(tmp_path, "work/train.py", "secret")
    (tmp_path / "work" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "work" / "all").symlink_to(tmp_path)
    assert sent(tmp_path / "work") == {"train.py"}


def test_too_much_is_refused_with_the_largest_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, "train.py", "big.dat")
    monkeypatch.setattr(script_files, "SHIP_LIMIT_BYTES", 10)
    with pytest.raises(InputError, match=r"the largest train.py \(0.0 MiB\)") as raised:
        find_script_files(tmp_path)
    assert ".skyctlignore" in str(raised.value.hint)
    monkeypatch.setattr(script_files, "MOST_FILES", 1)
    with pytest.raises(InputError, match="more than 1 files"):
        find_script_files(tmp_path)
