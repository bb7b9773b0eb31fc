"""Conversion is all or nothing: existing targets, failures, kills, a second writer; what the folder holds; memory."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import clo_jax
from clo_jax import checkpoints
from clo_jax.checkpoints import orbax_io
from clo_jax.errors import CheckpointError
from tests.checkpoints import builders


def test_what_the_folder_holds(source, checkpoint):
    assert {path.name for path in checkpoint.iterdir()} == {
        "params",
        "clo_jax.json",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for name in ("config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"):
        assert (checkpoint / name).read_bytes() == (source / name).read_bytes()
    manifest = json.loads((checkpoint / "clo_jax.json").read_text())
    weights = source / "model.safetensors"
    assert manifest["format_version"] == 1
    assert manifest["converter"] == f"clo-jax {clo_jax.__version__}"
    assert (manifest["source_kind"], manifest["source_name"]) == ("safetensors", "tiny")
    assert manifest["source_files"][weights.name] == hashlib.sha256(weights.read_bytes()).hexdigest()
    config = builders.config()
    values = builders.tensors(config)
    assert manifest["num_tensors"] == len(values)
    assert manifest["num_bytes"] == sum(value.nbytes for value in values.values())
    stored = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == stored - {"clo_jax.json"}


def test_progress_reaches_its_end_in_every_stage(source, tmp_path):
    seen: dict[str, list] = {}
    result = checkpoints.convert(
        source,
        tmp_path / "out",
        verify=True,
        progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)),
    )
    assert list(seen) == ["convert", "write", "verify"]
    for steps in seen.values():
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert steps[-1] == (result.num_bytes, result.num_bytes)


def test_an_existing_target_is_never_touched_without_force(source, tmp_path):
    for name in ("file", "folder", "link"):
        out = tmp_path / name
        {"file": out.touch, "folder": out.mkdir, "link": lambda out=out: out.symlink_to(tmp_path / "gone")}[name]()
        with pytest.raises(CheckpointError, match="exists already; --force"):
            checkpoints.convert(source, out)
        with pytest.raises(CheckpointError, match="exists and is no checkpoint folder"):
            checkpoints.convert(source, out, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link"]


def test_force_replaces_only_after_success(source, checkpoint, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(checkpoint, out)
    other = builders.config()
    values = builders.tensors(other, seed=1)
    good = builders.write_folder(tmp_path / "good", other, values)
    del values["model.norm.weight"]
    bad = builders.write_folder(tmp_path / "bad", other, values)
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight"):
        checkpoints.convert(bad, out, force=True)
    assert checkpoints.read_info(out)[1].manifest.source_name == "tiny"
    checkpoints.convert(good, out, force=True)
    _, params, info = checkpoints.load_checkpoint(out)
    assert info.manifest.source_name == "good"
    np.testing.assert_array_equal(params["embed"]["embedding"], values["model.embed_tokens.weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "good", "out"]


def test_a_replacement_killed_between_its_renames_is_undone(source, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / ".out.replaced")
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoints.convert(source, tmp_path / "out")
    assert checkpoints.load_checkpoint(tmp_path / "out")[2].manifest.source_name == "tiny"


def test_targets_around_the_source_are_refused(source, tmp_path):
    for out in (source, source.parent):
        with pytest.raises(CheckpointError, match="holds the source"):
            checkpoints.convert(source, out, force=True)
    with pytest.raises(CheckpointError, match="no such folder to write into"):
        checkpoints.convert(source, tmp_path / "a" / "b")


def test_target_paths_of_every_kind(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "linked").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    for out, wanted in [("a", "a"), ("b/", "b"), ("~/c", "c"), ("link/d", "linked/d")]:
        assert checkpoints.convert(str(source), out).path == tmp_path / wanted
        assert checkpoints.read_info(out)[1].path == tmp_path / wanted


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError()]
)
def test_a_failed_write_leaves_nothing(source, tmp_path, monkeypatch, error):
    def fail(path, params):
        path.mkdir()
        (path / "half").write_bytes(b"x")
        raise error

    monkeypatch.setattr(orbax_io, "save", fail)
    with pytest.raises(CheckpointError if isinstance(error, OSError) else type(error)) as caught:
        checkpoints.convert(source, tmp_path / "out")
    if isinstance(error, OSError):
        assert str(caught.value) == f"{tmp_path / 'out'}: cannot be written: No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_a_second_writer_is_refused(source, tmp_path):
    refusals = []

    def again(stage, done, total):
        if stage == "write" and done == 0:
            with pytest.raises(CheckpointError) as error:
                checkpoints.convert(source, tmp_path / "out")
            refusals.append(str(error.value))

    checkpoints.convert(source, tmp_path / "out", progress=again)
    assert refusals == [f"{tmp_path / 'out'}: another conversion is writing it"]
    checkpoints.load_checkpoint(tmp_path / "out")


def test_verification_notices_a_wrong_tensor(source, tmp_path, monkeypatch):
    save = orbax_io.save

    def spoil(path, params):
        params["layers"][1]["mlp"]["up"]["kernel"] = params["layers"][1]["mlp"]["up"]["kernel"].at[3, 4].add(1e-6)
        save(path, params)

    monkeypatch.setattr(orbax_io, "save", spoil)
    with pytest.raises(CheckpointError, match=r"layers/1/mlp/up/kernel differs from model\.layers\.1\.mlp\.up_proj"):
        checkpoints.convert(source, tmp_path / "out", verify=True)
    assert list(tmp_path.iterdir()) == []


def test_tokenizers_are_checked(source, tmp_path):
    with pytest.raises(ValueError, match="tokenizer: got a file together with with_tokenizer=False"):
        checkpoints.convert(source, tmp_path / "out", tokenizer="x", with_tokenizer=False)
    (tmp_path / "broken.json").write_text("{}")
    builders.train_tokenizer(330).save(str(tmp_path / "large.json"))
    for name, wanted in [
        ("absent.json", "absent.json: cannot be read"),
        ("broken.json", r"broken.json: not a readable tokenizer\.json"),
        ("large.json", "the tokenizer has token 329, the model only 320 rows"),
    ]:
        with pytest.raises(CheckpointError, match=wanted):
            checkpoints.convert(source, tmp_path / "out", tokenizer=tmp_path / name)


def test_a_source_without_tokenizer_is_noted(tmp_path):
    config = builders.config()
    folder = builders.write_folder(tmp_path / "model", config, builders.tensors(config), tokenizer=False)
    result = checkpoints.convert(folder, tmp_path / "out")
    assert result.notes == (f"{folder}/tokenizer.json is not there: the checkpoint takes and gives token ids only",)


def _start(source, out) -> subprocess.Popen:
    program = (
        f"from clo_jax import checkpoints; print('go', flush=True); checkpoints.convert({str(source)!r}, {str(out)!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "go\n"
    return process


@pytest.mark.slow
def test_killed_conversions_never_load_and_can_be_repeated(tmp_path):
    config = builders.config(hidden_size=512, intermediate_size=1536, vocab_size=4096, num_hidden_layers=8)
    source = builders.write_folder(tmp_path / "model", config, builders.tensors(config))
    target = tmp_path / "target"
    target.mkdir()
    start = time.monotonic()
    with _start(source, target / "whole") as process:
        assert process.wait() == 0
    whole = time.monotonic() - start
    wanted = checkpoints.load_checkpoint(target / "whole")[1]
    shutil.rmtree(target / "whole")
    rng, killed = np.random.default_rng(0), 0
    for _ in range(20):
        with _start(source, target / "out") as process:
            try:
                process.wait(rng.uniform(0, whole))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                killed += process.wait() == -signal.SIGKILL
        assert {path.name for path in target.iterdir()} <= {"out", ".out.partial"}
        if (target / "out").exists():
            jax.tree.map(np.testing.assert_array_equal, checkpoints.load_checkpoint(target / "out")[1], wanted)
            shutil.rmtree(target / "out")
        elif (target / ".out.partial").exists():
            with pytest.raises(CheckpointError):
                checkpoints.load_checkpoint(target / ".out.partial")
    assert killed >= 5
    assert checkpoints.convert(source, target / "out", verify=True).path == target / "out"
    assert [path.name for path in target.iterdir()] == ["out"]


MEASURED = """
import json, sys
from clo_jax import checkpoints
verb, source, out = sys.argv[1:]
if verb == "convert":
    num_bytes = checkpoints.convert(source, out).num_bytes
else:
    _, params, info = checkpoints.load_checkpoint(out)
    num_bytes = info.manifest.num_bytes
# Not ru_maxrss: that of a new program begins with the peak of the process that started it.
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(json.dumps([num_bytes, 1024 * peak]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_peak_memory_of_converting_and_loading(tmp_path, dtype):
    size = {"F32": 6, "BF16": 12}[dtype]
    config = builders.config(hidden_size=2048, intermediate_size=5632, vocab_size=16000, num_hidden_layers=size // 3)
    config["num_attention_heads"] = config["num_key_value_heads"] = 32
    config["head_dim"] = 64
    source = builders.write_folder(tmp_path / "model", config, builders.tensors(config), dtype=dtype, tokenizer=False)
    for verb in ("convert", "load"):
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, verb, source, tmp_path / "out"],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        )
        num_bytes, peak = json.loads(done.stdout)
        print(f"{dtype} {verb}: {num_bytes / 1e6:.0f} MB of parameters, peak {peak / 1e6:.0f} MB")
        assert num_bytes > 400e6
        assert peak <= 1.3 * num_bytes + 2**30
