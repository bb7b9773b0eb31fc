"""Full attention that leaves behind what it attended to: what selections are measured against."""

import dataclasses

import jax
import jax.numpy as jnp

from clo_jax.policies import dense
from clo_jax.policies.base import LayerState, Position, Prefilled, Shared, Tables
from clo_jax.policies.full import FullPolicy


@dataclasses.dataclass(frozen=True)
class ObservedFullPolicy(FullPolicy):
    """As `FullPolicy`. State of a layer beside its rows: `mass` [B, K, S] float32: the softmax of the last step's
    queries over the cached tokens, mean over the query heads of the group; it sums to 1. Beyond the tokens cached it
    is negative."""

    def absorb(
        self, kind: str, tables: Tables, prompt: Prefilled, layer: jax.Array, shared: Shared
    ) -> tuple[LayerState, Shared]:
        state, shared = super().absorb(kind, tables, prompt, layer, shared)
        return state | {"mass": jnp.zeros(state["resident"].shape[:3], jnp.float32)}, shared

    def attend(
        self, layer: int, tables: Tables, q: jax.Array, k: jax.Array, v: jax.Array, at: Position, state: LayerState,
        shared: Shared,
    ) -> tuple[jax.Array, LayerState, Shared]:  # fmt: skip
        out, state, shared = super().attend(layer, tables, q, k, v, at, state, shared)
        cached = jnp.arange(self.layout.max_tokens, dtype=jnp.int32)[None, None] <= at.position[:, None, None]
        query = dense.grouped(q, self.layout.num_kv_heads)
        score = dense.masked(dense.scores(query, state["resident"][:, :, :, 0], self.layout.head_dim**-0.5), cached)
        return out, state | {"mass": dense.group_mass(score) / self.layout.group}, shared
