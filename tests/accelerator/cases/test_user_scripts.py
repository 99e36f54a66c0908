"""A script of one's own over the backend ``skyctl``, with its tensors on the toy accelerator."""

from __future__ import annotations

from tests.transport.test_user_scripts import assert_alike, results_of, run, world

__all__ = ["world"]


def test_collectives_come_to_the_same_as_on_the_cpu(world: dict[str, str]) -> None:
    there = results_of(run("collectives", "skyctl", {**world, "DEVICE": "toy"}, 3))
    here = results_of(run("collectives", "skyctl", world, 3))
    for one, other in zip(there, here, strict=True):
        assert_alike(one, other)
