"""What the policies that CLO is compared with have in common: first layers that stay on the device and are attended to
in full, nothing that is the same for all steps, and an account of the rows that a step reads."""

from typing import NamedTuple

import jax
import numpy as np

from clo_jax.policies.base import LayerState, Position, Prefilled, Shared, Tables, Unprepared
from clo_jax.policies.full import FullPolicy
from clo_jax.policies.geometry import RivalLayout


class Reads(NamedTuple):
    """Rows of one of a policy's own heads that decode steps read, int or float arrays over the steps. `selected`: those
    that scores choose; `attended`: all whose keys and values are read exactly. Where a step decides how many, at most
    (or, of clusters, as many as clusters of mean size have)."""

    selected: np.ndarray
    attended: np.ndarray


class Always(NamedTuple):
    """What one of a policy's own heads attends to whatever the scores: tokens before `sink` and from `begin` on, with
    sink <= begin; int or int arrays over the steps."""

    sink: np.ndarray | int
    begin: np.ndarray | int

    def count(self, cached: np.ndarray) -> np.ndarray:
        """How many they are of the `cached` tokens and the one being decoded."""
        return np.minimum(self.sink, cached + 1) + np.maximum(cached + 1 - self.begin, 0)


class HostPolicy(Unprepared):
    """A policy with rows in host memory. A subclass says what happens in its own layers: `absorb_own`, `prefetch_own`
    (nothing, unless it speculates), `attend_own`; the arguments are those of `policies.base.Policy`."""

    layout: RivalLayout

    def layer_kind(self, layer: int) -> str:
        return "resident" if layer < self.layout.full_layers else "offloaded"

    def absorb(
        self, kind: str, tables: Tables, prompt: Prefilled, layer: jax.Array, shared: Shared
    ) -> tuple[LayerState, Shared]:
        if kind == "resident":
            return FullPolicy(self.layout.full).absorb(kind, tables, prompt, layer, shared)
        return self.absorb_own(prompt, layer, shared)

    def prefetch(
        self, layer: int, tables: Tables, query: jax.Array, at: Position, state: LayerState, shared: Shared
    ) -> tuple[LayerState, Shared]:
        if self.layer_kind(layer) == "resident":
            return state, shared
        return self.prefetch_own(layer, query, at, state, shared)

    def attend(
        self, layer: int, tables: Tables, q: jax.Array, k: jax.Array, v: jax.Array, at: Position, state: LayerState,
        shared: Shared,
    ) -> tuple[jax.Array, LayerState, Shared]:  # fmt: skip
        if self.layer_kind(layer) == "resident":
            return FullPolicy(self.layout.full).attend(layer, tables, q, k, v, at, state, shared)
        return self.attend_own(layer, q, k, v, at, state, shared)

    def absorb_own(self, prompt: Prefilled, layer: jax.Array, shared: Shared) -> tuple[LayerState, Shared]:
        raise NotImplementedError

    def prefetch_own(
        self, layer: int, query: jax.Array, at: Position, state: LayerState, shared: Shared
    ) -> tuple[LayerState, Shared]:
        """Nothing: the selection waits for the exact query."""
        return state, shared

    def attend_own(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, at: Position, state: LayerState, shared: Shared
    ) -> tuple[jax.Array, LayerState, Shared]:
        raise NotImplementedError

    def always(self, prompt_tokens: int, cached: np.ndarray) -> Always:
        """Of steps with `cached` tokens before them (int32), after a prompt of `prompt_tokens`."""
        raise NotImplementedError

    def reads(self, prompt_tokens: int, cached: np.ndarray) -> Reads:
        """Of the same steps."""
        raise NotImplementedError
