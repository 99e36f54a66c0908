import json

import pytest
from tests.torch.ranks import SCRIPTS, run_ranks

from skyctl.torch.share_advice import RankTimes, better_shares, summarize


def test_the_median_of_each_step_s_time_by_its_samples():
    times = [(8.0, 4), (8.0, 4), (1.0, 1), (80.0, 4), (9.0, 4)]
    summary = summarize(times, share=None)
    assert (summary.samples, summary.sample_s) == (4, 2.0)
    assert summarize([(8.0, None)] * 5, share=4) == RankTimes(4, 2.0, 0.0)
    assert summarize([(8.0, None)] * 5, share=None) is None
    assert summarize([(8.0, 4)] * 2, share=None) is None  # too few to tell


def test_other_shares_are_advised_when_they_gain_more_than_noise():
    slow, fast = RankTimes(16, 4.0, 0.0), RankTimes(16, 1.0, 0.0)
    assert better_shares([fast, slow]) == ((26, 6), 64.0, 26.0)
    assert better_shares([fast, fast]) == (None, 16.0, 16.0)
    assert better_shares([RankTimes(26, 1.0, 0.0), RankTimes(6, 4.0, 0.0)])[0] is None
    noisy = RankTimes(16, 1.3, 0.1)
    assert better_shares([fast, noisy])[0] is None
    assert better_shares([fast, RankTimes(16, 1.3, 0.01)])[0] == (18, 14)


@pytest.mark.slow
def test_all_ranks_agree_and_the_first_one_says_it(tmp_path):
    ends = run_ranks(SCRIPTS / "advised.py", 2, tmp_path, "0.001,0.02")
    assert [end.returncode for end in ends] == [0, 0], ends[0].stderr
    *lines, first = ends[0].stdout.splitlines()
    second = ends[1].stdout.strip()  # the other one says nothing
    assert first == second
    advised = json.loads(first)
    assert [number for number, shares in enumerate(advised) if shares] == [49, 99]
    assert advised[49][0] > 6 > advised[49][1] >= 1
    assert sum(advised[49]) == 12
    assert lines[0].startswith(
        f"skyctl: shares {advised[49][0]},{advised[49][1]} would make a step's computing"
    )


def test_a_script_that_says_no_samples_is_refused_on_all_ranks(tmp_path):
    ends = run_ranks(SCRIPTS / "advised.py", 2, tmp_path, "0,0", "silent")
    for end in ends:
        assert end.returncode == 0, end.stderr
        assert "step() has no times per sample of ranks [0, 1]" in end.stdout
