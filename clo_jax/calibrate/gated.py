"""A decoder layer whose heads can be faded from full attention to attention over sink and recent tokens, and its
gradient.

Only gates are trained, and only one layer's intermediate values exist at a time: a forward pass keeps each layer's
input, the backward pass computes the layer again. One compiled program serves every layer of a prompt length.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import models
from clo_jax.config import ModelConfig
from clo_jax.ops.causal_attention import implementation

# Scores of one chunk of queries exist at a time. A prompt makes at most this many chunks: they are unrolled, so that no
# chunk meets keys that come after it.
_MOST_CHUNKS = 16
_SMALLEST_CHUNK = 256
_MASKED = -1e30


class Window(NamedTuple):
    """What a head keeps when its gate is 0: the first `sink` tokens and the newest `recent` ones, the query's own
    included."""

    sink: int
    recent: int


def attention(query: jax.Array, key: jax.Array, value: jax.Array, window: Window | None = None) -> jax.Array:
    """Causal attention that can be differentiated, in chunks of queries whose scores are computed again for it.

    Args:
      query: [B, N, H, D]; key, value: [B, N, K, D].
      window: what each query sees; None: everything before it.

    Returns:
      [B, N, H, D] in the dtype of `query`; softmax in float32.
    """
    N, D = query.shape[1], query.shape[3]
    if window is None and implementation(query.dtype, D) == "cudnn":
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
    size = max(_SMALLEST_CHUNK, -(-N // _MOST_CHUNKS))
    parts = []
    for start in range(0, N, size):
        end = min(start + size, N)
        tokens = np.arange(end, dtype=np.int32)
        if window is not None:
            tokens = tokens[(tokens < window.sink) | (tokens > start - window.recent)]
        chunk = jax.checkpoint(functools.partial(_chunk, tokens, start, window))
        # Two slices rather than a gather: sink, and the span that the chunk's windows cover.
        split = 0 if window is None else int(np.searchsorted(tokens, min(window.sink, end)))
        first = int(tokens[split]) if split < len(tokens) else end
        k, v = (jnp.concatenate([x[:, :split], x[:, first:end]], axis=1) for x in (key, value))
        parts.append(chunk(query[:, start:end], k, v))
    return jnp.concatenate(parts, axis=1)


def _chunk(tokens: np.ndarray, start: int, window: Window | None, query: jax.Array, key: jax.Array, value: jax.Array):
    """Queries at positions from `start` on over the keys of `tokens`."""
    B, C, H, D = query.shape
    K = key.shape[2]
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    position = np.arange(start, start + C, dtype=np.int32)[:, None]
    seen = tokens[None, :] <= position
    if window is not None:
        seen &= (tokens < window.sink)[None, :] | (tokens[None, :] > position - window.recent)
    scores = jnp.einsum(
        "bnkgd,bmkd->bkgnm", query.reshape(B, C, K, H // K, D), key,
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip
    weights = jax.nn.softmax(jnp.where(seen[None, None, None], scores * jnp.float32(D**-0.5), _MASKED), axis=-1)
    out = jnp.einsum(
        "bkgnm,bmkd->bnkgd", weights.astype(value.dtype), value, precision=precision, preferred_element_type=jnp.float32
    )
    return out.reshape(B, C, H, D).astype(query.dtype)


def layer(
    config: ModelConfig, window: Window, params, gate: jax.Array | None, x: jax.Array, lengths: jax.Array
) -> jax.Array:
    """One layer over whole prompts: its heads attend to gate · full + (1 - gate) · window.

    Args:
      config: the architecture (static). window: (static).
      params: this layer's parameters.
      gate: float32 [K] or [H]; None: full attention alone.
      x: [B, N, hidden], padded at the right. lengths: [B] int32 (read by RoPE type dynamic alone).

    Returns:
      x after the layer.
    """
    module = models.merge_layer(config, params)
    B, N, _ = x.shape
    positions = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), (B, N))
    q, k, v = module.qkv(x, models.rotation(config, positions, lengths))
    attended = attention(q, k, v)
    if gate is not None:
        share = jnp.repeat(gate, config.num_heads // gate.shape[0])[None, None, :, None]
        mixed = share * attended.astype(jnp.float32)
        mixed = mixed + (1 - share) * attention(q, k, v, window).astype(jnp.float32)
        attended = mixed.astype(attended.dtype)
    return module.finish(x, attended)


def layer_gradient(
    config: ModelConfig, window: Window, params, gate: jax.Array, x: jax.Array, lengths: jax.Array, grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the gate and of x, from that of the layer's output; the layer is computed again."""
    _, back = jax.vjp(lambda gate, x: layer(config, window, params, gate, x, lengths), gate, x)
    return back(grad)


def embed(config: ModelConfig, params, tokens: jax.Array) -> jax.Array:
    """Token embeddings: [B, N] int32 -> [B, N, hidden]."""
    return models.merge(config, params).embed(tokens)


def answers(config: ModelConfig, params, x: jax.Array, where: jax.Array) -> jax.Array:
    """Hidden states after the final norm of x [1, N, hidden] at tokens `where` [A]: float32 [A, hidden]."""
    picked = jnp.take(x[0], where, axis=0, mode="clip")
    return models.merge(config, params).final_norm(picked).astype(jnp.float32)


def distance(
    config: ModelConfig, params, x: jax.Array, where: jax.Array, weight: jax.Array, wanted: jax.Array
) -> jax.Array:
    """Squared distance of the answers' hidden states from the wanted ones [A, hidden], as a share of the wanted ones'
    square: comparable between models, whatever their scale. weight [A] is 0 for padding."""
    weight = weight[:, None]
    off = (answers(config, params, x, where) - wanted) * weight
    return jnp.sum(off * off) / jnp.sum(wanted * wanted * weight)


embed_jitted = jax.jit(embed, static_argnums=0)
layer_jitted = jax.jit(layer, static_argnums=(0, 1))
layer_gradient_jitted = jax.jit(layer_gradient, static_argnums=(0, 1), donate_argnums=6)
answers_jitted = jax.jit(answers, static_argnums=0)
distance_jitted = jax.jit(jax.value_and_grad(distance, argnums=2), static_argnums=0)
