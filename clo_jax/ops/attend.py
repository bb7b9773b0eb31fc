"""Append of one token and exact attention over resident, selected, sink and recent rows (reference and native call)."""

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import _host
from clo_jax.ops import _check, hash_encode
from clo_jax.ops._registry import register_all


def _write(rows, index, new):
    """rows [B, Kx, N, ...] with `new` [B, Kx, ...] at row index[b] of every head."""
    return jax.vmap(lambda r, i, n: r.at[:, i].set(n))(rows, index, new)


def reference(
    query,
    key,
    value,
    weights,
    mean,
    position,
    flushed,
    resident,
    tail,
    codes,
    factors,
    selected_rows,
    slot_counts,
    *,
    sink,
    scale,
):
    """Plain JAX form of `attend`, in float32. The engine's part is explicit: `selected_rows` [B, Ko, C, 2, D] (of
    quantized ones what `quantized_rows.dequantize` gives) and `slot_counts` [B, Ko] int32, of which a head's first
    slot_counts rows are attended. Returns the results of `attend` but the token."""
    B, H, D = query.shape
    Ko, Kr, K = tail.shape[1], resident.shape[1], key.shape[1]
    G, T, R = H // K, tail.shape[2], weights.shape[2]
    rows = jnp.stack([key, value], axis=2)  # [B, K, 2, D]
    q = query.astype(jnp.float32).reshape(B, K, G, D)
    outs, lses = [], []

    def softmax(q, rows, valid):
        rows = rows.astype(jnp.float32)
        scores = jnp.einsum("bkgd,bksd->bkgs", q, rows[:, :, :, 0], precision="highest") * scale
        scores = jnp.where(valid[:, :, None, :], scores, -jnp.inf)
        top = scores.max(axis=-1, keepdims=True)
        p = jnp.exp(scores - jnp.where(top > -jnp.inf, top, 0.0))
        total = p.sum(axis=-1, keepdims=True)
        acc = jnp.einsum("bkgs,bksd->bkgd", p, rows[:, :, :, 1], precision="highest")
        outs.append((acc / jnp.where(total > 0, total, 1.0)).reshape(B, -1, D))
        lses.append((jnp.log(total) + top)[..., 0].reshape(B, -1))

    if Ko:
        ring = jnp.where(position < sink, position, sink + (position - sink) % (T - sink))
        tail = _write(tail, ring, rows[:, :Ko])
        if R:
            code, factor = hash_encode.reference(key[:, :Ko, None], weights, mean)
            codes, factors = _write(codes, position, code[:, :, 0]), _write(factors, position, factor[:, :, 0])
        # The token of each tail row: of a ring row, the newest one that fell on it.
        row, new = jnp.arange(T)[None, :], position[:, None]
        token = jnp.where(row < sink, row, new - (new - row) % (T - sink))
        wanted = (token <= new) & jnp.where(row < sink, True, token >= jnp.maximum(sink, flushed[:, None]))
        slots = jnp.arange(selected_rows.shape[2])[None, None, :] < slot_counts[:, :, None]
        valid = jnp.concatenate([slots, jnp.broadcast_to(wanted[:, None, :], (B, Ko, T))], axis=2)
        rows_read = jnp.concatenate([selected_rows.astype(jnp.float32), tail.astype(jnp.float32)], axis=2)
        softmax(q[:, :Ko], rows_read, valid)
    if Kr:
        resident = _write(resident, position, rows[:, Ko:])
        valid = jnp.arange(resident.shape[2])[None, :] <= position[:, None]
        softmax(q[:, Ko:], resident, jnp.broadcast_to(valid[:, None, :], (B, Kr, resident.shape[2])))
    out = jnp.concatenate(outs, axis=1).astype(query.dtype)
    return out, jnp.concatenate(lses, axis=1), resident, tail, codes, factors


def attend(
    query,
    key,
    value,
    weights,
    mean,
    position,
    flushed,
    resident,
    tail,
    codes,
    factors,
    layer,
    token,
    *,
    engine: int,
    sink: int,
    scale: float,
):
    """Appends one token's key and value, then attends with its exact query.

    KV heads are ordered [offloaded Ko, resident Kr]. An offloaded head attends to the filled slots of its selected
    rows, which the engine holds, to the sink tokens, and to every token since the last flush; a resident head to all
    its rows up to `position`. Everything but the selected rows is done before the layer's transfer is waited for.

    Args:
      query: [B, H, D] float32, bfloat16 or float16, H = G·K, rotated (RoPE) like the keys.
      key, value: [B, K, D], dtype of `query`, K = Ko + Kr; the new token's rows.
      weights: [Ko, D, R] float32 hash weights; R = 0: codes are not kept.
      mean: [B, Ko, D] float32 centres of the keys.
      position: [B] int32 index of the new token, 0 to S - 1.
      flushed: [B] int32; tokens before it are selectable, the tail keeps [flushed, position] and the first `sink`.
      resident: [B, Kr, S, 2, D], dtype of `query`; key then value of every token.
      tail: [B, Ko, T, 2, D], dtype of `query`; token p at row p if p < sink, else sink + (p - sink) % (T - sink).
      codes: [B, Ko, S, R/32] uint32.
      factors: [B, Ko, S] float16 ([B, Ko, 0] is accepted when R = 0).
      layer: [1] int32, the engine's layer.
      token: [1] uint32, ordered after every op whose engine effects must be seen.
      engine: handle of the engine; 0 when and only when Ko is 0.
      sink: first tokens, which stay in the tail for ever.
      scale: factor of the scores, usually D^-1/2.

    Returns:
      out [B, H, D] in the dtype of `query`; lse [B, H] float32, the natural log-sum-exp of the scaled scores; resident,
      tail, codes, factors and token, updated in place when their arguments are donated.

    Raises:
      ValueError: shapes, dtypes or attributes that do not agree; at run time, a position or flushed token out of range,
        or an engine of another shape.
      jax.errors.JaxRuntimeError: at run time, an engine that is closed, or a transfer that failed or timed out, with
        the engine's text.
    """
    _check.dtype("query", query, *_check.ACTIVATION_DTYPES)
    _check.shape("query", query, (None, None, None), "[B, H, D]")
    B, H, D = query.shape
    _check.shape("tail", tail, (B, None, None, 2, D), "[B, Ko, T, 2, D]")
    _check.shape("codes", codes, (B, tail.shape[1], None, None), "[B, Ko, S, R/32]")
    (_, Ko, T, _, _), S, R = tail.shape, codes.shape[2], 32 * codes.shape[3]
    _check.shape("resident", resident, (B, None, S, 2, D), "[B, Kr, S, 2, D]")
    K = Ko + resident.shape[1]
    _check.multiple("query heads", H, "KV heads", K)
    _check.shape("key", key, (B, K, D), "[B, K, D]")
    _check.shape("value", value, (B, K, D), "[B, K, D]")
    for name, array in (("key", key), ("value", value), ("resident", resident), ("tail", tail)):
        _check.dtype(name, array, query.dtype)
    _check.shape("weights", weights, (Ko, D, R), "[Ko, D, R]")
    _check.shape("mean", mean, (B, Ko, D), "[B, Ko, D]")
    _check.dtype("weights", weights, jnp.float32)
    _check.dtype("mean", mean, jnp.float32)
    _check.dtype("codes", codes, jnp.uint32)
    factor_rows = 0 if R == 0 and factors.shape[-1:] == (0,) else S
    _check.shape("factors", factors, (B, Ko, factor_rows), "[B, Ko, S]")
    _check.dtype("factors", factors, jnp.float16)
    for name, array, n, letters in (
        ("position", position, B, "[B]"),
        ("flushed", flushed, B, "[B]"),
        ("layer", layer, 1, "[1]"),
    ):
        _check.shape(name, array, (n,), letters)
        _check.dtype(name, array, jnp.int32)
    _check.shape("token", token, (1,), "[1]")
    _check.dtype("token", token, jnp.uint32)
    if engine < 0 or (engine == 0) != (Ko == 0):
        raise ValueError(f"engine: got handle {engine} with Ko = {Ko}, wanted a positive handle, or 0 when Ko = 0")
    if sink < 0 or (Ko > 0 and sink >= T):
        raise ValueError(f"sink: got {sink}, wanted 0 to T - 1 = {T - 1}")
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"scale: got {scale}, wanted a positive number")
    register_all()
    workspace = _host.attend_workspace(batch=B, offloaded=Ko, resident=K - Ko, group=H // K, head_dim=D, bits=R)
    call = jax.ffi.ffi_call(
        "clo_attend",
        tuple(
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (
                (query.shape, query.dtype),
                ((B, H), jnp.float32),
                *((x.shape, x.dtype) for x in (resident, tail, codes, factors, token)),
                ((workspace,), jnp.uint8),
            )
        ),
        input_output_aliases={7: 2, 8: 3, 9: 4, 10: 5, 12: 6},
    )
    operands = (query, key, value, weights, mean, position, flushed, resident, tail, codes, factors, layer, token)
    *results, _ = call(*operands, engine=np.int64(engine), sink=np.int64(sink), scale=np.float32(scale))
    return tuple(results)
