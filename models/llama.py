"""Llama 3, 3.1, 3.2 and models of the same architecture (SmolLM2 and others of model_type "llama")."""

from clo_jax.models.layers import Decoder

MODEL_TYPE = "llama"
HF_ARCHITECTURE = "LlamaForCausalLM"


def biases(attention_bias: bool, mlp_bias: bool) -> dict[str, bool]:
    """Which projections have a bias: `attention_bias` covers q, k, v and o alike."""
    return {"qkv_bias": attention_bias, "output_bias": attention_bias, "mlp_bias": mlp_bias}


class Llama(Decoder):
    """Llama decoder."""
