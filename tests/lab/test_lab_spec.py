"""lab.yaml: what it may say, and what its errors say."""

from __future__ import annotations

import pytest

from skyctl.errors import InputError, InvalidRecordError, InventoryError
from skyctl.lab.lab_spec import LabSpec, read_lab
from skyctl.lab.lab_state import free_name

GOOD = """\
nodes:
  - {name: n1, cpus: 0.8, memory_gib: 2, rate_mbit: 100, site: a}
  - {name: n2, cpus: 0.4, rate_mbit: 50, site: b}
sites: {latency_ms: 5, uplink_mbit: {b: 20}}    # one way, between sites; an uplink is shared by its site
"""


def read(tmp_path, text):
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    return read_lab(path)


def test_the_contracts_example(tmp_path):
    spec = read(tmp_path, GOOD)
    assert [node.name for node in spec.nodes] == ["n1", "n2"]
    assert spec.nodes[0].memory_gib == 2
    assert spec.nodes[1].memory_gib is None
    assert spec.sites.latency_ms == 5
    assert spec.sites.uplink_mbit == {"b": 20}
    assert spec.site_names() == ["a", "b"]
    assert spec.apart()


def test_the_example_that_is_shipped(request):
    spec = read_lab(request.config.rootpath / "docs" / "examples" / "lab.yaml")
    assert len(spec.nodes) == 4


def test_a_slice_may_be_given(tmp_path):
    assert read(tmp_path, GOOD).cpu_slice_ms is None
    assert read(tmp_path, f"{GOOD}cpu_slice_ms: 5\n").cpu_slice_ms == 5


LINKED = """\
nodes: [{name: n1, cpus: 1}, {name: n2, cpus: 1}, {name: n3, cpus: 1}]
links:
  - {between: [n1, n2], rate_mbit: 40, latency_ms: 2}
  - {from: n3, to: n1, rate_mbit: 5}
  - {from: n1, to: n3, latency_ms: 1.5}
"""


def test_a_link_is_said_for_both_directions_or_for_each(tmp_path):
    spec = read(tmp_path, LINKED)
    assert [(a.source, a.target, a.rate_mbit, a.latency_ms) for a, _ in spec.lines()] == [
        ("n1", "n2", 40, 2),
        ("n3", "n1", 5, 0),
    ]
    assert [(b.source, b.target, b.rate_mbit, b.latency_ms) for _, b in spec.lines()] == [
        ("n2", "n1", 40, 2),
        ("n1", "n3", None, 1.5),
    ]
    assert LabSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("n1 n2", "a link is a mapping with the nodes that it is between, it is 'n1 n2'"),
        ("{between: [n1, n2]}", "link 1 has neither rate_mbit nor latency_ms"),
        ("{between: [n1, n22], rate_mbit: 1}", "names node 'n22', which the lab has not; did you mean"),
        ("{between: [n1, n1], rate_mbit: 1}", "a link names two nodes"),
        ("{between: [n1, n2, n3], rate_mbit: 1}", "a link names two nodes"),
        ("{between: n1, rate_mbit: 1}", "a link names two nodes"),
        ("{between: [n1, [n2]], rate_mbit: 1}", "a link names two nodes"),
        ("{between: [n1, n2], to: n3, rate_mbit: 1}", "a link names two nodes"),
        ("{from: n1, rate_mbit: 1}", "a link names two nodes"),
        ("{rate_mbit: 1}", "a link names two nodes"),
        ("{from: n1, to: n2, rate_mbit: 1}", "links says n1 → n2 and not n2 → n1: a line has two directions"),
        ("{between: [n1, n2], rate_mbit: 0}", "'rate_mbit' in link 1"),
        ("{between: [n1, n2], rate_mbit: fast}", "'rate_mbit' in link 1"),
        ("{between: [n1, n2], latency_ms: -1}", "'latency_ms' in link 1"),
        ("{between: [n1, n2], rate: 1}", "unknown key 'rate' in link 1; did you mean 'rate_mbit'?"),
    ],
)
def test_a_links_fault_is_named_with_its_line(tmp_path, link, words):
    text = f"{LINKED.partition('links:')[0]}links:\n  - {link}\n"
    with pytest.raises(InventoryError) as caught:
        read(tmp_path, text)
    assert "lab.yaml:3: " in str(caught.value)
    assert words in str(caught.value)


def test_a_direction_is_said_once(tmp_path):
    with pytest.raises(InventoryError, match=r"lab.yaml:6: links says n2 → n1 more than once"):
        read(tmp_path, f"{LINKED}  - {{from: n2, to: n1, rate_mbit: 5}}\n")


def test_sites_may_be_left_out(tmp_path):
    spec = read(tmp_path, "nodes:\n  - {name: n1, cpus: 1}\n  - {name: n2, cpus: 2, site: z}\n")
    assert spec.site_names() == ["default", "z"]
    assert not spec.apart()


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("nodes:\n  - {name: n1, cpu: 0.8}\n", 2, "unknown key 'cpu' in node 'n1'; did you mean 'cpus'?"),
        ("nodes:\n  - {name: n1, cpus: 1}\nsite: {latency_ms: 5}\n", 3, "did you mean 'sites'?"),
        (
            "nodes:\n  - {name: n1, cpus: 1}\n  - {name: n1, cpus: 1}\n",
            3,
            "duplicate node 'n1' (node 1 is the first)",
        ),
        ("nodes:\n  - name: n1\n    cpus: fast\n", 3, "'cpus' in node 'n1'"),
        ("nodes:\n  - name: n1\n    cpus: -1\n", 3, "'cpus' in node 'n1'"),
        ("nodes:\n  - name: n1\n    cpus: .nan\n", 3, "'cpus' in node 'n1'"),
        ("nodes:\n  - {name: n1}\n", 2, "'cpus' in node 'n1'"),
        ("nodes:\n  - {cpus: 1}\n", 2, "'name' in node 1"),
        ("nodes:\n  - {name: 'a b; rm', cpus: 1}\n", 2, "a lab node's name is letters"),
        ("nodes:\n  - n1\n", 2, "a lab node is a mapping"),
        ("nodes:\n\t- n1\n", 2, "a tab"),
        ("nodes: []\n", 1, "nodes is empty"),
        (GOOD.replace("{b: 20}", "{bb: 20}"), 4, "names site 'bb', which no node is in; did you mean"),
        (GOOD.replace("{b: 20}", "{b: 0}"), 4, "uplink_mbit.b"),
        (GOOD.replace("latency_ms: 5", "latency_ms: -5"), 4, "'latency_ms' in sites"),
        (f"{GOOD}cpu_slice_ms: 0.5\n", 5, "'cpu_slice_ms' in the file"),
        (f"{GOOD}cpu_slice_ms: [10]\n", 5, "'cpu_slice_ms' in the file"),
        (f"{GOOD}cpu_slice_ms: 10\ncpu_period_ms: 100\n", 1, "cpu_slice_ms and cpu_period_ms"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path, text, line, words):
    with pytest.raises(InventoryError) as caught:
        read(tmp_path, text)
    assert f"lab.yaml:{line}: " in str(caught.value)
    assert words in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        read_lab(tmp_path / "nowhere.yaml")


def test_a_spec_made_in_python_is_checked_too():
    node = {"name": "n", "cpus": 1.0}
    link = {"source": "n", "target": "m", "rate_mbit": 1.0}
    for faulty in (
        {"nodes": [node, {**node, "name": "m"}], "links": [link]},
        {"nodes": [node], "links": [link, {**link, "source": "m", "target": "n"}]},
        {"nodes": []},
        {"nodes": [node, node]},
        {"nodes": [node], "sites": {"uplink_mbit": {"x": 1.0}}},
        {"nodes": [{**node, "name": f"n{i}"} for i in range(251)]},
    ):
        with pytest.raises(InvalidRecordError):
            LabSpec.model_validate(faulty)


def test_names_are_made_of_the_files(tmp_path):
    assert free_name(tmp_path / "two sites!.yaml") == "two-sites"
    assert free_name("...") == "lab"
