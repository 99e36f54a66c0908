"""Thousands of damaged files through the commands themselves: a message and an exit code, whatever they hold.

``SKYCTL_FUZZ`` sets how many in all (default 10 000); case N is the same file each time. Of those that take
long, CI tries a third and ``make matrix`` the others. A case that fails is kept in the test's folder, and its
seed is in the message.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import typer
import yaml
from tests.fuzz import mutate, samples

from skyctl.cli import app
from skyctl.errors import RecordError

CASES = int(os.environ.get("SKYCTL_FUZZ", "10000"))
SHARES = {"inventory": 0.3, "problem": 0.2, "plan": 0.2, "profile": 0.1, "header": 0.2}
"""How the cases are spread: those that get as far as planning take longest."""
CASE_S = 60.0
"""A case that takes longer hangs (the planner's own limit is 0.1 s; the first one imports its solvers)."""
CODES = range(6)
"""The contract's, without those of signals."""
MOST_FAULTS = 20
"""No more than so many are looked for."""
BUG = "this is a bug in skyctl"


class HangError(BaseException):
    """A case took too long. No Exception: nothing may catch it on its way."""


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Ends what takes longer than a case may: by an exception, and where not even that helps, by force."""

    def alarm(_number: int, _frame: FrameType | None) -> None:
        raise HangError(f"longer than {CASE_S:g} s")

    before = signal.signal(signal.SIGALRM, alarm)
    faulthandler.dump_traceback_later(3 * CASE_S, exit=True, file=sys.__stderr__)
    signal.setitimer(signal.ITIMER_REAL, CASE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def run(*words: str) -> tuple[int, str, str]:
    """``skyctl WORDS``: its exit code, and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    argv, sys.argv = sys.argv, ["skyctl", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                app.main()
            except SystemExit as exc:
                code = exc.code or 0
    finally:
        sys.argv = argv
    return code, out.getvalue(), err.getvalue()


def check(*words: str) -> None:
    """Runs it; AssertionError where its end is none that the contract knows."""
    code, out, err = run(*words)
    assert code in CODES, f"exit code {code}"
    assert BUG not in err, err
    assert "Traceback" not in err, err
    if code in (2, 3, 4, 5):
        assert "error:" in err, err
    if "--json" in words:
        json.loads(out)


Act = Callable[[Path, random.Random], None]
sampled = pytest.mark.parametrize(
    "of",
    [
        pytest.param(lambda number: number % 3 == 0, id="a third"),
        pytest.param(lambda number: number % 3 != 0, id="the others", marks=pytest.mark.matrix),
    ],
)


def each(
    kind: str,
    tmp_path: Path,
    suffix: str,
    write: Callable[[random.Random], bytes],
    act: Act,
    of: Callable[[int], bool] | None = None,
) -> None:
    """Does it with a file a case (of these numbers), watched; what fails is kept, and told with its seed."""
    path = tmp_path / f"case{suffix}"
    faults = []
    cases = range(max(1, round(CASES * SHARES[kind])))
    for number in [number for number in cases if of is None or of(number)]:
        rng = random.Random(f"{kind}/{number}")
        path.write_bytes(write(rng))
        try:
            with watched():
                act(path, rng)
        except (Exception, HangError) as exc:
            kept = tmp_path / f"{kind}-{number}{suffix}"
            path.replace(kept)
            last = [line for line in str(exc).splitlines() if line.strip()][:3]
            faults.append(f"{kept}: {type(exc).__name__}: {' / '.join(last)[:400]}")
            if len(faults) >= MOST_FAULTS:
                break
    assert not faults, "\n".join([f"{len(faults)} cases failed:", *faults])


def damaged(document: Any, rng: random.Random, dump: Callable[[Any], bytes] = mutate.text_of) -> bytes:
    """A document with a few things wrong in it; one in four has bytes wrong, too, or only those."""
    how = rng.randrange(8)
    if how < 6:
        document = mutate.structural(document, rng, rng.choice([1, 1, 1, 2, 3, 8]))
    data = dump(document)
    return mutate.bytewise(data, rng, rng.choice([1, 2, 5])) if how >= 5 else data


@pytest.fixture(scope="module")
def commands() -> Any:
    """The commands, put together once: that takes longer than most cases."""
    return typer.main.get_command(app.app)


@pytest.fixture(autouse=True)
def _in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, commands: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(app, "app", commands)


def as_yaml(document: Any) -> bytes:
    try:
        return yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, RecursionError):
        return mutate.text_of(document)


@pytest.mark.slow
@sampled
def test_inventories(tmp_path: Path, of: Callable[[int], bool]) -> None:
    def write(rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return mutate.bytewise(samples.INVENTORY_TEXT, rng, rng.choice([1, 2, 6]))
        # JSON is YAML, and quicker to write
        return damaged(samples.INVENTORY, rng, mutate.text_of if rng.random() < 0.7 else as_yaml)

    def act(path: Path, rng: random.Random) -> None:
        limit = rng.choice([(), ("--limit", "all"), ("--limit", "fast,!laptop"), ("--limit", "")])
        check("check", "-c", str(path), "--dry-run", "--json", *limit)

    each("inventory", tmp_path, ".yaml", write, act, of)


@pytest.mark.slow
@sampled
def test_problems(tmp_path: Path, of: Callable[[int], bool]) -> None:
    originals = [samples.problem(), samples.repeated(), samples.problem(2)]

    def write(rng: random.Random) -> bytes:
        return damaged(rng.choice(originals), rng)

    def act(path: Path, rng: random.Random) -> None:
        strategy = rng.choice(["even", "heuristic", "optimal"])
        more = rng.choice(
            [(), (), ("--objective", "bottleneck"), ("--pin-first", "n0"), ("--assign", "n0=0:2,n1=2:5")]
        )
        words = ("--strategy", strategy) if "--assign" not in more else ()
        check("plan", "--problem", str(path), "--time-limit", "0.1", "--json", *words, *more)

    each("problem", tmp_path, ".json", write, act, of)


@pytest.mark.slow
@sampled
def test_plans(tmp_path: Path, of: Callable[[int], bool]) -> None:
    originals = samples.plans()

    def write(rng: random.Random) -> bytes:
        return damaged(rng.choice(originals), rng)

    each("plan", tmp_path, ".json", write, lambda path, _: check("verify", str(path), "--json"), of)


@pytest.mark.slow
@sampled
def test_profiles(tmp_path: Path, of: Callable[[int], bool]) -> None:
    from skyctl.workload.shipped_files import digest_workload
    from skyctl.workload.workload_spec import make_spec

    (tmp_path / "cluster.yaml").write_text(
        "name: home\nnodes:\n  - {name: a, transport: local}\n  - {name: b, transport: local}\n"
    )
    original = samples.profile(digest_workload(make_spec(samples.WORKLOAD)))
    words = (
        "plan",
        samples.WORKLOAD,
        "--time-limit",
        "0.1",
        "--json",
        "--microbatches",
        "4",
        "--batch-size",
        "8",
    )
    (tmp_path / "whole.json").write_bytes(mutate.text_of(original))
    code, _, err = run(*words, "--profile", "whole.json")
    assert code == 0, err

    def act(path: Path, rng: random.Random) -> None:
        strategy = rng.choice(["even", "heuristic", "optimal"])
        check(*words, "--profile", str(path), "--strategy", strategy)

    each("profile", tmp_path, ".json", lambda rng: damaged(original, rng), act, of)


def test_checkpoint_headers(tmp_path: Path) -> None:
    from skyctl.checkpoint.node.safetensors import read_header

    whole = samples.tensors(tmp_path / "whole.safetensors")
    length = int.from_bytes(whole[:8], "little")
    header, content = json.loads(whole[8 : 8 + length]), whole[8 + length :]

    def write(rng: random.Random) -> bytes:
        if rng.random() < 0.4:
            return mutate.bytewise(whole, rng, rng.choice([1, 2, 5]))
        text = damaged(header, rng)
        said = len(text) if rng.random() < 0.9 else rng.choice([0, 1, 2**63, len(text) - 1, len(text) + 9])
        return said.to_bytes(8, "little") + text + content

    def act(path: Path, _: random.Random) -> None:
        with contextlib.suppress(RecordError):
            found = read_header(path)
            size = path.stat().st_size
            assert all(0 <= entry.start <= entry.stop <= size for entry in found.tensors.values())

    each("header", tmp_path, ".safetensors", write, act)
