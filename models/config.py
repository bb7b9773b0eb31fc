"""Hugging Face `config.json` to `ModelConfig`. Whatever would change the arithmetic and is not supported is refused by
name: a key that is silently dropped gives a model that runs and writes nonsense."""

import math
from collections.abc import Mapping
from typing import Any

from clo_jax.config import ModelConfig, RopeConfig
from clo_jax.models import llama, qwen

FAMILIES = {family.MODEL_TYPE: family for family in (llama, qwen)}

# Keys of each RoPE type beyond `rope_theta`: those it must have and those it may have.
_ROPE_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_ROPE_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
# Keys that a type does not read change nothing for it (`finetuned` is a remark, never arithmetic).
_ROPE_KNOWN = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"}.union(
    *_ROPE_REQUIRED.values(), *_ROPE_OPTIONAL.values()
)


def _refuse(key: str, got: Any, supported: str) -> ValueError:
    return ValueError(f"{key}: got {got!r}, supported: {supported}")


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise _refuse(key, value, "a positive integer")
    return value


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise _refuse(key, value, "a positive number")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    """A boolean that transformers takes to be false when absent."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise _refuse(key, value, "true or false")
    return bool(value)


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads the contents of a Hugging Face `config.json`, as written by transformers 4 or 5.

    Args:
      config: the parsed file. Both layouts of the rotary embedding are read: `rope_theta` with `rope_scaling`
        (`rope_type` or the older `type` in it), and `rope_parameters`.

    Returns:
      The architecture. Absent `num_key_value_heads` means one KV head per query head, absent `head_dim` means
      hidden_size / num_attention_heads, absent `tie_word_embeddings` means untied, as transformers has it for Llama
      and Qwen2. Nothing else that shapes the arithmetic has a default.

    Raises:
      ValueError: names the key, what came and what is supported: another architecture or activation, a RoPE type that
        is not default, linear, dynamic, llama3 or yarn, no rotary base, a sliding window in use, quantized weights.
    """
    family = _family(config)
    if config.get("hidden_act") != "silu":
        raise _refuse("hidden_act", config.get("hidden_act"), "silu")
    if config.get("quantization_config") is not None:
        raise _refuse("quantization_config", config["quantization_config"], "unquantized weights (fp32, fp16, bf16)")
    _refuse_sliding_window(config)
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    if config.get("head_dim") is None and hidden % heads:
        raise _refuse("hidden_size", hidden, f"a multiple of num_attention_heads = {heads} when head_dim is absent")
    return ModelConfig(
        architecture=family.MODEL_TYPE,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads if config.get("num_key_value_heads") is None else _integer(config, "num_key_value_heads"),
        head_dim=hidden // heads if config.get("head_dim") is None else _integer(config, "head_dim"),
        rms_norm_eps=_number("rms_norm_eps", config.get("rms_norm_eps")),
        max_position_embeddings=_integer(config, "max_position_embeddings"),
        rope=_rope(config),
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        **family.biases(_flag(config, "attention_bias"), _flag(config, "mlp_bias")),
    )


def _family(config: Mapping[str, Any]):
    """The module of the model family; `architectures`, where given, must name its causal language model."""
    model_type, named = config.get("model_type"), config.get("architectures")
    if model_type is None and named:
        model_type = next((t for t, f in FAMILIES.items() if f.HF_ARCHITECTURE in named), named)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise _refuse("model_type", model_type, ", ".join(FAMILIES))
    family = FAMILIES[model_type]
    if named and list(named) != [family.HF_ARCHITECTURE]:
        raise _refuse("architectures", named, f"[{family.HF_ARCHITECTURE!r}] for model_type {model_type!r}")
    return family


def _refuse_sliding_window(config: Mapping[str, Any]) -> None:
    wanted = "full attention in every layer"
    kinds = config.get("layer_types")
    if kinds is not None:
        if set(kinds) - {"full_attention"}:
            raise _refuse("layer_types", kinds, wanted)
        return
    window = config.get("sliding_window")
    # A file without the switch but with a window is one whose meaning we do not know, so it counts as in use.
    if window is None or not config.get("use_sliding_window", True):
        return
    first = config.get("max_window_layers")
    if config.get("use_sliding_window") and first is not None and first >= _integer(config, "num_hidden_layers"):
        return  # the window begins above the last layer
    raise _refuse("sliding_window", window, f"{wanted} (null, or use_sliding_window false)")


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    layouts = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key) is not None}
    for key, given in layouts.items():
        if not isinstance(given, Mapping):
            raise _refuse(key, given, "an object or null")
    holders = (*layouts.values(), config)
    for holder in holders:
        if holder.get("partial_rotary_factor") not in (None, 1):
            raise _refuse("partial_rotary_factor", holder["partial_rotary_factor"], "1 (rotary over the whole head)")
    bases = [_number("rope_theta", h["rope_theta"]) for h in holders if h.get("rope_theta") is not None]
    if not bases:
        raise _refuse("rope_theta", None, "a number, in rope_parameters or beside rope_scaling; it has no default")
    if any(base != bases[0] for base in bases):
        raise _refuse("rope_theta", bases, f"one base; {', '.join(layouts)} and the top level disagree")
    read = [_rope_of(key, given, bases[0], config) for key, given in layouts.items()]
    if any(other != read[0] for other in read):
        raise _refuse("rope_scaling", config["rope_scaling"], "the same values as rope_parameters when both are given")
    return read[0] if read else RopeConfig(bases[0])


def _rope_of(where: str, given: Mapping[str, Any], theta: float, config: Mapping[str, Any]) -> RopeConfig:
    if unknown := sorted(set(given) - _ROPE_KNOWN):
        raise _refuse(f"{where}.{unknown[0]}", given[unknown[0]], ", ".join(sorted(_ROPE_KNOWN)))
    rope_type = given.get("rope_type", given.get("type"))
    rope_type = "default" if rope_type is None else rope_type
    if not isinstance(rope_type, str) or rope_type not in _ROPE_REQUIRED:
        raise _refuse(f"{where}.rope_type", rope_type, ", ".join(_ROPE_REQUIRED))
    parameters = {key: given.get(key) for key in _ROPE_REQUIRED[rope_type]}
    parameters |= {key: given[key] for key in _ROPE_OPTIONAL.get(rope_type, ()) if given.get(key) is not None}
    if rope_type == "yarn":
        parameters.setdefault("original_max_position_embeddings", _integer(config, "max_position_embeddings"))
    for key, value in parameters.items():
        if key != "truncate":
            parameters[key] = _number(f"{where}.{key}", value)
        elif not isinstance(value, bool):
            raise _refuse(f"{where}.{key}", value, "true or false")
    return RopeConfig(theta, rope_type, tuple(sorted(parameters.items())))
