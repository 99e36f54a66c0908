"""A profile as tables and as plain lines."""

import io

from rich.console import Console
from tests.helpers.bare_records import OF_DEVICE, OF_LAYER, OF_NODE, OF_WORKLOAD

from skyctl.probe.profile_tables import bar, profile_lines, profile_tables
from skyctl.records.profile import (
    Conditions,
    DeviceProfile,
    LayerCosts,
    LayerTiming,
    LineProfile,
    LinkProfile,
    NodeFailure,
    NodeProfile,
    Profile,
    ShapeProfile,
    WorkloadProfile,
)


def profile() -> Profile:
    def node(name: str) -> NodeProfile:
        return NodeProfile(
            name=name,
            hostname=name,
            platform="Linux",
            python="3.12.1",
            torch="2.9.0",
            cpu_model="A [bold]cpu[/bold]",
            cpus=0.8,
            memory_total_bytes=2.0**34,
            memory_available_bytes=2.0**33,
            address="192.0.2.1",
            interface="eth0",
            **OF_NODE,
        )

    costs = [
        LayerCosts(
            name=f"block.{i}",
            signature="b",
            flops=1e9,
            state_bytes=1.0,
            activation_bytes=1.0,
            output_bytes=1.0,
            workspace_bytes=0.0,
            **OF_LAYER,
        )
        for i in range(3)
    ]
    timing = LayerTiming(
        signature="b",
        microbatch_size=2,
        forward_s=0.01,
        backward_s=0.02,
        optimizer_s=0.001,
        spread=0.04,
        repeats=9,
        interval=0.045,
    )
    skipped = LayerTiming(signature="b", microbatch_size=2, skipped="needs 5.00 GiB")
    return Profile(
        cluster="c",
        cluster_digest="d",
        created="2026-01-01T00:00:00+00:00",
        nodes=[node("n1"), node("n[2]")],
        devices=[
            DeviceProfile(
                id=f"{name}/cpu:0",
                node=name,
                name="A cpu",
                threads=1,
                slowdown=slowdown,
                memory_bytes=2.0**33,
                memory_from="free memory",
                reserved_bytes=2.0**28,
                flops_per_s=1e11 / slowdown,
                timings=[row],
                conditions=Conditions(wall_s=1.0, share=0.6, notes=("other load",)),
                **OF_DEVICE,
            )
            for name, slowdown, row in (("n1", 1.0, timing), ("n[2]", 2.0, skipped))
        ],
        links=[
            LinkProfile(source="n1", target="n[2]", latency_s=0.005, bandwidth_bytes_per_s=1.25e7),
            LinkProfile(source="n[2]", target="n1", error="no connection"),
        ],
        workload=WorkloadProfile(
            source="train.py",
            digest="x",
            batch_size=4,
            dtype="float32",
            shapes=[ShapeProfile(microbatch_size=2, microbatches=2, layers=costs)],
            **OF_WORKLOAD,
        ),
        failures=[NodeFailure(node="n3", error="no torch", hint="install it")],
        lines=[
            LineProfile(node="n[2]", direction="in", bandwidth_bytes_per_s=2.5e6, peers=["n1", "n3"]),
        ],
        sites=(),
        uplinks=(),
        encrypted=False,
        interrupted=False,
    )


def test_tables_show_every_fact() -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(profile_tables(profile()))
    text = out.getvalue()
    for word in (
        "n1/cpu:0",
        "n[2]/cpu:0",
        "slowed 2×",
        "block.0 ×3",
        "10 + 20 ±4.5%?",
        "share",
        "60%",
        "! n1/cpu:0, n[2]/cpu:0: other load",
        "skipped",
    ):
        assert word in text
    for word in (
        "Mbit/s, below it ms",
        "100",
        "✗ n[2] → n1: no connection",
        "no torch",
        "install it",
        "n[2] in: 20 Mbit/s for all",
    ):
        assert word in text


def test_plain_lines_show_every_fact() -> None:
    lines = profile_lines(profile(), "each layer")
    assert "  note: other load" in lines
    assert any("±4.5%, spread 4%, 9 repeats, not steady" in line for line in lines)
    assert "link n1 -> n[2]: 5.00 ms, 100 Mbit/s" in lines
    assert "link n[2] -> n1: no figures: no connection" in lines
    together = "20 Mbit/s for all its links together (measured with n1 and n3 at once)"
    assert f"line n[2] in: {together}" in lines
    assert "failed n3: no torch (install it)" in lines
    assert any("skipped: needs 5.00 GiB" in line for line in lines)
    assert any(line.startswith("  block.0 ×3 × 2: forward 10 ms, backward 20 ms") for line in lines)


def many_layers(count: int) -> Profile:
    """The profile with so many distinct layers, the first of which takes longest and is there three times."""
    whole = profile()
    assert whole.workload is not None
    (shape,) = whole.workload.shapes
    (timing,) = whole.devices[0].timings
    extra = [f"layer.{i}" for i in range(count - 1)]
    costs = shape.layers[0]
    layers = [*shape.layers, *(costs.model_copy(update={"name": x, "signature": x}) for x in extra)]
    timings = [timing, *(timing.model_copy(update={"signature": x, "backward_s": 0.001}) for x in extra)]
    return whole.model_copy(
        update={
            "devices": (whole.devices[0].model_copy(update={"timings": tuple(timings)}),),
            "workload": whole.workload.model_copy(
                update={"shapes": (shape.model_copy(update={"layers": tuple(layers)}),)}
            ),
        }
    )


def test_many_layers_take_a_line_unless_each_is_asked_for() -> None:
    whole = many_layers(21)
    each = [line for line in profile_lines(whole, "each layer") if " × 2: " in line]
    assert len(each) == 21
    (line,) = [line for line in profile_lines(whole) if " × 2: " in line]
    assert line == (
        "  all layers × 2: forward 230 ms, backward 80 ms; the largest, both, each: block.0 ×3 30, "
        "layer.0 11, layer.1 11"
    )
    out = io.StringIO()
    Console(file=out, width=200).print(profile_tables(whole))
    text = out.getvalue()
    assert "each layer's times: -v" in text
    assert "all 23 layers" in text
    assert "230 + 80" in text
    assert "layer.2" not in text


def test_devices_alone_say_no_layer_and_no_link() -> None:
    lines = profile_lines(profile(), "devices")
    assert [line.partition(" ")[0] for line in lines if not line.startswith(" ")] == [
        "node", "node", "device", "device", "failed",
    ]  # fmt: skip
    assert not any(" ms" in line for line in lines)


def test_bars() -> None:
    assert bar(1.0, 4) == "████"
    assert bar(0.5, 4) == "██"
    assert bar(1e-9, 4) == "▏"
    assert bar(0.0, 4) == ""
