"""Tiny models named by what they exercise, with weights made from a seed, so that only results need recording.

NumPy alone: the script that records with torch and transformers and the tests that replay with JAX both read this."""

import zlib

import numpy as np

_BASE = {
    "hidden_act": "silu",
    "vocab_size": 128,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LLAMA = {**_BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
_QWEN2 = {**_BASE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}


def _heads(query: int, kv: int, hidden: int, head_dim: int | None = None) -> dict:
    return {"num_attention_heads": query, "num_key_value_heads": kv, "hidden_size": hidden, "head_dim": head_dim}


def _llama3(factor: float) -> dict:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }


MODELS = {
    "llama-untied-g3": {**_LLAMA, **_heads(6, 2, 96), "rope_scaling": None},
    "llama-tied-g1-bias-linear": {
        **_LLAMA,
        **_heads(4, 4, 48, 16),
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "llama-untied-g5-llama3": {**_LLAMA, **_heads(5, 1, 80), "rope_scaling": _llama3(8.0)},
    "llama-tied-g7-llama3": {
        **_LLAMA,
        **_heads(7, 1, 70, 8),
        "tie_word_embeddings": True,
        "rope_theta": None,
        "rope_parameters": {**_llama3(32.0), "rope_theta": 500000.0},
    },
    "llama-untied-g3-dynamic": {
        **_LLAMA,
        **_heads(3, 1, 48),
        "max_position_embeddings": 12,
        "rope_scaling": {"rope_type": "dynamic", "factor": 3.0},
    },
    "llama-untied-g1-yarn": {
        **_LLAMA,
        **_heads(2, 2, 64),
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "qwen2-tied-g7": {**_QWEN2, **_heads(7, 1, 56), "tie_word_embeddings": True, "rope_theta": 1000000.0},
    "qwen2-untied-g3-yarn": {
        **_QWEN2,
        **_heads(6, 2, 48),
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 16},
    },
    "qwen2-untied-g5": {**_QWEN2, **_heads(10, 2, 80), "sliding_window": 64, "max_window_layers": 1},
}
for _config in MODELS.values():
    for _absent in [key for key, value in _config.items() if value is None and key != "rope_scaling"]:
        del _config[_absent]

# Rotary embeddings alone, at the sizes of released models. "lengths" are asked of dynamic ones.
ROPES = {
    "llama3-8b": (128, 8192, {"rope_theta": 500000.0, "rope_scaling": None}),
    "llama3.1-8b": (
        128,
        131072,
        {"rope_theta": 500000.0, "rope_scaling": {**_llama3(8.0), "original_max_position_embeddings": 8192}},
    ),
    "llama3.2-1b": (
        64,
        131072,
        {"rope_parameters": {**_llama3(32.0), "original_max_position_embeddings": 8192, "rope_theta": 500000.0}},
    ),
    "linear-d80": (80, 4096, {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "dynamic-d96": (96, 2048, {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "qwen2.5-yarn": (
        128,
        32768,
        {
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
    ),
    "yarn-scaled": (
        64,
        65536,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.2,
                "mscale_all_dim": 0.8,
                "truncate": False,
            }
        },
    ),
    "yarn-attention-factor": (
        64,
        16384,
        {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 8.0, "attention_factor": 1.3}},
    ),
}
ROPE_LENGTHS = (1, 2048, 2049, 5000)
ROPE_POSITIONS = (0, 1, 17, 4095, 100_003)

BATCH, PROMPT, NEW = 2, 20, 8


def rope_model(head_dim: int, max_positions: int, rope: dict) -> dict:
    """A config whose rotary embedding is `rope`."""
    base = {key: value for key, value in _LLAMA.items() if key != "rope_theta"}
    return {**base, **_heads(2, 1, 2 * head_dim), "max_position_embeddings": max_positions, **rope}


def prompt() -> np.ndarray:
    """Token ids [BATCH, PROMPT] int32."""
    return np.random.default_rng(7).integers(0, 128, size=(BATCH, PROMPT)).astype(np.int32)


def _shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors as Hugging Face has them ([out, in])."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    wide, narrow = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    qwen = config["model_type"] == "qwen2"
    qkv_bias, o_bias = qwen or config.get("attention_bias"), config.get("attention_bias")
    linear = {
        "self_attn.q_proj": (wide, hidden, qkv_bias),
        "self_attn.k_proj": (narrow, hidden, qkv_bias),
        "self_attn.v_proj": (narrow, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, wide, o_bias),
        "mlp.gate_proj": (inner, hidden, config.get("mlp_bias")),
        "mlp.up_proj": (inner, hidden, config.get("mlp_bias")),
        "mlp.down_proj": (hidden, inner, config.get("mlp_bias")),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        shapes[stem + "input_layernorm.weight"] = shapes[stem + "post_attention_layernorm.weight"] = (hidden,)
        for name, (out, size_in, bias) in linear.items():
            shapes[f"{stem}{name}.weight"] = (out, size_in)
            if bias:
                shapes[f"{stem}{name}.bias"] = (out,)
    return shapes


def tensors(config: dict) -> dict[str, np.ndarray]:
    """Weights under their Hugging Face names, float32, the same wherever they are made."""
    made = {}
    for name, shape in _shapes(config).items():
        values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
        if "norm" in name:
            values = 1 + 0.2 * values
        elif len(shape) == 2:
            values = values * (1.0 if "embed" in name else 1.5 / np.sqrt(shape[1]))
        else:
            values = 0.3 * values
        made[name] = values.astype(np.float32)
    return made


def params(config: dict) -> dict:
    """The same weights in the nesting of `clo_jax.models`, kernels [in, out]."""
    hf = tensors(config)

    def linear(stem: str) -> dict[str, np.ndarray]:
        made = {"kernel": hf[f"{stem}.weight"].T}
        return {**made, "bias": hf[f"{stem}.bias"]} if f"{stem}.bias" in hf else made

    tree: dict = {
        "embed": {"embedding": hf["model.embed_tokens.weight"]},
        "final_norm": {"scale": hf["model.norm.weight"]},
        "layers": {},
    }
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        tree["layers"][layer] = {
            "attn": {short: linear(f"{stem}self_attn.{short}_proj") for short in "qkvo"},
            "mlp": {short: linear(f"{stem}mlp.{short}_proj") for short in ("gate", "up", "down")},
            "input_norm": {"scale": hf[stem + "input_layernorm.weight"]},
            "post_norm": {"scale": hf[stem + "post_attention_layernorm.weight"]},
        }
    if "lm_head.weight" in hf:
        tree["lm_head"] = {"kernel": hf["lm_head.weight"].T}
    return tree
