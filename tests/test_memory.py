"""Memory plan: limits read right, refusals whose figures add up."""

import re

import jax
import jax.numpy as jnp
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


GIB = 1 << 30
PREALLOCATED = memory.Device(free=30 * GIB, pool_limit=100 * GIB, pool_held=100 * GIB, pool_used=20 * GIB)
GROWING = memory.Device(free=120 * GIB, pool_limit=100 * GIB, pool_held=24 * GIB, pool_used=20 * GIB)


def figures(text):
    """need, parts, reserve, together and available of one place's refusal."""
    need, *parts, reserve, together, available = map(float, re.findall(r"([\d.]+) GiB", text))
    return need, parts, reserve, together, available


def test_refusal_adds_up():
    memory.require(memory.Place("host memory", {"a": 1}, memory.RESERVE_BYTES + 1))
    memory.require(memory.Place("host memory", {"a": 0}, 0))
    with pytest.raises(MemoryPlanError, match="In host memory") as error:
        memory.require(memory.Place("host memory", {"rows": 3 * GIB, "codes": GIB, "none": 0}, 2 * GIB))
    need, parts, reserve, together, available = figures(str(error.value))
    assert need == sum(parts) == 4.0 and reserve == 0.5 and together == need + reserve and available == 2.0
    assert "none" not in str(error.value)


def test_every_place_that_falls_short_has_figures_of_its_own():
    places = [memory.Place(name, {"rows": 2 * GIB}, n * GIB) for name, n in (("one", 1), ("two", 3), ("three", 2))]
    with pytest.raises(MemoryPlanError) as error:
        memory.require(*places)
    for name, part in zip(("one", "three"), str(error.value).split("In ")[1:], strict=True):
        need, parts, reserve, together, _ = figures(part)
        assert part.startswith(name) and need == sum(parts) and together == need + reserve


def refused(pool, arenas, device):
    try:
        memory.require(*memory.device_places({"codes": pool * GIB}, {"selected rows": arenas * GIB}, device))
    except MemoryPlanError as error:
        return str(error)
    return ""


def test_a_pool_that_is_taken_leaves_the_rest_to_the_arenas():
    assert not refused(79, 29, PREALLOCATED)
    text = refused(80, 1, PREALLOCATED)
    assert "In XLA's pool on the device: need 80.00 GiB (codes 80.00 GiB)" in text and "available 80.00 GiB" in text
    assert "limit is 100.00 GiB" in text and "raise XLA_PYTHON_CLIENT_MEM_FRACTION" in text and "outside" not in text
    text = refused(1, 30, PREALLOCATED)
    assert "outside of XLA's pool: need 30.00 GiB (selected rows 30.00 GiB)" in text and "holds 100.00 GiB" in text
    assert "PREALLOCATE=false" in text and "on the device:" not in text


def test_a_pool_that_grows_takes_from_what_the_arenas_take_from():
    assert not refused(60, 60, GROWING)
    text = refused(60, 70, GROWING)
    need, (rows, growth), reserve, together, available, *_ = figures(text.split(". XLA's pool")[0])
    assert (rows, growth) == (70.0, 56.5)  # 60 and a reserve of 0.5, less the 4 that the pool has to give
    assert need == rows + growth and together == need + reserve and available == 120.0
    assert refused(90, 1, GROWING).count("In ") == 1  # beyond its limit: the pool's own refusal, and only that


def test_without_a_pool_there_is_one_place():
    device = memory.Device(8 * GIB, None, None, None)
    assert not refused(4, 3, device)
    assert "In device memory: need 8.00 GiB (codes 4.00 GiB, selected rows 4.00 GiB)" in refused(4, 4, device)


@pytest.mark.parametrize("name", memory.POOL_SETTINGS)
def test_a_users_choice_of_the_pool_stays(name, monkeypatch):
    monkeypatch.setattr(memory.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(memory._host, "build_info", lambda: {"cuda": True})
    memory.grow_pool_on_demand(environment := {name: "x"})
    assert environment == {name: "x"}


@pytest.mark.parametrize("started, cuda, changed", [(False, True, True), (True, True, False), (False, False, False)])
def test_the_pool_grows_only_where_it_can_be_told_to(started, cuda, changed, monkeypatch):
    monkeypatch.setattr(memory.xla_bridge, "backends_are_initialized", lambda: started)
    monkeypatch.setattr(memory._host, "build_info", lambda: {"cuda": cuda})
    memory.grow_pool_on_demand(environment := {})
    assert environment == ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if changed else {})


@pytest.mark.gpu
def test_the_devices_figures_are_plausible():
    before = memory.device()
    assert 0 < before.pool_used <= before.pool_held <= before.pool_limit
    array = jax.block_until_ready(jnp.zeros(256 << 20, jnp.uint8))
    after = memory.device()
    assert after.pool_used - before.pool_used >= array.nbytes
    assert after.pool_held - after.pool_used >= 0 and after.free <= before.free
