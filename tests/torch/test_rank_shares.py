import pytest

from skyctl.errors import InputError
from skyctl.torch import rank_shares, share, shares


@pytest.fixture
def ranks(monkeypatch):
    """Puts this process into a world as its environment tells it."""

    def enter(rank, world_size, shares=None, speeds=None):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        for name, value in (("SKYCTL_SHARES", shares), ("SKYCTL_SPEEDS", speeds)):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return enter


def test_plain_python_has_all_of_the_batch(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SKYCTL_SHARES", "SKYCTL_SPEEDS"):
        monkeypatch.delenv(name, raising=False)
    assert shares(64) == (64,)
    assert share(64) == 64


def test_under_torchrun_parts_are_equal(ranks):
    ranks(2, 3)
    assert shares(64) == (22, 21, 21)
    assert share(64) == 21


def test_under_skyctl_they_are_as_skyctl_says(ranks):
    ranks(1, 4, "32,16,8,8")
    assert shares() == shares(64) == (32, 16, 8, 8)
    assert share() == share(64) == 16


def test_the_scripts_batch_is_shared_in_the_proportion_of_skyctls(ranks):
    ranks(0, 4, "32,16,8,8")
    assert shares(128) == (64, 32, 16, 16)
    assert shares(4) == (1, 1, 1, 1)


def test_a_batch_is_shared_by_speeds_unless_skyctls_shares_add_up_to_it(ranks):
    ranks(0, 3, None, "1,0.25,0.25")
    assert shares(64) == (43, 11, 10)
    assert shares(3) == (1, 1, 1)
    with pytest.raises(InputError, match="told this script no shares"):
        share()
    ranks(0, 3, "40,12,12", "1,0.25,0.25")
    assert shares(64) == shares() == (40, 12, 12)
    assert shares(6) == (4, 1, 1)


def test_the_first_batch_that_is_asked_for_is_known(ranks, monkeypatch):
    monkeypatch.setattr(rank_shares._Here, "batch", None)
    ranks(0, 3)
    assert rank_shares.asked_batch() is None
    assert (share(64), share(9)) == (22, 3)
    assert rank_shares.asked_batch() == 64


def test_what_can_not_be_shared_is_refused(ranks):
    ranks(0, 3)
    with pytest.raises(InputError, match="a batch of 2 is too small for 3 ranks"):
        share(2)
    with pytest.raises(InputError, match="told this script no shares"):
        share()
    ranks(0, 3, "8,8")
    with pytest.raises(InputError, match="has the shares of 2 ranks, but there are 3"):
        share(64)
    for wrong in ("8,x,8", "8,0,8", "8,,8", "-1,2,3"):
        ranks(0, 3, wrong)
        with pytest.raises(InputError, match="whole numbers of at least 1"):
            share(64)
    for wrong in ("1,x,1", "1,0,1", "1,nan,1", "1,inf,1"):
        ranks(0, 3, None, wrong)
        with pytest.raises(InputError, match=r"SKYCTL_SPEEDS is .* it needs positive numbers"):
            share(64)
