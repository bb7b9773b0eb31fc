"""Any policy on a tiny model along a given text: what its steps attended to."""

import contextlib

from clo_jax.config import CloConfig
from clo_jax.forced import forced_attention
from tests import tiny
from tests.policies import rivals

TOKENS = 256
CLO = dict(hash_bits=64, sink_tokens=4, recent_tokens=16, flush_tokens=8)
RETRO = dict(recent_tokens=8, cluster_tokens=4, segment_tokens=32, iterations=4, page_tokens=2, update_tokens=8)


@contextlib.contextmanager
def policy_of(config, model=rivals.LLAMA):
    """The policy of a configuration, None: full attention, for one sequence of up to 256 tokens; who keeps its rows."""
    if config is None:
        yield tiny.full_policy(model, 1, TOKENS), None
        return
    made = tiny.clo_policy if isinstance(config, CloConfig) else rivals.rival
    with made(model, config, 1, TOKENS) as found:
        yield found


def steps(config, text, prompt, model=rivals.LLAMA, weights=None):
    """[step][layer]."""
    weights = rivals.params(model) if weights is None else weights
    with policy_of(config, model) as (policy, keeper):
        return list(forced_attention(model, weights, policy, policy.tables(), keeper, text, prompt))
