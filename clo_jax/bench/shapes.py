"""Named architectures: what a bench or a plan is made for where there is no checkpoint."""

import dataclasses

from clo_jax.config import ModelConfig, RopeConfig

SHAPES = {
    "llama3-8b": ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 2**20, RopeConfig(5e5)),
    "qwen2.5-14b": ModelConfig(
        "qwen2", 152064, 5120, 13824, 48, 40, 8, 128, 1e-5, 1010000, RopeConfig(1e7), qkv_bias=True
    ),
    "smollm2-135m": ModelConfig(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, 8192, RopeConfig(1e5), tie_word_embeddings=True
    ),
    "tiny": ModelConfig("llama", 256, 128, 256, 3, 4, 2, 64, 1e-5, 32768, RopeConfig(1e4)),
}


def shape(name: str, layers: int | None = None) -> ModelConfig:
    """The architecture of that name, of its first `layers` layers (None: all).

    Raises:
      ValueError: an unknown name, or more layers than it has.
    """
    if name not in SHAPES:
        raise ValueError(f"--shape: got {name!r}, wanted {', '.join(SHAPES)}")
    return with_layers(SHAPES[name], layers)


def with_layers(model: ModelConfig, layers: int | None) -> ModelConfig:
    """The same with its first `layers` layers (None: all).

    Raises:
      ValueError: a number outside of 1 to the model's.
    """
    if layers is None:
        return model
    if not 1 <= layers <= model.num_layers:
        raise ValueError(f"--layers: got {layers}, wanted 1 to {model.num_layers}, the model's layers")
    return dataclasses.replace(model, num_layers=layers)
