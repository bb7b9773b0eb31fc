"""Sign codes of centred vectors under linear projections, with one estimator factor each (reference and native call).

The estimator is RaBitQ's (Gao and Long, SIGMOD 2024, arXiv:2405.12497): x·q is about factor · sum_r sign_r · (q·W)_r.
"""

import jax
import jax.numpy as jnp

from clo_jax.ops import _check
from clo_jax.ops._registry import register_all

_LARGEST_HALF = 65504.0


def reference(x, weights, mean):
    """Plain JAX form of `hash_encode`: same results, but for bits whose projection is 0 up to rounding."""
    B, K, N, _ = x.shape
    R = weights.shape[-1]
    centred = x.astype(jnp.float32) - mean[:, :, None, :]
    p = jnp.einsum("bknd,kdr->bknr", centred, weights, precision="highest")
    bits = (p > 0).astype(jnp.uint32).reshape(B, K, N, R // 32, 32)
    place = jnp.arange(32, dtype=jnp.uint32)[None, None, None, None, :]
    total = jnp.abs(p).sum(-1)
    ratio = (centred**2).sum(-1) / jnp.where(total > 0, total, 1.0)
    usable = (total > 0) & (ratio >= 0)
    factors = jnp.where(usable, jnp.minimum(ratio, _LARGEST_HALF), 0.0)
    return (bits << place).sum(-1, dtype=jnp.uint32), factors.astype(jnp.float16)


def hash_encode(x, weights, mean):
    """Encodes vectors: bit r % 32 of word r // 32 is set where ((x - mean)·W)[r] > 0.

    Args:
      x: [B, K, N, D] float32, bfloat16 or float16; keys after RoPE.
      weights: [K, D, R] float32; projections of each KV head, R a multiple of 32.
      mean: [B, K, D] float32; what the vectors are centred by (zeros for codes that are not centred).

    Returns:
      codes [B, K, N, R/32] uint32; factors [B, K, N] float16, |x - mean|² / sum_r |((x - mean)·W)[r]|, at most 65504,
      and 0 where that is not a number. A vector's results do not depend on the vectors beside it.

    Raises:
      ValueError: shapes or dtypes that do not agree.
    """
    _check.dtype("x", x, *_check.ACTIVATION_DTYPES)
    _check.shape("x", x, (None, None, None, None), "[B, K, N, D]")
    B, K, N, D = x.shape
    _check.shape("weights", weights, (K, D, None), "[K, D, R]")
    _check.dtype("weights", weights, jnp.float32)
    R = weights.shape[-1]
    _check.multiple("weights' hash bits", R, "word size", 32)
    _check.shape("mean", mean, (B, K, D), "[B, K, D]")
    _check.dtype("mean", mean, jnp.float32)
    register_all()
    call = jax.ffi.ffi_call(
        "clo_hash_encode",
        (jax.ShapeDtypeStruct((B, K, N, R // 32), jnp.uint32), jax.ShapeDtypeStruct((B, K, N), jnp.float16)),
    )
    return call(x, weights, mean)
