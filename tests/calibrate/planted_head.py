"""A hand-made model with one retrieval head: every other head looks at the first token only.

Features of the residual stream stand for themselves: a token is "the first", "a needle" with one of several payloads,
"the question", or filler. In layer 1, query head 2 (KV head 1) of a question looks for needles and copies their payload
into features that nothing else writes, and that make one of four answers the likeliest next token.
"""

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.calibrate.passkeys import Example
from clo_jax.config import ModelConfig, RopeConfig

# A base so large that the last pair of dimensions does not turn within these prompts.
CONFIG = ModelConfig("llama", 32, 32, 32, 2, 4, 2, 16, 1e-5, 4096, RopeConfig(1e12), tie_word_embeddings=True)
LAYER, HEAD, KV_HEAD = 1, 2, 1
FIRST, QUESTION, NEEDLES, FILLER, ANSWERS = 0, 1, range(2, 6), range(6, 28), range(28, 32)
_STILL = 7  # the first dimension of that pair
_IS_FIRST, _IS_NEEDLE, _IS_QUESTION, _CONSTANT, _PAYLOAD, _COPIED, _SEEN = 0, 1, 2, 3, 4, 8, 12


def params():
    rng, D = np.random.default_rng(0), CONFIG.head_dim
    embedding = np.zeros((32, 32))
    embedding[:, _CONSTANT] = 1
    embedding[FIRST, _IS_FIRST] = embedding[QUESTION, _IS_QUESTION] = 1
    for i, token in enumerate(NEEDLES):
        embedding[token, [_IS_NEEDLE, _PAYLOAD + i]] = 1
        embedding[ANSWERS[i], _COPIED + i] = 1
    embedding[list(FILLER), 16:] = 0.3 * rng.standard_normal((len(FILLER), 16))
    layers = {}
    for layer in range(2):
        q, k, v = np.zeros((32, 4 * D)), np.zeros((32, 2 * D)), np.zeros((32, 2 * D))
        o = np.zeros((4 * D, 32))
        for head in range(4):  # everybody looks at the first token and notes that it was there
            q[_CONSTANT, head * D + _STILL] = 8
            o[head * D + 4, _SEEN] = 0.1
        for head in range(2):
            k[_IS_FIRST, head * D + _STILL] = 8
            v[_IS_FIRST, head * D + 4] = 1
        if layer == LAYER:
            # A needle beats the first token only for a question of the planted head: the other head of its group asks
            # for the opposite.
            k[_IS_NEEDLE, KV_HEAD * D + _STILL + 8] = 8
            q[_IS_QUESTION, HEAD * D + _STILL + 8] = 16
            q[_CONSTANT, (HEAD + 1) * D + _STILL + 8] = -8
            for i in range(4):
                v[_PAYLOAD + i, KV_HEAD * D + i] = 1
                o[HEAD * D + i, _COPIED + i] = 1
        layers[layer] = {
            "attn": {name: {"kernel": kernel} for name, kernel in (("q", q), ("k", k), ("v", v), ("o", o))},
            "mlp": {name: {"kernel": np.zeros((32, 32))} for name in ("gate", "up", "down")},
            "input_norm": {"scale": np.ones(32)},
            "post_norm": {"scale": np.ones(32)},
        }
    tree = {"embed": {"embedding": embedding}, "layers": layers, "final_norm": {"scale": np.ones(32)}}
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def example(seed: int, length: int = 96) -> Example:
    """Filler with one needle in the middle and three questions at the end."""
    rng = np.random.default_rng(seed)
    tokens = rng.choice(list(FILLER), length)
    tokens[0] = FIRST
    tokens[rng.integers(20, 50)] = rng.choice(list(NEEDLES))
    asked = np.array([length - 9, length - 5, length - 1])
    tokens[asked] = QUESTION
    answer = np.zeros(length, bool)
    answer[asked] = True
    return Example(tokens.astype(np.int32), answer)
