"""Conversion from Hugging Face folders: layouts, dtypes, tied heads, and every way in which a folder can be wrong."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clo_jax import checkpoints
from clo_jax.errors import CheckpointError
from tests.checkpoints import builders

SHARD = "model-00002-of-00003.safetensors"


def converted(folder, **options):
    out = folder.parent / f"{folder.name}-converted"
    result = checkpoints.convert(folder, out, **options)
    return result, checkpoints.load_checkpoint(out)[1]


def refused(folder, **options) -> str:
    """The message of the refusal; nothing may be left behind."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(CheckpointError) as error:
        checkpoints.convert(folder, folder.parent / "out", **options)
    assert sorted(folder.parent.iterdir()) == before
    return str(error.value)


def equal(one, other) -> bool:
    one, other = (jax.tree.map(lambda x: (x.dtype, np.asarray(x).tobytes()), tree) for tree in (one, other))
    return one == other


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_values_and_names(tmp_path, family, tied):
    config = builders.config(family, tied)
    values = builders.tensors(config)
    result, params = converted(builders.write_folder(tmp_path / "model", config, values), verify=True)
    assert result.verification.num_tensors == result.num_tensors == len(values)
    assert result.verification.logit_difference < 1e-4
    assert result.dtype == "float32"
    assert result.num_bytes == sum(value.nbytes for value in values.values())
    np.testing.assert_array_equal(params["embed"]["embedding"], values["model.embed_tokens.weight"])
    layer = params["layers"][2]
    np.testing.assert_array_equal(layer["attn"]["q"]["kernel"].T, values["model.layers.2.self_attn.q_proj.weight"])
    np.testing.assert_array_equal(layer["mlp"]["down"]["kernel"].T, values["model.layers.2.mlp.down_proj.weight"])
    np.testing.assert_array_equal(layer["post_norm"]["scale"], values["model.layers.2.post_attention_layernorm.weight"])
    assert ("lm_head" in params) != tied
    if family == "qwen2":
        np.testing.assert_array_equal(layer["attn"]["v"]["bias"], values["model.layers.2.self_attn.v_proj.bias"])
        assert "bias" not in layer["attn"]["o"]


def test_attention_and_mlp_bias(tmp_path):
    config = builders.config(attention_bias=True)
    result, params = converted(builders.write_folder(tmp_path / "model", config, builders.tensors(config)), verify=True)
    assert params["layers"][0]["attn"]["o"]["bias"].shape == (48,)


def test_one_file_and_three_shards_give_equal_checkpoints(tmp_path):
    config = builders.config()
    values = builders.tensors(config)
    _, one = converted(builders.write_folder(tmp_path / "one", config, values))
    _, three = converted(builders.write_folder(tmp_path / "three", config, values, shards=3))
    assert equal(one, three)


@pytest.mark.parametrize(
    "stored, dtype, wanted",
    [
        ("F32", "auto", "float32"),
        ("F16", "auto", "float32"),
        ("BF16", "auto", "bfloat16"),
        ("BF16", "float32", "float32"),
        ("F32", "bfloat16", "bfloat16"),
        ("F16", "bfloat16", "bfloat16"),
    ],
)
def test_dtypes(tmp_path, stored, dtype, wanted):
    config = builders.config(tied=True)
    values = builders.tensors(config)
    result, params = converted(
        builders.write_folder(tmp_path / "model", config, values, dtype=stored), dtype=dtype, verify=True
    )
    assert result.dtype == wanted
    kernel = params["layers"][1]["mlp"]["up"]["kernel"]
    assert kernel.dtype == wanted
    np.testing.assert_array_equal(
        np.asarray(kernel, np.float32).T, values["model.layers.1.mlp.up_proj.weight"].astype(builders.DTYPES[stored])
    )


def test_rounding_to_bfloat16_is_to_nearest(tmp_path):
    config = builders.config(tied=True)
    values = builders.tensors(config)
    odd = np.random.default_rng(3).standard_normal((48,)).astype(np.float32)
    values["model.norm.weight"] = odd
    folder = builders.write_folder(tmp_path / "model", config, values)
    _, params = converted(folder, dtype="bfloat16", verify=True)
    np.testing.assert_array_equal(np.asarray(params["final_norm"]["scale"]), odd.astype(ml_dtypes.bfloat16))


def test_unknown_dtype_argument(tmp_path, source):
    with pytest.raises(ValueError, match="dtype: got 'int8', wanted auto, float32, bfloat16, float16"):
        checkpoints.convert(source, tmp_path / "out", dtype="int8")


def test_other_stored_dtypes_are_refused_by_name(tmp_path):
    config = builders.config()
    values = builders.tensors(config)
    folder = builders.write_folder(tmp_path / "model", config, values)
    values["model.norm.weight"] = values["model.norm.weight"].astype(ml_dtypes.float8_e4m3fn)
    values["lm_head.weight"] = values["lm_head.weight"].astype(np.int8)
    save_file(values, folder / "model.safetensors")
    message = refused(folder)
    assert "model.norm.weight in model.safetensors is F8_E4M3" in message
    assert "lm_head.weight in model.safetensors is I8" in message


def test_tied_with_an_equal_head_loads_and_with_another_is_refused(tmp_path):
    config = builders.config(tied=True)
    values = builders.tensors(config)
    extra = {**values, "lm_head.weight": values["model.embed_tokens.weight"].copy()}
    _, params = converted(builders.write_folder(tmp_path / "equal", config, extra))
    assert "lm_head" not in params
    extra["lm_head.weight"][3, 4] += 1
    message = refused(builders.write_folder(tmp_path / "other", config, extra))
    assert "lm_head.weight differs from model.embed_tokens.weight" in message
    assert "tie_word_embeddings" in message


def test_untied_without_a_head_names_tensor_index_and_key(tmp_path):
    config = builders.config()
    values = builders.tensors(config)
    del values["lm_head.weight"]
    message = refused(builders.write_folder(tmp_path / "model", config, values, shards=3))
    assert "lm_head.weight" in message
    assert "model.safetensors.index.json" in message
    assert "tie_word_embeddings" in message


def test_all_mismatches_come_together_with_both_names(tmp_path):
    config = builders.config()
    values = builders.tensors(config)
    del values["model.layers.1.mlp.up_proj.weight"]
    values["model.layers.0.self_attn.q_norm.weight"] = np.ones(16, np.float32)
    values["model.layers.2.self_attn.k_proj.weight"] = np.ones((16, 48), np.float32)
    message = refused(builders.write_folder(tmp_path / "model", config, values))
    assert "missing: model.layers.1.mlp.up_proj.weight (layers/1/mlp/up/kernel)" in message
    assert "unexpected: model.layers.0.self_attn.q_norm.weight [16] in model.safetensors" in message
    assert "model.layers.2.self_attn.k_proj.weight (layers/2/attn/k/kernel): got [16, 48], wanted [32, 48]" in message


def test_rotary_buffers_of_old_exports_are_ignored(tmp_path):
    config = builders.config()
    values = builders.tensors(config)
    values["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    result, _ = converted(builders.write_folder(tmp_path / "model", config, values), verify=True)
    assert result.num_tensors == len(values) - 1


def _drop_shard(folder):
    (folder / SHARD).unlink()


def _duplicate(folder):
    other = folder / "model-00001-of-00003.safetensors"
    shard = load_file(folder / SHARD)
    save_file({**load_file(other), "model.layers.0.self_attn.q_proj.weight": np.ones(3, np.float32)}, other)
    save_file({**shard, "model.layers.0.self_attn.q_proj.weight": np.ones(3, np.float32)}, folder / SHARD)


def _extra(folder):
    save_file({**load_file(folder / SHARD), "surplus": np.ones(3, np.float32)}, folder / SHARD)


def _unlisted(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["phantom"] = SHARD
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _listed_twice(folder):
    file = folder / "model.safetensors.index.json"
    file.write_text(file.read_text().replace('"weight_map": {', '"weight_map": {"lm_head.weight": "' + SHARD + '", '))


def _outside(folder):
    file = folder / "model.safetensors.index.json"
    file.write_text(file.read_text().replace(SHARD, f"../{SHARD}"))


def _no_map(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


def _cut(folder):
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[:-8])


def _empty(folder):
    (folder / SHARD).write_bytes(b"")


def _huge_header(folder):
    (folder / SHARD).write_bytes(b"\xff" * 64)


def _no_config(folder):
    (folder / "config.json").unlink()


def _config_list(folder):
    (folder / "config.json").write_text("[]")


def _no_weights(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def _bad_generation_config(folder):
    (folder / "generation_config.json").write_text("{")


@pytest.mark.parametrize(
    "damage, wanted",
    [
        (_drop_shard, f"missing shards: {SHARD}"),
        (_duplicate, "tensor model.layers.0.self_attn.q_proj.weight is in 2 shards"),
        (_extra, "tensor surplus is in a shard but not in the index"),
        (_unlisted, f"tensor phantom is not in its shard {SHARD}"),
        (_listed_twice, "'lm_head.weight' is there twice"),
        (_outside, "shards outside the folder"),
        (_no_map, "weight_map: got NoneType"),
        (_cut, f"{SHARD}: not a readable safetensors file"),
        (_empty, f"{SHARD}: not a readable safetensors file"),
        (_huge_header, f"{SHARD}: not a readable safetensors file"),
        (_no_config, "config.json: cannot be read: No such file"),
        (_config_list, "config.json: got a JSON list, wanted an object"),
        (_no_weights, "neither model.safetensors nor model.safetensors.index.json"),
        (_bad_generation_config, "generation_config.json: not a valid JSON file"),
    ],
)
def test_damaged_folders_are_refused_before_any_output(tmp_path, damage, wanted):
    config = builders.config()
    folder = builders.write_folder(tmp_path / "model", config, builders.tensors(config), shards=3)
    damage(folder)
    assert wanted in refused(folder)


def test_unsupported_configurations_name_file_and_key(tmp_path):
    config = builders.config(hidden_act="gelu")
    message = refused(builders.write_folder(tmp_path / "model", config, builders.tensors(config)))
    assert str(tmp_path / "model" / "config.json") in message
    assert "hidden_act: got 'gelu'" in message


def test_source_that_is_no_model(tmp_path, checkpoint):
    for path, wanted in [
        (tmp_path / "nothing", "no such file or folder"),
        (checkpoint, "is converted already"),
        (tmp_path, "config.json: cannot be read"),
    ]:
        with pytest.raises(CheckpointError, match=wanted):
            checkpoints.convert(path, tmp_path / "out")
    (tmp_path / "a.gguf").touch()
    with pytest.raises(CheckpointError, match=r"name the file: .*a\.gguf"):
        checkpoints.convert(tmp_path, tmp_path / "out")
