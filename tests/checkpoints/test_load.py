"""Loading: placement, dtypes, paths, what a wrong path is told, and damaged checkpoints."""

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from clo_jax import checkpoints
from clo_jax.config import ModelConfig
from clo_jax.errors import CheckpointError
from tests.checkpoints import builders

# Orbax leaves coroutines behind when it fails; they are collected at the end of the test that made them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A checkpoint that may be damaged."""
    return shutil.copytree(checkpoint, tmp_path / "copy")


def changed(file, **values):
    content = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in {**content, **values}.items() if value is not ...}))


def refused(path, **options) -> str:
    with pytest.raises(CheckpointError) as error:
        checkpoints.load_checkpoint(path, **options)
    return str(error.value)


def test_configuration_parameters_and_info(checkpoint):
    config, params, info = checkpoints.load_checkpoint(checkpoint)
    assert isinstance(config, ModelConfig) and config.num_layers == 3
    assert list(params["layers"]) == [0, 1, 2]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert info.path == checkpoint and info.dtype == "float32"
    assert info.stop_token_ids == (2, 5)
    assert info.generation_config == {"eos_token_id": [2, 5], "temperature": 0.6}
    assert info.calibration is False
    assert checkpoints.read_info(checkpoint) == (config, info)


def test_absent_generation_config_and_present_calibration(copy):
    (copy / "generation_config.json").unlink()
    (copy / "calibration").mkdir()
    manifest = json.loads((copy / "clo_jax.json").read_text())
    del manifest["files"]["generation_config.json"]
    (copy / "clo_jax.json").write_text(json.dumps(manifest))
    _, info = checkpoints.read_info(copy)
    assert info.generation_config == {} and info.stop_token_ids == (2,) and info.calibration


def test_dtype(checkpoint):
    _, params, info = checkpoints.load_checkpoint(checkpoint, dtype="bfloat16")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert info.dtype == "float32"
    with pytest.raises(ValueError, match="dtype: got 'int8', wanted auto, float32, bfloat16, float16"):
        checkpoints.load_checkpoint(checkpoint, dtype="int8")


def test_sharding(checkpoint):
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    _, params, _ = checkpoints.load_checkpoint(checkpoint, sharding=one)
    assert {leaf.sharding for leaf in jax.tree.leaves(params)} == {one}
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tp"))
    wanted = jax.tree.map(lambda leaf: split if leaf.ndim == 2 else one, params)
    _, params, _ = checkpoints.load_checkpoint(checkpoint, sharding=wanted)
    jax.tree.map(lambda leaf, where: leaf.sharding == where or pytest.fail(str(leaf.shape)), params, wanted)


def test_paths_and_reading_only(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(copy)
    before = [(path, path.stat().st_mtime_ns) for path in sorted(copy.rglob("*"))]
    for path in ("copy", "copy/", "~/copy", "link", copy):
        assert checkpoints.load_checkpoint(path)[2].path == copy
    assert [(path, path.stat().st_mtime_ns) for path in sorted(copy.rglob("*"))] == before


def test_no_warning_in_a_fresh_process(checkpoint):
    program = f"from clo_jax import checkpoints; checkpoints.load_checkpoint({str(checkpoint)!r})"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_importing_the_package_leaves_heavy_libraries_alone():
    program = "import sys, clo_jax.checkpoints; print({'orbax', 'gguf', 'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_wrong_paths_are_told_what_they_are(source, copy, tmp_path):
    (tmp_path / "model.gguf").touch()
    (tmp_path / "nowhere").mkdir()
    partial = shutil.copytree(copy, tmp_path / "sub" / ".x.partial")
    bare = shutil.copytree(copy / "params", tmp_path / "bare")
    for path, wanted in [
        (tmp_path / "absent", "no such folder"),
        (tmp_path / "model.gguf", "a file, wanted a checkpoint folder; convert it first: clo-jax convert"),
        (copy / "config.json", "a file, wanted a checkpoint folder"),
        (tmp_path / "nowhere", "no checkpoint: clo_jax.json is missing"),
        (source, "a Hugging Face folder; convert it first: clo-jax convert"),
        (copy / "params", f"inside a checkpoint, 1 level(s) too deep; wanted {copy}"),
        (copy / "params" / "state", f"inside a checkpoint, 2 level(s) too deep; wanted {copy}"),
        (tmp_path, "one level above a checkpoint; wanted one of: copy"),
        (partial, "left over from an unfinished conversion"),
        (bare, "clo_jax.json is missing: not a folder that clo-jax convert finished"),
    ]:
        assert wanted in refused(path), path


@pytest.mark.parametrize(
    "values, wanted",
    [
        ({"format_version": 2}, "format_version: got 2, this release reads 1"),
        ({"format_version": ...}, "format_version: got None"),
        ({"dtype": "int8"}, "dtype: got 'int8', wanted float32 or bfloat16 or float16"),
        ({"num_bytes": "many"}, "num_bytes: got 'many', wanted int"),
        ({"files": {"config.json": 3}}, "files: wanted bytes and sha256 for each"),
    ],
)
def test_manifests_that_cannot_be_read(copy, values, wanted):
    changed(copy / "clo_jax.json", **values)
    message = refused(copy)
    assert wanted in message and "clo_jax.json" in message


def test_changed_configuration_is_noticed_and_can_be_meant(copy):
    changed(copy / "config.json", rope_theta=20000.0)
    assert "config.json: " in refused(copy)
    manifest = json.loads((copy / "clo_jax.json").read_text())
    del manifest["files"]["config.json"]
    (copy / "clo_jax.json").write_text(json.dumps(manifest))
    assert checkpoints.load_checkpoint(copy)[0].rope.theta == 20000.0
    changed(copy / "config.json", vocab_size=321)
    assert "wrong shape: embed/embedding: got [320, 48], wanted [321, 48]" in refused(copy)


def test_stop_tokens_that_are_no_ids(copy):
    changed(copy / "generation_config.json", eos_token_id="</s>")
    manifest = json.loads((copy / "clo_jax.json").read_text())
    del manifest["files"]["generation_config.json"]
    (copy / "clo_jax.json").write_text(json.dumps(manifest))
    assert "generation_config.json: eos_token_id: got '</s>'" in refused(copy)


@pytest.mark.parametrize("kind", ["flip", "cut", "empty", "delete"])
def test_damaged_files_never_change_a_value_silently(checkpoint, copy, kind):
    names = sorted(path.relative_to(copy) for path in copy.rglob("*") if path.is_file())
    rng = np.random.default_rng(7)
    wanted = checkpoints.load_checkpoint(checkpoint)
    for name in names:
        data = (copy / name).read_bytes()
        for _ in range(3 if kind in ("flip", "cut") else 1):
            if kind in ("flip", "cut") and not data:
                continue
            damaged = bytearray(data)
            if kind == "flip":
                damaged[rng.integers(len(data))] ^= 1 << rng.integers(8)
            (copy / name).write_bytes({"flip": damaged, "cut": data[: rng.integers(len(data) or 1)]}.get(kind, b""))
            if kind == "delete":
                (copy / name).unlink()
            try:
                found = checkpoints.load_checkpoint(copy)
            except CheckpointError as error:
                assert str(copy) in str(error)
            else:  # no value of the manifest but the digests matters to a load
                assert name.name == "clo_jax.json" or not data
                assert found[0] == wanted[0]
                jax.tree.map(np.testing.assert_array_equal, found[1], wanted[1])
            (copy / name).write_bytes(data)


def test_damaged_parameters_without_the_digests_give_typed_errors(copy):
    rng = np.random.default_rng(11)
    files = sorted(path for path in (copy / "params").rglob("*") if path.is_file() and path.stat().st_size)
    for file in files:
        data = file.read_bytes()
        for _ in range(3):
            damaged = bytearray(data)
            damaged[rng.integers(len(data))] ^= 1 << rng.integers(8)
            file.write_bytes(damaged)
            try:
                checkpoints.load_checkpoint(copy, check=False)
            except CheckpointError as error:
                assert str(copy) in str(error)
        file.write_bytes(data)


def test_swapped_weights_of_another_model_are_noticed(copy, tmp_path):
    config = builders.config()
    other = builders.write_folder(tmp_path / "other", config, builders.tensors(config, seed=1))
    checkpoints.convert(other, tmp_path / "converted")
    shutil.rmtree(copy / "params")
    shutil.copytree(tmp_path / "converted" / "params", copy / "params")
    assert "changed since it was converted" in refused(copy)
