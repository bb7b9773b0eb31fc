"""Attention in plain JAX for the policies that CLO is compared with: scores, selection, and one softmax over parts.

Query heads of a KV head stay together: queries are [B, K, G, D], scores [B, K, G, N], all sums in float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Part(NamedTuple):
    """Some of what a step attends to. An entry is one token, or a group of tokens under one score."""

    scores: jax.Array  # [B, K, G, N] float32, scaled; -inf: not attended
    values: jax.Array  # [B, K, N, D]: of a group, the sum of its tokens' values
    counts: jax.Array | None = None  # [B, K, N] float32: tokens of each entry; None: one each


def grouped(query: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, H, D] -> [B, K, G, D]."""
    B, _, D = query.shape
    return query.reshape(B, num_kv_heads, -1, D)


def scores(query: jax.Array, keys: jax.Array, scale: float) -> jax.Array:
    """scale · q·k: query [B, K, G, D], keys [B, K, N, D] -> float32 [B, K, G, N]."""
    exact = jax.lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    found = jnp.einsum(
        "bkgd,bknd->bkgn", query.astype(keys.dtype), keys, precision=exact, preferred_element_type=jnp.float32
    )
    return found * jnp.float32(scale)


def masked(score: jax.Array, valid: jax.Array) -> jax.Array:
    """`score` [B, K, G, N], -inf where `valid` [B, 1 or K, N] is false."""
    return jnp.where(valid[:, :, None], score, -jnp.inf)


def group_mass(score: jax.Array) -> jax.Array:
    """What a group attends to: softmax over the entries, summed over the group; [B, K, G, N] -> [B, K, N]. Entries of
    score -inf have mass -1, so that they come after all others."""
    return jnp.where(score[:, :, 0] > -jnp.inf, jax.nn.softmax(score, axis=-1).sum(axis=2), -1.0)


def heaviest(mass: jax.Array, count: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """The entries with the most mass, in descending order, ties to the lowest index.

    mass [B, K, N]; count [B] int32; most: static bound of it, at most N.
    Returns indices [B, K, most] int32 and which of them are chosen [B, K, most] bool.
    """
    best, index = jax.lax.top_k(mass, most)
    chosen = (jnp.arange(most, dtype=jnp.int32)[None, None] < count[:, None, None]) & (best >= 0)
    return index, chosen


def row_part(query: jax.Array, rows: jax.Array, valid: jax.Array) -> Part:
    """Tokens as they are: query [B, K, G, D], rows [B, K, N, 2, D], valid [B or 1, K or 1, N]."""
    score = scores(query, rows[:, :, :, 0], query.shape[-1] ** -0.5)
    return Part(masked(score, valid), rows[:, :, :, 1])


def attend(parts: list[Part], dtype) -> jax.Array:
    """One softmax over all parts -> [B, H, D] in `dtype`. At least one entry of each head has a finite score."""
    top = jnp.max(jnp.stack([part.scores.max(axis=-1) for part in parts]), axis=0)[..., None]
    total, out = jnp.float32(0), jnp.float32(0)
    for part in parts:
        p = jnp.exp(part.scores - top)
        weighted = p if part.counts is None else p * part.counts[:, :, None]
        total = total + weighted.sum(axis=-1, keepdims=True)
        out = out + jnp.einsum("bkgn,bknd->bkgd", p, part.values.astype(jnp.float32), precision="highest")
    out = out / total
    B, _, _, D = out.shape
    return out.reshape(B, -1, D).astype(dtype)


def num_selected(sparsity: float, length: jax.Array, most: int) -> jax.Array:
    """k = ceil(sparsity · length), at most `most` and at most `length`: [B] int32 -> [B] int32."""
    k = jnp.ceil(jnp.float32(sparsity) * length.astype(jnp.float32)).astype(jnp.int32)
    return jnp.minimum(jnp.minimum(k, most), length)
