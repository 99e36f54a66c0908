"""Pipelines that are cut alike: sums stay within a cluster of devices, activations pass between clusters."""

from tests.planner.clusters import sites_of

from skyctl import plan, verify
from skyctl.planner.hybrid import hybrid_search
from skyctl.planner.hybrid.aligned_drafts import aligned_drafts
from skyctl.planner.hybrid.hybrid_model import HybridModel


def test_all_pipelines_of_a_draft_have_the_same_cuts():
    model = HybridModel(sites_of((4, 3, 3)))
    drafts = list(aligned_drafts(model))
    assert drafts
    for draft in drafts:
        assert len(draft.placements) > 1
        assert sum(draft.shares) == model.microbatches
        assert min(draft.shares) >= 1
        cuts = {tuple(stage.stop for stage in placement) for placement in draft.placements}
        assert len(cuts) == 1
        used = [stage.device for placement in draft.placements for stage in placement]
        assert len(used) == len(set(used))
    sites = [
        [{model.ids[s.device][:2] for s in column} for column in zip(*d.placements, strict=False)]
        for d in drafts
    ]
    assert any(
        all(len(column) == 1 for column in columns) and len(set().union(*columns)) == 3 for columns in sites
    )


def test_it_is_a_start_that_others_do_not_reach(monkeypatch):
    """Slow lines between sites, large gradients, small activations: each site is a stage."""
    problem = sites_of((4, 4, 4))
    planned = plan(problem, "heuristic", time_limit_s=2.0)
    assert verify(problem, planned).ok
    for pipeline in planned.pipelines:
        assert len({stage.device[:2] for stage in pipeline.stages}) == 3
    monkeypatch.setattr(hybrid_search, "aligned_drafts", lambda _model: iter(()))
    without = plan(problem, "heuristic", time_limit_s=2.0)
    assert planned.certificate.value_s < without.certificate.value_s
