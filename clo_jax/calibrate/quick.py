"""A quick estimate of head importance, without training: how much attention a head pays, where answers are looked up,
to tokens that are neither at the start nor recent. One forward pass a prompt.

It says where a head looks, not whether the model needs what it finds there: gates do (`importance`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import models
from clo_jax.cache.calibration_parts import Importance
from clo_jax.calibrate import gated
from clo_jax.calibrate.importance import answer_tokens, padded
from clo_jax.calibrate.passkeys import Example
from clo_jax.config import ModelConfig

SOURCE = "quick estimate"


def distant_mass(
    config: ModelConfig, params: Any, examples: Sequence[Example], window: gated.Window,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> np.ndarray:  # fmt: skip
    """Mean share of attention that each query head pays, at the tokens that predict answers, outside of `window`.

    Args:
      progress: called with the prompts done and their number.

    Returns:
      float64 [L, H], in [0, 1].
    """
    total = np.zeros((config.num_layers, config.num_heads))
    for done, example in enumerate(examples):
        x, lengths = padded(config, params, example)
        where, weight = answer_tokens(example)
        for index in range(config.num_layers):
            mass, x = _mass_and_layer(config, window, params["layers"][index], x, lengths, where)
            total[index] += np.asarray(mass, np.float64) @ np.asarray(weight / weight.sum(), np.float64)
        progress(done + 1, len(examples))
    return total / len(examples)


def quick_estimate(
    config: ModelConfig, params: Any, examples: Sequence[Example], window: gated.Window,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Importance:  # fmt: skip
    """`distant_mass`, divided by that of the head with the most: importance [L, H]."""
    mass = distant_mass(config, params, examples, window, progress)
    top = mass.max()
    return Importance((mass / top if top > 0 else mass).astype(np.float32), SOURCE)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _mass_and_layer(config, window, params, x, lengths, where):
    """Distant mass of the queries at tokens `where` [A]: float32 [H, A]; x after the layer."""
    module = models.merge_layer(config, params)
    B, N, _ = x.shape
    positions = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), (B, N))
    q, k, _ = module.qkv(x, models.rotation(config, positions, lengths))
    A, D = where.shape[0], config.head_dim
    query = q[0][where].reshape(A, config.num_kv_heads, config.group, D).astype(jnp.float32)
    scores = jnp.einsum("akgd,nkd->kgan", query, k[0].astype(jnp.float32), precision="highest")
    token, position = jnp.arange(N, dtype=jnp.int32)[None, :], where[:, None]
    weights = jax.nn.softmax(
        jnp.where((token <= position)[None, None], scores * jnp.float32(D**-0.5), -jnp.inf), axis=-1
    )
    distant = (token >= window.sink) & (token <= position - window.recent)
    mass = jnp.sum(jnp.where(distant[None, None], weights, 0.0), axis=-1)
    return mass.reshape(config.num_heads, A), gated.layer(config, window, params, None, x, lengths)
