"""Problems of devices in sites that are far apart."""

from collections.abc import Sequence

from skyctl.records.problem import Device, Layer, Link, Problem

GBIT = 1.25e8


def sites_of(sizes: Sequence[int], microbatches: int = 24) -> Problem:
    """Sites of so many devices: 2 Gbit/s within, 200 Mbit/s between; gradients are a hundred activations.

    A device's id begins with its site's number: ``s0n0``.
    """
    ids = [f"s{site}n{n}" for site, size in enumerate(sizes) for n in range(size)]
    layers = [
        Layer(
            name=f"l{i}",
            flops=1e9,
            state_bytes=4e8,
            activation_bytes=4e6,
            output_bytes=1e6,
            gradient_bytes=1e8,
        )
        for i in range(12)
    ]
    links = [
        Link(source=a, target=b, latency_s=1e-3, bandwidth_bytes_per_s=2 * GBIT)
        if a[:2] == b[:2]
        else Link(source=a, target=b, latency_s=1e-2, bandwidth_bytes_per_s=0.2 * GBIT)
        for a in ids
        for b in ids
        if a != b
    ]
    devices = tuple(Device(id=name, flops_per_s=2e10, memory_bytes=None) for name in ids)
    return Problem(
        layers=tuple(layers),
        devices=devices,
        links=tuple(links),
        microbatches=microbatches,
        parallel="hybrid",
    )
