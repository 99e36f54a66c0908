"""What a stage costs beside its layers, measured by running stages that only sleep."""

import threading

from skyctl.probe.node.handling import measure


def test_a_quota_stretches_what_the_whole_process_takes() -> None:
    alone = measure(None)
    under = measure(0.1)
    assert 0 < alone.stage_s < 0.1
    assert under.stage_s > alone.stage_s
    assert under.byte_s >= 0


def test_nothing_is_left_running() -> None:
    before = threading.active_count()
    measure(None)
    assert threading.active_count() == before
