"""What a decode bench runs in place of a session: its cache may be filled with random rows instead of by a prefill; and
the control that attends to nothing."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from clo_jax.bench.subject import RANDOM
from clo_jax.cache.layout import CacheLayout
from clo_jax.generate import JITTED
from clo_jax.policies.base import LayerState, Position, Prefilled, Shared, Tables, Unprepared
from clo_jax.session import Session


class BenchSession(Session):
    """A session that may begin with random rows, as many as the longest prompt has tokens, instead of with a prefill:
    absorbed by the policy like a prompt's, so that everything it keeps is there. `fill`: "synthetic" or "prefill"."""

    def __init__(self, fill: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fill = fill

    def set_tables(self, tables: tuple[Tables, ...]) -> None:
        """Other tables of the same shapes, from the next chunk on."""
        self._tables = tables

    def _prefill(
        self, raise_pending: Callable[[], None]
    ) -> tuple[tuple[LayerState, ...], Shared, jax.Array, jax.Array]:
        if self._fill == "prefill":
            return super()._prefill(raise_pending)
        batch, length = len(self._request.prompts), max(len(prompt) for prompt in self._request.prompts)
        model, policy, key = self._model, self._policy, jax.random.key(0, impl=RANDOM)
        shape = (batch, model.num_heads, model.num_kv_heads, length, model.head_dim)
        layers, shared = [], policy.allocate()
        for index in range(model.num_layers):
            prompt = random_prompt(
                shape, policy.sampled_queries, jnp.dtype(self._layout.dtype), jax.random.fold_in(key, index)
            )
            which = jnp.full((1,), index, jnp.int32)
            state, shared = JITTED.absorb(
                policy, policy.layer_kind(index), self._tables[index], prompt, which, shared
            )  # fmt: skip
            layers.append(state)
            jax.block_until_ready((state, shared))  # so that only one layer's rows exist at a time
            raise_pending()
        logits = jax.random.normal(jax.random.fold_in(key, model.num_layers), (batch, model.vocab_size), jnp.float32)
        return tuple(layers), shared, logits, jnp.full((batch,), length, jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def random_prompt(shape: tuple[int, int, int, int, int], samples: int, dtype: jnp.dtype, key: jax.Array) -> Prefilled:
    """A layer's prompts of random rows; shape: B, H, K, N, D."""
    B, H, K, N, D = shape
    keys = jax.random.split(key, 3)
    queries = jax.random.normal(keys[1], (B, samples, H, D), dtype) if samples else None
    return Prefilled(
        jax.random.normal(keys[0], (B, K, N, 2, D), dtype), jax.random.normal(keys[2], (B, H, D), dtype),
        jnp.full((B,), N, jnp.int32), queries,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class WeightsOnlyPolicy(Unprepared):
    """Keeps nothing and attends to nothing but the token itself: what is left of a step are its matrix products."""

    layout: CacheLayout
    name = "weights only"

    def layer_kind(self, layer: int) -> str:
        return "nothing"

    def absorb(
        self, kind: str, tables: Tables, prompt: Prefilled, layer: jax.Array, shared: Shared
    ) -> tuple[LayerState, Shared]:
        return {}, shared

    def attend(
        self, layer: int, tables: Tables, q: jax.Array, k: jax.Array, v: jax.Array, at: Position, state: LayerState,
        shared: Shared,
    ) -> tuple[jax.Array, LayerState, Shared]:  # fmt: skip
        # All three take part, so that no projection is left out as useless.
        return q + jnp.repeat(k + v, self.layout.group, axis=1), state, shared
