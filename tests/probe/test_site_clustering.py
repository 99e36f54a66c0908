"""Sites from links: by latency, by rate, with noise, and what is filled in between them."""

import itertools
import random
from collections.abc import Callable

import pytest

from skyctl.probe.pairings import disjoint_pairs, exploratory_pairs, pairs_within_sites, site_crossings
from skyctl.probe.site_clustering import SiteNames, best_rates, estimate_links, find_sites, name_sites
from skyctl.records.profile import LinkProfile

Found = dict[tuple[str, str], LinkProfile]
Figure = Callable[[str, str], float]


def build(names: list[str], ms: Figure, mbit: Figure) -> Found:
    """Every link, both ways."""
    return {
        (a, b): LinkProfile(
            source=a, target=b, latency_s=ms(a, b) / 1e3, bandwidth_bytes_per_s=mbit(a, b) * 125_000
        )
        for a, b in itertools.permutations(names, 2)
    }


def nodes(*sites: tuple[str, int]) -> list[str]:
    """a0, a1, …, b0, …: the letter is the site."""
    return [f"{letter}{number}" for letter, count in sites for number in range(count)]


def by_letter(names: list[str]) -> SiteNames:
    return [list(group) for _, group in itertools.groupby(names, key=lambda name: name[0])]


def apart(near_ms: float, far_ms: float, noise: float = 0.0, seed: int = 0) -> Figure:
    draw = random.Random(seed)
    return lambda a, b: (near_ms if a[0] == b[0] else far_ms) * (1 + noise * draw.random())


@pytest.mark.parametrize("far_ms", [1.0, 5.0, 50.0])
@pytest.mark.parametrize("counts", [(2, 2), (1, 3), (5, 1, 2), (16, 16, 16, 16)])
def test_sites_by_latency_with_noise(far_ms: float, counts: tuple[int, ...]) -> None:
    names = nodes(*zip("abcd", counts, strict=False))
    links = build(names, apart(0.1, far_ms, noise=0.9, seed=len(names)), lambda a, b: 100)
    assert find_sites(names, links) == by_letter(names)


def test_waits_for_a_processor_are_no_distance() -> None:
    """A tenth of the pairs 20 times as slow as the others, at random: still one site."""
    draw = random.Random(1)
    names = nodes(("a", 12))
    links = build(names, lambda a, b: 6.0 if draw.random() < 0.1 else 0.3, lambda a, b: 100)
    assert find_sites(names, links) == [names]


def test_one_site_and_every_node_its_own() -> None:
    names = nodes(("a", 6))
    assert find_sites(names, build(names, lambda a, b: 0.4, lambda a, b: 100)) == [names]
    far = build(names, apart(12, 12, noise=2.0), lambda a, b: 20)
    assert find_sites(names, far) == [[name] for name in names]
    assert find_sites(["a"], {}) == [["a"]]
    assert find_sites([], {}) == []


def test_no_latency_but_a_slow_uplink_between_groups() -> None:
    names = nodes(("a", 3), ("b", 4))
    links = build(names, lambda a, b: 0.2, lambda a, b: 100 if a[0] == b[0] else 20)
    assert find_sites(names, links) == by_letter(names)


def test_slow_nodes_are_no_sites() -> None:
    names = nodes(("a", 5))
    rate = {"a0": 5.0, "a1": 20.0, "a2": 50.0, "a3": 100.0, "a4": 200.0}
    links = build(names, lambda a, b: 0.2, lambda a, b: min(rate[a], rate[b]))
    assert find_sites(names, links) == [names]


def test_rates_disturbed_at_random_split_nothing() -> None:
    draw = random.Random(2)
    names = nodes(("a", 16))
    links = build(names, lambda a, b: 0.2, lambda a, b: draw.uniform(30, 100))
    assert find_sites(names, links) == [names]


def test_a_node_that_no_link_joins_is_apart() -> None:
    names = nodes(("a", 3))
    links = build(names, lambda a, b: 0.2, lambda a, b: 100)
    for way in list(links):
        if "a2" in way:
            links[way] = LinkProfile(source=way[0], target=way[1], error="refused")
    assert find_sites(names, links) == [["a0", "a1"], ["a2"]]


def test_names_are_those_of_groups_with_just_these_nodes() -> None:
    sites = [["x", "y"], ["z"]]
    named = name_sites(sites, {"lab": ["y", "x"], "all": ["x", "y", "z"], "s2": ["y"]})
    assert [(site.name, list(site.nodes)) for site in named] == [("lab", ["x", "y"]), ("s2'", ["z"])]


# The links that are filled in


def test_disturbed_links_are_corrected_by_the_pair_that_was_alone() -> None:
    """Nodes of 100 and 10 Mbit/s; 32 crossings of a round shared 50: the one that was alone tells."""
    names = nodes(("a", 3), ("b", 3))
    slow = {"a2", "b1"}

    def alone(a: str, b: str) -> float:
        most = 50.0 if a[0] != b[0] else 100.0
        return min(most, 10.0 if {a, b} & slow else 100.0)

    links = build(names, apart(0.1, 5), lambda a, b: alone(a, b) if a[0] == b[0] else 7.0)
    links |= build(["a0", "b0"], apart(0.1, 5), alone)
    fixed = links | estimate_links(by_letter(names), links, [("b0", "a0")])
    for way, link in fixed.items():
        assert link.bandwidth_bytes_per_s == pytest.approx(alone(*way) * 125_000), way
        assert link.estimated == (way[0][0] != way[1][0] and set(way) != {"a0", "b0"})


def test_links_that_got_what_they_should_and_errors_stay() -> None:
    names = nodes(("a", 2), ("b", 2))
    links = build(names, apart(0.1, 5), lambda a, b: 100 if a[0] == b[0] else 19)
    links |= build(["a0", "b0"], apart(0.1, 5), lambda a, b: 20)
    links["a1", "b1"] = LinkProfile(source="a1", target="b1", error="refused")
    assert estimate_links(by_letter(names), links, [("a0", "b0")]) == {}


def test_missing_links_are_filled_in_or_say_why_not() -> None:
    names = nodes(("a", 2), ("b", 2), ("c", 1))
    links = {k: v for k, v in build(names, apart(0.1, 5), lambda a, b: 100).items() if k[0][0] == k[1][0]}
    links |= build(["a0", "b0"], apart(0.1, 5), lambda a, b: 30)
    estimated = estimate_links(by_letter(names), links, [("a0", "b0")])
    filled = estimated["b1", "a1"]
    assert (filled.latency_s, filled.estimated) == (pytest.approx(0.005), True)
    assert filled.bandwidth_bytes_per_s == pytest.approx(30 * 125_000)
    assert "no other pair of their sites" in (estimated["a1", "c0"].error or "")
    assert len(estimated) + len(links) == 20


# Rounds


def explore(names: list[str], links: Found) -> tuple[int, Found]:
    """Rounds until every two sites were compared and every site is known within, and what was measured."""
    measured: Found = {}
    for number in range(1000):
        sites = find_sites(names, measured)
        pairs = {frozenset(way) for way in measured}
        todo = disjoint_pairs(exploratory_pairs(sites, pairs) + pairs_within_sites(sites, pairs))
        if not todo:
            return number + sum(1 for _ in site_crossings(sites, best_rates(measured))), measured
        met = [name for pair in todo for name in pair]
        assert len(set(met)) == len(met)
        measured |= {way: links[way] for a, b in todo for way in ((a, b), (b, a))}
    raise AssertionError("never done")


@pytest.mark.parametrize(
    ("counts", "most"), [((32, 32), 50), ((16,) * 4, 40), ((8,) * 8, 40), ((20, 40, 3, 1), 60)]
)
def test_sites_take_rounds_like_nodes_of_a_site_and_sites(counts: tuple[int, ...], most: int) -> None:
    names = nodes(*zip("abcdefgh", counts, strict=False))
    mixed = names[::3] + names[1::3] + names[2::3]
    links = build(names, apart(0.1, 5, noise=0.5), lambda a, b: 100 if a[0] == b[0] else 40)
    count, measured = explore(mixed, links)
    assert {frozenset(site) for site in find_sites(mixed, measured)} == {
        frozenset(s) for s in by_letter(names)
    }
    assert count <= most


def test_rounds_of_one_site_and_of_sites_of_one_node_are_a_tournament() -> None:
    names = nodes(("a", 10))
    for ms in (0.1, 30.0):
        count, measured = explore(names, build(names, lambda a, b, ms=ms: ms, lambda a, b: 100))
        assert len(measured) == 90
        assert count <= 14


def test_one_pair_alone_between_every_two_sites() -> None:
    sites = [["a0", "a1"], ["b0"], ["c0"], ["d0", "d1"]]
    fast = {"a1": 5.0, "a0": 1.0, "d0": 1.0, "d1": 1.0, "b0": 2.0, "c0": 2.0}
    crossings = site_crossings(sites, fast, barred=[frozenset(("a1", "b0"))], done=[frozenset(("d1", "c0"))])
    assert len(crossings) <= 3
    pairs = {frozenset(pair) for pairs in crossings for pair in pairs}
    assert frozenset(("a0", "b0")) in pairs  # a1 cannot be connected with it
    assert frozenset(("a1", "c0")) in pairs
    assert not any({"b0", "c0"} == set(pair) or {"d0", "c0"} == set(pair) for pair in pairs)
    assert len(pairs) == 4
