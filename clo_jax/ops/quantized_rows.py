"""Rows as the engine keeps them with `kv_dtype` int8 or fp8, in plain JAX; for the kernels ffi/include/clo/row_format.h
says the same.

A row is the key, then the value of one token and head. Quantized it is 2·D bytes and eight scales: those of four groups
of the key's channels, then of the value's, bfloat16. An element is its byte times the scale of its group: an integer
from -127 to 127 (int8), or e4m3 (fp8: four bits of exponent, three of mantissa, at most 448). A scale is the group's
largest magnitude over 127 or 448, rounded up, so that nothing is clipped. Every row has its own: rows may come in any
order, and outliers of one token or of a few channels cost others nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.cache.layout import SCALE_BYTES
from clo_jax.ops import _check

_GROUPS = SCALE_BYTES // 2  # of a row: half of the key, half of the value
LARGEST = {"int8": 127.0, "fp8": 448.0}  # magnitude of a byte, by kv_dtype
_SMALLEST = 2.0**-100  # a group whose largest magnitude is below becomes zero
_NAN = 0x7FC0  # scale of a group that holds a NaN or an infinity


def _groups(rows):
    return rows.reshape(*rows.shape[:-2], _GROUPS, -1)


def quantize(rows: jax.Array, kv_dtype: str) -> jax.Array:
    """Rows [..., 2, D] float32, bfloat16 or float16 -> [..., 2·D + 16] uint8; D a multiple of 4.

    Raises:
      ValueError: another `kv_dtype` than int8 or fp8, another dtype, or a shape that cannot be cut into groups.
    """
    if kv_dtype not in LARGEST:
        raise ValueError(f"kv_dtype: got {kv_dtype!r}, wanted int8 or fp8")
    _check.dtype("rows", rows, *_check.ACTIVATION_DTYPES)
    if rows.ndim < 2 or rows.shape[-2] != 2 or rows.shape[-1] % 4:
        raise ValueError(f"rows: got shape {rows.shape}, wanted [..., 2, D] with D a multiple of 4")
    x = _groups(rows.astype(jnp.float32))
    top = jnp.max(jax.lax.bitcast_convert_type(jnp.abs(x), jnp.uint32), axis=-1)  # NaN is larger than infinity
    amax = jax.lax.bitcast_convert_type(top, jnp.float32)
    finite = top < np.uint32(0x7F800000)
    used = finite & (amax >= np.float32(_SMALLEST))
    exact = jax.lax.bitcast_convert_type(amax * np.float32(1 / np.float32(LARGEST[kv_dtype])), jnp.uint32)
    scale = jnp.where(used, (exact + np.uint32(0xFFFF)) >> np.uint32(16), np.uint32(0))
    wide = jax.lax.bitcast_convert_type(scale << np.uint32(16), jnp.float32)
    inverse = jnp.where(used, np.float32(1) / jnp.where(used, wide, np.float32(1)), np.float32(0))
    y = jnp.where(used[..., None], x, np.float32(0)) * inverse[..., None]
    y = jnp.clip(y, -LARGEST[kv_dtype], LARGEST[kv_dtype])
    codes = jnp.round(y).astype(jnp.int8) if kv_dtype == "int8" else y.astype(jnp.float8_e4m3fn)
    stored = jnp.where(finite, scale, np.uint32(_NAN)).astype(jnp.uint16)
    tail = jax.lax.bitcast_convert_type(stored, jnp.uint8).reshape(*rows.shape[:-2], SCALE_BYTES)
    body = jax.lax.bitcast_convert_type(codes, jnp.uint8).reshape(*rows.shape[:-2], -1)
    return jnp.concatenate([body, tail], axis=-1)


def dequantize(stored: jax.Array, kv_dtype: str) -> jax.Array:
    """Rows [..., 2·D + 16] uint8 as `quantize` makes them -> [..., 2, D] float32.

    Raises:
      ValueError: another `kv_dtype` than int8 or fp8, another dtype, or a width that no row has.
    """
    if kv_dtype not in LARGEST:
        raise ValueError(f"kv_dtype: got {kv_dtype!r}, wanted int8 or fp8")
    _check.dtype("stored", stored, jnp.uint8)
    width = stored.shape[-1] - SCALE_BYTES if stored.ndim else 0
    if width <= 0 or width % _GROUPS:
        raise ValueError(f"stored: got shape {stored.shape}, wanted [..., 2·D + {SCALE_BYTES}] with D a multiple of 4")
    lead = stored.shape[:-1]
    kind = jnp.int8 if kv_dtype == "int8" else jnp.float8_e4m3fn
    codes = jax.lax.bitcast_convert_type(stored[..., :width], kind).astype(jnp.float32)
    scale = jax.lax.bitcast_convert_type(stored[..., width:].reshape(*lead, _GROUPS, 2), jnp.bfloat16)
    rows = codes.reshape(*lead, _GROUPS, -1) * scale.astype(jnp.float32)[..., None]
    return rows.reshape(*lead, 2, width // 2)
