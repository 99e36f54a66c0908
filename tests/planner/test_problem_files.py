"""Problem files as people write them: every fault ends with its exit code and one message that names it."""

from __future__ import annotations

import json
import math
import sys

import pytest

from skyctl.cli.app import main

IDS = ["n0/cpu:0", "n1/cpu:0"]


def document(**changes):
    """Four layers on two devices with a link, some of it changed."""
    fields = {
        "kind": "skyctl/problem",
        "version": 1,
        "layers": [
            {"name": f"l{i}", "flops": 3e9, "state_bytes": 1e6, "activation_bytes": 1e3, "output_bytes": 1e3}
            for i in range(4)
        ],
        "devices": [{"id": i, "flops_per_s": 1e10, "memory_bytes": 1e9} for i in IDS],
        "links": [
            {"source": IDS[0], "target": IDS[1], "latency_s": 0.001, "bandwidth_bytes_per_s": 1e8},
            {"source": IDS[1], "target": IDS[0], "latency_s": 0.001, "bandwidth_bytes_per_s": 1e8},
        ],
        "microbatches": 4,
    }
    return fields | changes


def layers(**changes):
    return [layer | changes for layer in document()["layers"]]


def devices(**changes):
    return [device | changes for device in document()["devices"]]


def links(**changes):
    return [link | changes for link in document()["links"]]


def times(forward=0.0, length=4):
    figures = {"forward_s": [forward] * length, "backward_s": [0.0] * 4, "optimizer_s": [0.0] * 4}
    return dict.fromkeys(IDS, figures)


@pytest.fixture
def skyctl(tmp_path, monkeypatch, capsys):
    """Runs ``skyctl plan --problem FILE …`` in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "state"))

    def run(text, *arguments):
        path = tmp_path / "problem.json"
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        monkeypatch.setattr(sys, "argv", ["skyctl", "plan", "--problem", "problem.json", *arguments])
        code = 0
        try:
            main()
        except SystemExit as exc:
            code = exc.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert "bug in skyctl" not in err
        return code, out, err

    return run


FAULTS = {
    "NaN": (document(layers=layers(flops=math.nan)), "layers.0.flops", "finite"),
    "Infinity": (document(devices=devices(flops_per_s=math.inf)), "devices.0.flops_per_s", "finite"),
    "minus infinity": (document(layers=layers(state_bytes=-math.inf)), "layers.0.state_bytes"),
    "too large for a float": (json.dumps(document()).replace("3000000000.0", "1e999"), "layers.0.flops"),
    "negative flops": (document(layers=layers(flops=-1.0)), "layers.0.flops", "-1"),
    "negative bytes": (document(layers=layers(activation_bytes=-1.0)), "layers.0.activation_bytes"),
    "negative memory": (document(devices=devices(memory_bytes=-1.0)), "devices.0.memory_bytes"),
    "negative time": (document(times=times(-0.5)), "forward_s.0", "-0.5"),
    "negative latency": (document(links=links(latency_s=-1.0)), "links.0.latency_s"),
    "zero speed": (document(devices=devices(flops_per_s=0)), "devices.0.flops_per_s", "greater than 0"),
    "zero bandwidth": (document(links=links(bandwidth_bytes_per_s=0)), "links.0.bandwidth_bytes_per_s"),
    "zero microbatches": (document(microbatches=0), "microbatches", "1"),
    "half a microbatch": (document(microbatches=1.5), "microbatches"),
    "a negative window": (document(receive_window=-1), "receive_window"),
    "no layers": (document(layers=[]), "layers: must hold at least 1, it is empty"),
    "no devices": (document(devices=[], links=[]), "devices: must hold at least 1, it is empty"),
    "duplicate ids": (document(devices=devices(id=IDS[0]), links=[]), "duplicate device", IDS[0]),
    "duplicate links": (document(links=document()["links"] * 2), "duplicate link"),
    "a link to itself": (document(links=links(target=IDS[0])), "to itself"),
    "an unknown link end": (document(links=links(target="n9/cpu:0")), "links", "n9/cpu:0"),
    "an unknown shared end": (
        document(shared=[{"name": "up", "bandwidth_bytes_per_s": 1.0, "links": [[IDS[0], "n9"]]}]),
        "'up'",
        "'n9'",
    ),
    "a shared link of three": (
        document(shared=[{"name": "up", "bandwidth_bytes_per_s": 1.0, "links": [[*IDS, IDS[0]]]}]),
        "[source, target]",
    ),
    "a shared link to itself": (
        document(shared=[{"name": "up", "bandwidth_bytes_per_s": 1.0, "links": [[IDS[0], IDS[0]]]}]),
        "shared 'up': a link of 'n0/cpu:0' to itself",
    ),
    "an unknown pin": (
        document(first_stage=["n9/cpu:0"]),
        "first_stage names device 'n9/cpu:0', which is not in devices: n0/cpu:0, n1/cpu:0",
    ),
    "times of an unknown device": (document(times={"n9/cpu:0": times()[IDS[0]]}), "times", "n9/cpu:0"),
    "times of wrong length": (document(times=times(length=3)), "forward_s has 3 values for 4 layers"),
    "an unknown schedule": (document(schedule="zigzag"), "schedule", "1f1b", "zigzag"),
    "an unknown objective": (document(objective="joy"), "objective", "bottleneck"),
    "an unknown field": (document(color="red"), "'color' is not a field; there are", "microbatches"),
    "a field's name misspelt": (
        document(layers=layers(flop=1.0)),
        "layers.0.flop: 'flop' is not a field; did you mean 'flops'?",
    ),
    "a time's name misspelt": (
        document(times={IDS[0]: times()[IDS[0]] | {"forwards": []}}),
        "'forwards' is not a field; did you mean 'forward_s'?",
    ),
    "a missing field": (
        {k: v for k, v in document().items() if k != "microbatches"},
        "microbatches: is missing",
    ),
    "a text for a number": (document(microbatches="4"), "microbatches"),
    "not JSON": ("{", "problem.json is not JSON"),
    "nothing": ("", "problem.json is not JSON"),
    "a list": ("[]", "must hold a JSON object"),
    "the wrong kind": (document(kind="skyctl/plan"), "skyctl/problem", "skyctl/plan"),
    "a newer version": (document(version=99), "version 99", "upgrade"),
    "a step of too many seconds": (document(layers=layers(flops=1e308)), "too large"),
    "a speed too small": (document(devices=devices(flops_per_s=1e-320)), "too large"),
    "a bandwidth too small": (document(links=links(bandwidth_bytes_per_s=1e-320)), "too large"),
    "a share too large": (document(links=links(sent_share=1e306)), "link", "too large"),
    "put off too large": (document(layers=layers(deferred_bytes=1e308)), "more than can be computed with"),
    "bytes too large": (document(layers=layers(state_bytes=1.7e308)), "more than can be computed with"),
    "too many microbatches": (document(microbatches=10**400), "at most 100000"),
    "too wide a window": (document(receive_window=10**400), "at most 1000000"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(skyctl, name):
    text, *words = FAULTS[name]
    code, out, err = skyctl(text)
    assert code == 2, err
    assert out == ""
    assert err.count("error:") == 1
    for word in ("problem.json", *words):
        assert word in err


def test_a_missing_file_and_a_folder(skyctl, tmp_path):
    (tmp_path / "folder.json").mkdir()
    for name in ("nowhere.json", "folder.json"):
        code, _, err = skyctl(document(), "--problem", name)
        assert code == 2
        assert name in err


def test_too_many_microbatches_by_flag(skyctl):
    code, _, err = skyctl(document(), "--microbatches", "2000000")
    assert code == 2
    assert "at most 100000" in err


WORKS = {
    "one device": document(devices=devices()[:1], links=[]),
    "one layer": document(layers=layers()[:1]),
    "more devices than layers": document(layers=layers()[:1], first_stage=[IDS[1]]),
    "layers of no flops": document(layers=layers(flops=0.0)),
    "times of zero": document(times=times()),
    "nothing but zeros": document(
        layers=layers(flops=0, state_bytes=0, activation_bytes=0, output_bytes=0),
        devices=devices(memory_bytes=0),
        links=links(latency_s=0),
    ),
    "unlimited memory": document(devices=devices(memory_bytes=None)),
    "one microbatch": document(microbatches=1),
    "large numbers": document(
        layers=layers(flops=1e200, state_bytes=1e200),
        devices=devices(memory_bytes=1e250, flops_per_s=1e150),
    ),
    "small numbers": document(layers=layers(flops=1e-200), devices=devices(flops_per_s=1e-150)),
    "a shared uplink with no link": document(
        links=[], shared=[{"name": "up", "bandwidth_bytes_per_s": 1e6, "links": [IDS]}]
    ),
}


@pytest.mark.parametrize("strategy", ["even", "heuristic", "optimal"])
@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("objective", ["iteration", "bottleneck"])
def test_unusual_but_right(skyctl, name, strategy, objective):
    code, out, err = skyctl(WORKS[name], "--strategy", strategy, "--objective", objective, "--json")
    if strategy == "even" and name == "more devices than layers":
        assert code == 3
        return
    assert code == 0, err
    plan = json.loads(out)
    assert plan["stages"][-1]["stop"] == len(WORKS[name]["layers"])
    assert math.isfinite(plan["predicted"]["iteration_s"])
    if strategy == "optimal":
        assert plan["certificate"]["status"] == "optimal"


@pytest.mark.parametrize("name", WORKS)
def test_unusual_but_right_for_a_person(skyctl, name):
    code, out, err = skyctl(WORKS[name])
    assert code == 0, err
    assert "what binds" in out
    assert "nan" not in out
