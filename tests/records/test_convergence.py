"""Which layers' times are known well enough."""

from skyctl.records.profile import LayerTiming, unconverged


def timing(name: str, seconds: float | None, interval: float | None, size: int = 1) -> LayerTiming:
    if seconds is None:
        return LayerTiming(signature=name, microbatch_size=size, skipped="too large")
    return LayerTiming(
        signature=name, microbatch_size=size, forward_s=seconds, backward_s=seconds, interval=interval
    )


def names(*timings: LayerTiming, limit: float = 0.03) -> list[str]:
    return [row.signature for row in unconverged(timings, limit)]


def test_by_interval() -> None:
    assert names(timing("a", 1.0, 0.02), timing("b", 1.0, 0.04)) == ["b"]
    assert names(timing("a", 1.0, 0.04), limit=0.06) == []
    assert names(timing("a", 1.0, None)) == ["a"], "too few repetitions to tell"
    assert names(timing("a", None, None)) == []


def test_a_layer_of_next_to_nothing_is_judged_beside_the_others() -> None:
    cheap = timing("cheap", 0.001, 0.5)
    assert names(cheap, timing("a", 1.0, 0.01)) == []
    assert names(cheap, timing("a", 1.0, 0.01, size=2)) == ["cheap"], "sizes are apart"
    assert names(timing("zero", 0.0, 0.5)) == ["zero"]
    assert names(timing("dear", 10.0, 0.05), timing("a", 0.1, 0.01)) == ["dear"]
