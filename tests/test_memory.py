"""Memory plan: limits read right, refusals whose figures add up."""

import re

import pytest

from clo_jax import memory
from clo_jax.errors import MemoryPlanError


def machine(tmp_path, available_kib, **files):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_without_a_cgroup_limit(tmp_path):
    assert memory.available_host_bytes(machine(tmp_path, 1000)) == 1000 * 1024


def test_cgroup_limits_count(tmp_path):
    root = machine(tmp_path, 10**6)
    folder = root / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("max\n")
    (folder / "memory.current").write_text("5\n")
    assert memory.available_host_bytes(root) == 10**6 * 1024
    (folder / "memory.max").write_text("1000005\n")
    assert memory.available_host_bytes(root) == 1000000


def test_refusal_adds_up():
    memory.require({"a": 1}, memory.RESERVE_BYTES + 1)
    with pytest.raises(MemoryPlanError) as error:
        memory.require({"rows": 3 << 30, "codes": 1 << 30}, 2 << 30)
    need, rows, codes, reserve, together, available = map(float, re.findall(r"([\d.]+) GiB", str(error.value)))
    assert need == rows + codes == 4.0 and reserve == 0.5 and together == need + reserve and available == 2.0
