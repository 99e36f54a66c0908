"""Memory that several nodes draw from is divided, and caps leave the others more."""

from skyctl.probe.resource_shares import SeenMemory, divide_memory


def seen(free: float, pot: str | None = "m", own: float = 0.0, cap: float | None = None) -> SeenMemory:
    return SeenMemory(free, "free memory", pot, own, cap)


def test_alone() -> None:
    shares = divide_memory({"a": seen(100.0)})
    assert (shares["a"].memory_bytes, shares["a"].memory_from) == (100.0, "free memory")


def test_one_pot_is_divided() -> None:
    shares = divide_memory({"a": seen(90.0), "b": seen(90.0), "c": seen(90.0), "other": seen(70.0, pot="n")})
    assert [shares[n].memory_bytes for n in "abc"] == [30.0, 30.0, 30.0]
    assert shares["a"].memory_from == "free memory, shared by 3 devices"
    assert shares["other"].memory_bytes == 70.0


def test_what_the_others_probes_hold_comes_back() -> None:
    shares = divide_memory({"a": seen(80.0, own=10.0), "b": seen(80.0, own=10.0)})
    assert shares["a"].memory_bytes == shares["b"].memory_bytes == 45.0


def test_a_cap_leaves_the_others_more() -> None:
    shares = divide_memory({"a": seen(90.0), "b": seen(90.0, cap=10.0), "c": seen(90.0)})
    assert [shares[n].memory_bytes for n in "abc"] == [40.0, 10.0, 40.0]
    assert shares["b"].memory_from == "memory_gib"


def test_a_cap_above_what_there_is_changes_nothing() -> None:
    shares = divide_memory({"a": seen(50.0, cap=80.0)})
    assert (shares["a"].memory_bytes, shares["a"].memory_from) == (50.0, "free memory")


def test_own_memory_is_not_shared() -> None:
    shares = divide_memory({"x/cuda:0": seen(16.0, pot=None), "x/cuda:1": seen(24.0, pot=None)})
    assert [u.memory_bytes for u in shares.values()] == [16.0, 24.0]
