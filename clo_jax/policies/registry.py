"""The policies that CLO is compared with, by the name that `LLM.load(attention=...)` takes."""

from clo_jax.config import ModelConfig
from clo_jax.policies.exact import ExactPolicy
from clo_jax.policies.geometry import RivalLayout
from clo_jax.rivals import RivalConfig

RIVAL_POLICIES = {policy.name: policy for policy in (ExactPolicy,)}


def rival_layout(model: ModelConfig, config: RivalConfig, batch: int, max_tokens: int, dtype: str) -> RivalLayout:
    """Where the rows of a batch are.

    Raises:
      ValueError: settings that do not fit the model.
    """
    return RIVAL_POLICIES[config.attention].geometry(model, config, batch, max_tokens, dtype)


def rival_policy(layout: RivalLayout, config: RivalConfig) -> ExactPolicy:
    """The policy for a layout."""
    return RIVAL_POLICIES[config.attention](layout, config)
