"""What a policy is: four pure functions over its own state, called by `generate` at fixed points of a model's life.

    allocate   once, before prefill: the state that all layers share
    absorb     after each prefilled layer: that layer's state, from its K and V
    prefetch   one layer ahead in decode, with a guess of the query
    attend     in decode: appends K and V, attends with the exact query

A policy object holds only static facts (it is a static argument of jitted functions); arrays live in the state (donated
from step to step) and in the tables (constants of the run).
"""

from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from clo_jax.config import GuessFrom

LayerState = dict[str, jax.Array]
Shared = dict[str, jax.Array]
Tables = dict[str, jax.Array]

# In `Shared` while a layer is prefetched: what the layer at hand goes on with (the normed input of its MLP, or of its
# attention), which a policy that asks for rows hands through, so that what is computed from it comes after the request
# and hides the transfer.
LATER = "later"


class Prefilled(NamedTuple):
    """One layer's prompt, as prefill leaves it. N is the bucket; tokens from `lengths` on are padding."""

    rows: jax.Array  # [B, K, N, 2, D]: K (after RoPE) and V
    query: jax.Array  # [B, H, D]: query of each prompt's last token
    lengths: jax.Array  # [B] int32
    queries: jax.Array | None = None  # [B, n, H, D]: as many of the prompt's as the policy samples, evenly spaced


class Position(NamedTuple):
    """Where a decode step stands; shared by all layers."""

    position: jax.Array  # [B] int32: index of the token being decoded = tokens before it
    active: jax.Array  # [B] bool: false once a sequence has ended (its row is computed and ignored)


class Policy(Protocol):
    """See the module docstring. `tables` are the policy's constants of one layer."""

    name: str
    sampled_queries: int  # how many queries of a prompt `absorb` wants to see besides the last one
    guess_from: GuessFrom | None  # what of the layer before `prefetch` gets a guessed query of; None: of nothing

    def tables(self) -> tuple[Tables, ...]:
        """Constants of each layer, made once on the host."""

    def layer_kind(self, layer: int) -> Any:
        """Hashable; layers of one kind share their compiled `absorb`."""

    def allocate(self) -> Shared: ...

    def absorb(
        self, kind: Any, tables: Tables, prompt: Prefilled, layer: jax.Array, shared: Shared
    ) -> tuple[LayerState, Shared]: ...

    def prefetch(
        self, layer: int, tables: Tables, query: jax.Array, at: Position, state: LayerState, shared: Shared
    ) -> tuple[LayerState, Shared]: ...

    def attend(
        self, layer: int, tables: Tables, q: jax.Array, k: jax.Array, v: jax.Array, at: Position, state: LayerState,
        shared: Shared,
    ) -> tuple[jax.Array, LayerState, Shared]: ...  # fmt: skip


class Unprepared:
    """What a policy has that prepares nothing: no constants, no state of all layers but the token that host effects are
    ordered by, and nothing that it does one layer ahead."""

    layout: Any  # knows how many layers there are
    sampled_queries: ClassVar[int] = 0
    guess_from: ClassVar[GuessFrom | None] = None

    def tables(self) -> tuple[Tables, ...]:
        return ({},) * self.layout.num_layers

    def allocate(self) -> Shared:
        return {"token": jnp.zeros((1,), jnp.uint32)}

    def prefetch(
        self, layer: int, tables: Tables, query: jax.Array, at: Position, state: LayerState, shared: Shared
    ) -> tuple[LayerState, Shared]:
        return state, shared
