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


def test_the_best_one_is_kept_until_a_better_one_has_its_copies() -> None:
    made = retention()
    made.written(10, 3.0)
    made.copied(10, [0, 1, 2])
    for step, loss in ((20, 4.0), (30, None)):
        made.written(step, loss)
        made.copied(step, [0, 1, 2])
    assert made.steps == [10, 30]
    made.written(40, 2.0)
    assert made.best is not None
    assert (made.best.step, made.best.loss) == (40, 2.0)
    made.copied(40, [0, 1])
    made.written(50)
    assert 10 in made.steps
    made.copied(40, [2])
    assert 10 not in made.steps
    made.copied(50, [0, 1, 2])
    assert made.steps == [40, 50]


def test_another_attempt_has_the_best_one_that_is_there_in_full() -> None:
    for from_step, whole, kept in ((40, {10, 40}, 40), (30, {10, 30}, 10), (40, {10}, 10), (30, {30}, None)):
        made = retention()
        made.written(10, 3.0)
        made.copied(10, [0, 1, 2])
        made.written(40, 2.0)
        made.restarted(from_step, whole)
        assert (made.best and made.best.step) == kept, (from_step, whole)
