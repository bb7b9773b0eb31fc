"""InfiniGen: speculate the next layer's important tokens from partial queries and keys, gather them on the CPU.

Source: Lee et al., "InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache
Management", OSDI 2024, and the authors' repository; where CLO's authors compared with it, their own port (fixed number
of channels, fixed top-k), whose settings are the defaults here.

The method. All keys and values live in host memory. The device holds a *partial key cache*: every key, rotated by an
orthogonal matrix A of its head and cut to the few columns that carry most of the queries' magnitude. A comes from the
singular value decomposition of the queries, so that few columns carry much ("skewing"); q·k is the same before and
after it. One layer ahead, a guess of the next layer's query is projected in the same way and multiplied with the
partial keys. These speculated scores choose the tokens, the CPU gathers their full rows into a staging buffer, and the
buffer is copied to the device. Every step fetches its whole set anew: there is no cache on the device.

Which tokens. Scores are scaled by D^-1/2; their softmax is summed over the query heads that share a KV head; each KV
head fetches its n tokens with the largest sums. n is the same for all heads of a layer: with `alpha`, the mean over the
query heads of how many tokens score above their maximum minus alpha, at most the budget; without it (the default, as in
the port) the budget itself: ceil(sparsity · tokens cached). The token being decoded is always attended to, on top.
Attention is with the exact query over exactly these rows; a wrong speculation is not repaired.

The pool. With `pool_tokens` the host keeps only that many rows per head. When the pool is full, a new token takes the
place of the row that was fetched least often. A prompt longer than the pool leaves its newest tokens there.

Where things are. Device: partial keys [S, r] and the fetched rows [k, 2, D] of each KV head. Host: all rows. Each step
and layer moves one new row per head to the host (with the next fetch) and at most k rows per head to the device. The
device speculates; the CPU gathers; the program waits for the CPU. The first `full_layers` layers stay on the device and
are attended to in full: 2, in the original as in the port, because what enters the first layer tells nothing of the
second one's queries.

What differs from the original.
- A is made from the prompt at hand during its prefill (from up to `sample_queries` of its queries, evenly spaced), not
  offline from a sample text. It fits the prompt at least as well, needs no preparation, and is different for each
  prompt. Columns are chosen by Σ|q'|, as in the original's system, whatever their order, so the keys' singular values,
  which only order them there, have no say. (Its accuracy scripts for Llama add as many by Σ|k'|, from a sample text.)
- A is one per KV head, from the queries of its whole group, so that the group shares a partial key cache. (The original
  speaks of models with one KV head per query head.)
- The guess is the query projection of layer l, with its own norm, of the residual stream that enters layer l - 1, as
  in CLO's paper; the original, and the port, multiply the input of layer l - 1's attention, after that layer's norm.
  (`docs/policies.md`: the same, measured.) The projection is computed whole and cut afterwards: more multiplications.
- n is the mean over the heads of one sequence, not over the batch, so that sequences do not depend on their neighbours.
- Every layer has fetched rows of its own on the device; there they go once they have been attended to.
- The pool's counters are wide enough never to be halved. A row that replaces another starts with one use more than that
  one had, so that it is not the next to go.
- Gathering is NumPy's, on a few threads, and does not run beside the layer before: see `policies.host_rows` for how
  times suffer. What is attended to and what is counted is not affected.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.config import GuessFrom, ModelConfig
from clo_jax.policies import dense
from clo_jax.policies.base import LayerState, Position, Prefilled, Shared
from clo_jax.policies.exact import write_row
from clo_jax.policies.full import pad_tokens
from clo_jax.policies.geometry import RivalLayout
from clo_jax.policies.host_rows import HostRows, call
from clo_jax.policies.rival import Always, HostPolicy, Reads
from clo_jax.rivals import InfiniGenConfig


@dataclasses.dataclass(frozen=True)
class InfiniGenPolicy(HostPolicy):
    """See the module docstring. `rows`: the handle of its HostRows.

    State of a layer, P the pool: projection [B, K, D, r] float32, partial keys [B, K, P, r], fetched rows
    [B, K, k, 2, D] and how many [B], the last token's row [B, K, 2, D] and its place [B, K] until the next fetch takes
    it to the host, times that each row was fetched [B, K, P] int32 (with a limited pool).
    """

    layout: RivalLayout
    config: InfiniGenConfig
    rows: int
    name = "infinigen"
    guess_from: ClassVar[GuessFrom | None] = "input"

    @staticmethod
    def geometry(model: ModelConfig, config: InfiniGenConfig, batch: int, max_tokens: int, dtype: str) -> RivalLayout:
        """The layout for a batch. Raises ValueError for more full layers than the model has."""
        layout = RivalLayout.of(model, batch, max_tokens, dtype, config.full_layers)
        policy = InfiniGenPolicy(layout, config, 0)
        D, G, r = layout.head_dim, layout.full.group, policy.channels
        parts = {
            "partial keys": policy.pool * r * layout.itemsize,
            "fetched rows": policy.most * layout.row_bytes,
            "projections": 4 * D * r,
            "counters": 4 * policy.pool if policy.limited else 0,
            "queries": G * D * layout.itemsize,
        }
        return layout.with_bytes(parts, policy.pool * layout.row_bytes)

    @staticmethod
    def keeper(layout: RivalLayout, config: InfiniGenConfig) -> HostRows:
        """The host's part."""
        return HostRows(layout)

    @property
    def retriever_name(self) -> str:
        skew = "skewed" if self.config.skew else "unskewed"
        return f"{self.channels} of {self.layout.head_dim} channels, {skew}, query one layer ahead"

    @property
    def sampled_queries(self) -> int:
        return self.config.sample_queries

    @property
    def channels(self) -> int:
        """r: columns of the partial keys."""
        return math.ceil(self.config.partial_ratio * self.layout.head_dim)

    @property
    def limited(self) -> bool:
        """Whether the pool holds less than the context."""
        return self.config.pool_tokens is not None and self.config.pool_tokens < self.layout.max_tokens

    @property
    def pool(self) -> int:
        """P: rows per head that the host keeps."""
        return self.config.pool_tokens if self.limited else self.layout.max_tokens

    @property
    def most(self) -> int:
        """Rows of the staging buffer of a head."""
        return min(math.ceil(self.config.sparsity * self.layout.max_tokens), self.pool)

    def always(self, prompt_tokens: int, cached: np.ndarray) -> Always:
        return Always(0, cached)

    def reads(self, prompt_tokens: int, cached: np.ndarray) -> Reads:
        stored = np.minimum(cached, self.pool)
        count = np.minimum(np.ceil(np.float32(self.config.sparsity) * stored.astype(np.float32)), self.most)
        return Reads(count, self.always(prompt_tokens, cached).count(cached) + count)

    # --- prefill ----------------------------------------

    def absorb_own(self, prompt: Prefilled, layer: jax.Array, shared: Shared) -> tuple[LayerState, Shared]:
        lay, P = self.layout, self.pool
        B, K, D, dtype = lay.batch, lay.num_kv_heads, lay.head_dim, prompt.rows.dtype
        kept = jnp.minimum(prompt.lengths, P)
        rows = prompt.rows
        if self.limited:
            place = jnp.arange(min(P, rows.shape[2]), dtype=jnp.int32)[None]
            token = jnp.minimum((prompt.lengths - kept)[:, None] + place, rows.shape[2] - 1)
            rows = jnp.take_along_axis(rows, token[:, None, :, None, None], axis=2)
        projection = partial_projection(prompt.queries, K, self.channels, self.config.skew)
        (token,) = call(self.rows, "offload", (), shared["token"], layer, rows, kept)
        state: LayerState = {
            "projection": projection,
            "partial": pad_tokens(project(rows[:, :, :, 0], projection), P),
            "fetched": jnp.zeros((B, K, self.most, 2, D), dtype),
            "count": jnp.zeros((B,), jnp.int32),
            "new": jnp.zeros((B, K, 2, D), dtype),
            "slot": jnp.full((B, K), -1, jnp.int32),
        }
        if self.limited:
            state["uses"] = jnp.zeros((B, K, P), jnp.int32)
        return state, shared | {"token": token}

    # --- decode ----------------------------------------

    def prefetch_own(
        self, layer: int, query: jax.Array, at: Position, state: LayerState, shared: Shared
    ) -> tuple[LayerState, Shared]:
        """Speculates and fetches: every selected row of every head, at every step."""
        lay = self.layout
        guess = project(dense.grouped(query, lay.num_kv_heads), state["projection"]).astype(state["partial"].dtype)
        stored = jnp.minimum(at.position, self.pool)
        valid = jnp.arange(self.pool, dtype=jnp.int32)[None, None] < stored[:, None, None]
        score = dense.masked(dense.scores(guess, state["partial"], lay.head_dim**-0.5), valid)
        count = dense.num_selected(self.config.sparsity, stored, self.most)
        if self.config.alpha is not None:
            count = jnp.clip(num_above(score, self.config.alpha), 1, count)
        count = jnp.where(at.active, count, 0)
        index, chosen = dense.heaviest(dense.group_mass(score), count, self.most)
        token, fetched = call(
            self.rows, "fetch", (jax.ShapeDtypeStruct(state["fetched"].shape, state["fetched"].dtype),),
            shared["token"], layer, index, count, state["slot"], state["new"],
        )  # fmt: skip
        state = state | {"fetched": fetched, "count": count}
        if self.limited:
            add = jax.vmap(jax.vmap(lambda uses, i, c: uses.at[i].add(c)))
            state["uses"] = add(state["uses"], index, chosen.astype(jnp.int32))
        return state, shared | {"token": token}

    def attend_own(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, at: Position, state: LayerState, shared: Shared
    ) -> tuple[jax.Array, LayerState, Shared]:
        lay = self.layout
        query, new = dense.grouped(q, lay.num_kv_heads), jnp.stack([k, v], axis=2)
        out = dense.attend(
            [
                dense.row_part(query, state["fetched"], below(state["count"], self.most)),
                dense.row_part(query, new[:, :, None], jnp.ones((1, 1, 1), bool)),
            ],
            q.dtype,
        )
        slot = jnp.broadcast_to(at.position[:, None], (lay.batch, lay.num_kv_heads))
        if self.limited:
            slot, uses = replaced(state["uses"], at.position)
            state = state | {"uses": uses}
        key = project(k[:, :, None], state["projection"]).astype(state["partial"].dtype)[:, :, 0]
        partial = jax.vmap(write_row)(state["partial"][:, :, None], slot, key[:, :, None])[:, :, 0]
        slot = jnp.where(at.active[:, None], slot, -1)
        return out, state | {"partial": partial, "new": new, "slot": slot}, shared


def partial_projection(queries: jax.Array, num_kv_heads: int, channels: int, skew: bool) -> jax.Array:
    """The columns of the skewing matrix that carry most of the queries' magnitude.

    queries [B, n, H, D]; channels: r. Returns float32 [B, K, D, r] with orthonormal columns, in descending order of
    Σ|q'|: right singular vectors of the group's queries, or unit vectors without `skew`.
    """
    B, n, _, D = queries.shape
    q = queries.astype(jnp.float32).reshape(B, n, num_kv_heads, -1, D)
    axes = jnp.broadcast_to(jnp.eye(D, dtype=jnp.float32), (B, num_kv_heads, D, D))
    if skew:
        axes = jnp.linalg.eigh(jnp.einsum("bnkgd,bnkge->bkde", q, q, precision="highest"))[1]
    magnitude = jnp.abs(jnp.einsum("bnkgd,bkde->bnkge", q, axes, precision="highest")).sum(axis=(1, 3))
    _, best = jax.lax.top_k(magnitude, channels)
    return jnp.take_along_axis(axes, best[:, :, None], axis=3)


def project(x: jax.Array, projection: jax.Array) -> jax.Array:
    """x [B, K, N, D] on projection [B, K, D, r] -> [B, K, N, r] in the dtype of x."""
    return jnp.einsum("bknd,bkdr->bknr", x.astype(jnp.float32), projection, precision="highest").astype(x.dtype)


def num_above(score: jax.Array, alpha: float) -> jax.Array:
    """How many tokens score above the maximum minus alpha: mean over the heads of a sequence, rounded down.

    score [B, K, G, N] float32 -> [B] int32.
    """
    above = score > score.max(axis=-1, keepdims=True) - jnp.float32(alpha)
    heads = score.shape[1] * score.shape[2]
    return above.sum(axis=(1, 2, 3), dtype=jnp.int32) // heads


def replaced(uses: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where a full pool takes a new row: in place of the one used least, the lowest place of several.

    uses [B, K, P] int32, position [B] -> slots [B, K] int32, the uses after it. A pool that is not full takes it next
    to the others.
    """
    full = (position >= uses.shape[2])[:, None]
    slot = jnp.where(full, jnp.argmin(uses, axis=2).astype(jnp.int32), position[:, None])
    start = jnp.where(full, jnp.min(uses, axis=2) + 1, 0)
    return slot, jax.vmap(jax.vmap(lambda u, i, n: u.at[i].set(n)))(uses, slot, start)


def below(count: jax.Array, most: int) -> jax.Array:
    """[B] -> [B, 1, most] bool: the first count[b] of `most`."""
    return jnp.arange(most, dtype=jnp.int32)[None, None] < count[:, None, None]
