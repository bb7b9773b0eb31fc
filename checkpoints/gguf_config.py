"""Hugging Face config.json and generation_config.json out of GGUF metadata."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from clo_jax.checkpoints.gguf_tokenizer import special_ids
from clo_jax.errors import CheckpointError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

# llama.cpp writes Llama 3.1's scaling as a tensor of frequency divisors. These are the parameters of every released
# model (the factor differs: 8, and 32 in 3.2); divisors that they do not reproduce are refused.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _shortest(value: float) -> float:
    """The decimal that was meant: GGUF keeps floats in 32 bits, and 1e-5 would come out as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _integer(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if isinstance(value, list):
        # One value for each layer.
        if len(set(value)) != 1:
            raise CheckpointError(f"{key}: got different values for layers, wanted one for all")
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"{key}: got {value!r}, wanted a positive integer")
    return value


def hf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], divisors: np.ndarray | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The configuration, and notes on what was assumed.

    Args:
      metadata: the key-value part of the file.
      shapes: of the tensors, by Hugging Face name; they tell tied embeddings, biases and the vocabulary.
      divisors: float32 [D / 2], the tensor `rope_freqs.weight`, or None.

    Raises:
      CheckpointError: names a key that is missing, malformed, or asks for what is not supported.
    """
    family = metadata.get("general.architecture")
    if family not in ARCHITECTURES:
        raise CheckpointError(f"general.architecture: got {family!r}, supported: {', '.join(ARCHITECTURES)}")
    if metadata.get(f"{family}.expert_count", 0):
        raise CheckpointError(f"{family}.expert_count: got {metadata[f'{family}.expert_count']}, wanted no experts")
    if metadata.get(f"{family}.attention.sliding_window", 0):
        raise CheckpointError(f"{family}.attention.sliding_window: supported: full attention only")
    if "model.embed_tokens.weight" not in shapes:
        raise CheckpointError("token_embd.weight is missing")
    heads, hidden = (
        _integer(metadata, f"{family}.attention.head_count"),
        _integer(metadata, f"{family}.embedding_length"),
    )
    head_dim = _head_dim(metadata, family, hidden, heads)
    epsilon = metadata.get(f"{family}.attention.layer_norm_rms_epsilon")
    if not isinstance(epsilon, float):
        raise CheckpointError(f"{family}.attention.layer_norm_rms_epsilon: got {epsilon!r}, wanted a number")
    rope, notes = _rope(metadata, family, head_dim, divisors)
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": _integer(metadata, f"{family}.feed_forward_length"),
        "num_hidden_layers": _integer(metadata, f"{family}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(metadata, f"{family}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(epsilon),
        "max_position_embeddings": _integer(metadata, f"{family}.context_length"),
        **rope,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
    }
    if family == "llama":
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in shapes
        config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in shapes
    config.update(_token_ids(metadata))
    return config, notes


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Stop tokens: end of sequence, of turn and of message, those that the file names."""
    return {"_from_model_config": True, **_token_ids(metadata)}


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ids = special_ids(metadata)
    stops = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if name in ids))
    found: dict[str, Any] = {}
    if "bos" in ids:
        found["bos_token_id"] = ids["bos"]
    if stops:
        found["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    if "padding" in ids:
        found["pad_token_id"] = ids["padding"]
    return found


def _head_dim(metadata: Mapping[str, Any], family: str, hidden: int, heads: int) -> int:
    rotary, key = f"{family}.rope.dimension_count", f"{family}.attention.key_length"
    head_dim = _integer(metadata, key, _integer(metadata, rotary, hidden // heads))
    for name in (rotary, key, f"{family}.attention.value_length"):
        if _integer(metadata, name, head_dim) != head_dim:
            raise CheckpointError(f"{name}: got {metadata[name]}, wanted {head_dim} as in the other head dimensions")
    return head_dim


def _rope(
    metadata: Mapping[str, Any], family: str, head_dim: int, divisors: np.ndarray | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    base, notes = metadata.get(f"{family}.rope.freq_base"), ()
    if base is None:
        base, notes = 10000.0, (f"{family}.rope.freq_base is absent: 10000, as llama.cpp has it",)
    base = _shortest(base)
    prefix = f"{family}.rope.scaling."
    given = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if f"{family}.rope.scale_linear" in metadata:  # what files before 2023-10 have
        given = {"type": "linear", "factor": metadata[f"{family}.rope.scale_linear"], **given}
    kind, factor = given.pop("type", "none"), given.pop("factor", 1.0)
    original = given.pop("original_context_length", None)
    given.pop("finetuned", None)
    if given:
        raise CheckpointError(
            f"{prefix}{min(given)}: got {given[min(given)]!r}, supported: type, factor and original length"
        )
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"{prefix}type: got {kind!r}, supported: none, linear, yarn")
    if divisors is not None:
        if kind != "none":
            raise CheckpointError(f"{prefix}type: got {kind!r} together with rope_freqs.weight, wanted one of them")
        scaling: dict[str, Any] | None = _llama3(base, head_dim, divisors)
    elif kind == "none":
        scaling = None
    else:
        scaling = {"rope_type": kind, "factor": _shortest(factor)}
        if kind == "yarn" and original is not None:
            scaling["original_max_position_embeddings"] = int(original)
    return {"rope_theta": base, "rope_scaling": scaling}, notes


def _llama3(base: float, head_dim: int, divisors: np.ndarray) -> dict[str, Any] | None:
    """Parameters of Llama 3.1's scaling that give these divisors of the frequencies; None when all are one."""
    factor = _shortest(float(divisors.max()))
    if factor == 1 and divisors.min() == 1:
        return None
    low, high, length = (_LLAMA3[key] for key in _LLAMA3)
    turns = length / (2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim))
    blend = np.clip((turns - low) / (high - low), 0, 1)
    wanted = 1 / ((1 - blend) / factor + blend)
    if divisors.shape != wanted.shape or not np.allclose(divisors, wanted, rtol=1e-4):
        raise CheckpointError(
            f"rope_freqs.weight: not the divisors of a llama3 scaling with factor {factor} and {_LLAMA3}"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
