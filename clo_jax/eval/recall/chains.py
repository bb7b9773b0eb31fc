"""The task: a context full of records that link one key to another, in random order, then a chain of lookups.

    <begin> <key> a b <value> c d <key> e f <value> g h ... <ask> <key> a b <value> c d <key> c d <value> i j ...

A key is a pair of symbols, and every value is the key of another record: each answer is where the next question starts.
So a model that continues a chain looks records up at two tokens in six, far behind it, by what it has just written
itself; a wrong answer shows, and later ones are judged by the chain that the model is on.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BEGIN, ASK, KEY, VALUE = 0, 1, 2, 3
FIRST_SYMBOL = 4
SYMBOLS = 256
VOCAB = FIRST_SYMBOL + SYMBOLS
NAMES = ("<begin>", "<ask>", "<key>", "<value>", *(f"s{i:03}" for i in range(SYMBOLS)))
RECORD = 6  # tokens of a record, and of a hop of a chain
MOST_RECORDS = SYMBOLS**2  # keys that there are
_ROUNDS = 4  # of the cipher
_QUESTION = 4  # of a hop: <key> a b <value>


class Chains(NamedTuple):
    """Token ids int32 [N], and whether the token after each can be known: bool [N]."""

    tokens: jax.Array
    known: jax.Array


def num_tokens(records: int, segments: int, hops: int) -> int:
    """Length of a context with `segments` chains of `hops` lookups each behind it."""
    return 1 + RECORD * records + segments * (1 + RECORD * hops)


def draw(key: jax.Array, records: int, segments: int, hops: int) -> Chains:
    """One context and chains that start at random records. The records form one ring, so that no chain ends early.

    Args:
      key: of the random numbers.
      records: at most `MOST_RECORDS`. segments: chains. hops: lookups of each.

    Raises:
      ValueError: more records than there are keys, or nothing to look up.
    """
    if not 1 <= records <= MOST_RECORDS or segments < 1 or hops < 1:
        raise ValueError(
            f"records, segments, hops: got {records}, {segments}, {hops}, wanted up to {MOST_RECORDS} records, and "
            "at least one of each"
        )
    of_codes, of_order, of_starts = jax.random.split(key, 3)
    codes = _distinct_codes(of_codes, records)
    order = jax.random.permutation(of_order, jnp.arange(records, dtype=jnp.int32))
    starts = jax.random.randint(of_starts, (segments, 1), 0, records)
    walks = (starts + jnp.arange(hops, dtype=jnp.int32)[None]) % records  # along the ring
    chains = hop(codes[walks], codes[(walks + 1) % records]).reshape(segments, hops * RECORD)
    asked = jnp.concatenate([jnp.full((segments, 1), ASK, jnp.int32), chains], axis=1)
    table = hop(codes[order], codes[(order + 1) % records])
    tokens = jnp.concatenate([jnp.full((1,), BEGIN, jnp.int32), table.reshape(-1), asked.reshape(-1)])
    place = np.arange(1 + hops * RECORD)
    # The first key of a chain is anybody's guess; <ask> and the end of a chain predict nothing that is asked for.
    can_know = (place >= _QUESTION) & (place < hops * RECORD)
    known = np.concatenate([np.zeros(1 + RECORD * records, bool), np.tile(can_know, segments)])
    return Chains(tokens, jnp.asarray(known))


def _distinct_codes(key: jax.Array, number: int) -> jax.Array:
    """Random codes int32 [number], no two alike: a Feistel cipher of 0, 1, 2, ... on two symbols, which costs next to
    nothing where sorting all codes would be most of a training step."""
    left, right = jnp.divmod(jnp.arange(number, dtype=jnp.int32), SYMBOLS)
    for table in jax.random.randint(key, (_ROUNDS, SYMBOLS), 0, SYMBOLS):
        left, right = right, left ^ table[right]
    return left * SYMBOLS + right


def hop(keys: jax.Array, values: jax.Array) -> jax.Array:
    """Records [..., RECORD] from codes of keys and values [...]."""

    def symbols(codes):
        return FIRST_SYMBOL + codes // SYMBOLS, FIRST_SYMBOL + codes % SYMBOLS

    marks = (jnp.full_like(keys, KEY), jnp.full_like(keys, VALUE))
    return jnp.stack([marks[0], *symbols(keys), marks[1], *symbols(values)], axis=-1)


def spread_positions(key: jax.Array, records: int, length: int, limit: int, cuts: int) -> jax.Array:
    """Positions int32 [length] below `limit` that ascend, with jumps of random size between some records: distances of
    a long context at the price of a short one (as in PoSE, arXiv 2309.10400)."""
    of_share, of_cuts, of_sizes = jax.random.split(key, 3)
    spare = jax.random.uniform(of_share) * (limit - length)
    at = 1 + RECORD * jax.random.randint(of_cuts, (cuts,), 0, records + 1)
    sizes = jax.random.exponential(of_sizes, (cuts,))
    jumps = jnp.floor(sizes / sizes.sum() * spare).astype(jnp.int32)
    place = jnp.arange(length, dtype=jnp.int32)
    return place + jnp.sum(jnp.where(place[:, None] >= at[None], jumps[None], 0), axis=1)


class Question(NamedTuple):
    """Token ids that end right before an answer, and the symbols' codes that follow along the true chain."""

    ids: list[int]
    values: list[int]


def question(seed: int, length: int, hops: int) -> Question:
    """A prompt of at most `length` tokens, as full of records as it gets, that asks for a chain of `hops`.

    Raises:
      ValueError: no room for a record, or more than there are keys.
    """
    records = (length - 2 - _QUESTION) // RECORD
    made = draw(jax.random.key(seed), records, 1, hops)
    tokens = np.asarray(made.tokens)
    ids = tokens[: 1 + RECORD * records + 1 + _QUESTION]
    chain = tokens[len(ids) - _QUESTION :].reshape(hops, RECORD)
    return Question(ids.tolist(), _codes(chain[:, _QUESTION], chain[:, _QUESTION + 1]).tolist())


def num_answer_tokens(hops: int) -> int:
    """What `hops` answers take, with the questions between them."""
    return hops * RECORD - _QUESTION


def right(asked: Question, answer: list[int]) -> list[bool]:
    """For each hop of the true chain, whether the answer has its value in its place; False where it ends early."""
    wanted = num_answer_tokens(len(asked.values))
    tokens = np.array([-1] * _QUESTION + (answer + [-1] * wanted)[:wanted]).reshape(-1, RECORD)
    found = _codes(tokens[:, _QUESTION], tokens[:, _QUESTION + 1])
    symbols = (tokens[:, _QUESTION:] >= FIRST_SYMBOL).all(axis=1)
    return (symbols & (found == np.array(asked.values))).tolist()


def _codes(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return (first - FIRST_SYMBOL) * SYMBOLS + second - FIRST_SYMBOL
