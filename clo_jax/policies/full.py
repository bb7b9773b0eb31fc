"""Full attention: every KV head resident. The control that every other policy is compared with."""

import dataclasses

import jax
import jax.numpy as jnp

from clo_jax.cache.layout import CacheLayout
from clo_jax.ops.attend import attend
from clo_jax.policies.base import LayerState, Position, Prefilled, Shared, Tables, Unprepared


@dataclasses.dataclass(frozen=True)
class FullPolicy(Unprepared):
    """All rows on the device, read by every head at every step."""

    layout: CacheLayout
    name = "full"

    def layer_kind(self, layer: int) -> str:
        return "resident"

    def absorb(
        self, kind: str, tables: Tables, prompt: Prefilled, layer: jax.Array, shared: Shared
    ) -> tuple[LayerState, Shared]:
        return {"resident": pad_tokens(prompt.rows, self.layout.max_tokens)}, shared

    def attend(
        self, layer: int, tables: Tables, q: jax.Array, k: jax.Array, v: jax.Array, at: Position, state: LayerState,
        shared: Shared,
    ) -> tuple[jax.Array, LayerState, Shared]:  # fmt: skip
        B, D, dtype = self.layout.batch, self.layout.head_dim, q.dtype
        out, _, resident, _, _, _, token = attend(
            q, k, v,
            jnp.zeros((0, D, 0), jnp.float32), jnp.zeros((B, 0, D), jnp.float32),
            at.position, at.position,
            state["resident"], jnp.zeros((B, 0, self.layout.tail_rows, 2, D), dtype),
            jnp.zeros((B, 0, self.layout.max_tokens, 0), jnp.uint32),
            jnp.zeros((B, 0, self.layout.max_tokens), jnp.float16),
            jnp.full((1,), layer, jnp.int32), shared["token"],
            engine=0, sink=self.layout.sink, scale=D**-0.5,
        )  # fmt: skip
        return out, {"resident": resident}, shared | {"token": token}


def pad_tokens(rows: jax.Array, max_tokens: int) -> jax.Array:
    """Extends the token axis of [B, heads, N, ...] to `max_tokens` with zeros."""
    widths = [(0, 0), (0, 0), (0, max_tokens - rows.shape[2])] + [(0, 0)] * (rows.ndim - 3)
    return jnp.pad(rows, widths)
