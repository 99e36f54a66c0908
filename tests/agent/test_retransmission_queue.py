"""Frames that are kept until they are acknowledged."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from skyctl.agent import retransmission_queue
from skyctl.agent.frames import FrameParser
from skyctl.agent.retransmission_queue import RetransmissionQueue


def taken(kept: RetransmissionQueue, count: int | None = None) -> list[int]:
    """The numbers of the next frames; each holds its number twice, and a body."""
    parser = FrameParser()
    for data in itertools.islice(iter(kept.next_frame, None), count):
        parser.feed(data)
    numbers = []
    for message, body in parser.frames():
        assert message["n"] == message["same"]
        assert body == b"b" * (message["n"] % 7)
        numbers.append(message["n"])
    return numbers


def filled(kept: RetransmissionQueue, count: int) -> RetransmissionQueue:
    for number in range(kept.last + 1, kept.last + count + 1):
        assert kept.push({"same": number}, b"b" * (number % 7)) == number
    return kept


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for about ten frames."""
    monkeypatch.setattr(retransmission_queue, "MAX_MEMORY_BYTES", 300)


def test_in_memory() -> None:
    kept = filled(RetransmissionQueue("n"), 10)
    assert taken(kept, 4) == [1, 2, 3, 4]
    kept.acknowledge(2)
    kept.rewind(0)
    assert taken(kept) == [3, 4, 5, 6, 7, 8, 9, 10]
    assert kept.unsent_bytes == 0
    assert kept.kept_bytes > 0
    kept.acknowledge(99)
    assert (kept.kept_bytes, kept.acknowledged, kept.next_frame()) == (0, 10, None)
    assert taken(filled(kept, 2)) == [11, 12]


def test_beyond_memory(small: None, tmp_path: Path) -> None:
    kept = filled(RetransmissionQueue("n", tmp_path), 100)
    assert len(files(tmp_path)) > 5
    for number in (0, 1, 37, 55, 99, 100, 3):
        kept.rewind(number)
        before = kept.unsent_bytes
        assert taken(kept) == list(range(number + 1, 101))
        assert kept.unsent_bytes == 0
        assert (before == 0) == (number == 100)
    kept.acknowledge(50)
    kept.rewind(0)
    assert taken(kept, 3) == [51, 52, 53]
    filled(kept, 30)
    assert taken(kept) == list(range(54, 131))
    kept.acknowledge(130)
    assert files(tmp_path) == []
    assert (kept.kept_bytes, kept.unsent_bytes) == (0, 0)


def test_acknowledged_before_it_was_sent(small: None, tmp_path: Path) -> None:
    """Another launcher has them already."""
    kept = filled(RetransmissionQueue("n", tmp_path), 100)
    kept.acknowledge(42)
    assert taken(kept) == list(range(43, 101))
    assert kept.unsent_bytes == 0


def test_full(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retransmission_queue, "MAX_SPOOL_BYTES", 2000)
    kept = filled(RetransmissionQueue("n", tmp_path), 20)
    assert not kept.is_full
    filled(kept, 80)
    assert kept.is_full
    kept.acknowledge(95)
    assert not kept.is_full


def test_no_room_for_files(small: None, tmp_path: Path) -> None:
    """It stays in memory, says that it is full, and nothing is lost; later there is room again."""
    folder = tmp_path / "gone"
    kept = filled(RetransmissionQueue("n", folder), 50)
    assert kept.is_full
    folder.mkdir()
    filled(kept, 50)
    assert len(files(folder)) > 0
    assert not kept.is_full
    assert taken(kept) == list(range(1, 101))


def test_file_that_was_tampered_with(small: None, tmp_path: Path) -> None:
    kept = filled(RetransmissionQueue("n", tmp_path), 100)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match="is not what was written"):
        taken(kept)
