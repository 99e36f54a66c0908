"""Texts and host files as other programs write them: read rightly, or refused by their name."""

from pathlib import Path

import pytest
import yaml
from tests.helpers.commands import run_here

from skyctl.errors import WorkloadError
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import make_spec

TEXT = "Thirty kilometres north, the café was closed – »für immer«, said the sign.\n" * 20
GPT = "gpt:layers=1,hidden=16,heads=2,context=16"
TEXTS = {
    "utf8": TEXT.encode(),
    "utf8_mark": b"\xef\xbb\xbf" + TEXT.encode(),
    "utf16": TEXT.encode("utf-16"),
    "utf32": TEXT.encode("utf-32"),
    "windows": TEXT.encode("cp1252"),
    "empty": b"",
    "short": "naïve\n".encode(),
}
READ = {"utf8"}
"""Those that must be taken; the others may also be refused, but not taken for other characters."""
HOSTS = {
    "mark": (b"\xef\xbb\xbftower slots=2\nattic slots=2\n", ["tower", "attic"]),
    "windows_lines": (b"tower slots=2\r\nattic slots=2\r\n", ["tower", "attic"]),
    "utf16_hosts": ("tower slots=2\nattic slots=2\n".encode("utf-16"), ["tower", "attic"]),
    "slurm": (b"node[07-09] slots=2\n", ["node07", "node08", "node09"]),
    "slurm_list": (b"node[1,3-4] slots=2\nlogin slots=1\n", ["node1", "node3", "node4", "login"]),
    "slurm_several": (b"gpu[1-3,7],cpu01\n", ["gpu1", "gpu2", "gpu3", "gpu7", "cpu01"]),
    "slurm_two_ranges": (b"r[1-2]n[09-10]:4\n", ["r1n09", "r1n10", "r2n09", "r2n10"]),
    "inventory_slurm": (b"[gpu]\nnode[07-08]\n", ["node07", "node08"]),
    "ports": (b"tower:2222 slots=2\nattic slots=2\n", ["tower", "attic"]),
    "inventory_mark": (b"\xef\xbb\xbf[gpu]\ntower ansible_host=192.0.2.7\nattic\n", ["tower", "attic"]),
    "inventory_ranges": (b"[gpu]\nnode[01:03].example.org\n", [f"node0{i}.example.org" for i in (1, 2, 3)]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_decoded_or_refused_by_name(name, tmp_path):
    file = tmp_path / f"{name}.txt"
    file.write_bytes(TEXTS[name])
    rows = _first_rows(file)
    if isinstance(rows, WorkloadError):
        assert name not in READ, rows
        assert file.name in str(rows)
        assert rows.hint
        return
    for row in rows:
        assert bytes(row) in TEXT.encode()


def _first_rows(file: Path) -> list[list[int]] | WorkloadError:
    try:
        workload = load_workload(make_spec(GPT, batch_size=2, data_path=str(file)))
        inputs, _ = next(workload.batches())
    except WorkloadError as exc:
        return exc
    rows: list[list[int]] = inputs.tolist()
    return rows


@pytest.mark.parametrize("name", HOSTS)
def test_hosts_are_read_as_they_are_meant(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    content, names = HOSTS[name]
    file = tmp_path / ("hosts.ini" if name.startswith("inventory") else "hostfile")
    file.write_bytes(content)
    done = run_here(capsys, "init", "--from", str(file))
    if done.returncode == 2:
        assert file.name in done.stderr
        assert "next:" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    nodes = yaml.safe_load((tmp_path / "cluster.yaml").read_text())["nodes"]
    assert [node if isinstance(node, str) else node["name"] for node in nodes] == names
