"""The Orbax item: device counts, dtypes, placement, paths, levels, memory, and that loading only reads."""

import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.checkpoints import keys, orbax_io
from clo_jax.errors import CheckpointError

# Orbax leaves coroutines behind when it fails; they are collected at the end of the test that made them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from clo_jax.checkpoints import orbax_io

verb, devices, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
assert jax.device_count() == devices
mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
split = {"kernel": ("x", None), "bias": ("x",), "scale": (), "wide": (None, "x")}
values = {
    "kernel": np.arange(64 * 8, dtype=np.float32).reshape(64, 8),
    "bias": np.arange(16, dtype=np.float32),
    "scale": np.float32(3).reshape(1),
    "wide": np.arange(3 * 16, dtype=np.float32).reshape(3, 16).astype(jnp.bfloat16),
}
place = {name: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for name, axes in split.items()}
if verb == "save":
    params = {"layers": {0: {n: jax.device_put(v, place[n]) for n, v in values.items()}}}
    orbax_io.save(f"{folder}/from-{devices}", params)
else:
    for saved in (1, 2, 8):
        stored = orbax_io.metadata(f"{folder}/from-{saved}")
        assert {path[-1]: (leaf.shape, leaf.dtype) for path, leaf in stored.items()} == {
            n: (v.shape, v.dtype) for n, v in values.items()
        }
        target = {n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=place[n]) for n, v in values.items()}
        loaded = orbax_io.load(f"{folder}/from-{saved}", {"layers": {0: target}})["layers"][0]
        for name, value in values.items():
            assert loaded[name].sharding == place[name], name
            assert np.asarray(loaded[name]).tobytes() == value.tobytes(), name
        print("equal", saved, devices)
"""


def run(*args, devices: int = 1) -> str:
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, *map(str, args)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_saved_on_n_devices_and_loaded_on_m_without_a_warning(tmp_path):
    for devices in (1, 2, 8):
        run("save", devices, tmp_path, devices=devices)
    found = [run("load", devices, tmp_path, devices=devices) for devices in (1, 2, 8)]
    assert "".join(found).split("\n")[:-1] == [f"equal {n} {m}" for m in (1, 2, 8) for n in (1, 2, 8)]


def tree(seed: int = 0):
    rng = np.random.default_rng(seed)

    def values(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    return {"embed": {"embedding": values(40, 8)}, "layers": {i: {"kernel": values(8, 6)} for i in range(11)}}


def abstract(params, dtype=jnp.float32):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)


@pytest.fixture(scope="module")
def item(tmp_path_factory):
    path = tmp_path_factory.mktemp("orbax") / "params"
    orbax_io.save(path, tree())
    return path


def snapshot(folder):
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
    }


def test_loading_gives_what_was_saved_and_touches_nothing(item):
    before = snapshot(item)
    loaded = orbax_io.load(item, abstract(tree()))
    assert list(loaded["layers"]) == list(range(11))
    jax.tree.map(np.testing.assert_array_equal, loaded, tree())
    assert snapshot(item) == before


def test_loading_in_another_dtype_rounds_to_nearest(item):
    loaded = orbax_io.load(item, abstract(tree(), jnp.bfloat16))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.bfloat16)), loaded, tree())


def test_leaves_can_be_left_out(item):
    wanted = abstract(tree())
    wanted["embed"]["embedding"] = None
    loaded = orbax_io.load(item, wanted)
    assert loaded["embed"]["embedding"] is None
    np.testing.assert_array_equal(loaded["layers"][10]["kernel"], tree()["layers"][10]["kernel"])


def test_paths_of_every_kind(item, tmp_path, monkeypatch):
    shutil.copytree(item, tmp_path / "home" / "params")
    (tmp_path / "link").symlink_to(tmp_path / "home" / "params")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for path in ["params", "./params/", "~/params", tmp_path / "link", f"{tmp_path}/home/../link/"]:
        loaded = orbax_io.load(path, abstract(tree()))
        np.testing.assert_array_equal(loaded["embed"]["embedding"], tree()["embed"]["embedding"])
    orbax_io.save("~/again/", tree())
    assert orbax_io.metadata("again").keys() == keys.flatten(tree()).keys()
    with pytest.raises(CheckpointError, match="exists already"):
        orbax_io.save("again", tree())


def test_levels_are_told_apart(item, tmp_path):
    (tmp_path / "file").touch()
    for path, wanted in [
        (item / "state", rf"inside an Orbax item, one level too deep; wanted {item}$"),
        (item.parent, "one level above an Orbax item; wanted one of: params"),
        (tmp_path / "nothing", "nothing is there; wanted an Orbax item"),
        (tmp_path / "file", "a file; wanted an Orbax item"),
        (tmp_path, "not an Orbax item: orbax.checkpoint is missing in it"),
    ]:
        with pytest.raises(CheckpointError, match=wanted):
            orbax_io.load(path, abstract(tree()))


def test_arrays_that_do_not_match_come_together(item):
    wanted = abstract(tree())
    wanted["embed"]["embedding"] = jax.ShapeDtypeStruct((40, 9), jnp.float32)
    wanted["head"] = {"kernel": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
    del wanted["layers"][4]
    with pytest.raises(CheckpointError) as error:
        orbax_io.load(item, wanted)
    message = str(error.value)
    assert "missing: head/kernel" in message
    assert "unexpected: layers/4/kernel [8, 6]" in message
    assert "wrong shape: embed/embedding: got [40, 8], wanted [40, 9]" in message


ROUNDS = """
import ctypes, gc, shutil, sys
import jax, jax.numpy as jnp, psutil
from clo_jax.checkpoints import orbax_io

params = {"layers": {i: {"kernel": jnp.full((2048, 512), i, jnp.float32)} for i in range(8)}}
abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
for _ in range(20):
    orbax_io.save(sys.argv[1], params)
    jax.block_until_ready(orbax_io.load(sys.argv[1], abstract))
    shutil.rmtree(sys.argv[1])
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is no leak
    print(psutil.Process().memory_info().rss)
"""


def test_arrays_beyond_those_wanted_are_not_passed_over(item):
    wanted = abstract(tree())
    del wanted["layers"][10]
    with pytest.raises(CheckpointError, match=r"unexpected: layers/10/kernel \[8, 6\]"):
        orbax_io.load(item, wanted)


def test_rounds_of_saving_and_loading_leave_memory_flat(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, tmp_path / "params"],
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # an arena for each of many threads grows by chance
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    resident = [int(line) for line in done.stdout.split()]
    # Each round moves 32 MiB: a leak of one copy a round would add 544 MiB.
    assert len(resident) == 20
    assert resident[-1] <= 1.05 * resident[2], resident
