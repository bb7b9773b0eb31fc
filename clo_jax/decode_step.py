"""One decode step through all layers, the heart of the method: each layer's rows are asked for while the layer before
it computes."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from clo_jax import models
from clo_jax.config import GuessFrom, ModelConfig
from clo_jax.models.layers import Decoder, DecoderLayer, RMSNorm, add_and_norm
from clo_jax.policies.base import LATER, LayerState, Policy, Position, Shared, Tables


class DecodeState(NamedTuple):
    """Everything that a decode step changes; donated from chunk to chunk."""

    layers: tuple[LayerState, ...]
    shared: Shared
    position: jax.Array  # [B] int32: index of `token`, which is not in the cache yet
    token: jax.Array  # [B] int32: last generated token
    count: jax.Array  # [B] int32: tokens generated so far
    done: jax.Array  # [B] bool


def norms_of_stream(
    model: Decoder, guess_from: GuessFrom | None, ahead: Sequence[DecoderLayer]
) -> tuple[list[list[RMSNorm]], list[list[RMSNorm]]]:
    """Which norms of the residual stream a decode step wants: of each layer's input (after the last layer's, the
    head's), and of the stream between its attention and its MLP. Where queries are guessed from, the second one is that
    of the layer in `ahead` that the layer guesses for."""
    inputs = [[layer.input_norm] for layer in model.layers] + [[model.final_norm]]
    middles = [[layer.post_norm] for layer in model.layers]
    if guess_from is not None:
        for norms, target in zip(inputs if guess_from == "input" else middles, ahead, strict=False):
            norms.append(target.input_norm)
    return inputs, middles


def decode_step(
    config: ModelConfig, policy: Policy, params, tables: tuple[Tables, ...], state: DecodeState
) -> tuple[jax.Array, DecodeState]:
    """All layers of one token (design, section 2). Returns logits [B, V] float32 and the state with the token cached.

    The layers are unrolled over separate arrays: stacking them, or looping over them, would copy the caches.
    """
    model = models.merge(config, params)
    at = Position(state.position, ~state.done)
    rope = models.rotation(config, state.position[:, None], state.position + 1)
    inputs, middles = norms_of_stream(model, policy.guess_from, model.layers[1:])
    layers, shared = list(state.layers), state.shared

    def prefetch(target: int, normed: jax.Array, guessed_from: jax.Array | None = None) -> jax.Array:
        """For layer `target`, if there is its own norm of the stream to guess from. Returns `normed`, what the layer at
        hand goes on with: what is computed from that comes later."""
        nonlocal shared
        if guessed_from is None:
            return normed
        guess = model.layers[target].query_of(guessed_from, rope)[:, 0]
        handed = {**shared, LATER: normed}
        layers[target], handed = policy.prefetch(target, tables[target], guess, at, layers[target], handed)
        shared = {name: array for name, array in handed.items() if name != LATER}
        return handed[LATER]

    x = model.embed(state.token[:, None])
    normed, *ahead = (norm(x) for norm in inputs[0])
    # The first layer has no predecessor to guess from; if any of its heads is offloaded it waits for its own fetch.
    normed = prefetch(0, normed, normed)
    for index, layer in enumerate(model.layers):
        # At most one of the layer's two prefetches has a stream to guess from: `policy.guess_from` says which.
        normed = prefetch(index + 1, normed, *ahead)
        q, k, v = (part[:, 0] for part in layer.qkv_of(normed, rope))
        attended, layers[index], shared = policy.attend(index, tables[index], q, k, v, at, layers[index], shared)
        x, normed, *ahead = add_and_norm(x, layer.project(attended[:, None]), middles[index])
        normed = prefetch(index + 1, normed, *ahead)
        x, normed, *ahead = add_and_norm(x, layer.mlp(normed), inputs[index + 1])
    logits = model.logits_of(normed)[:, 0]
    position = jnp.where(state.done, state.position, state.position + 1)
    return logits, state._replace(layers=tuple(layers), shared=shared, position=position)
