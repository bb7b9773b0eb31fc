"""config_from_hf: what it reads, and everything it refuses by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax import models
from clo_jax.config import RopeConfig
from clo_jax.models import rope
from tests.models import forward, tiny

# As Hugging Face ships it, without the keys that shape nothing.
LLAMA_32_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_reads_llama():
    config = models.config_from_hf(LLAMA_32_1B)
    assert (config.architecture, config.num_layers, config.group, config.head_dim) == ("llama", 16, 4, 64)
    assert config.tie_word_embeddings and not (config.qkv_bias or config.output_bias or config.mlp_bias)
    assert config.rope.rope_type == "llama3" and config.rope.theta == 500000.0
    assert config.rope.options == {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert hash(config) == hash(models.config_from_hf(LLAMA_32_1B))


def test_reads_qwen2():
    config = models.config_from_hf(QWEN25_7B)
    assert (config.architecture, config.group, config.head_dim) == ("qwen2", 7, 128)
    assert config.qkv_bias and not (config.output_bias or config.mlp_bias or config.tie_word_embeddings)
    assert config.rope == RopeConfig(1000000.0)


def test_both_key_layouts_give_equal_logits():
    old = tiny.MODELS["llama-untied-g5-llama3"]
    new = without(old, "rope_theta", "rope_scaling")
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": old["rope_theta"]}
    configs = [models.config_from_hf(c) for c in (old, new, {**new, "rope_scaling": old["rope_scaling"]})]
    configs.append(models.config_from_hf({**old, **new}))
    assert all(c == configs[0] for c in configs)
    inverse = [rope.inverse_frequencies(c)[0] for c in configs[:2]]
    np.testing.assert_array_equal(*inverse)
    logits = [forward.run(c, tiny.params(old), tiny.prompt(), 1)["logits"] for c in configs[:2]]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("name", ["linear", "dynamic"])
def test_older_type_key(name):
    old = {**LLAMA_32_1B, "rope_scaling": {"type": name, "factor": 2.0}}
    new = {**LLAMA_32_1B, "rope_scaling": {"rope_type": name, "factor": 2.0}}
    assert models.config_from_hf(old) == models.config_from_hf(new)


def test_absent_keys_that_have_a_meaning():
    config = models.config_from_hf(
        without(LLAMA_32_1B, "num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias")
    )
    assert (config.num_kv_heads, config.head_dim, config.tie_word_embeddings) == (32, 64, False)
    assert models.config_from_hf({**LLAMA_32_1B, "head_dim": None, "num_key_value_heads": None}).num_kv_heads == 32
    assert models.config_from_hf({**LLAMA_32_1B, "rope_scaling": None}).rope == RopeConfig(500000.0)
    assert models.config_from_hf(without(LLAMA_32_1B, "rope_scaling")).rope == RopeConfig(500000.0)
    assert models.config_from_hf(without(LLAMA_32_1B, "model_type")).architecture == "llama"
    assert models.config_from_hf(without(LLAMA_32_1B, "architectures")).architecture == "llama"


def test_llama_biases():
    config = models.config_from_hf({**LLAMA_32_1B, "attention_bias": True})
    assert config.qkv_bias and config.output_bias and not config.mlp_bias
    assert models.config_from_hf({**LLAMA_32_1B, "mlp_bias": True}).mlp_bias


def test_yarn_trained_length_is_the_models_when_absent():
    config = models.config_from_hf({**QWEN25_7B, "rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert config.rope.options["original_max_position_embeddings"] == 32768


def test_sliding_window_that_touches_no_layer():
    config = {**QWEN25_7B, "use_sliding_window": True, "max_window_layers": 28}
    assert models.config_from_hf(config).num_layers == 28
    assert models.config_from_hf({**QWEN25_7B, "layer_types": ["full_attention"] * 28}).num_layers == 28


ROPE = LLAMA_32_1B["rope_scaling"]


@pytest.mark.parametrize(
    "base, changes, message",
    [
        (LLAMA_32_1B, {"model_type": "mistral"}, r"model_type: got 'mistral', supported: llama, qwen2"),
        (LLAMA_32_1B, {"model_type": None, "architectures": None}, r"model_type: got None, supported: llama, qwen2"),
        (LLAMA_32_1B, {"model_type": None, "architectures": ["GPT2LMHeadModel"]}, r"model_type: got \['GPT2LM"),
        (LLAMA_32_1B, {"architectures": ["LlamaForSequenceClassification"]}, r"architectures: .*'LlamaForCausalLM'"),
        (LLAMA_32_1B, {"hidden_act": "gelu"}, r"hidden_act: got 'gelu', supported: silu"),
        (LLAMA_32_1B, {"hidden_act": None}, r"hidden_act: got None, supported: silu"),
        (LLAMA_32_1B, {"quantization_config": {"quant_method": "awq"}}, r"quantization_config: got .*awq.*unquantized"),
        (LLAMA_32_1B, {"sliding_window": 4096}, r"sliding_window: got 4096, supported: full attention"),
        (QWEN25_7B, {"use_sliding_window": True, "max_window_layers": 20}, r"sliding_window: got 131072"),
        (QWEN25_7B, {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types: got .*supported: full"),
        (QWEN25_7B, {"mlp_bias": True}, r"mlp_bias: got True, supported: false"),
        (LLAMA_32_1B, {"rope_theta": None}, r"rope_theta: got None, supported: a number.*no default"),
        (LLAMA_32_1B, {"rope_theta": None, "rope_scaling": None}, r"rope_theta: got None"),
        (LLAMA_32_1B, {"rope_theta": 0}, r"rope_theta: got 0, supported: a positive number"),
        (
            LLAMA_32_1B,
            {"rope_scaling": {**ROPE, "rope_theta": 1e4}},
            r"rope_theta: got \[10000.0, 500000.0\].*disagree",
        ),
        (LLAMA_32_1B, {"rope_scaling": {"rope_type": "longrope"}}, r"rope_scaling.rope_type: got 'longrope'.*yarn"),
        (LLAMA_32_1B, {"rope_parameters": {"rope_type": "mrope"}}, r"rope_parameters.rope_type: got 'mrope'"),
        (LLAMA_32_1B, {"rope_parameters": {"full_attention": {}}}, r"rope_parameters.full_attention: got \{\}"),
        (LLAMA_32_1B, {"rope_parameters": {"rope_type": "default"}}, r"rope_scaling: .*same values"),
        (LLAMA_32_1B, {"rope_scaling": "linear"}, r"rope_scaling: got 'linear', supported: an object or null"),
        (
            LLAMA_32_1B,
            {"rope_scaling": {"type": "linear"}},
            r"rope_scaling.factor: got None, supported: a positive num",
        ),
        (LLAMA_32_1B, {"rope_scaling": {**ROPE, "low_freq_factor": "1"}}, r"rope_scaling.low_freq_factor: got '1'"),
        (
            LLAMA_32_1B,
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}},
            r"rope_scaling.truncate: got 1",
        ),
        (LLAMA_32_1B, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor: got 0.5, supported: 1"),
        (LLAMA_32_1B, {"vocab_size": None}, r"vocab_size: got None, supported: a positive integer"),
        (LLAMA_32_1B, {"num_hidden_layers": 2.5}, r"num_hidden_layers: got 2.5"),
        (LLAMA_32_1B, {"num_key_value_heads": 0}, r"num_key_value_heads: got 0"),
        (LLAMA_32_1B, {"num_key_value_heads": 5}, r"num_kv_heads: got 5, wanted a divisor of num_heads = 32"),
        (LLAMA_32_1B, {"head_dim": 63}, r"head_dim: got 63, wanted a positive even integer"),
        (LLAMA_32_1B, {"head_dim": None, "hidden_size": 2049}, r"hidden_size: got 2049, supported: a multiple of"),
        (LLAMA_32_1B, {"rms_norm_eps": None}, r"rms_norm_eps: got None"),
        (LLAMA_32_1B, {"rms_norm_eps": float("nan")}, r"rms_norm_eps: got nan"),
        (LLAMA_32_1B, {"tie_word_embeddings": "yes"}, r"tie_word_embeddings: got 'yes', supported: true or false"),
    ],
)
def test_refused_by_name(base, changes, message):
    with pytest.raises(ValueError, match=message):
        models.config_from_hf({**base, **changes})


def test_parameters_match_their_abstract_form():
    for name in ("llama-tied-g1-bias-linear", "qwen2-untied-g5"):
        config = models.config_from_hf(tiny.MODELS[name])
        for dtype in (jnp.float32, jnp.bfloat16):
            abstract = models.abstract_params(config, dtype)
            made = jax.eval_shape(functools.partial(models.random_params, config, dtype=dtype), jax.random.key(0))
            stored = jax.tree.map(lambda x, dtype=dtype: jnp.asarray(x, dtype), tiny.params(tiny.MODELS[name]))
            for tree in (made, stored):
                assert jax.tree.map(lambda x: (x.shape, x.dtype), tree) == jax.tree.map(
                    lambda x: (x.shape, x.dtype), abstract
                )
    assert ("lm_head" in abstract) and "bias" in abstract["layers"][0]["attn"]["q"]


def test_bfloat16_keeps_its_dtype_and_gives_float32_logits():
    name = "qwen2-untied-g5"
    config = models.config_from_hf(tiny.MODELS[name])
    stored = tiny.params(tiny.MODELS[name])
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), stored)
    model = models.merge(config, params)
    tokens = jnp.asarray(tiny.prompt())
    position = jnp.broadcast_to(jnp.arange(tiny.PROMPT, dtype=jnp.int32), tokens.shape)
    x = model.embed(tokens)
    turn = model.rope(position, position[:, -1] + 1)
    q, k, v = model.layers[0].qkv(x, turn)
    assert {a.dtype for a in (x, q, k, v, model.layers[0].finish(x, q))} == {jnp.dtype(jnp.bfloat16)}
    logits = model.logits(x)
    assert logits.dtype == jnp.float32
    exact = models.merge(config, jax.tree.map(jnp.asarray, stored))
    want = exact.logits(exact.embed(tokens))
    assert 0 < float(jnp.abs(logits - want).max()) < 0.05 * float(jnp.abs(want).max())
