"""Wheels that are found and fetched here, for nodes that get none themselves."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from skyctl.errors import UnfitError
from skyctl.setup.wheels import WheelFetcher, WheelTarget

OTHER = "aarch64" if platform.machine() == "x86_64" else "x86_64"
TARGET = WheelTarget("3.12.1", "Linux", OTHER, "2.35")
NO_INDEX = {"index_url": None, "extra_index_url": None}


def test_a_node_of_another_system_gets_its_own_uv(site, wheel: Callable[..., Path], monkeypatch) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(site.state))
    number = version("uv")
    wheel(site.wheels, "uv", number, {f"uv-{number}.data/scripts/uv": b"program"})
    with WheelFetcher(site.wheels, NO_INDEX) as fetcher:
        path, _ = fetcher.program("n", TARGET)
        assert path.read_bytes() == b"program"
        here = WheelTarget("3.12.1", platform.system(), platform.machine(), "2.35")
        assert fetcher.program("n", here)[0].name == "uv"
    assert not path.exists()
    assert list(site.state.glob("wheels-*")) == []


def test_wheels_are_fetched_with_the_indexs_password(site, index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(site.state))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    site.torch()
    index.password = "s3cr3t"
    url = f"http://ada:s3cr3t@127.0.0.1:{index.port}/simple"
    with WheelFetcher(None, {**NO_INDEX, "index_url": url}) as fetcher:
        found = fetcher.fetch("n", TARGET, ["torch"])
        assert [path.name.partition("-")[0] for path in found] == ["stubdep", "torch"]
        assert found[1].read_bytes() == next(site.wheels.glob("torch-*")).read_bytes()
        with pytest.raises(UnfitError, match=f"no wheels for node n.*Linux {OTHER}: .*torch>99"):
            fetcher.fetch("n", TARGET, ["torch>99"])
        for glibc in ("2.12", None):
            with pytest.raises(UnfitError, match="no wheels can be found here for node n"):
                fetcher.fetch("n", WheelTarget("3.12.1", "Linux", OTHER, glibc), ["torch"])
    with WheelFetcher(None, {**NO_INDEX, "index_url": "http://127.0.0.1:1/simple"}) as fetcher:
        with pytest.raises(UnfitError, match="neither node n nor this machine") as caught:
            fetcher.fetch("n", TARGET, ["torch"])
        assert "--wheels DIR" in str(caught.value.hint)
