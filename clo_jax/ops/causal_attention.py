"""Causal grouped-query attention over a prompt, for prefill. Memory grows with the chunk, not with the square of the
prompt: chunks of queries meet blocks of keys, and an online softmax in float32 joins the blocks."""

import jax
import jax.numpy as jnp
from jax import lax

from clo_jax.ops import _check

# Queries per chunk and keys per block. Measured on two Zen 5 cores, N = 4096, H = 9, K = 3, D = 64, float32: 256 x 256
# takes 0.14 s of processor time, 128 x 256 0.16, 64 x 256 0.17, 512 x 512 0.16; the dense form takes 1.5.
QUERIES = 256
KEYS = 256

# Far below every score, yet finite: a fully masked block then gives exp(0) = 1 times a later exp(-huge) = 0, never NaN.
_MASKED = -1e30


def reference(query, key, value, lengths, *, scale=None):
    """Dense form of `prefill_attention`: same arguments and results."""
    B, N, H, D = query.shape
    K = key.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (query.reshape(B, N, K, H // K, D), key, value))
    scores = jnp.einsum("bnkgd,bmkd->bkgnm", q, k, precision="highest") * (D**-0.5 if scale is None else scale)
    seen = jnp.tril(jnp.ones((N, N), jnp.bool_))[None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, _MASKED), axis=-1)
    out = jnp.einsum("bkgnm,bmkd->bnkgd", weights, v, precision="highest").reshape(B, N, H, D)
    inside = jnp.arange(N, dtype=jnp.int32)[None, :] < lengths[:, None]
    return jnp.where(inside[:, :, None, None], out, 0).astype(query.dtype)


def implementation(dtype, head_dim: int) -> str:
    """What `prefill_attention` runs on the default backend: "cudnn" or "chunked"."""
    fits = jnp.dtype(dtype) != jnp.float32 and head_dim % 8 == 0 and head_dim <= 128
    return "cudnn" if fits and jax.default_backend() == "gpu" else "chunked"


def prefill_attention(query, key, value, lengths, *, scale=None):
    """Causal attention of whole prompts, padded on the right.

    Padding needs no mask, since no token of the prompt comes after it. The chunked form does no work past the longest
    length, so that one program per bucket serves shorter prompts at their own cost. On a GPU in 16 bits (D a multiple
    of 8, at most 128) cuDNN's flash attention takes its place: see `implementation`.

    Args:
      query: [B, N, H, D] float32, bfloat16 or float16.
      key, value: [B, N, K, D], dtype of `query`, H a multiple of K.
      lengths: [B] int32, tokens of each prompt, at most N.
      scale: factor on the scores; 1 / sqrt(D) by default.

    Returns:
      [B, N, H, D], dtype of `query`. Rows past a sequence's length hold no meaning; they are finite.

    Raises:
      ValueError: shapes or dtypes that do not agree.
    """
    _check.shape("query", query, (None, None, None, None), "[B, N, H, D]")
    _check.dtype("query", query, *_check.ACTIVATION_DTYPES)
    B, N, H, D = query.shape
    _check.shape("key", key, (B, N, None, D), "[B, N, K, D]")
    _check.shape("value", value, key.shape, "[B, N, K, D]")
    _check.dtype("key", key, query.dtype)
    _check.dtype("value", value, query.dtype)
    _check.multiple("query heads", H, "KV heads", key.shape[2])
    if N == 0:
        raise ValueError("query: got 0 tokens, wanted at least 1")
    _check.shape("lengths", lengths, query.shape[:1], "[B]")
    _check.dtype("lengths", lengths, jnp.int32)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if implementation(query.dtype, query.shape[-1]) == "cudnn":
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            scale=scale,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )
    return _chunks(query, key, value, jnp.max(lengths), scale)


def _chunks(query, key, value, count, scale):
    """Attention of queries [B, N, H, D]; those from `count` on may be left zero."""
    B, N, H, D = query.shape
    K, size = key.shape[2], min(QUERIES, N)
    # Heads before tokens, so that each head's block is one matrix.
    grouped = query.reshape(B, N, K, H // K, D).transpose(0, 2, 3, 1, 4)
    keys, values = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)

    def chunk(index, out):
        # The last chunk is moved back to end at N; the queries it shares with the one before come out the same.
        first = jnp.minimum(index * size, N - size)
        queries = lax.dynamic_slice_in_dim(grouped, first, size, axis=3)
        return lax.dynamic_update_slice_in_dim(out, _chunk(queries, keys, values, first, scale), first, axis=3)

    out = lax.fori_loop(0, (count + size - 1) // size, chunk, jnp.zeros_like(grouped))
    return out.transpose(0, 3, 1, 2, 4).reshape(B, N, H, D)


def _chunk(queries, keys, values, start, scale):
    """Queries [B, K, G, C, D] at positions start .. start + C over keys, values [B, K, N, D] up to themselves."""
    B, K, G, C, D = queries.shape
    N, size = keys.shape[2], min(KEYS, keys.shape[2])
    # A CPU multiplies float32 faster than 16 bits, and more exactly.
    work = jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else queries.dtype
    precision = lax.Precision.HIGHEST if work == jnp.float32 else None
    q = (queries.astype(jnp.float32) * scale).astype(work).reshape(B, K, G * C, D)
    position = start + jnp.tile(jnp.arange(C, dtype=jnp.int32), G)[:, None]

    def product(a, b, contract_b):
        dims = (((3,), (contract_b,)), ((0, 1), (0, 1)))
        return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)

    def block(index, state, masked):
        top, total, out = state
        begin = index * size
        first = jnp.minimum(begin, N - size)  # the last block is moved back to end at N, and what it repeats is masked
        k = lax.dynamic_slice_in_dim(keys, first, size, axis=2).astype(work)
        v = lax.dynamic_slice_in_dim(values, first, size, axis=2).astype(work)
        scores = product(q, k, 3)
        if masked:
            token = first + jnp.arange(size, dtype=jnp.int32)[None, :]
            scores = jnp.where(((token <= position) & (token >= begin))[None, None], scores, _MASKED)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        kept = jnp.exp(top - new_top)
        out = out * kept[..., None] + product(weights.astype(work), v, 2)
        return new_top, total * kept + weights.sum(axis=-1), out

    rows = (B, K, G * C)
    state = jnp.full(rows, _MASKED), jnp.zeros(rows, jnp.float32), jnp.zeros((*rows, D), jnp.float32)
    whole = start // size  # blocks that lie before every query of the chunk
    state = lax.fori_loop(0, whole, lambda index, state: block(index, state, masked=False), state)
    end = (start + C + size - 1) // size
    _, total, out = lax.fori_loop(whole, end, lambda index, state: block(index, state, masked=True), state)
    return (out / total[..., None]).astype(queries.dtype).reshape(B, K, G, C, D)
