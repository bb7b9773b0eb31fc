"""Selection of the k most promising tokens of each KV head from their hash codes (reference and native call)."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import _host
from clo_jax.config import Retriever
from clo_jax.ops import _check, hash_encode
from clo_jax.ops._registry import register_all

RETRIEVERS: tuple[Retriever, ...] = get_args(Retriever)  # their places are the native enumeration
_LEVELS = 7.0  # the query's projections are rounded to -7 .. 7
# exp() of the scores: below, 0; above, the same. Sums over a group stay finite and no score is subnormal.
_LEAST_LOGIT, _MOST_LOGIT = -87.0, 80.0


def sort_keys(query, weights, mean, lse, codes, factors, *, retriever, scale, rows=None):
    """Sort key of every token, [B, Ko, S] int32 in [0, 65535]: arguments as `select_topk`, plain JAX."""
    B, H, D = query.shape
    Ko = rows.shape[1] if retriever == "exact" else codes.shape[1]
    q = query.astype(jnp.float32).reshape(B, Ko, H // Ko, D)
    lse = lse.reshape(B, Ko, H // Ko, 1)
    if retriever == "hata":
        hashed, _ = hash_encode.reference(q, weights, jnp.zeros((B, Ko, D), jnp.float32))
        different = jax.lax.population_count(hashed[:, :, :, None, :] ^ codes[:, :, None, :, :])
        same = H // Ko * weights.shape[-1] - different.sum((2, 4), dtype=jnp.uint32).astype(jnp.int32)
        return same
    if retriever == "exact":
        keys = rows[:, :, :, 0, :].astype(jnp.float32)
        logits = scale * jnp.einsum("bkgd,bksd->bkgs", q, keys, precision="highest") - lse
    else:
        z = jnp.einsum("bkgd,kdr->bkgr", q, weights, precision="highest")
        step = jnp.abs(z).max(-1, keepdims=True) / _LEVELS
        step = jnp.where(jnp.isfinite(step) & (step > 0), step, 0.0)
        levels = jnp.where(step > 0, jnp.clip(jnp.round(z / jnp.where(step > 0, step, 1.0)), -_LEVELS, _LEVELS), 0.0)
        bits = (codes[..., None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, None, None, :]) & 1
        signs = 2.0 * bits.reshape(*codes.shape[:3], -1).astype(jnp.float32) - 1.0
        dot = jnp.einsum("bkgr,bksr->bkgs", levels, signs, precision="highest")
        dot = step * factors.astype(jnp.float32)[:, :, None, :] * dot
        along_mean = jnp.einsum("bkgd,bkd->bkg", q, mean, precision="highest")
        logits = scale * (dot + along_mean[..., None]) - lse
    scores = jnp.where(logits >= _LEAST_LOGIT, jnp.exp(jnp.minimum(logits, _MOST_LOGIT)), 0.0).sum(2)
    return (jax.lax.bitcast_convert_type(scores, jnp.uint32) >> 15).astype(jnp.int32)


def reference(
    query, weights, mean, lse, codes, factors, begin, end, k, skip, *, k_max, retriever, scale, rows=None
):  # fmt: skip
    """Plain JAX form of `select_topk`: same arguments and results, but for keys whose score rounds to a neighbour."""
    keys = sort_keys(query, weights, mean, lse, codes, factors, retriever=retriever, scale=scale, rows=rows)
    S = keys.shape[-1]
    token = jnp.arange(S, dtype=jnp.int32)[None, None, :]
    begin, end = jnp.maximum(begin, 0)[:, None, None], jnp.minimum(end, S)[:, None, None]
    keys = jnp.where((token >= begin) & (token < end), keys, -1)
    _, best = jax.lax.top_k(keys, k_max)  # equal keys: lowest index first
    count = jnp.where(skip[:, :, None], 0, jnp.minimum(k[:, None, None], end - begin))
    chosen = jnp.where(jnp.arange(k_max, dtype=jnp.int32)[None, None, :] < count, best, S)
    chosen = jnp.sort(chosen, axis=-1)
    return jnp.where(chosen < S, chosen, -1)


def select_topk(
    query, weights, mean, lse, codes, factors, begin, end, k, skip, *, k_max, retriever, scale, rows=None
):  # fmt: skip
    """Selects for each sequence and KV head the k tokens of [begin, end) with the highest scores.

    The score of a token, with z = q·W for each query head q of the group:
      hata: G·R less the sum over the group of the Hamming distances between the bits z > 0 and the token's code.
      sign: sum over the group of exp(scale · (q·mean + factor · step · sum_r level_r · sign_r) - lse), where
        level = round(z / step) in [-7, 7] with step = max|z| / 7, and sign_r = ±1 is bit r of the token's code
        (RaBitQ's estimate of q·K, arXiv:2405.12497, and the attention weight that it implies).
      exact: sum over the group of exp(scale · q·K - lse).
    hata compares its integers, the others the 16 leading bits of the float32 score (8 of them mantissa). Selection is
    exact on those, ties to the lowest index.

    Args:
      query: [B, H, D] float32, bfloat16 or float16; H = G·Ko query heads of offloaded KV heads.
      weights: [Ko, D, R] float32; projections, as for `hash_encode`.
      mean: [B, Ko, D] float32; what the codes were centred by.
      lse: [B, H] float32; log-sum-exp of the last step's attention, which makes the group's heads comparable.
      codes: [B, Ko, S, R/32] uint32.
      factors: [B, Ko, S] float16.
      begin, end: [B] int32; candidates of each sequence are the tokens [begin, end), cut to [0, S).
      k: [B] int32; wanted. Never more than k_max nor the number of candidates are selected.
      skip: [B, Ko] bool; heads that select nothing.
      k_max: width of the result, 1 .. S.
      retriever: "sign", "hata" or "exact".
      scale: of the attention, usually D^-1/2.
      rows: [B, Ko, S, 2, D] in query's dtype; for "exact" only, which ignores weights, mean, codes and factors.

    Returns:
      indices [B, Ko, k_max] int32, ascending, -1 after the last.

    Raises:
      ValueError: shapes, dtypes or values that do not agree.
    """
    if retriever not in RETRIEVERS:
        raise ValueError(f"retriever: got {retriever!r}, wanted {', '.join(RETRIEVERS)}")
    if (rows is not None) != (retriever == "exact"):
        raise ValueError(f"rows: got {'an array' if rows is not None else None} with retriever {retriever!r}, wanted "
                         "an array for exact and None else")  # fmt: skip
    _check.dtype("query", query, *_check.ACTIVATION_DTYPES)
    _check.shape("query", query, (None, None, None), "[B, H, D]")
    _check.shape("skip", skip, (query.shape[0], None), "[B, Ko]")
    _check.dtype("skip", skip, jnp.bool_)
    B, H, D = query.shape
    Ko = skip.shape[1]
    _check.multiple("query heads", H, "KV heads", Ko)
    _check.shape("lse", lse, (B, H), "[B, H]")
    _check.dtype("lse", lse, jnp.float32)
    _check.dtype("weights", weights, jnp.float32)
    _check.dtype("mean", mean, jnp.float32)
    _check.dtype("codes", codes, jnp.uint32)
    _check.dtype("factors", factors, jnp.float16)
    if retriever == "exact":
        _check.shape("rows", rows, (B, Ko, None, 2, D), "[B, Ko, S, 2, D]")
        _check.dtype("rows", rows, query.dtype)
        S = rows.shape[2]
    else:
        _check.shape("weights", weights, (Ko, D, None), "[Ko, D, R]")
        R = weights.shape[2]
        _check.multiple("weights' hash bits", R, "word size", 32)
        if H // Ko * R > 65535:
            raise ValueError(f"G·R: got {H // Ko * R}, wanted less than 65536, which 16-bit sort keys hold")
        _check.shape("mean", mean, (B, Ko, D), "[B, Ko, D]")
        _check.shape("codes", codes, (B, Ko, None, R // 32), "[B, Ko, S, R/32]")
        S = codes.shape[2]
        _check.shape("factors", factors, (B, Ko, S), "[B, Ko, S]")
        rows = jnp.zeros((0,), query.dtype)
    for name, array in (("begin", begin), ("end", end), ("k", k)):
        _check.shape(name, array, (B,), "[B]")
        _check.dtype(name, array, jnp.int32)
    if not 0 < k_max <= S:
        raise ValueError(f"k_max: got {k_max}, wanted an integer in [1, S = {S}]")
    register_all()
    number = RETRIEVERS.index(retriever)
    bits = 0 if retriever == "exact" else weights.shape[2]
    workspace = _host.select_topk_workspace(
        batch=B, kv_heads=Ko, group=H // Ko, head_dim=D, bits=bits, max_tokens=S, retriever=number
    )
    call = jax.ffi.ffi_call(
        "clo_select_topk",
        (jax.ShapeDtypeStruct((B, Ko, k_max), jnp.int32), jax.ShapeDtypeStruct((workspace,), jnp.uint8)),
    )
    indices, _ = call(
        query, weights, mean, lse, codes, factors, rows, begin, end, k, skip,
        retriever=number, scale=np.float32(scale),
    )  # fmt: skip
    return indices
