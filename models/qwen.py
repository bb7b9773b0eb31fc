"""Qwen2 and Qwen2.5."""

from clo_jax.models.layers import Decoder

MODEL_TYPE = "qwen2"
HF_ARCHITECTURE = "Qwen2ForCausalLM"


def biases(attention_bias: bool, mlp_bias: bool) -> dict[str, bool]:
    """Which projections have a bias: q, k and v always, o and the MLP never. The configuration has no say in it."""
    if mlp_bias:
        raise ValueError("mlp_bias: got True, supported: false or absent for model_type 'qwen2'")
    return {"qkv_bias": True, "output_bias": False, "mlp_bias": False}


class Qwen2(Decoder):
    """Qwen2 decoder."""
