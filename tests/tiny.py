"""Tiny random models and the shortest way to run one: shared by the tests above the ops."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import _host, models
from clo_jax.cache.layout import CacheLayout
from clo_jax.config import CloConfig, ModelConfig, RopeConfig
from clo_jax.policies.clo import CloPolicy, HeadScores, neutral_scores
from clo_jax.policies.full import FullPolicy
from clo_jax.prompts import Request
from clo_jax.session import Session
from clo_jax.transfer.choice import GPU_BACKENDS
from clo_jax.transfer.engine import Engine

# The CPU kernels take any head dim; the GPU's take those that models have.
HEAD_DIM = 16 if jax.default_backend() == "cpu" else 64
# Backends that serve programs where JAX runs; one that a GPU machine lacks is not tested there.
ON_GPU = jax.default_backend() == "gpu"
BACKENDS = tuple(name for name in GPU_BACKENDS if _host.find_backend(name)[0]) if ON_GPU else ("host",)
LLAMA = ModelConfig("llama", 256, 64, 96, 3, 6, 2, HEAD_DIM, 1e-5, 4096, RopeConfig(10000.0), tie_word_embeddings=True)
QWEN = dataclasses.replace(LLAMA, architecture="qwen2", num_heads=5, num_kv_heads=1, qkv_bias=True)


def params(config: ModelConfig, seed: int = 0, dtype=jnp.float32):
    """Distributed as `models.random_params`, but drawn by NumPy: JAX compiles seconds for a tiny model's."""
    r = np.random.default_rng(seed)

    def draw(path, leaf):
        kind = path[-1].key
        if kind == "scale":
            return jnp.ones(leaf.shape, dtype)
        std = 0.02 if kind == "bias" else leaf.shape[-1 if kind == "embedding" else 0] ** -0.5
        return jnp.asarray(r.normal(size=leaf.shape) * std, dtype)

    return jax.tree_util.tree_map_with_path(draw, models.abstract_params(config, dtype))


def prompt(length: int, seed: int = 0, vocab: int = 256) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, length)]


@contextlib.contextmanager
def clo_policy(
    config: ModelConfig, clo: CloConfig, batch: int, max_tokens: int, *, scores: HeadScores | None = None,
    dtype: str = "float32", **engine,
) -> Iterator[tuple[CloPolicy, Engine]]:  # fmt: skip
    """A CLO policy with an engine of its own."""
    layout = CacheLayout.clo(config, clo, batch, max_tokens, dtype)
    heads = [len(layout.offloaded(layer)) for layer in range(layout.num_layers)]
    with Engine(
        kv_heads=heads, batch=batch, max_tokens=max_tokens, num_slots=layout.num_slots, head_dim=layout.head_dim,
        dtype=jnp.dtype(dtype), kv_dtype=layout.kv_dtype, **engine,
    ) as transfers:  # fmt: skip
        yield CloPolicy(layout, clo, transfers.handle, scores or neutral_scores(layout)), transfers


def full_policy(config: ModelConfig, batch: int, max_tokens: int, dtype: str = "float32") -> FullPolicy:
    return FullPolicy(CacheLayout.full(config, batch, max_tokens, dtype))


def run(config, weights, policy, engine, prompts, max_new_tokens, stop=(), sampling=None, chunk=16) -> Session:
    """Runs prompts to their end and returns the session (tokens, metrics)."""
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    session = Session(
        config, weights, policy, policy.tables(), engine, Request(prompts, limits, list(stop), sampling), chunk
    )
    for _ in session:
        pass
    return session
