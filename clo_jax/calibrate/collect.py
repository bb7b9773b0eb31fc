"""The model's own queries and keys, layer by layer: what hash functions are trained on and similarity is measured on.

Whole prompts run through one layer after the other, so that only one layer's queries and keys exist at a time.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import generate as gen
from clo_jax import models
from clo_jax.config import GuessFrom, ModelConfig


class LayerSamples(NamedTuple):
    """One layer, one prompt. M sampled positions, N the prompt's bucket.

    `queries` and `guesses` float32 [M, H, D], after RoPE: exact ones, and those that would have been guessed in the
    layer before (those of layer 0 are its exact ones). `keys` float32 [K, N, D], after RoPE; those from `length` on are
    padding. `positions` int32 [M]: a query at position p sees keys [0, p].
    """

    queries: jax.Array
    guesses: jax.Array
    keys: jax.Array
    positions: jax.Array
    length: int


@functools.partial(jax.jit, static_argnums=0)
def queries_at(config: ModelConfig, params, x: jax.Array, positions: jax.Array, length: jax.Array) -> jax.Array:
    """Queries float32 [M, H, D] that a layer makes of residual streams x [M, hidden] at positions [M] of a prompt of
    `length` [1] tokens."""
    layer = models.merge_layer(config, params)
    rope = models.rotation(config, positions[None], length)
    return layer.query(x[None], rope)[0].astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def after_attention(
    config: ModelConfig, params, x: jax.Array, queries: jax.Array, rows: jax.Array, positions: jax.Array
) -> jax.Array:
    """Residual streams [M, hidden] between a layer's attention and its MLP, from those before it, x, and the queries
    float32 [M, H, D] that they make; rows [K, N, 2, D] of the prompt."""
    K, N, _, D = rows.shape
    keys, values = rows[:, :, 0].astype(jnp.float32), rows[:, :, 1].astype(jnp.float32)
    grouped = queries.reshape(len(queries), K, -1, D)
    logits = jnp.einsum("mkgd,knd->mkgn", grouped, keys, precision="highest") * jnp.float32(D**-0.5)
    seen = jnp.arange(N, dtype=jnp.int32)[None] <= positions[:, None]
    p = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -jnp.inf), axis=-1)
    attended = jnp.einsum("mkgn,knd->mkgd", p, values, precision="highest").reshape(1, *queries.shape)
    return models.merge_layer(config, params).add_attention(x[None], attended.astype(x.dtype))[0]


def layers(
    config: ModelConfig, params, prompts: Sequence[Sequence[int]], positions: Sequence[Sequence[int]],
    guess_from: GuessFrom = "input",
) -> Iterator[list[LayerSamples]]:  # fmt: skip
    """Yields each layer's samples, one entry per prompt.

    Args:
      config, params: the model.
      prompts: token ids. Prompts whose lengths share a bucket (a power of two) share their compiled programs.
      positions: for each prompt the positions whose queries are wanted, ascending.
      guess_from: what of the layer before queries are guessed from.

    Raises:
      ValueError: an empty prompt, or positions outside of it.
    """
    for prompt, wanted in zip(prompts, positions, strict=True):
        if not len(prompt) or not len(wanted) or not 0 <= min(wanted) <= max(wanted) < len(prompt):
            raise ValueError(f"positions: got {list(wanted)[:4]}... for {len(prompt)} tokens, wanted some inside")
    at = [jnp.asarray(wanted, jnp.int32) for wanted in positions]
    lengths = [jnp.array([len(prompt)], jnp.int32) for prompt in prompts]
    streams = []
    for prompt in prompts:
        tokens = np.zeros((1, gen.bucket_length(len(prompt), config.max_position_embeddings)), np.int32)
        tokens[0, : len(prompt)] = prompt
        streams.append(gen.JITTED.embed(config, params, jnp.asarray(tokens)))
    before = [x[0, where] for x, where in zip(streams, at, strict=True)]
    for index in range(config.num_layers):
        layer_params, samples = params["layers"][index], []
        for number, (x, where, length) in enumerate(zip(streams, at, lengths, strict=True)):
            here = x[0, where]
            queries = queries_at(config, layer_params, here, where, length)
            guesses = queries_at(config, layer_params, before[number], where, length)
            streams[number], prompt, _ = gen.JITTED.prefill_layer(config, layer_params, x, length)
            before[number] = here
            if guess_from == "attention":
                before[number] = after_attention(config, layer_params, here, queries, prompt.rows[0], where)
            keys = prompt.rows[0, :, :, 0].astype(jnp.float32)
            samples.append(LayerSamples(queries, guesses, keys, where, len(prompts[number])))
        yield samples
