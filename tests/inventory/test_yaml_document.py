"""YAML with line numbers."""

from __future__ import annotations

import pytest

from skyctl.errors import InputError, InventoryError
from skyctl.inventory.yaml_document import load_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n\t- x\n", "f.yaml:3: a tab"),
        ("a:\n  b: 1\n\tc: 2\n", "f.yaml:3: a tab"),
        ("a: 1\na: 2\n", "f.yaml:2: key 'a' stands twice (first on line 1)"),
        ("x:\n  - {n: 1,\n     n: 2}\n", "f.yaml:3: key 'n' stands twice (first on line 2)"),
        ("a: [1\n", "f.yaml:2: not YAML: while parsing a flow sequence"),
        ("- 1\n---\n- 2\n", "f.yaml:2: not YAML"),
        ("!!python/object/apply:os.system [x]\n", "f.yaml:1: a value may not carry the tag"),
        ("a: !!python/name:os.system x\n", "f.yaml:1: not YAML: could not determine a constructor"),
        ("a: *nope\n", "f.yaml:1: not YAML: found undefined alias"),
        ("a: &x [1, *x]\n", "f.yaml:1: an alias that holds itself"),
        ("[1]: 2\n", "f.yaml:1: a key must be a text"),
        ("x: 2026-99-99\n", "f.yaml:1: '2026-99-99': month must be in 1..12; put it in quotes"),
        ("a: \x01\n", "f.yaml: not YAML: unacceptable character"),
        ("[" * 100_000, "f.yaml: nested too deeply"),
    ],
)
def test_not_yaml(text: str, message: str) -> None:
    with pytest.raises(InventoryError) as caught:
        parse_yaml(text, "f.yaml")
    assert caught.value.message.startswith(message)


def test_aliases_that_multiply_are_refused() -> None:
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(InventoryError, match="too large"):
        parse_yaml("\n".join(lines), "f.yaml")


def test_lines_of_keys_items_and_what_is_missing() -> None:
    document = parse_yaml(
        "# c\na:\n  - b: 1\n    c: 2\n  - x\nq: &z {m: 1}\nr:\n  <<: *z\n  n: 2\n", "f.yaml"
    )
    assert document.data == {"a": [{"b": 1, "c": 2}, "x"], "q": {"m": 1}, "r": {"m": 1, "n": 2}}
    lines = {("a",): 2, ("a", 0): 3, ("a", 0, "c"): 4, ("a", 1): 5, ("r", "n"): 9, ("a", 0, "zz"): 3, (): 2}
    assert {loc: document.line(loc) for loc in lines} == lines


def test_mapping_sequence_text() -> None:
    document = parse_yaml("a: {prot: 1}\nb: []\nc: no\nd: x\n", "f.yaml")
    with pytest.raises(InventoryError, match=r"f.yaml:1: unknown key 'prot' in a; did you mean 'port'\?"):
        document.mapping(("a",), ("port", "host"), "a")
    with pytest.raises(InventoryError, match=r"f.yaml:1: unknown key 'prot' in a; there are xyz"):
        document.mapping(("a",), ("xyz",), "a")
    with pytest.raises(InventoryError, match=r"f.yaml:2: b must be a mapping .*it is a list"):
        document.mapping(("b",), None, "b")
    with pytest.raises(InventoryError, match=r"f.yaml:1: a must be a list, it is a mapping"):
        document.sequence(("a",), "a")
    with pytest.raises(InventoryError, match=r"f.yaml:3: c must be a text, it is False \(YAML reads it as"):
        document.text(("c",), "c")
    assert document.text(("d",), "d") == "x"
    assert document.mapping(("nothing",), (), "nothing") == {}
    assert document.sequence(("nothing",), "nothing") == []


def test_files_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_yaml(tmp_path / "none.yaml")
    (tmp_path / "latin").write_bytes(b"name: \xe9")
    with pytest.raises(InputError, match="UTF-8"):
        load_yaml(tmp_path / "latin")
