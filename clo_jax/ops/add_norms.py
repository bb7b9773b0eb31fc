"""A residual connection and the norms that follow it (reference implementation and native call on a GPU).

There is no CPU kernel: XLA's loops over a few kilobytes start at once there and are nothing beside the matrix products.
On a GPU it makes three kernels of the sum and a norm, five of two norms, and each of them takes longer to start and to
reach memory than to compute.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.ops import _check
from clo_jax.ops._registry import register_all

MAX_HIDDEN = 16384  # kMaxNormHidden of ffi/include/clo/params.h
MAX_NORMS = 2


def reference(x, y, scales, eps):
    """Plain JAX form of `add_norms`: same arguments and results."""
    total = x + y
    wide = total.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    wide_scales = (scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,)) for scale in scales)
    return total, *((normed * scale).astype(x.dtype) for scale in wide_scales)


def add_norms(x: jax.Array, y: jax.Array, scales: Sequence[jax.Array], eps: float) -> tuple[jax.Array, ...]:
    """The sum of x and y, rounded to their dtype, and its root-mean-square norm times each of the scales.

    For a few rows: a GPU has one block for each. Which form runs is decided by the platform that a program is lowered
    for. Norms of the plain form are what the model's own are: XLA may compute them from the sum before its rounding.

    Args:
      x, y: [..., hidden] float32, bfloat16 or float16; the residual stream and what is added to it. hidden is at most
        16384.
      scales: one or two arrays [hidden], all of x's dtype or all float32.
      eps: added to the mean of squares, static.

    Returns:
      x + y [..., hidden]; for each scale (s / sqrt(mean(s²) + eps)) · scale of the rounded sum s, float32 inside,
      rounded to x's dtype [..., hidden]. On a GPU the sum takes the place of x when x is donated or not used again.

    Raises:
      ValueError: shapes or dtypes that do not agree, another number of scales, a hidden size beyond the largest.
    """
    _check.dtype("x", x, *_check.ACTIVATION_DTYPES)
    if x.ndim < 1 or not 0 < x.shape[-1] <= MAX_HIDDEN:
        raise ValueError(f"x: got shape {x.shape}, wanted [..., hidden], hidden from 1 to {MAX_HIDDEN}")
    _check.shape("y", y, x.shape, "[..., hidden]")
    _check.dtype("y", y, x.dtype)
    scales = tuple(scales)
    if not 1 <= len(scales) <= MAX_NORMS:
        raise ValueError(f"scales: got {len(scales)} arrays, wanted from 1 to {MAX_NORMS}")
    for index, scale in enumerate(scales):
        _check.shape(f"scales[{index}]", scale, x.shape[-1:], "[hidden]")
        _check.dtype(f"scales[{index}]", scale, *dict.fromkeys((x.dtype, jnp.dtype(jnp.float32))))
        _check.dtype(f"scales[{index}]", scale, scales[0].dtype)
    register_all()

    def native(x, y, *scales):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = jax.ffi.ffi_call("clo_add_norms", (out,) * (1 + len(scales)), input_output_aliases={0: 0})
        return tuple(call(x, y, *scales, eps=np.float32(eps)))

    def plain(x, y, *scales):
        return reference(x, y, scales, eps)

    return jax.lax.platform_dependent(x, y, *scales, cuda=native, default=plain)
