"""Exact selection: the upper bound of what any selection of k tokens can do.

Source: the definition of top-k attention; there is no system behind it. Every other sparse policy guesses which tokens
matter, from codes, partial keys, quantised keys or centroids, often with a guessed query too. This one knows: at every
step, in every layer, it scores every cached key with the exact query of that very step, takes the softmax of each query
head, sums it over the group that shares a KV head, and attends to the k tokens of the KV head with the largest sums. Of
all sets of k tokens per KV head this one holds the most attention mass. What a policy loses against `exact` at the same
sparsity it loses by its selection; what `exact` loses against `full` no selection of k tokens can win back.

What is attended to: k = ceil(sparsity · n) tokens at a context of n, the token being decoded included. No token is
exempt: sink tokens and recent ones are in the set when their scores put them there. (CLO, PQCache and RetroInfer attend
to some tokens whatever their scores, on top of the selection or at its expense; their modules say which.)

Where things are: all rows on the device. Nothing moves, nobody decides anything on the host. It costs as much memory as
full attention and reads all keys, so its speed says nothing of any system: it is for accuracy alone.

Why it is a policy and no setting of CLO: `CloConfig(retriever="exact", sim_threshold=2)` refreshes every head at every
step from exact keys, but with the query guessed one layer ahead, as CLO always does; its sink and tail come on top of
k, it may keep more than k rows, and layer 0 is resident. It bounds CLO's retrievers, not selection as such.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.config import ModelConfig
from clo_jax.policies import dense
from clo_jax.policies.base import LayerState, Position, Prefilled, Shared, Tables, Unprepared
from clo_jax.policies.full import pad_tokens
from clo_jax.policies.geometry import RivalLayout
from clo_jax.policies.rival import Reads
from clo_jax.rivals import ExactConfig


@dataclasses.dataclass(frozen=True)
class ExactPolicy(Unprepared):
    """See the module docstring. State of a layer: rows [B, K, S, 2, D]; with `track` also what the last step selected,
    [B, K, n] int32, -1 beyond the count."""

    layout: RivalLayout
    config: ExactConfig
    track: bool = False
    name = "exact"
    retriever_name = "exact query, exact keys"

    @staticmethod
    def geometry(model: ModelConfig, config: ExactConfig, batch: int, max_tokens: int, dtype: str) -> RivalLayout:
        """The layout for a batch."""
        layout = RivalLayout.of(model, batch, max_tokens, dtype)
        return layout.with_bytes({"resident rows": max_tokens * layout.row_bytes}, 0)

    @property
    def most(self) -> int:
        """Tokens that a head selects, at most."""
        return int(np.ceil(self.config.sparsity * self.layout.max_tokens))

    def reads(self, prompt_tokens: int, cached: np.ndarray) -> Reads:
        """As `HostPolicy.reads`."""
        count = np.ceil(np.float32(self.config.sparsity) * (cached + 1).astype(np.float32))
        count = np.minimum(count, self.most)
        return Reads(count, count)

    def layer_kind(self, layer: int) -> str:
        return "selected"

    def absorb(
        self, kind: str, tables: Tables, prompt: Prefilled, layer: jax.Array, shared: Shared
    ) -> tuple[LayerState, Shared]:
        state = {"resident": pad_tokens(prompt.rows, self.layout.max_tokens)}
        if self.track:
            state["selected"] = jnp.full((*prompt.rows.shape[:2], self.most), -1, jnp.int32)
        return state, shared

    def attend(
        self, layer: int, tables: Tables, q: jax.Array, k: jax.Array, v: jax.Array, at: Position, state: LayerState,
        shared: Shared,
    ) -> tuple[jax.Array, LayerState, Shared]:  # fmt: skip
        lay, S = self.layout, self.layout.max_tokens
        rows = write_row(state["resident"], at.position, jnp.stack([k, v], axis=2))
        query = dense.grouped(q, lay.num_kv_heads)
        token = jnp.arange(S, dtype=jnp.int32)[None, None]
        score = dense.masked(
            dense.scores(query, rows[:, :, :, 0], lay.head_dim**-0.5), token <= at.position[:, None, None]
        )
        count = dense.num_selected(self.config.sparsity, at.position + 1, self.most)
        index, chosen = dense.heaviest(dense.group_mass(score), count, self.most)
        picked = jnp.take_along_axis(score, index[:, :, None], axis=3)
        values = jnp.take_along_axis(rows[:, :, :, 1], index[..., None], axis=2)
        out = dense.attend([dense.Part(dense.masked(picked, chosen), values)], q.dtype)
        state = {"resident": rows}
        if self.track:
            state["selected"] = jnp.where(chosen, index, -1)
        return out, state, shared


def write_row(rows: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
    """rows [B, K, N, ...] with `new` [B, K, ...] at row index[b] of every head."""
    return jax.vmap(lambda r, i, n: r.at[:, i].set(n))(rows, index, new)
