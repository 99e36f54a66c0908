"""The option's text, who goes next under each policy, and what jobs can't do."""

from __future__ import annotations

import pytest

from skyctl.errors import InputError
from skyctl.turns.turn_arbiter import TurnArbiter, TurnError
from skyctl.turns.turn_policy import LEAST_LATE_S, STARVE_S, TurnPolicy, parse_turns


@pytest.mark.parametrize("text", ["fifo", "fair", "srtf", "pack", "priority=0", "priority=99"])
def test_read_and_written(text: str) -> None:
    assert str(parse_turns(text)) == text


@pytest.mark.parametrize(
    "text", ["", "FAIR", "fair ", "priority", "priority=", "priority=100", "priority=-1"]
)
def test_no_policy(text: str) -> None:
    with pytest.raises(InputError, match="needs fifo, fair, srtf, pack or priority=N"):
        parse_turns(text)


def ordered(arbiter: TurnArbiter, now: float) -> list[str]:
    """In which order those who wait are served, each giving its turn back at once."""
    order = []
    while granted := arbiter.grant(now):
        for number in granted:
            order.append(arbiter.jobs[number].name)
            arbiter.give(number, now)
    return order


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("fifo", "abc"), ("fair", "cab"), ("srtf", "cba"), ("priority", "cba")],
)
def test_order(kind: str, expected: str) -> None:
    arbiter = TurnArbiter(kind)
    told: list[tuple[float, float | None]] = []
    for name, priority, used_s, remaining_s in (("a", 1, 2.0, 5.0), ("b", 2, 3.0, 4.0), ("c", 3, 1.9, None)):
        arbiter.open(0.0, name, priority=priority)
        told.append((used_s, remaining_s))
    for number, (used_s, remaining_s) in enumerate(told):
        arbiter.use(number, used_s, 1)
        arbiter.tell(number, remaining_s, None)
    for number in (2, 0, 1):
        arbiter.ask(number, 1.0)
    assert "".join(ordered(arbiter, 1.0)) == expected


def test_fifo_keeps_one_order_of_runs_on_all_devices() -> None:
    """Two runs of two ranks: each comes first to one of the devices."""
    for names in (("first", "second"), ("second", "first")):
        arbiter = TurnArbiter("fifo")
        for number in [arbiter.open(0.0, name) for name in names]:
            arbiter.ask(number, 0.0)
        assert ordered(arbiter, 0.0) == ["first", "second"]


@pytest.mark.parametrize("kind", ["fifo", "fair", "srtf", "priority"])
def test_who_has_waited_long_goes_next(kind: str) -> None:
    arbiter = TurnArbiter(kind)
    first, last = arbiter.open(0.0, "first", priority=9), arbiter.open(0.0, "last", priority=0)
    arbiter.use(last, 100.0, 1)
    arbiter.tell(first, 1.0, 0.1)
    arbiter.tell(last, 99.0, 1.0)
    arbiter.ask(first, 0.0)
    assert arbiter.grant(0.0) == [first]
    arbiter.ask(last, 0.5)
    for now in (STARVE_S, STARVE_S + 0.5):
        arbiter.give(first, now)
        arbiter.ask(first, now)
        granted = arbiter.grant(now)
        assert granted == ([first] if now < STARVE_S + 0.5 else [last])


def test_pack_holds_several_while_they_fit() -> None:
    arbiter = TurnArbiter("pack")
    numbers = [arbiter.open(0.0, name) for name in "abcd"]
    for number, demand in zip(numbers, (0.5, 0.6, 0.3, 0.2), strict=True):
        arbiter.tell(number, None, demand)
        arbiter.ask(number, 0.0)
    assert arbiter.grant(0.0) == [0, 2, 3]
    arbiter.give(0, 1.0)
    assert arbiter.grant(1.0) == []  # 0.5 + 0.6 > 1
    arbiter.close(2)
    assert arbiter.grant(1.0) == [1]


def test_pack_lets_others_pass_who_does_not_fit_until_it_has_waited_long() -> None:
    arbiter = TurnArbiter("pack")
    long, large, small = (arbiter.open(0.0, name) for name in ("long", "large", "small"))
    for number, demand in ((long, 0.5), (large, 1.0), (small, 0.3)):
        arbiter.tell(number, None, demand)
    arbiter.ask(long, 0.0)
    assert arbiter.grant(0.0) == [long]
    arbiter.ask(large, 0.0)
    arbiter.ask(small, 1.0)
    assert arbiter.grant(1.0) == [small]
    arbiter.give(small, STARVE_S)
    arbiter.ask(small, STARVE_S)
    assert arbiter.grant(STARVE_S) == []
    arbiter.give(long, STARVE_S)
    assert arbiter.grant(STARVE_S) == [large]


def test_demand_is_measured_without_what_was_waited() -> None:
    arbiter = TurnArbiter("pack")
    number = arbiter.open(0.0, "a", used_s=50.0, waited_s=7.0)
    arbiter.ask(number, 0.0)
    assert arbiter.jobs[number].demand(4.0) == 1.0
    arbiter.grant(4.0)
    arbiter.use(number, 51.5, 3)
    assert arbiter.jobs[number].demand(10.0) == pytest.approx(1.5 / 6.0)
    arbiter.tell(number, None, 0.75)
    assert arbiter.jobs[number].demand(10.0) == 0.75


def test_who_comes_later_is_owed_nothing() -> None:
    arbiter = TurnArbiter("fair")
    old = arbiter.open(0.0, "old")
    arbiter.use(old, 100.0, 9)
    new = arbiter.open(100.0, "new")
    arbiter.use(new, 1.0, 1)
    for number in (new, old):
        arbiter.ask(number, 101.0)
    assert arbiter.grant(101.0) == [old]


def test_who_keeps_a_wanted_turn_for_unusually_long_is_late_and_put_aside() -> None:
    arbiter = TurnArbiter("fair")
    slow, other = arbiter.open(0.0, "slow"), arbiter.open(0.0, "other")
    now = 0.0
    for turn in range(1, 4):  # its turns take 10 s, which is usual for it from the third one on
        arbiter.ask(slow, now)
        assert arbiter.grant(now) == [slow]
        arbiter.ask(other, now)
        arbiter.grant(now)
        assert arbiter.late(now + LEAST_LATE_S - 0.1) == []
        assert arbiter.late(now + LEAST_LATE_S) == [slow]
        now += 10.0
        arbiter.use(slow, 10.0 * turn, turn)
        arbiter.give(slow, now)
        assert arbiter.grant(now) == [other]
        arbiter.use(other, 10.0 * turn, turn)
        arbiter.give(other, now)
    arbiter.ask(slow, now)
    arbiter.grant(now)
    assert arbiter.late(now + 100.0) == [], "nobody else wants the turn"
    arbiter.ask(other, now + 50.0)
    arbiter.grant(now + 50.0)
    assert arbiter.late(now + 59.9) == []
    assert arbiter.late(now + 61.0) == [slow]
    arbiter.put_aside(slow, now + 61.0)
    assert arbiter.grant(now + 61.0) == [other]
    assert arbiter.late(now + 99.0) == [], "it was put aside already"
    arbiter.use(other, 45.0, 4)
    arbiter.use(slow, 1030.0, 4)  # of which others had the device for all but 11 s
    arbiter.give(slow, now + 1000.0)
    arbiter.ask(slow, now + 1000.0)
    arbiter.give(other, now + 1000.0)
    arbiter.ask(other, now + 1000.0)
    assert arbiter.grant(now + 1000.0) == [slow]


def test_ranks_of_a_run_have_together_what_another_run_has() -> None:
    arbiter = TurnArbiter("fair")
    ranks = [arbiter.open(0.0, name) for name in ("one", "two", "two")]
    used = [0.0] * len(ranks)
    for number in ranks:
        arbiter.ask(number, 0.0)
    for turn in range(400):
        [number] = arbiter.grant(float(turn))
        used[number] += (0.5, 0.9, 1.3)[number]
        arbiter.use(number, used[number], turn)
        arbiter.give(number, float(turn))
        arbiter.ask(number, float(turn))
    assert used[0] == pytest.approx(used[1] + used[2], rel=0.02)
    assert min(used) > 0.0
    late = arbiter.open(400.0, "two")
    assert arbiter.jobs[late].fair_s == arbiter.jobs[1].fair_s


def test_what_a_job_cannot_do() -> None:
    arbiter = TurnArbiter("fair")
    number = arbiter.open(0.0, "a")
    arbiter.use(number, 1.0, 1)
    with pytest.raises(TurnError):
        arbiter.give(number, 0.0)
    with pytest.raises(TurnError):
        arbiter.use(number, 0.5, 1)
    arbiter.ask(number, 0.0)
    with pytest.raises(TurnError):
        arbiter.ask(number, 0.0)
    arbiter.grant(0.0)
    with pytest.raises(TurnError):
        arbiter.ask(number, 0.0)


def test_a_policy_says_its_priority() -> None:
    assert parse_turns("priority=7") == TurnPolicy("priority", 7)
