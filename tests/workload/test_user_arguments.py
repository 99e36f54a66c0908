"""The user's file reads its own arguments, of which there are none, and not skyctl's."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from skyctl.errors import WorkloadError
from skyctl.workload.workload import Workload

Make = Callable[..., Workload]
PARSER = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument({})\n"
MODEL = "def model(): return [nn.Linear(6, args.width), nn.Linear(args.width, 4)]\n"


@pytest.fixture(autouse=True)
def _skyctls_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["skyctl", "probe", "train.py", "--batch-size", "8"])


@pytest.mark.parametrize("where", ["", "def model():\n    args = parser.parse_args()\n"])
def test_argparse_gives_its_defaults(user: Make, where: str) -> None:
    parser = PARSER.format('"--width", type=int, default=5')
    own = "    return [nn.Linear(6, args.width), nn.Linear(args.width, 4)]\n"
    workload = user(parser + (where + own if where else "args = parser.parse_args()\n" + MODEL))
    assert workload.boundary(1, 2)[0].shape == (2, 5)
    assert sys.argv[0] == "skyctl"


def test_a_needed_argument_is_refused_with_the_way_out(user: Make) -> None:
    with pytest.raises(WorkloadError, match=r"train\.py, line \d+: importing it ended the program") as caught:
        user(PARSER.format('"--width", required=True') + "args = parser.parse_args()\n" + MODEL)
    assert "give each a default" in str(caught.value.hint)
    assert "train.py,width=512" in str(caught.value.hint)
    assert sys.argv[0] == "skyctl"


def test_a_file_that_ends_the_program_is_told_where_that_belongs(user: Make) -> None:
    with pytest.raises(WorkloadError, match=r"ended the program \(exit done\)") as caught:
        user("import sys\ndef model(): return [nn.Linear(6, 4)]\nsys.exit('done')\n")
    assert 'if __name__ == "__main__":' in str(caught.value.hint)
