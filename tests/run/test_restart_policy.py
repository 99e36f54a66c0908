"""The fault that ended an attempt, and whether another one is begun: by tables."""

from __future__ import annotations

import pytest

from skyctl.errors import (
    InputError,
    MismatchError,
    ProtocolError,
    RecordError,
    RunError,
    SkyctlError,
    UnreachableError,
    WorkloadError,
)
from skyctl.records.run_state import RunAttempt, RunState
from skyctl.run.rank_failure import FailureReport
from skyctl.run.restart_policy import (
    Fault,
    RestartPolicy,
    classify,
    final_error,
    no_checkpoint_error,
    resume_hint,
)

LOST = UnreachableError("node b was lost", node="b")


@pytest.mark.parametrize(
    ("error", "evidence", "kind"),
    [
        (LOST, FailureReport("lost", ("b",), (1,), 7), "node"),
        (LOST, None, "node"),
        (RunError("ended by SIGKILL"), FailureReport("died", ("b",), (1,), 7), "died"),
        (RunError("has stalled"), FailureReport("stalled", ("b",), (1,), 7), "stalled"),
        (RunError("no sign of life"), FailureReport("silent", ("b",), (1,), 7), "stalled"),
        (RunError("the connection is gone"), FailureReport("peer", ("b",), (1,), 7), "network"),
        (RunError("every rank has waited"), FailureReport("deadlock", (), (0, 1), 7), "network"),
        (RunError("ValueError: x"), FailureReport("raised", ("b",), (1,), 7), "failed"),
        (RunError("diverged"), FailureReport("raised", step=7, final=True), "final"),
        (WorkloadError("data() ended"), FailureReport("raised", ("b",), (1,), 7, final=True), "final"),
        (MismatchError("no such device"), FailureReport("raised", ("b",), (1,), 0), "final"),
        (MismatchError("other torch"), None, "final"),
        (InputError("no such file"), None, "final"),
        (SkyctlError("disk full"), FailureReport("launcher", ("b",), (1,), 7), "final"),
        (
            RecordError("damaged"),
            FailureReport("raised", ("b",), (1,), 7, "reading the checkpoint"),
            "checkpoint",
        ),
        (RecordError("damaged"), FailureReport("raised", ("b",), (1,), 7, "build"), "final"),
    ],
)
def test_kinds(error: SkyctlError, evidence: FailureReport | None, kind: str) -> None:
    assert classify(error, evidence).kind == kind


def test_waits_grow_and_a_new_checkpoint_counts_anew() -> None:
    patience = RestartPolicy(3)
    died = Fault("died", (), 1, 7)
    assert [patience.wait_s(died, None) for _ in range(4)] == [1.0, 2.0, 4.0, None]
    patience = RestartPolicy(10)
    assert [patience.wait_s(died, 5) for _ in range(7)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert patience.wait_s(died, 10) == 1.0
    assert patience.wait_s(died, 10) == 2.0


def test_a_lost_nodes_first_plan_does_not_wait() -> None:
    patience = RestartPolicy(3)
    lost = Fault("node", ("b",), 1, 7)
    assert [patience.wait_s(lost, 5) for _ in range(4)] == [0.0, 2.0, 4.0, None]


def test_the_same_rank_in_the_same_step_is_tried_once_more_only() -> None:
    patience = RestartPolicy(3)
    assert patience.wait_s(Fault("failed", (), 1, 7), None) is not None
    assert patience.wait_s(Fault("failed", (), 2, 7), None) is not None
    assert patience.wait_s(Fault("failed", (), 1, 7), 5) is None
    assert RestartPolicy(3).wait_s(Fault("final"), None) is None
    assert RestartPolicy(0).wait_s(Fault("died"), None) is None


def test_giving_up_says_how_to_go_on() -> None:
    patience = RestartPolicy(2)
    fault = Fault("died", (), 1, 7)
    while patience.wait_s(fault, 5) is not None:
        pass
    state = RunState(run_id="R", created="t", written="t", workload="gpt", cluster="c", steps=9, checkpoint=5)
    error = final_error(
        RunError("rank 1 was killed", hint="look"), fault, patience, resume_hint(state, "step")
    )
    assert error.message.startswith("rank 1 was killed\n  tried again 2 times")
    assert error.hint == "look; then go on from step 5: skyctl launch --resume R"
    plain = final_error(RunError("no"), Fault("final"), RestartPolicy(3), None)
    assert (plain.message, plain.hint) == ("no", None)
    assert resume_hint(state, "step", done=True) == "go on from step 5: skyctl launch --resume R --steps MORE"
    assert resume_hint(state.model_copy(update={"checkpoint": None}), "step") is None


def test_a_checkpoint_that_is_not_there_is_looked_for_on_nodes_that_are_not() -> None:
    attempt = RunAttempt(number=1, began="t", why="launched", from_step=0, devices=("a/cpu:0", "b/cpu:0"))
    state = RunState(
        run_id="R", created="t", written="t", workload="gpt", cluster="c", steps=9, checkpoint=5,
        attempts=(attempt,),
    )  # fmt: skip
    error = no_checkpoint_error(state, {"b", "c"})
    assert "step 5" in error.message
    assert error.message.endswith("its nodes a are not connected")
    assert "skyctl checkpoint ls R" in (error.hint or "")
    assert "connected" not in no_checkpoint_error(state, {"a", "b"}).message


def test_a_node_that_accuses_a_second_one_is_lost_itself() -> None:
    patience = RestartPolicy(3)

    def accused(accuser: str, node: str) -> tuple[ProtocolError, FailureReport]:
        error = ProtocolError(f"node {node} sent rank 0 what skyctl never sends", node=node)
        return error, FailureReport("lost", (node,), (1,), 7, accuser=accuser)

    first = accused("a", "b")
    assert patience.believe(*first) == first
    assert patience.believe(*first) == first, "the same one, again"
    error, report = patience.believe(*accused("a", "c"))
    assert isinstance(error, ProtocolError)
    assert (error.node, classify(error, report).lost) == ("a", ("a",))
    assert "a second node" in error.message
    assert patience.believe(LOST, None) == (LOST, None)
