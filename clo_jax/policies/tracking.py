"""What a run says of its own heads: how alike their guesses are from step to step, and how often they hit.

Kept in the state of each layer beside everything else, for all KV heads, resident ones too: a head that is resident may
have become easy.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.policies.base import LayerState


class HeadStatistics(NamedTuple):
    """Of one request so far, sums over its sequences. Layers that nothing is tracked of have 0 steps.

    `similarity` float64 [L, K]: mean cosine of the guesses of adjacent steps, weighted over the group as in Eq. 10;
    `steps` int64 [L]: cosines in it. `hits`, `lookups` int64 [L, K]: of offloaded heads.
    """

    similarity: np.ndarray
    steps: np.ndarray
    hits: np.ndarray
    lookups: np.ndarray


def begin(query: jax.Array, num_kv_heads: int) -> LayerState:
    """The tracked part of a layer's state after prefill; query [B, H, D]: of the last prompt token."""
    B, K = query.shape[0], num_kv_heads
    return {
        "guess": query,
        "cosines": jnp.zeros((B, K), jnp.float32),
        "steps": jnp.zeros((B,), jnp.int32),
        "hits": jnp.zeros((B, K), jnp.int32),
        "lookups": jnp.zeros((B, K), jnp.int32),
    }


def observe_guess(state: LayerState, query: jax.Array, importance: jax.Array, active: jax.Array) -> LayerState:
    """Adds the cosine of this step's guess and the last one.

    query [B, H, D]; importance [H]: weights over each group, equal ones where all are 0; active [B] bool.
    """
    B, K = state["cosines"].shape
    now, before = (x.astype(jnp.float32) for x in (query, state["guess"]))
    norms = jnp.linalg.norm(now, axis=-1) * jnp.linalg.norm(before, axis=-1)
    cosine = (jnp.sum(now * before, axis=-1) / jnp.maximum(norms, 1e-30)).reshape(B, K, -1)
    weight = importance.reshape(1, K, -1)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    weight = jnp.where(total > 0, weight, 1.0)
    mean = jnp.sum(weight * cosine, axis=-1) / jnp.sum(weight, axis=-1)
    return state | {
        "guess": query,
        "cosines": state["cosines"] + jnp.where(active[:, None], mean, 0.0),
        "steps": state["steps"] + active.astype(jnp.int32),
    }


def observe_hits(state: LayerState, heads: np.ndarray, hit: jax.Array, active: jax.Array) -> LayerState:
    """Adds what the lookup of the offloaded heads [Ko] found: hit [B, Ko] bool."""
    seen = jnp.broadcast_to(active[:, None], hit.shape)
    return state | {
        "hits": state["hits"].at[:, heads].add((hit & seen).astype(jnp.int32)),
        "lookups": state["lookups"].at[:, heads].add(seen.astype(jnp.int32)),
    }


def collect(layers: tuple[LayerState, ...], num_kv_heads: int) -> HeadStatistics:
    """Statistics of all layers, read from the device."""
    L, K = len(layers), num_kv_heads
    found = HeadStatistics(
        np.zeros((L, K)), np.zeros(L, np.int64), np.zeros((L, K), np.int64), np.zeros((L, K), np.int64)
    )
    for layer, state in enumerate(layers):
        if "cosines" not in state:
            continue
        found.steps[layer] = np.asarray(state["steps"], np.int64).sum()
        found.similarity[layer] = np.asarray(state["cosines"], np.float64).sum(axis=0) / max(found.steps[layer], 1)
        found.hits[layer] = np.asarray(state["hits"], np.int64).sum(axis=0)
        found.lookups[layer] = np.asarray(state["lookups"], np.int64).sum(axis=0)
    return found
