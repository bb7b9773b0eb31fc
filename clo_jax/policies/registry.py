"""The policies that CLO is compared with, by the name that `LLM.load(attention=...)` takes."""

from clo_jax.config import ModelConfig
from clo_jax.policies.base import Policy
from clo_jax.policies.exact import ExactPolicy
from clo_jax.policies.geometry import RivalLayout
from clo_jax.policies.host_rows import HostRows
from clo_jax.policies.infinigen import InfiniGenPolicy
from clo_jax.policies.pqcache import PQCachePolicy
from clo_jax.policies.retroinfer import RetroInferPolicy
from clo_jax.rivals import RivalConfig

RivalPolicy = ExactPolicy | InfiniGenPolicy | PQCachePolicy | RetroInferPolicy
RIVAL_POLICIES = {policy.name: policy for policy in (ExactPolicy, InfiniGenPolicy, PQCachePolicy, RetroInferPolicy)}


def rival_layout(model: ModelConfig, config: RivalConfig, batch: int, max_tokens: int, dtype: str) -> RivalLayout:
    """Where the rows of a batch are.

    Raises:
      ValueError: settings that do not fit the model.
    """
    return RIVAL_POLICIES[config.attention].geometry(model, config, batch, max_tokens, dtype)


def rival_policy(layout: RivalLayout, config: RivalConfig) -> tuple[Policy, HostRows | None]:
    """The policy for a layout, and what keeps its rows in host memory (close it); None when they are on the device."""
    kind = RIVAL_POLICIES[config.attention]
    keeper = None if kind is ExactPolicy else kind.keeper(layout, config)
    return rival_policy_of(layout, config, 0 if keeper is None else keeper.handle), keeper


def rival_policy_of(layout: RivalLayout, config: RivalConfig, rows: int = 0) -> RivalPolicy:
    """The policy over the rows that a keeper of handle `rows` has; without one for what its sizes tell."""
    kind = RIVAL_POLICIES[config.attention]
    return ExactPolicy(layout, config) if kind is ExactPolicy else kind(layout, config, rows)
