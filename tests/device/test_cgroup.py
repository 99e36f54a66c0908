"""Limits are read from made-up /proc and cgroup trees, v1 and v2."""

from pathlib import Path

import pytest

from skyctl.device.cgroup import read_limits

MIB = 1 << 20


def tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def proc(root: Path, groups: str, mounts: list[str]) -> Path:
    tree(root, {"proc/self/cgroup": groups, "proc/self/mountinfo": "\n".join(mounts) + "\n"})
    return root / "proc"


def mount(point: Path, kind: str, options: str, inside: str = "/") -> str:
    escaped = str(point).replace(" ", "\\040")
    return f"30 20 0:28 {inside} {escaped} rw,relatime shared:9 - {kind} {kind} {options}"


def test_v2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    fs = tmp_path / "a mount with blanks"
    tree(
        fs,
        {
            "user/job/cpu.max": "max 100000\n",
            "user/cpu.max": "20000 10000\n",
            "user/cpu.stat": "usage_usec 5\nthrottled_usec 2500000\n",
            "cpu.max": "50000 10000\n",
            "user/job/memory.max": f"{512 * MIB}\n",
            "user/job/memory.current": f"{300 * MIB}\n",
            "user/job/memory.stat": f"anon 1\ninactive_file {80 * MIB}\nactive_file {20 * MIB}\n",
            "user/memory.max": "max\n",
            "user/memory.current": "1\n",
        },
    )
    limits = read_limits(proc(tmp_path, "0::/user/job\n", [mount(fs, "cgroup2", "rw")]))
    assert limits.quota is not None
    assert limits.memory is not None
    assert (limits.quota.cpus, limits.quota.period_s, limits.quota.throttled_s) == (2.0, 0.01, 2.5)
    assert limits.memory.left_bytes == (512 - 300 + 100) * MIB
    assert limits.unseen is None


def test_v1_has_a_tree_per_controller(tmp_path: Path) -> None:
    cpu, memory = tmp_path / "cpu,cpuacct", tmp_path / "memory"
    tree(cpu, {"lab/n1/cpu.cfs_quota_us": "8000\n", "lab/n1/cpu.cfs_period_us": "10000\n"})
    tree(cpu, {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"})
    tree(
        memory,
        {
            "lab/n1/memory.limit_in_bytes": f"{2048 * MIB}\n",
            "lab/n1/memory.usage_in_bytes": f"{100 * MIB}\n",
            "lab/n1/memory.stat": f"inactive_file 1\ntotal_inactive_file {10 * MIB}\ntotal_active_file 0\n",
            "memory.limit_in_bytes": "9223372036854771712\n",
            "memory.usage_in_bytes": "1\n",
        },
    )
    mounts = [mount(cpu, "cgroup", "rw,cpu,cpuacct"), mount(memory, "cgroup", "rw,memory")]
    limits = read_limits(proc(tmp_path, "4:memory:/lab/n1\n1:cpu,cpuacct:/lab/n1\n0::/\n", mounts))
    assert limits.quota is not None
    assert limits.memory is not None
    assert limits.quota.cpus == pytest.approx(0.8)
    assert limits.memory.limit_bytes == 2048 * MIB
    assert limits.memory.used_bytes == 90 * MIB


def test_inside_a_container_the_mounts_root_is_its_own_group(tmp_path: Path) -> None:
    fs = tmp_path / "fs"
    tree(fs, {"cpu.max": "15000 10000\n"})
    groups = "0::/docker/abc\n"
    limits = read_limits(proc(tmp_path, groups, [mount(fs, "cgroup2", "rw", inside="/docker/abc")]))
    assert limits.quota is not None
    assert limits.quota.cpus == 1.5


def test_hidden_cgroups_are_unknown_with_a_reason(tmp_path: Path) -> None:
    hidden = read_limits(proc(tmp_path, "0::/lab/n1\n", [mount(tmp_path / "gone", "cgroup2", "rw")]))
    assert (hidden.quota, hidden.memory) == (None, None)
    assert "cgroup" in (hidden.unseen or "")
    missing = read_limits(tmp_path / "no proc here")
    assert missing.unseen is not None


def test_broken_files_limit_nothing(tmp_path: Path) -> None:
    fs = tmp_path / "fs"
    tree(fs, {"cpu.max": "", "memory.max": "what\n", "memory.current": ""})
    limits = read_limits(proc(tmp_path, "0::/\nnonsense\n", [mount(fs, "cgroup2", "rw"), "short line"]))
    assert (limits.quota, limits.memory) == (None, None)
