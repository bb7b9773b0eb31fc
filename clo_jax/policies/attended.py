"""Which tokens a decode step attended to exactly, whatever the policy: read on the host after the step."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from clo_jax.policies.base import LayerState, Policy
from clo_jax.policies.clo import CloPolicy
from clo_jax.policies.exact import ExactPolicy
from clo_jax.policies.full import FullPolicy
from clo_jax.policies.host_rows import HostRows
from clo_jax.policies.infinigen import InfiniGenPolicy
from clo_jax.policies.observed import ObservedFullPolicy
from clo_jax.policies.rival import Always
from clo_jax.transfer.engine import Engine


class Attended(NamedTuple):
    """One layer in one step of one sequence, at a context of n tokens, the one being decoded included.

    `heads` int32 [h]: the KV heads that do not attend to all tokens, ascending; `tokens` bool [h, n]: those whose keys
    and values each of them attended to exactly, by whatever means: always, selected now or earlier. `mass` float32
    [K, n]: of full attention only (that has no such heads), see `ObservedFullPolicy`.
    """

    heads: np.ndarray
    tokens: np.ndarray
    mass: np.ndarray | None = None


def observed(policy: Policy) -> Policy:
    """A policy that attends like `policy` and whose steps `attended` can read.

    Raises:
      ValueError: InfiniGen with a limited pool, whose rows are known by their places, not by their tokens.
    """
    if isinstance(policy, InfiniGenPolicy) and policy.limited:
        raise ValueError(
            f"pool_tokens: got {policy.config.pool_tokens}, wanted None or the whole context of "
            f"{policy.layout.max_tokens}: what a pool holds is not known by its tokens"
        )
    if isinstance(policy, FullPolicy):
        return ObservedFullPolicy(policy.layout)
    return dataclasses.replace(policy, track=True) if isinstance(policy, ExactPolicy) else policy


def attended(
    policy: Policy, keeper: Engine | HostRows | None, layers: Sequence[LayerState], prompt_tokens: int, position: int
) -> tuple[Attended, ...]:
    """What each layer attended to in the last step of the only sequence.

    Args:
      policy: an `observed` one. keeper: of its rows. layers: its state after the step.
      prompt_tokens: tokens of the prompt. position: index of the token that was decoded.
    """
    return tuple(_of_layer(policy, keeper, layer, state, prompt_tokens, position) for layer, state in enumerate(layers))


def _of_layer(
    policy: Policy, keeper: Engine | HostRows | None, layer: int, state: LayerState, prompt_tokens: int, position: int
) -> Attended:
    n = position + 1
    if isinstance(policy, ObservedFullPolicy):
        return Attended(np.zeros(0, np.int32), np.zeros((0, n), bool), np.asarray(state["mass"])[0, :, :n])
    heads, always = policy.layout.offloaded(layer), Always(0, n)
    if isinstance(policy, ExactPolicy):
        heads, selected = range(policy.layout.num_kv_heads), np.asarray(state["selected"])[0]
    elif not heads:
        selected = []
    elif isinstance(policy, CloPolicy):
        always = Always(policy.layout.sink, int(policy.layout.flushed(np.int32(position))))
        selected = keeper.slot_tokens(layer)[0]  # -1 in empty slots
    else:
        always = policy.always(prompt_tokens, np.int32(position))
        selected = keeper.selected(layer)[0]
    tokens = np.zeros((len(heads), n), bool)
    tokens[:, : always.sink] = True
    tokens[:, always.begin :] = True
    for row, chosen in zip(tokens, selected, strict=True):
        row[chosen[chosen >= 0]] = True
    return Attended(np.array(heads, np.int32), tokens)
