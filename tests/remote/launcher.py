"""A launcher of its own, for tests that kill it: ``launcher.py STATE NODES [forked]``.

It starts ``node_tasks.count`` on each local node, appends every event to ``STATE/NODE.jsonl`` before it says
that it is handled, and prints each session's id.
"""

import json
import sys
import threading
from pathlib import Path

from skyctl.records.cluster import Node
from skyctl.remote.base import ConnectOptions
from skyctl.remote.forkserver_client import ForkedConnection, ForkServerClient
from skyctl.remote.session_factory import open_session

SOURCE = (Path(__file__).parent / "node_tasks.py").read_bytes()


def follow(session, task, path):
    with path.open("a") as file:
        while not task.done:
            message, _ = task.recv()
            file.write(json.dumps(message) + "\n")
            file.flush()
            session.acknowledge(message["seq"])


def main():
    state, count, hold_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    options = ConnectOptions(grace_s=0.3, hold_s=hold_s, manual_ack=True)
    forkserver = ForkServerClient(("skyctl.agent.task_runner",)) if sys.argv[4:] == ["forked"] else None
    extra = [lambda node, _: ForkedConnection(node, forkserver)] if forkserver else []
    for index in range(count):
        session = open_session(Node(name=f"n{index}", transport="local"), options, *extra)
        env = {"PYTHONPATH": session.push_tree({"node_tasks.py": SOURCE})}
        task = session.start_task("node_tasks", {"do": "count"}, env=env)
        arguments = (session, task, state / f"n{index}.jsonl")
        threading.Thread(target=follow, args=arguments, daemon=True).start()
        print(session.id, flush=True)
    threading.Event().wait()


main()
