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

# Full attention: scores of one chunk of queries exist at a time. A prompt makes at most this many chunks: they are
# unrolled, so that no chunk meets keys that come after it.
_MOST_CHUNKS = 16
_SMALLEST_CHUNK = 256
# Attention over a window: queries in blocks of this size meet their own block and the ones before it that their windows
# reach, all blocks of a segment in one product: a GPU has few kernels to start.
_BLOCK = 256
_SEGMENT = 8192
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
    if window is not None:
        return _windowed(query, key, value, window)
    N, D = query.shape[1], query.shape[3]
    if implementation(query.dtype, D) == "cudnn":
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
    size = max(_SMALLEST_CHUNK, -(-N // _MOST_CHUNKS))
    parts = []
    for start in range(0, N, size):
        end = min(start + size, N)
        chunk = jax.checkpoint(functools.partial(_chunk, start))
        parts.append(chunk(query[:, start:end], key[:, :end], value[:, :end]))
    return jnp.concatenate(parts, axis=1)


def _chunk(start: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Queries at positions from `start` on over all the keys."""
    B, C, H, D = query.shape
    K, N = key.shape[2], key.shape[1]
    seen = np.arange(N)[None, :] <= np.arange(start, start + C)[:, None]
    grouped = query.reshape(B, C, K, H // K, D)
    weights = _softmax(_product("bnkgd,bmkd->bkgnm", grouped, key), seen[None, None, None], D)
    return _product("bkgnm,bmkd->bnkgd", weights.astype(value.dtype), value).reshape(B, C, H, D).astype(query.dtype)


def _windowed(query: jax.Array, key: jax.Array, value: jax.Array, window: Window) -> jax.Array:
    """`attention` over a window, at a cost that grows with the window rather than with the prompt."""
    N = query.shape[1]
    behind, end = -(-N // _BLOCK) * _BLOCK - N, -(-N // _BLOCK) * _BLOCK
    before = -(-(window.recent - 1) // _BLOCK) * _BLOCK

    def padded(x, before):
        return jnp.pad(x, ((0, 0), (before, behind), (0, 0), (0, 0)))

    sink = tuple(x[:, : window.sink] for x in (key, value))
    query, key, value = padded(query, 0), padded(key, before), padded(value, before)
    parts = []
    for start in range(0, end, _SEGMENT):
        stop = min(start + _SEGMENT, end)
        segment = jax.checkpoint(functools.partial(_segment, window, start))
        parts.append(segment(query[:, start:stop], *(x[:, start : stop + before] for x in (key, value)), *sink))
    return jnp.concatenate(parts, axis=1)[:, :N]


def _segment(
    window: Window, start: int, query: jax.Array, key: jax.Array, value: jax.Array, sink_key: jax.Array,
    sink_value: jax.Array,
) -> jax.Array:  # fmt: skip
    """Queries at positions from `start` on over the sink and over keys whose last one is that of the last query."""
    B, n, H, D = query.shape
    K, blocks, reach = key.shape[2], n // _BLOCK, key.shape[1] - n

    def band(x):
        """[B, tokens, K, D] -> [B, blocks, tokens that a block's windows reach, K, D]."""
        x = x.reshape(B, -1, _BLOCK, K, D)
        return jnp.concatenate([x[:, i : i + blocks] for i in range(reach // _BLOCK + 1)], axis=2)

    position = start + jnp.arange(n, dtype=jnp.int32).reshape(blocks, _BLOCK, 1)
    token = position[:, :1] - reach + jnp.arange(reach + _BLOCK, dtype=jnp.int32)[None, None]
    recent = (token >= window.sink) & (token <= position) & (token > position - window.recent)
    sink = jnp.arange(sink_key.shape[1], dtype=jnp.int32)[None, None] <= position
    seen = jnp.concatenate([sink, recent], axis=2)[None, :, None, None]
    grouped = query.reshape(B, blocks, _BLOCK, K, H // K, D)
    products = (
        _product("bcnkgd,bmkd->bckgnm", grouped, sink_key), _product("bcnkgd,bcmkd->bckgnm", grouped, band(key))
    )  # fmt: skip
    weights = _softmax(jnp.concatenate(products, axis=-1), seen, D).astype(value.dtype)
    of_sink, of_band = jnp.split(weights, [sink_key.shape[1]], axis=-1)
    out = _product("bckgnm,bmkd->bcnkgd", of_sink, sink_value) + _product("bckgnm,bcmkd->bcnkgd", of_band, band(value))
    return out.reshape(B, n, H, D).astype(query.dtype)


def _product(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product in float32, of whole float32 numbers on a GPU too."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(form, a, b, precision=precision, preferred_element_type=jnp.float32)


def _softmax(products: jax.Array, seen: jax.Array | np.ndarray, head_dim: int) -> jax.Array:
    return jax.nn.softmax(jnp.where(seen, products * jnp.float32(head_dim**-0.5), _MASKED), axis=-1)


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
