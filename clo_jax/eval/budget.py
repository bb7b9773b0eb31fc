"""How much of the context a policy reads: what a refresh selects, and what attention reads in all."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from clo_jax.cache.layout import CacheLayout
from clo_jax.config import CloConfig, ModelConfig
from clo_jax.policies.registry import rival_layout, rival_policy_of
from clo_jax.rivals import RivalConfig

_POINTS = 16  # steps that stand for all of an answer: arrays of one shape compile once


class Shares(NamedTuple):
    """Means over the steps of an answer, in [0, 1].

    `selected`: rows that a refresh selects, of the context, for an offloaded head. `attended`: rows that attention
    reads at most (sink, tail, selected and retained rows, resident heads), of all rows of all heads.
    """

    selected: float
    attended: float


def shares(
    model: ModelConfig, load: Mapping[str, Any], described: Mapping[str, Any], prompt_tokens: int, new_tokens: int
) -> Shares:
    """Of an answer of `new_tokens` after `prompt_tokens`; `load`: the arguments of `LLM.load` (`Variant.load`);
    `described`: what the LLM says of itself."""
    if load["attention"] == "full":
        return Shares(1.0, 1.0)
    if load["attention"] == "clo":
        return clo_shares(model, load["clo"], described, prompt_tokens, new_tokens)
    return rival_shares(model, load["rival"], described, prompt_tokens, new_tokens)


def clo_shares(
    model: ModelConfig, clo: CloConfig, described: Mapping[str, Any], prompt_tokens: int, new_tokens: int
) -> Shares:
    """Of CLO."""
    resident = tuple((layer, tuple(heads)) for layer, heads in described["resident_heads"])
    planned = dataclasses.replace(clo, resident_heads=resident)
    layout = CacheLayout.clo(model, planned, 1, described["max_context"], described["dtype"])
    heads = model.num_layers * model.num_kv_heads
    resident_share = sum(len(layer) for layer in layout.resident) / heads
    before = _before(prompt_tokens, new_tokens)
    on_device = jnp.asarray(before)
    k = layout.num_selected(on_device)
    selected, capacity, flushed = (np.asarray(x) for x in (k, layout.capacity(k), layout.flushed(on_device)))
    rows = np.minimum(np.minimum(layout.sink, flushed) + before + 1 - flushed + capacity, before + 1)
    attended = float(np.mean(rows / (before + 1)))
    return Shares(float(np.mean(selected / before)), resident_share + (1 - resident_share) * attended)


def rival_shares(
    model: ModelConfig, config: RivalConfig, described: Mapping[str, Any], prompt_tokens: int, new_tokens: int
) -> Shares:
    """Of a policy that CLO is compared with. What is estimated without being read (RetroInfer) does not count."""
    layout = rival_layout(model, config, 1, described["max_context"], described["dtype"])
    before = _before(prompt_tokens, new_tokens)
    selected, attended = rival_policy_of(layout, config).reads(prompt_tokens, before)
    full = layout.full_layers / layout.num_layers
    return Shares(float(np.mean(selected / before)), full + (1 - full) * float(np.mean(attended / (before + 1))))


def _before(prompt_tokens: int, new_tokens: int) -> np.ndarray:
    """Tokens before each decoded one, int32; an answer of one token has no decode step and counts as if it had one."""
    last = prompt_tokens + max(new_tokens - 2, 0)
    return np.linspace(prompt_tokens, last, _POINTS).round().astype(np.int32)
