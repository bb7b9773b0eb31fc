"""Copies rows of one layer into the engine's host rows: the end of a layer's prefill, and every tail flush."""

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.ops import _check
from clo_jax.ops._registry import register_all


def reference(host_rows, rows, begin, end, *, sink):
    """`host_rows` [B, Ko, S, 2, D] after an `offload` of the same arguments, in plain JAX."""
    N, S = rows.shape[2], host_rows.shape[2]
    p = np.arange(S)[None]
    at = np.where(p < sink, p, sink + (p - sink) % max(N - sink, 1)).clip(max=N - 1)
    written = (p >= begin[:, None]) & (p < end[:, None])
    return jnp.where(written[:, None, :, None, None], rows[:, :, at[0]], host_rows)


def offload(rows, begin, end, layer, token, *, engine, sink):
    """Writes tokens [begin, end) of each sequence to the host rows of one layer.

    Args:
      rows: [B, Ko, N, 2, D] float32, bfloat16 or float16, the engine's dtype; K then V of each token. Token p is at row
        p if p < sink, else at sink + (p - sink) % (N - sink): a tail, or a prefilled layer with N at least `end`. An
        engine whose rows are quantized gets the bytes of `quantized_rows.quantize`.
      begin, end: [B] int32; tokens of each sequence, at most N of them. begin == end writes nothing.
      layer: [1] int32; index of the layer in the engine.
      token: [1] uint32; orders calls with engine effects. A call whose token goes nowhere is never made.
      engine: handle of the engine (`Engine.handle`), static.
      sink: pinned rows at the front of the buffer, static.

    Returns:
      token, unchanged. When the call returns the rows are copied, so `rows` may be overwritten.

    Raises:
      ValueError: shapes or dtypes that do not agree.
      jax.errors.JaxRuntimeError or ValueError, run time: a closed engine, a layer or rows that are not the engine's,
        tokens that do not fit in the buffer or the context capacity.
    """
    _check.dtype("rows", rows, *_check.ACTIVATION_DTYPES)
    _check.shape("rows", rows, (None, None, None, 2, None), "[B, Ko, N, 2, D]")
    for name, array in (("begin", begin), ("end", end)):
        _check.shape(name, array, (rows.shape[0],), "[B]")
        _check.dtype(name, array, jnp.int32)
    _check.shape("layer", layer, (1,), "[1]")
    _check.dtype("layer", layer, jnp.int32)
    _check.shape("token", token, (1,), "[1]")
    _check.dtype("token", token, jnp.uint32)
    if engine <= 0:
        raise ValueError(f"engine: got {engine}, wanted the handle of an engine")
    if sink < 0:
        raise ValueError(f"sink: got {sink}, wanted an integer >= 0")
    register_all()
    call = jax.ffi.ffi_call("clo_offload", jax.ShapeDtypeStruct((1,), jnp.uint32), input_output_aliases={4: 0})
    return call(rows, begin, end, layer, token, engine=np.int64(engine), sink=np.int64(sink))
