"""Rows that stay on the device: the sink, then a ring of the newest tokens (laid out as CLO's tail)."""

import jax
import jax.numpy as jnp


def ring_place(token: jax.Array, sink: int, kept: int) -> jax.Array:
    """Where a token is among the `kept` rows."""
    return jnp.where(token < sink, token, sink + (token - sink) % (kept - sink))


def held_tokens(newest: jax.Array, sink: int, kept: int) -> jax.Array:
    """The token of each kept row when `newest` [B] is the newest: [B, kept] int32, -1: none yet."""
    row, newest = jnp.arange(kept, dtype=jnp.int32)[None], newest[:, None]
    token = jnp.where(row < sink, row, newest - (newest - row) % (kept - sink))
    return jnp.where((token <= newest) & ((row < sink) | (token >= sink)), token, -1)
