"""Hits and new rows as they are told instead of as random weights make them: by a calibration's trace, or by two
shares.

Which heads miss at which step is a table. The queries that select rows turn by one angle a step, each in a plane of its
own, so that a share of each refreshed set is new; how far, the bench finds out while it runs. The model's guesses are
computed all the same. Nothing is refreshed on a flush: the table has all misses.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.cache.calibration import Calibration
from clo_jax.config import ModelConfig
from clo_jax.policies.base import LayerState, Position, Shared, Tables
from clo_jax.policies.clo import CloPolicy

PERIOD = 64  # steps of a table that is made from a share
# Of SmolLM2-135M: hits with thresholds by importance (docs/calibration.md), new rows on a miss (docs/design.md).
HIT_RATE, NEW_ROWS = 0.79, 0.26
_SEQUENCES = 16  # that have tables of their own; the next ones have the same
_BELOW_ALL = -2.0  # cosines
FIRST_ANGLE = np.pi / 8  # radians a step, where nothing better is known


class Pattern(NamedTuple):
    """What is replayed. `misses` bool [P, N, L, K]: of sequence b, at step t, those of [b mod P, t mod N].
    `new_rows`: of a refreshed set, the share that was not in the buffer. `source`: where both come from."""

    misses: np.ndarray
    new_rows: float
    source: str


def spread(random: np.random.Generator, lines: int, size: int, share: float) -> np.ndarray:
    """bool [lines, size]: that share of each line, as even over the lines as whole numbers allow, at random places."""
    table = np.zeros((lines, size), bool)
    for i, line in enumerate(table):
        count = int(np.floor((i + 1) * share * size) - np.floor(i * share * size))
        line[random.permutation(size)[:count]] = True
    return table


def given(model: ModelConfig, hit_rate: float, new_rows: float) -> Pattern:
    """The same number of misses in each step, of heads at random.

    Raises:
      ValueError: shares outside of [0, 1].
    """
    for name, value in (("--hit-rate", hit_rate), ("--new-rows", new_rows)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: got {value}, wanted a share in [0, 1]")
    heads = model.num_layers * model.num_kv_heads
    misses = spread(np.random.default_rng(0), _SEQUENCES * PERIOD, heads, 1 - hit_rate)
    shape = (_SEQUENCES, PERIOD, model.num_layers, model.num_kv_heads)
    return Pattern(misses.reshape(shape), new_rows, f"hit rate {hit_rate:g}, {new_rows:g} of a set new")


def traced(model: ModelConfig, found: Calibration) -> Pattern:
    """A calibration's trace. Of a model of another shape, each layer replays the one at the same relative depth, and
    heads replay those of that layer in turn.

    Raises:
      ValueError: the calibration has no trace.
    """
    trace = found.trace
    if trace is None:
        raise ValueError(f"--trace: got {found.path}, which has none, wanted a calibration with --similarity")
    P, N, L, K = trace.hits.shape
    layers, heads = np.arange(model.num_layers) * L // model.num_layers, np.arange(model.num_kv_heads) % K
    misses = ~trace.hits[:, :, layers][..., heads]
    refreshed = (~trace.hits * trace.selected[:, :, None, None]).sum()
    other = "" if (L, K) == (model.num_layers, model.num_kv_heads) else f", of {L} layers with {K} KV heads"
    return Pattern(misses, float(trace.new_rows.sum() / max(refreshed, 1)), f"trace of {P} prompts, {N} steps{other}")


@dataclasses.dataclass(frozen=True)
class ReplayedPolicy(CloPolicy):
    """CLO that misses and moves as its tables say."""

    def _prefetch(
        self, layer: jax.Array, tables: Tables, query: jax.Array, at: Position, state: LayerState, shared: Shared
    ) -> tuple[LayerState, Shared, jax.Array]:
        steps, sequences, _ = tables["misses"].shape
        miss = tables["misses"][at.position % steps, jnp.arange(sequences)]
        # Counted from the end, which is near: a float32 holds no long way.
        angle = tables["angle"] * (at.position - self.layout.max_tokens).astype(jnp.float32)
        one, other = (angle_part(angle)[:, None, None] for angle_part in (jnp.cos, jnp.sin))
        turned = tables["planes"][0] * one + tables["planes"][1] * other
        query = turned.astype(query.dtype) + tables["nothing"] * query
        # A head that was never refreshed misses; others hit, as their thresholds are below every cosine.
        age = jnp.where(miss, jnp.int32(-1), jnp.int32(0))
        return super()._prefetch(layer, tables, query, at, state | {"age": age}, shared)


def replayed(
    policy: CloPolicy, tables: tuple[Tables, ...], pattern: Pattern
) -> tuple[ReplayedPolicy, tuple[Tables, ...]]:
    """The same policy with hits and new rows as told; its tables turn by nothing, see `turn`."""
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    fields["config"] = dataclasses.replace(policy.config, refresh_on_flush=False)
    lay, random = policy.layout, np.random.default_rng(0)
    sequences = np.arange(lay.batch) % len(pattern.misses)
    made = []
    for layer, table in enumerate(tables):
        heads = np.array(lay.offloaded(layer), np.int32)
        misses = pattern.misses[sequences, :, layer][..., heads]  # [B, N, Ko]
        planes = random.normal(size=(2, lay.batch, len(heads) * lay.group, lay.head_dim))
        own = {
            "thresholds": jnp.full((len(heads),), _BELOW_ALL, jnp.float32),
            "misses": jnp.asarray(misses.swapaxes(0, 1)),
            "planes": jnp.asarray(planes, jnp.float32),
            "angle": jnp.float32(0),
            "nothing": jnp.zeros((), jnp.dtype(lay.dtype)),
        }
        made.append(table | own)
    return ReplayedPolicy(**fields), tuple(made)


def turn(tables: tuple[Tables, ...], angle: float) -> tuple[Tables, ...]:
    """The tables of queries that turn by `angle` radians a step."""
    return tuple(table | {"angle": jnp.float32(angle)} for table in tables)
