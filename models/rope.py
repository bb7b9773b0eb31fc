"""Rotary position embedding, rotate-half convention: the head's first half is paired with its second half.

Inverse frequencies follow transformers' `modeling_rope_utils` in float32, operation by operation, because at position
100,000 an angle magnifies a rounding of its frequency by that much.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.config import ModelConfig


def _powers(base: float, dim: int) -> np.ndarray:
    return np.float32(base) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))


def _llama3(inverse: np.ndarray, options) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor, low, high = options["factor"], options["low_freq_factor"], options["high_freq_factor"]
    trained = options["original_max_position_embeddings"]
    wavelength = np.float32(2 * math.pi) / inverse
    smooth = (np.float32(trained) / wavelength - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * inverse / np.float32(factor) + smooth * inverse
    stretched = np.where(wavelength > trained / low, inverse / np.float32(factor), inverse)
    return np.where((wavelength >= trained / high) & (wavelength <= trained / low), between, stretched)


def _yarn(theta: float, dim: int, options) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071): interpolated and original frequencies blended by rotations within the trained length."""
    factor, trained = options["factor"], options["original_max_position_embeddings"]

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def dimension(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    attention_factor = options.get("attention_factor")
    if attention_factor is None:
        both = "mscale" in options and "mscale_all_dim" in options
        attention_factor = mscale(options["mscale"]) / mscale(options["mscale_all_dim"]) if both else mscale(1.0)
    low, high = dimension(options.get("beta_fast", 32.0)), dimension(options.get("beta_slow", 1.0))
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    keep = 1 - np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    powers = _powers(theta, dim)
    return (1 / (np.float32(factor) * powers)) * (1 - keep) + (1 / powers) * keep, attention_factor


@functools.lru_cache(maxsize=64)
def inverse_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies [D/2] float32 and the factor on cos and sin (1 except for yarn).

    For type dynamic these are the frequencies within the trained length; beyond it they depend on the sequence
    (`rotation`).
    """
    rope, dim = config.rope, config.head_dim
    options, factor = rope.options, 1.0
    inverse = 1 / _powers(rope.theta, dim)
    if rope.rope_type == "linear":
        inverse = inverse / np.float32(options["factor"])
    elif rope.rope_type == "llama3":
        inverse = _llama3(inverse, options)
    elif rope.rope_type == "yarn":
        inverse, factor = _yarn(rope.theta, dim, options)
    return inverse.astype(np.float32), factor


def dynamic_inverse_frequencies(config: ModelConfig, seq_len: jax.Array) -> jax.Array:
    """Dynamic NTK: base grown so that `seq_len` tokens fit the trained span. seq_len [B] int32 -> [B, D/2] float32."""
    dim, factor = config.head_dim, config.rope.options["factor"]
    trained = config.max_position_embeddings
    length = jnp.maximum(seq_len, trained).astype(jnp.float32)
    base = config.rope.theta * (factor * length / trained - (factor - 1)) ** (dim / (dim - 2))
    exponents = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    return 1 / base[:, None] ** exponents[None, :]


def rotation(config: ModelConfig, positions: jax.Array, seq_len: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of tokens at given positions.

    Args:
      config: the model's architecture.
      positions: [B, N] int32, position of each token in its sequence.
      seq_len: [B] int32, length of each sequence including these tokens; read by RoPE type dynamic alone. A key keeps
        the rotation of the step that wrote it.

    Returns:
      cos, sin: float32 [B, N, D/2].
    """
    if config.rope.rope_type == "dynamic":
        inverse, factor = dynamic_inverse_frequencies(config, seq_len)[:, None, :], 1.0
    else:
        inverse, factor = inverse_frequencies(config)
        inverse = jnp.asarray(inverse)[None, None, :]
    angles = positions.astype(jnp.float32)[:, :, None] * inverse
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns x [B, N, heads, D] by `rope` (cos, sin [B, N, D/2]), in float32; returns the dtype of x."""
    cos, sin = (part[:, :, None, :] for part in rope)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
