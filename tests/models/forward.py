"""A plain dense run of a model over its own public functions, with the values at every rung: what the parity tests
compare. It keeps keys and values in padded arrays, so that decoding compiles once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import models


def attend(q, k, v, position):
    """Dense attention of q [B, N, H, D] at `position` [B, N] over k, v [B, S, K, D], float32."""
    B, N, H, D = q.shape
    K = k.shape[2]
    scores = jnp.einsum("bnkgd,bskd->bnkgs", q.reshape(B, N, K, H // K, D), k) * D**-0.5
    seen = jnp.arange(k.shape[1])[None, None, :] <= position[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen[:, :, None, None, :], scores, -1e30), axis=-1)
    return jnp.einsum("bnkgs,bskd->bnkgd", weights, v).reshape(B, N, H, D)


@functools.partial(jax.jit, static_argnums=0)
def step(config, params, tokens, position, caches):
    """Tokens [B, N] at `position` [B, N]; caches: per layer k, v [B, S, K, D]. Returns rungs and caches."""
    model, rungs = models.merge(config, params), {}
    x = model.embed(tokens)
    rope = model.rope(position, position[:, -1] + 1)
    rows = jnp.arange(tokens.shape[0])[:, None]
    kept = []
    for index, (keys, values) in enumerate(caches):
        layer = models.merge_layer(config, params["layers"][index])
        q, k, v = layer.qkv(x, rope)
        keys, values = keys.at[rows, position].set(k), values.at[rows, position].set(v)
        attended = attend(q, keys, values, position)
        x = layer.finish(x, attended)
        kept.append((keys, values))
        if index == 0:
            rungs |= {"q": q, "k": k, "v": v, "attended": attended, "query": layer.query(model.embed(tokens), rope)}
        rungs[f"layer{index}"] = x
    return {**rungs, "logits": model.logits(x)}, kept


def run(config, params, tokens: np.ndarray, new: int) -> dict[str, np.ndarray]:
    """All rungs of a prompt [B, N], and "tokens": `new` greedy ones after its first row."""
    B, N = tokens.shape
    shape = (B, N + new, config.num_kv_heads, config.head_dim)
    caches = [(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)) for _ in range(config.num_layers)]
    position = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), (B, N))
    rungs, caches = step(config, params, jnp.asarray(tokens), position, caches)
    token, made = jnp.argmax(rungs["logits"][:, -1:], axis=-1).astype(jnp.int32), []
    for index in range(new):
        made.append(int(token[0, 0]))
        position = jnp.full((B, 1), N + index, jnp.int32)
        later, caches = step(config, params, token, position, caches)
        token = jnp.argmax(later["logits"], axis=-1).astype(jnp.int32)
    return {**{key: np.asarray(value) for key, value in rungs.items()}, "tokens": np.asarray(made, np.int32)}
