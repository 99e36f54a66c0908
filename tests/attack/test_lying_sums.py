"""A node that lies in the middle of the sums of ``skyctl bench-sync``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from ..helpers.commands import Skyctl
from .backends import GLOO, SKYCTL
from .liars import LIAR, nothing_is_left, write_cluster
from .test_lying_holder import FROM_STEP

pytestmark = pytest.mark.attack
SUMS = ("bench-sync", "--bytes", "1MB", "--sync", "ring,star")

LIES = f"""\
import os
import sys

if os.environ.get("LIE") and sys.orig_argv[-1] == "skyctl.worker.rank":
    from skyctl.worker.sums import sum_messages
    from skyctl.worker.sums.sum_messages import GRADIENTS, HEADER, SumMessage, SumStamp

    honest = sum_messages.OutgoingMessages.send

    def send(self, message):
        stamp = SumStamp(*HEADER.unpack_from(message._memory)[:-1])
        if stamp.kind == GRADIENTS and stamp.step >= {FROM_STEP}:
            if os.environ["LIE"] == "length":
                message = SumMessage(stamp.nbytes + 4)
                message.stamp(stamp)
            else:
                message.stamp(stamp._replace(kind=9))
        honest(self, message)

    sum_messages.OutgoingMessages.send = send
"""
"""The workload is skyctl's own, so this is what the nodes' Pythons begin with."""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Skyctl]:
    folder = tmp_path_factory.mktemp("lying")
    for name in ("work", "begins"):
        (folder / name).mkdir()
    (folder / "begins/sitecustomize.py").write_text(LIES)
    made = Skyctl(folder / "work", folder / "state")
    made.env |= {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(folder / "begins")}
    write_cluster(made.folder, "")
    made.run(*SUMS, "--repeat", "1")
    yield made
    made.end()


@pytest.mark.parametrize(
    ("backend", "lie", "said"),
    [
        (SKYCTL, "length", "bytes where"),
        (SKYCTL, "kind", "sent unknown (9)"),
        (GLOO, "kind", "sent unknown (9)"),
    ],
)
def test_the_liar_is_named(three: Skyctl, backend: str, lie: str, said: str) -> None:
    let_lie(three, backend, lie)
    err = three.run(*SUMS, "--repeat", str(2 * FROM_STEP), code=4).stderr
    assert f"error: node {LIAR} sent " in err
    assert said in err
    nothing_is_left(three)


def test_over_gloo_a_message_that_is_too_long_ends_a_rank_and_there_is_no_figure(three: Skyctl) -> None:
    """Gloo says neither to skyctl nor in its last words who has sent it."""
    let_lie(three, GLOO, "length")
    done = three.run(*SUMS, "--repeat", str(2 * FROM_STEP), "--json", code=1)
    figures = {row["sync"]: row for row in json.loads(done.stdout)["rows"]}
    assert figures["star"]["measured_s"] is None
    assert re.search(r"rank \d on .* was ended by SIGABRT; .*op\.preamble\.length", figures["star"]["error"])
    nothing_is_left(three)


def let_lie(three: Skyctl, backend: str, lie: str) -> None:
    write_cluster(three.folder, lie)
    with (three.folder / "cluster.yaml").open("a") as file:
        file.write(f"backend: {backend}\n")
