"""An agent's messages are checked where they arrive: a wrong one's error names the node and the field."""

from __future__ import annotations

import random
from typing import Any, BinaryIO

import pytest

from skyctl.agent.frames import FrameError, write_frame
from skyctl.errors import ProtocolError
from skyctl.records.cluster import Node
from skyctl.remote.agent_connection import AgentConnection
from skyctl.remote.agent_messages import SequenceSet, TaskEvent, TaskGone, parse_agent_message
from skyctl.remote.remote_task import translate_task_failure

from .fake_connection import FakeConnection

NODE = Node(name="n7", transport="local")


def test_a_message_is_the_record_of_its_kind() -> None:
    event = parse_agent_message({"op": "event", "task": 3, "message": {"event": "x"}, "n": 9, "newer": True})
    assert isinstance(event, TaskEvent)
    assert (event.task, event.message, event.number, event.sequence) == (3, {"event": "x"}, 9, "n")
    gone = parse_agent_message({"op": "gone", "task": 3, "returncode": -9, "signal": "SIGKILL"})
    assert isinstance(gone, TaskGone)
    assert (gone.returncode, gone.number) == (-9, 0)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({"op": "event", "task": "three", "message": {}}, r"event.task: .* \(it is 'three'\)"),
        ({"op": "event", "task": 3}, "event.message: is missing"),
        ({"op": "gone", "task": 3, "returncode": 1.5, "signal": None}, "gone.returncode"),
        ({"op": "bye", "left": [1, None]}, "bye.left.1"),
        ({"op": "sing"}, "'sing' found using 'op'"),
        ({}, "'op'"),
    ],
)
def test_a_wrong_message_is_refused_by_its_field(message: dict[str, Any], fault: str) -> None:
    with pytest.raises(FrameError, match=fault):
        parse_agent_message(message)


def test_a_wrong_message_ends_the_connection_and_names_the_node() -> None:
    def serve(_command: str, stdin: BinaryIO, stdout: BinaryIO) -> int:
        write_frame(stdout, {"op": "event", "task": None, "message": {}})
        stdin.read()
        return 0

    node_connection = FakeConnection(NODE, serve)
    connection = AgentConnection(NODE, node_connection.open(""), lambda *_: False, 60.0)
    connection.start()
    with connection.changed, pytest.raises(ProtocolError, match=r"node n7 was lost: .*event.task"):
        connection.wait(lambda: None, 20.0)
    connection.drop()
    node_connection.close()


def test_a_failure_that_says_nothing_is_one() -> None:
    failure = translate_task_failure(NODE, {"event": "error", "type": 7, "message": "?"})
    assert isinstance(failure, ProtocolError)
    assert "node n7" in failure.message
    assert "type" in failure.message


def test_a_sequence_set() -> None:
    order = random.Random(7)
    for _ in range(50):
        numbers, expected = SequenceSet(), set()
        for _ in range(200):
            number = order.randint(1, 60)
            assert numbers.add(number) == (number not in expected)
            expected.add(number)
            again = SequenceSet(numbers.upto, numbers.beyond)
            assert all((n in numbers) == (n in again) == (n in expected) for n in range(1, 62))
        upto = 0
        while upto + 1 in expected:
            upto += 1
        assert numbers.upto == upto
    numbers = SequenceSet(0, [(4, 6)])
    numbers.settle(3)
    assert (numbers.upto, numbers.beyond) == (6, [])
