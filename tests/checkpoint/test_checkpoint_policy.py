"""Which checkpoints are kept while copies of them are on their way."""

from __future__ import annotations

from skyctl.checkpoint.launcher.policy import RetentionPolicy


def retention() -> RetentionPolicy:
    return RetentionPolicy(layers=3, unreplicated=False)


def test_quick_copies_leave_the_newest_alone() -> None:
    made = retention()
    made.copied(10, [0, 1, 2])  # before the last rank's word came
    made.written(10)
    assert (made.steps, made.replicated, made.copying) == ([10], 10, None)
    made.written(20)
    assert made.steps == [10, 20]
    made.copied(20, [0])
    made.copied(20, [2])
    assert made.replicated == 10
    made.copied(20, [1])
    assert (made.steps, made.replicated) == ([20], 20)


def test_slow_copies_come_to_their_end_while_newer_steps_are_written() -> None:
    made = retention()
    made.written(10)
    for step in range(20, 60, 10):
        made.written(step)
        assert made.steps == [10, step]
    made.copied(10, [0, 1])
    made.copied(50, [0])
    made.copied(10, [2])
    assert (made.replicated, made.copying) == (10, 50)
    made.written(60)
    assert made.steps == [10, 50, 60]
    made.copied(50, [1, 2])
    assert (made.steps, made.copying) == ([50, 60], 60)


def test_a_node_that_can_not_copy_holds_up_nothing() -> None:
    made = retention()
    made.written(10)
    made.copied(10, [0, 1, 2])
    made.written(20)
    made.written(30)
    made.failed()
    assert (made.replicated, made.copying) == (10, 30)
    made.copied(20, [0, 1, 2])
    assert made.replicated == 10
    made.copied(30, [0, 1, 2])
    assert made.steps == [30]
    made.failed()
    assert made.copying is None


def test_one_node_keeps_its_own() -> None:
    made = RetentionPolicy(layers=3)
    made.written(10)
    made.written(20)
    assert (made.steps, made.replicated) == ([20], 20)


def test_another_attempt_forgets_what_was_newer() -> None:
    made = retention()
    made.written(10)
    made.copied(10, [0, 1, 2])
    made.written(20)
    made.copied(20, [0, 1])
    made.restarted(10)
    assert made.steps == [10]
    made.written(20)
    made.copied(20, [2])
    assert made.copying == 20, "the copies of the attempt before are not its"
