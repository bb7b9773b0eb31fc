"""Choosing the next token: greedy, or temperature, top-k and top-p with one seed per row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sampling(NamedTuple):
    """Arrays, so that changing a value compiles nothing. All of shape [B]."""

    temperature: jax.Array  # float32 > 0
    top_k: jax.Array  # int32; 0: off
    top_p: jax.Array  # float32 in (0, 1]; 1: off
    seed: jax.Array  # uint32


def greedy(logits: jax.Array) -> jax.Array:
    """The most likely token, lowest id first on ties. logits [B, V] float32 -> [B] int32."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(logits: jax.Array, sampling: Sampling, count: jax.Array) -> jax.Array:
    """Draws one token a row. A row's draw depends on its own logits, seed and count alone, never on its batch.

    Args:
      logits: [B, V] float32.
      sampling: see `Sampling`. top-k is applied before top-p, both after the temperature, as in Hugging Face.
      count: [B] int32; tokens that the row has generated so far.

    Returns:
      [B] int32.
    """
    scaled = logits / sampling.temperature[:, None]
    order = jnp.argsort(scaled, axis=-1, descending=True, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jax.lax.broadcasted_iota(jnp.int32, ranked.shape, 1)
    keep = (sampling.top_k[:, None] <= 0) | (rank < sampling.top_k[:, None])
    probabilities = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities  # mass of the more likely tokens
    keep &= before < sampling.top_p[:, None]  # the first token always stays: nothing lies before it
    ranked = jnp.where(keep, ranked, -jnp.inf)

    def draw(row, seed, n):
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), n), row)

    choice = jax.vmap(draw)(ranked, sampling.seed, count)
    return jnp.take_along_axis(order, choice[:, None], axis=-1)[:, 0].astype(jnp.int32)
