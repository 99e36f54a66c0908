"""The ranks and nodes that are alive, by tables: what was heard of them, and what follows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.run.callbacks import RunCallbacks
from skyctl.run.health_monitor import Deadlines, HealthMonitor, RankHealth, judge_health, silent_ranks

LIMITS = Deadlines()


def sign(rank: int, heard_s: float | None = 1.0, **more: object) -> RankHealth:
    values: dict[str, object] = {
        "node": f"n{rank}",
        "name": f"rank {rank}",
        "phase": "step 3, forward of microbatch 2",
        "waiting": False,
        "still_s": 0.1,
        "started_s": 100.0,
        "node_heard_s": 0.5,
    }
    return RankHealth(number=rank, heard_s=heard_s, **{**values, **more})  # type: ignore[arg-type]


def waits(rank: int, still_s: float = 9.0) -> RankHealth:
    return sign(rank, waiting=True, still_s=still_s)


BLACK = {"heard_s": 11.0, "node_heard_s": 11.0}


@pytest.mark.parametrize(
    ("signs", "kind", "ranks"),
    [
        ([sign(0), sign(1)], None, ()),
        # a node that is not heard, and everybody waits: it is lost
        ([waits(0), sign(1, **BLACK), waits(2)], "lost", (1,)),
        ([waits(0), sign(1, heard_s=10.5, away=True)], "lost", (1,)),
        ([waits(0), sign(1, **BLACK), sign(2, **BLACK)], "lost", (1, 2)),
        # unreachable is not dead: the others get on
        ([sign(0), sign(1, **BLACK), waits(2)], None, ()),
        ([waits(0, still_s=0.5), sign(1, **BLACK)], None, ()),
        # or one of them computes, for as long as it likes
        ([sign(0, still_s=500.0), sign(1, **BLACK)], None, ()),
        # not long enough yet
        ([waits(0), sign(1, heard_s=9.0, node_heard_s=9.0)], None, ()),
        # nobody at all is heard: it is we who are cut off
        ([sign(0, **BLACK), sign(1, **BLACK)], None, ()),
        # its agent answers, and it does not
        ([waits(0), sign(1, heard_s=10.5), waits(2)], "stalled", (1,)),
        # a lost node goes before a stalled rank
        ([waits(0), sign(1, heard_s=10.5), sign(2, **BLACK)], "lost", (2,)),
        # alone, or while others compute: with more patience
        ([sign(0, heard_s=30.0)], None, ()),
        ([sign(0, heard_s=46.0)], "silent", (0,)),
        ([sign(0), sign(1, heard_s=46.0)], "silent", (1,)),
        ([sign(0), sign(1, heard_s=400.0, node_heard_s=400.0, away=True)], None, ()),
        # it imports torch; its node is silent, though
        ([sign(0, heard_s=None, node_heard_s=11.0), waits(1)], "lost", (0,)),
        ([sign(0, heard_s=None, node_heard_s=9.0), waits(1)], None, ()),
        ([sign(0, heard_s=None), waits(1)], None, ()),
        ([sign(0, heard_s=None, started_s=181.0), waits(1)], "silent", (0,)),
        # all wait for each other
        ([waits(0, 61.0), waits(1, 61.0)], "deadlock", (0, 1)),
        ([waits(0, 61.0), waits(1, 59.0)], None, ()),
    ],
)
def test_what_follows(signs: list[RankHealth], kind: str | None, ranks: tuple[int, ...]) -> None:
    found = judge_health(signs, LIMITS, 60.0)
    assert (found.kind if found else None) == kind
    assert (found.ranks if found else ()) == ranks


def test_who_has_not_been_heard_is_named_before_anything_follows() -> None:
    found = silent_ranks([sign(0), sign(1, heard_s=8.5), sign(2, heard_s=9.0, node_heard_s=9.0)], LIMITS)
    assert {name: round(quiet_s, 1) for name, (quiet_s, _) in found.items()} == {
        "rank 1": 8.5,
        "node n2": 9.0,
    }
    assert silent_ranks([sign(0, heard_s=None)], LIMITS) == {}


def told_by(monkeypatch: pytest.MonkeyPatch, *looks: list[RankHealth]) -> list[str]:
    """The words of a monitor that sees ranks so, one look after the other."""
    said: list[str] = []
    monitor = HealthMonitor([], {}, LIMITS, RunCallbacks(note=said.append, warn=said.append))
    left = list(looks)
    monkeypatch.setattr(monitor, "_health", lambda: left.pop(0))
    ranks: Any = [SimpleNamespace(spec=SimpleNamespace(node=f"n{i}")) for i in range(3)]
    monitor._ranks = ranks
    while left:
        monitor._name_suspects(monitor._health())
    return said


def test_heard_again_is_said_of_who_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """First its rank is silent, then its whole node: that is no word from it."""
    silent, gone = sign(1, heard_s=9.0), sign(1, heard_s=10.0, node_heard_s=9.0)
    said = told_by(monkeypatch, [sign(0), silent], [sign(0), gone], [sign(0), sign(1)])
    assert [text.partition(";")[0] for text in said] == [
        "rank 1 has not been heard for 9 s",
        "node n1 has not been heard for 9 s",
        "node n1 is heard again",
    ]


def test_it_is_said_whom_alone_the_run_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = sign(1, **BLACK)
    said = told_by(monkeypatch, [sign(0), gone], [gone], [gone], [sign(1)])
    assert [text.partition(";")[0] for text in said] == [
        "node n1 has not been heard for 11 s",
        "waiting for node n1 to be heard again: no rank is left that is heard",
        "node n1 is heard again",
    ]


def test_a_silence_is_told_again_whenever_it_has_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [[sign(0), sign(1, heard_s=float(at))] for at in (9, 12, 18, 30, 36)]
    said = told_by(monkeypatch, *looks)
    assert [text.partition(";")[0] for text in said] == [
        f"rank 1 has not been heard for {at} s" for at in (9, 18, 36)
    ]
